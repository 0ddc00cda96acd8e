//! A plain model of guest memory: memslots in a `BTreeMap`, dirty pages in bitmaps. The model implements KVM's rules a
//! second time, independently of the engine, in the order of KVM's API document.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use slat::{
    Access, Change, Format, Gfn, Gpa, Granule, HostPage, Hva, Level, MAX_SLOTS, MemoryType, Region,
    Rights, SlotFlags,
};

use crate::host::HostMemory;
use crate::machine::Machine;

/// Returns the number of guest frames that the tables of a format can map.
pub const fn capacity<F: Format>() -> u64 {
    (F::ROOT_TABLES as u64) << ((F::GRANULE.shift() - 3) * F::TOP.0 as u32)
}

const EINVAL: i32 = 22;
const EEXIST: i32 = 17;
const ENXIO: i32 = 6;
const ENOENT: i32 = 2;

const LOG: u32 = 1;
const READONLY: u32 = 2;

/// A memslot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSlot {
    /// The granule, which determines the size of a page.
    pub granule: Granule,
    /// The first guest frame of the slot.
    pub base: u64,
    /// The length of the slot in pages.
    pub pages: u64,
    /// The host-virtual address of the memory that backs the slot.
    pub backing: u64,
    /// The slot's flags (`KVM_MEM_*`).
    pub flags: u32,
    /// The rights that the guest gets at most.
    pub rights: Rights,
    /// The memory type of the guest's accesses, unless the host page's type caches less.
    pub memory: MemoryType,
}

impl ModelSlot {
    /// Makes the slot that `region` describes.
    fn of(region: &Region, granule: Granule) -> Self {
        ModelSlot {
            granule,
            base: region.gpa.0 >> granule.shift(),
            pages: region.size >> granule.shift(),
            backing: region.backing.0,
            flags: region.flags.0,
            rights: region.rights,
            memory: region.memory,
        }
    }

    fn end(&self) -> u64 {
        self.base + self.pages
    }

    fn overlaps(&self, other: &ModelSlot) -> bool {
        self.base < other.end() && other.base < self.end()
    }

    /// Whether the slot contains `gfn`.
    pub fn contains(&self, gfn: u64) -> bool {
        (self.base..self.end()).contains(&gfn)
    }

    /// Whether the slot records dirty pages.
    pub fn logs(&self) -> bool {
        self.flags & LOG != 0
    }

    /// Whether the guest may write to the slot, if the host allows that.
    pub fn is_writable(&self) -> bool {
        self.rights.write && self.flags & READONLY == 0
    }

    /// Whether the guest may execute from the slot, if the host allows that.
    pub fn is_executable(&self) -> bool {
        self.rights.execute && self.memory == MemoryType::WriteBack
    }

    /// Returns the region that creates this slot as slot `id`.
    pub fn region(&self, id: u32) -> Region {
        Region::new(
            id,
            Gpa(self.base << self.granule.shift()),
            self.pages << self.granule.shift(),
            Hva(self.backing),
        )
        .with_flags(SlotFlags(self.flags))
        .with_rights(self.rights)
        .with_memory(self.memory)
    }

    /// Returns the host page `page` as the slot maps it: with the rights that page and slot both allow, and with the
    /// less cached of their two memory types.
    fn limit(&self, page: HostPage) -> HostPage {
        let device = [page.memory, self.memory].contains(&MemoryType::Device);
        let memory = match (page.memory, self.memory) {
            _ if device => MemoryType::Device,
            (MemoryType::WriteBack, memory) | (memory, _) => memory,
        };
        page.with_writable(page.writable && self.is_writable())
            .with_execute(page.execute && self.is_executable())
            .with_memory(memory)
    }

    /// Returns the number, in host memory, of the page that backs `gfn`.
    pub fn host_page(&self, gfn: u64) -> u64 {
        ((self.backing - HostMemory::BASE.0) >> self.granule.shift()) + gfn - self.base
    }

    /// Returns the largest level at which `gfn` may be mapped.
    pub fn fitting_level(&self, gfn: u64, host: &HostPage) -> Level {
        if self.logs() {
            return Level::PAGE;
        }
        self.bounded_level(gfn, host)
    }

