//! What guest memory should be: memslots in a `BTreeMap`, dirty pages in sets, and KVM's rules written
//! down a second time, in the order in which KVM's API document gives them and with no look at the
//! engine.

use std::collections::{BTreeMap, BTreeSet};

use slat::{Access, HostPage, Level, MAX_SLOTS, MemoryType, Region};

use crate::host::HostMemory;

/// Guest frames that a table of four levels can hold.
pub const CAPACITY: u64 = 1 << 36;

const EINVAL: i32 = 22;
const EEXIST: i32 = 17;
const ENOENT: i32 = 2;

const LOG: u32 = 1;
const READONLY: u32 = 2;

/// A memslot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSlot {
    /// First guest frame.
    pub base: u64,
    /// Length in pages.
    pub pages: u64,
    /// Byte address of the backing.
    pub backing: u64,
    /// KVM_MEM_* flags.
    pub flags: u32,
}

impl ModelSlot {
    fn end(&self) -> u64 {
        self.base + self.pages
    }

    /// Whether it holds `gfn`.
    pub fn contains(&self, gfn: u64) -> bool {
        (self.base..self.end()).contains(&gfn)
    }

    /// Whether it records dirty pages.
    pub fn logs(&self) -> bool {
        self.flags & LOG != 0
    }

    /// Number, in host memory, of the page behind `gfn`.
    pub fn host_page(&self, host: &HostMemory, gfn: u64) -> Option<u64> {
        host.page(slat::Hva(self.backing + ((gfn - self.base) << 12)))
    }

    /// The largest level at which `gfn` may be mapped.
    pub fn fitting_level(&self, gfn: u64, host: &HostPage) -> Level {
        if self.logs() {
            return Level::PAGE;
        }
        self.bounded_level(gfn, host)
    }

    /// The same, whether or not it logs: what a write-protected leaf from before the log may have.
    pub fn bounded_level(&self, gfn: u64, host: &HostPage) -> Level {
        let mut fits = Level::PAGE;
        for level in [Level::MEGA, Level::GIGA] {
            let pages = level.pages();
            let first = gfn / pages * pages;
            let whole = first >= self.base && first + pages <= self.end();
            if level <= host.level && whole && gfn % pages == host.pfn.0 % pages {
                fits = level;
            }
        }
        fits
    }
}

/// How an access must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The client emulates it.
    Mmio,
    /// KVM_RUN answers EFAULT.
    BadAddress,
    /// It reaches this page.
    Page(HostPage),
}

/// The memory of a guest.
#[derive(Clone, Debug, Default)]
pub struct GuestModel {
    /// Memslots by id.
    pub slots: BTreeMap<u32, ModelSlot>,
    /// For slots that log: pages written since the log was last taken, counted from the slot's start.
    dirty: BTreeMap<u32, BTreeSet<u64>>,
    /// New logs go by the dirty bits of leaves, and may name neighbours of a page, too.
    pub logs_by_dirty_bit: bool,
    /// Slots with such a log.
    loose: BTreeSet<u32>,
    /// Id of the slot that begins at a frame.
    by_base: BTreeMap<u64, u32>,
}