    /// Returns the level that [`Self::fitting_level`] would return if the slot had no dirty log. A write-protected leaf
    /// that was installed before dirty logging was turned on may have this level.
    pub fn bounded_level(&self, gfn: u64, host: &HostPage) -> Level {
        let mut fits = Level::PAGE;
        for level in [Level::MEGA, Level::GIGA] {
            let pages = self.granule.pages(level);
            let first = gfn / pages * pages;
            let whole = first >= self.base && first + pages <= self.end();
            if level <= host.level && whole && gfn % pages == host.pfn.0 % pages {
                fits = level;
            }
        }
        fits
    }
}

/// The correct result of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// MMIO: the VMM emulates the access.
    Mmio,
    /// KVM_RUN fails with EFAULT.
    BadAddress,
    /// The page is not present yet. The VMM brings it, and the access is tried again.
    Absent,
    /// The frame is private, and no private memory backs it.
    Private,
    /// A fetch that the slot does not allow.
    NoExecute,
    /// The access reaches this page.
    Page(HostPage),
}

/// The method by which a dirty log detects writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Write protection: a write fault detects each written page.
    #[default]
    Protection,
    /// The dirty bits of leaves show the written pages. The log may also contain neighbours of a written page.
    DirtyBits,
    /// The buffers that hardware walkers fill (Intel: PML) show the written pages.
    Buffers,
}

/// The settings of dirty logs. They apply to slots whose dirty logging starts from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogMode {
    /// Written pages are recorded in rings, and there are no bitmaps.
    pub rings: bool,
    /// Reading a log (KVM_GET_DIRTY_LOG) changes nothing. Only KVM_CLEAR_DIRTY_LOG clears bits and protects pages.
    pub manual: bool,
    /// Initially, a new dirty log has all bits set.
    pub initially_set: bool,
    /// The method by which new logs detect writes, if they are not rings.
    pub method: Method,
}

/// The dirty log of a slot.
#[derive(Clone, Debug)]
struct Log {
    /// One bit for each page of the slot. For bitmaps: the page was written since its bit was last cleared. For rings:
    /// a ring entry that was not reset contains the page.
    noted: Vec<u64>,
    method: Method,
    /// Whether the log may contain pages that were not written.
    loose: bool,
}

impl Log {
    fn new(pages: u64, mode: LogMode) -> Self {
        let mut noted = vec![0; pages.div_ceil(64) as usize];
        if mode.initially_set && !mode.rings {
            noted.fill(u64::MAX);
            if !pages.is_multiple_of(64) {
                *noted.last_mut().expect("a slot has a page") = (1 << (pages % 64)) - 1;
            }
        }
        let method = match mode.rings {
            true => Method::Protection,
            false => mode.method,
        };
        Log {
            noted,
            method,
            loose: method == Method::DirtyBits,
        }
    }

    fn holds(&self, page: u64) -> bool {
        self.noted[page as usize / 64] >> (page % 64) & 1 != 0
    }
}

/// The memory of a guest, in one address space.
#[derive(Clone, Debug)]
pub struct GuestModel {
    /// The granule, which determines the size of a page.
    pub granule: Granule,
    /// The number of guest frames that the tables can map.
    pub capacity: u64,
    /// Memslots by id.
    pub slots: BTreeMap<u32, ModelSlot>,
    /// The settings that the VMM has made by `KVM_ENABLE_CAP`.
    pub mode: LogMode,
    logs: BTreeMap<u32, Log>,
    /// The id of each slot, by the slot's first frame.
    by_base: BTreeMap<u64, u32>,
    /// The guest frames that are private (KVM_MEMORY_ATTRIBUTE_PRIVATE), as ranges that do not overlap. No slot has
    /// private memory.
    private: Vec<Range<u64>>,
}

impl GuestModel {
    /// Makes a guest without memory. Its tables have pages of `granule`, and map `capacity` frames.
    pub fn new(granule: Granule, capacity: u64) -> Self {
        GuestModel {
            granule,
            capacity,
            slots: BTreeMap::new(),
            mode: LogMode::default(),
            logs: BTreeMap::new(),
            by_base: BTreeMap::new(),
            private: Vec::new(),
        }
    }