impl GuestModel {
    /// KVM_SET_USER_MEMORY_REGION; the error is an errno.
    pub fn set_region(&mut self, region: &Region) -> Result<(), i32> {
        let (id, flags) = (region.slot, region.flags.0);
        let (gpa, size, backing) = (region.gpa.0, region.size, region.backing.0);
        let aligned = |x: u64| x & 0xfff == 0;
        if flags & !(LOG | READONLY) != 0
            || !aligned(size)
            || !aligned(gpa)
            || !aligned(backing)
            || id >= MAX_SLOTS
            || gpa.checked_add(size).is_none()
            || backing.checked_add(size).is_none()
            || size >> 12 > (1 << 31) - 1
        {
            return Err(EINVAL);
        }
        let old = self.slots.get(&id).copied();
        if size == 0 {
            return match old {
                Some(_) => {
                    self.remove(id);
                    Ok(())
                }
                None => Err(EINVAL),
            };
        }
        let new = ModelSlot {
            base: gpa >> 12,
            pages: size >> 12,
            backing,
            flags,
        };
        if let Some(old) = old {
            let fixed = |s: &ModelSlot| (s.backing, s.pages, s.flags & READONLY);
            if fixed(&old) != fixed(&new) {
                return Err(EINVAL);
            }
        }
        let overlaps = |(&other, s): (&u32, &ModelSlot)| {
            other != id && s.base < new.end() && new.base < s.end()
        };
        if old.is_none_or(|old| old.base != new.base) && self.slots.iter().any(overlaps) {
            return Err(EEXIST);
        }
        if new.end() > CAPACITY {
            return Err(EINVAL);
        }
        // KVM keeps the bitmap of a slot as long as the slot goes on logging, also when it moves.
        let log = match self.remove(id) {
            _ if !new.logs() => None,
            Some(log) => Some(log),
            None => {
                self.loose.remove(&id);
                if self.logs_by_dirty_bit {
                    self.loose.insert(id);
                }
                Some(BTreeSet::new())
            }
        };
        self.slots.insert(id, new);
        self.by_base.insert(new.base, id);
        if let Some(log) = log {
            self.dirty.insert(id, log);
        }
        Ok(())
    }

    /// Takes a slot away; returns its log.
    fn remove(&mut self, id: u32) -> Option<BTreeSet<u64>> {
        if let Some(slot) = self.slots.remove(&id) {
            self.by_base.remove(&slot.base);
        }
        self.dirty.remove(&id)
    }

    /// The slot that holds `gfn`.
    pub fn slot_at(&self, gfn: u64) -> Option<(u32, &ModelSlot)> {
        let (_, &id) = self.by_base.range(..=gfn).next_back()?;
        let slot = &self.slots[&id];
        slot.contains(gfn).then_some((id, slot))
    }

    /// How an access to `gfn` must end.
    pub fn expect(&self, host: &HostMemory, gfn: u64, access: Access) -> Expected {
        let Some((_, slot)) = self.slot_at(gfn) else {
            return Expected::Mmio;
        };
        if access == Access::Write && slot.flags & READONLY != 0 {
            return Expected::Mmio;
        }
        match slot.host_page(host, gfn).and_then(|p| host.get(p)) {
            None => Expected::BadAddress,
            Some(page) if access == Access::Write && !page.writable => Expected::BadAddress,
            Some(page) if access == Access::Execute && page.memory != MemoryType::WriteBack => {
                Expected::BadAddress
            }
            Some(page) => Expected::Page(page),
        }
    }

    /// Whether a write to `gfn` may go through without another fault.
    pub fn may_write(&self, host: &HostMemory, gfn: u64) -> bool {
        match (self.expect(host, gfn, Access::Write), self.slot_at(gfn)) {
            (Expected::Page(_), Some((id, slot))) => {
                !slot.logs() || self.is_loose(id) || self.dirty[&id].contains(&(gfn - slot.base))
            }
            _ => false,
        }
    }

    /// Whether the log of `id` may name more than was written.
    pub fn is_loose(&self, id: u32) -> bool {
        self.loose.contains(&id)
    }

    /// The guest was given the right to write to `gfn`.
    pub fn note_write(&mut self, gfn: u64) {
        if let Some((id, slot)) = self.slot_at(gfn) {
            let page = gfn - slot.base;
            if let Some(log) = self.dirty.get_mut(&id) {
                log.insert(page);
            }
        }
    }

    /// KVM_GET_DIRTY_LOG; the error is an errno.
    pub fn take_dirty(&mut self, id: u32) -> Result<Vec<u64>, i32> {
        let log = self.dirty.get_mut(&id).ok_or(ENOENT)?;
        let mut words = vec![0u64; self.slots[&id].pages.div_ceil(64) as usize];
        for page in std::mem::take(log) {
            words[page as usize / 64] |= 1 << (page % 64);
        }
        Ok(words)
    }
}