    /// Executes KVM_SET_MEMORY_ATTRIBUTES. The error is an errno.
    pub fn convert(&mut self, gfns: &Range<u64>, private: bool) -> Result<(), i32> {
        if gfns.is_empty() || gfns.end > (u64::MAX >> self.granule.shift()) + 1 {
            return Err(EINVAL);
        }
        let old = core::mem::take(&mut self.private);
        let parts = old.into_iter().flat_map(|range| {
            let below = range.start..range.end.min(gfns.start);
            [below, range.start.max(gfns.end)..range.end]
        });
        let new = private.then(|| gfns.clone());
        self.private = parts.chain(new).filter(|part| !part.is_empty()).collect();
        Ok(())
    }

    /// Whether a frame of `gfns` is private.
    pub fn has_private(&self, gfns: &Range<u64>) -> bool {
        let overlaps = |range: &Range<u64>| range.start < gfns.end && gfns.start < range.end;
        self.private.iter().any(overlaps)
    }

    /// Returns the highest level, at most `level`, at which a leaf around `gfn` covers no private frame.
    pub fn shared_level(&self, gfn: u64, mut level: Level) -> Level {
        while level > Level::PAGE {
            let block = self.granule.block(Gfn(gfn), level);
            if !self.has_private(&(block.start.0..block.end.0)) {
                break;
            }
            level = level.below();
        }
        level
    }

    /// Returns the model of a clone's memory: the same slots, with new logs.
    pub fn fork(&self) -> Self {
        let anew = |id: &u32| (*id, Log::new(self.slots[id].pages, self.mode));
        GuestModel {
            logs: self.logs.keys().map(anew).collect(),
            ..self.clone()
        }
    }

    /// Executes KVM_SET_USER_MEMORY_REGION. The error is an errno.
    pub fn set_region(&mut self, region: &Region) -> Result<(), i32> {
        let id = region.slot;
        check_alone(region, self.granule)?;
        let old = self.slots.get(&id).copied();
        if region.size == 0 {
            return match old {
                Some(_) => {
                    self.remove(id);
                    Ok(())
                }
                None => Err(EINVAL),
            };
        }
        let new = ModelSlot::of(region, self.granule);
        if let Some(old) = old {
            let fixed = |s: &ModelSlot| {
                let limits = (s.flags & READONLY, s.rights, s.memory);
                (s.backing, s.pages, limits)
            };
            if fixed(&old) != fixed(&new) {
                return Err(EINVAL);
            }
        }
        let overlaps = |(&other, s): (&u32, &ModelSlot)| other != id && s.overlaps(&new);
        if old.is_none_or(|old| old.base != new.base) && self.slots.iter().any(overlaps) {
            return Err(EEXIST);
        }
        if new.end() > self.capacity {
            return Err(EINVAL);
        }
        // In KVM, the bitmap of a slot survives as long as the slot logs, even when the slot moves.
        let log = self.remove(id);
        if new.logs() {
            let log = log.unwrap_or_else(|| Log::new(new.pages, self.mode));
            self.logs.insert(id, log);
        }
        self.insert(id, new);
        Ok(())
    }

    /// Changes several slots atomically ([`slat::Vm::set_memory_regions`]). The error is an errno.
    pub fn set_regions(&mut self, changes: &[Change]) -> Result<(), i32> {
        let mut regions = Vec::new();
        for change in changes {
            if let Change::Set(region) = change {
                check_alone(region, self.granule)?;
                if region.size == 0 {
                    return Err(EINVAL);
                }
                regions.push((region.slot, ModelSlot::of(region, self.granule)));
            }
        }
        let ids: BTreeSet<u32> = changes.iter().map(Change::slot).collect();
        if ids.len() < changes.len() {
            return Err(EINVAL);
        }
        for (i, (_, slot)) in regions.iter().enumerate() {
            if regions[..i].iter().any(|(_, other)| other.overlaps(slot)) {
                return Err(EEXIST);
            }
        }
        for change in changes {
            let Change::Set(region) = change else {
                if !self.slots.contains_key(&change.slot()) {
                    return Err(EINVAL);
                }
                continue;
            };
            let new = ModelSlot::of(region, self.granule);
            let mut others = self.slots.iter().filter(|(id, _)| !ids.contains(id));
            if others.any(|(_, slot)| slot.overlaps(&new)) {
                return Err(EEXIST);
            }
            if new.end() > self.capacity {
                return Err(EINVAL);
            }
        }
        let before = self.clone();
        ids.iter().for_each(|id| drop(self.remove(*id)));
        for (id, new) in regions {
            if new.logs() {
                let log = before.log_for(id, &new);
                self.logs.insert(id, log);
            }
            self.insert(id, new);
        }
        Ok(())
    }

    /// Returns the log of slot `id` after a change of several slots, which has made this slot `new`. Pages that the
    /// slot had before keep their bits.
    fn log_for(&self, id: u32, new: &ModelSlot) -> Log {
        let same = |old: &&ModelSlot| (old.backing, old.pages) == (new.backing, new.pages);
        let own = self.slots.get(&id).filter(same);
        let own = own.and_then(|_| self.logs.get(&id).cloned());
        let is_own = own.is_some();
        let mut log = own.unwrap_or_else(|| Log::new(new.pages, self.mode));
        for page in 0..new.pages {
            let gfn = new.base + page;
            if let Some((old, slot)) = self.slot_at(gfn)
                && !(is_own && old == id)
                && let Some(known) = self.logs.get(&old)
                && slot.host_page(gfn) == new.host_page(gfn)
            {
                let marked = known.holds(gfn - slot.base) && !self.mode.rings;
                let (word, bit) = (page as usize / 64, 1 << (page % 64));
                // If the slot keeps its log, the log already has bits set. If two slots exchange their memory, a log
                // may get some of its own bits back.
                let before = if is_own {
                    log.noted[word]
                } else {
                    log.noted[word] & !bit
                };
                log.noted[word] = before | if marked { bit } else { 0 };
                log.loose |= known.loose || is_own;
            }
        }
        log
    }

    fn insert(&mut self, id: u32, slot: ModelSlot) {
        self.slots.insert(id, slot);
        self.by_base.insert(slot.base, id);
    }

    /// Returns the frames that have the same memory and rights in `self` and in `after`. The change from `self` to
    /// `after` must not unmap these frames, even if it turns dirty logging on or off.
    pub fn kept(&self, after: &GuestModel) -> Vec<Range<u64>> {
        let mut kept = Vec::new();
        for (id, old) in &self.slots {
            let method = |model: &GuestModel, id| model.logs.get(&id).map(|log: &Log| log.method);
            // If a slot moves, the dirty bits of its leaves are moved to its log.
            let moved = after.slots.get(id).is_some_and(|new| new.base != old.base);
            if moved && method(self, *id).is_some_and(|method| method != Method::Protection) {
                continue;
            }
            for (other, new) in &after.slots {
                let limits =
                    |slot: &ModelSlot| (slot.is_writable(), slot.is_executable(), slot.memory);
                let (was, is) = (method(self, *id), method(after, *other));
                let logs = was.is_none() || is.is_none() || was == is;
                let start = old.base.max(new.base);
                let end = old.end().min(new.end());
                if start < end
                    && logs
                    && limits(old) == limits(new)
                    && old.host_page(start) == new.host_page(start)
                {
                    kept.push(start..end);
                }
            }
        }
        kept
    }

    /// Removes a slot. Returns its log.
    fn remove(&mut self, id: u32) -> Option<Log> {
        if let Some(slot) = self.slots.remove(&id) {
            self.by_base.remove(&slot.base);
        }
        self.logs.remove(&id)
    }

    /// Returns the slot that contains `gfn`.
    pub fn slot_at(&self, gfn: u64) -> Option<(u32, &ModelSlot)> {
        let (_, &id) = self.by_base.range(..=gfn).next_back()?;
        let slot = &self.slots[&id];
        slot.contains(gfn).then_some((id, slot))
    }

    /// Returns the correct result of an access to `gfn`.
    pub fn expect(&self, machine: &impl Machine, gfn: u64, access: Access) -> Expected {
        if gfn < self.capacity && self.has_private(&(gfn..gfn + 1)) {
            return Expected::Private;
        }
        let Some((_, slot)) = self.slot_at(gfn) else {
            return Expected::Mmio;
        };
        if access == Access::Write && !slot.is_writable() {
            return Expected::Mmio;
        }
        if access == Access::Execute && !slot.is_executable() {
            return Expected::NoExecute;
        }
        let page = slot.host_page(gfn);
        match machine.page(page) {
            None if machine.is_absent(page) => Expected::Absent,
            None => Expected::BadAddress,
            Some(page) if access == Access::Write && !page.writable => Expected::BadAddress,
            Some(page) if access == Access::Execute && !is_executable(&page) => {
                Expected::BadAddress
            }
            Some(page) => Expected::Page(slot.limit(page)),
        }
    }

    /// Whether the guest may write to `gfn` without another fault.
    pub fn may_write(&self, machine: &impl Machine, gfn: u64) -> bool {
        match (self.expect(machine, gfn, Access::Write), self.slot_at(gfn)) {
            (Expected::Page(_), Some((_, slot))) if machine.is_shared(slot.host_page(gfn)) => false,
            (Expected::Page(_), Some((id, slot))) => match self.logs.get(&id) {
                Some(log) => {
                    log.loose || log.method != Method::Protection || log.holds(gfn - slot.base)
                }
                None => true,
            },
            _ => false,
        }
    }

    /// Whether the log of slot `id` may contain pages that were not written.
    pub fn is_loose(&self, id: u32) -> bool {
        self.logs.get(&id).is_some_and(|log| log.loose)
    }

    /// Records that the guest was given the right to write to `gfn`. Call when that happens.
    pub fn note_write(&mut self, gfn: u64) {
        if let Some((id, slot)) = self.slot_at(gfn) {
            let page = gfn - slot.base;
            if let Some(log) = self.logs.get_mut(&id) {
                log.noted[page as usize / 64] |= 1 << (page % 64);
            }
        }
    }

    /// Records that the ring entry of `page` was reset, so that the next write to the page is recorded again. Call when
    /// that happens.
    pub fn reset(&mut self, id: u32, page: u64) {
        if let Some(log) = self.logs.get_mut(&id)
            && let Some(word) = log.noted.get_mut(page as usize / 64)
        {
            *word &= !(1 << (page % 64));
        }
    }

    fn bitmap(&mut self, id: u32) -> Result<&mut Vec<u64>, i32> {
        let log = self.logs.get_mut(&id).ok_or(ENOENT)?;
        if self.mode.rings {
            return Err(ENXIO);
        }
        Ok(&mut log.noted)
    }

    /// Executes KVM_GET_DIRTY_LOG. The error is an errno.
    pub fn dirty_log(&mut self, id: u32) -> Result<Vec<u64>, i32> {
        let manual = self.mode.manual;
        let noted = self.bitmap(id)?;
        let answer = noted.clone();
        if !manual {
            noted.fill(0);
        }
        Ok(answer)
    }

    /// Executes KVM_CLEAR_DIRTY_LOG. Bit n of `bitmap` is page `first + n`. The error is an errno.
    pub fn clear_dirty_log(
        &mut self,
        id: u32,
        first: u64,
        pages: u64,
        bitmap: &[u64],
    ) -> Result<(), i32> {
        let all = self.slots.get(&id).map_or(0, |slot| slot.pages);
        let noted = self.bitmap(id)?;
        let end = first.checked_add(pages).filter(|end| *end <= all);
        let end = end.ok_or(EINVAL)?;
        if !first.is_multiple_of(64) || !pages.is_multiple_of(64) && end != all {
            return Err(EINVAL);
        }
        let words = pages.div_ceil(64) as usize;
        for (noted, clear) in noted[first as usize / 64..]
            .iter_mut()
            .zip(&bitmap[..words])
        {
            *noted &= !clear;
        }
        Ok(())
    }
}

/// Makes the checks of a region that KVM makes before it compares the region with other slots. The error is an errno.
fn check_alone(region: &Region, granule: Granule) -> Result<(), i32> {
    let (gpa, size, backing) = (region.gpa.0, region.size, region.backing.0);
    let aligned = |x: u64| x.is_multiple_of(granule.bytes());
    if region.flags.0 & !(LOG | READONLY) != 0
        || !aligned(size)
        || !aligned(gpa)
        || !aligned(backing)
        || region.slot >= MAX_SLOTS
        || gpa.checked_add(size).is_none()
        || backing.checked_add(size).is_none()
        || size >> granule.shift() > (1 << 31) - 1
    {
        return Err(EINVAL);
    }
    Ok(())
}

/// Whether a guest may execute from `page`.
pub(crate) fn is_executable(page: &HostPage) -> bool {
    page.execute && page.memory == MemoryType::WriteBack
}
