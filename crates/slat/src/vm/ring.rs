//! The dirty ring of a vCPU: KVM_CAP_DIRTY_LOG_RING (Documentation/virt/kvm/api.rst, 8.29), in memory
//! shared with the client.
//!
//! The vCPU is the only producer: it writes slot and offset and moves the end of the ring, then
//! publishes the entry by a `Release` store of the flag DIRTY. The client reads the entry after an
//! `Acquire` load of the flag, and sets RESET when it has collected the page, with `Release`, too. [`Vm::reset_dirty_rings`], one at a time, takes entries with
//! RESET from the head, clears their flags, and protects their pages again.
//!
//! Nothing is lost when the ring is full: the fault that would add an entry stops with
//! [`crate::Stop::DirtyRingFull`] before it changes anything.
//!
//! # Whose memory
//! A [`DirtyRing`] owns its memory, or a share of it: whoever has the ring, the vCPU or the VM that resets it,
//! has the memory. A ring leaves the VM with its vCPU. The pages that it names and that were not reset are
//! protected again then, because no reset will do it: the next write to them, by any vCPU, is noted anew. The
//! client may still collect them from the memory, if it has a share.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::iter;

use super::{RangeOp, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::heap;
use crate::platform::Platform;
use crate::slots::OwnedSlot;
use crate::table::{OutOfMemory, Tree, Walk};

/// One entry, with the layout of `struct kvm_dirty_gfn`.
#[repr(C)]
pub struct DirtyGfn {
    flags: AtomicU32,
    /// Address space above bit 16, slot id below.
    slot: AtomicU32,
    /// Page in the slot.
    offset: AtomicU64,
}

const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

impl DirtyGfn {
    /// An entry that names no page: all zero.
    pub fn new() -> Self {
        DirtyGfn {
            flags: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            offset: AtomicU64::new(0),
        }
    }

    /// The page that the entry names, if it names one that was not collected: address space above bit 16 and
    /// slot id below, and the page's number in the slot. For the client.
    pub fn page(&self) -> Option<(u32, u64)> {
        let dirty = self.flags.load(Acquire) == DIRTY;
        dirty.then(|| (self.slot.load(Relaxed), self.offset.load(Relaxed)))
    }

    /// [`DirtyGfn::page`], which the client has collected with that: the next reset may take the entry back.
    pub fn collect(&self) -> Option<(u32, u64)> {
        let page = self.page()?;
        self.flags.store(DIRTY | RESET, Release);
        Some(page)
    }
}

impl Default for DirtyGfn {
    fn default() -> Self {
        Self::new()
    }
}

/// A ring of [`DirtyGfn`].
pub struct DirtyRing {
    memory: Box<dyn AsRef<[DirtyGfn]> + Send + Sync>,
    len: u32,
    /// First entry not reset yet; moved by `reset`, whose calls are serialized.
    head: AtomicU32,
    /// Behind the last entry; moved by the vCPU.
    tail: AtomicU32,
}

impl DirtyRing {
    /// Entries kept free beyond the soft limit (KVM_DIRTY_RING_RSVD_ENTRIES).
    pub const RESERVED: u32 = if cfg!(loom) { 1 } else { 64 };

    /// A ring in `memory`, whose entries are all zero. The ring owns it; a client in the same address space
    /// keeps a share (`Arc<[DirtyGfn]>`), another one maps the same pages.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    ///
    /// # Panics
    /// If there are not a power of two entries, and more than [`DirtyRing::RESERVED`].
    pub fn new(
        memory: impl AsRef<[DirtyGfn]> + Send + Sync + 'static,
    ) -> Result<Self, OutOfMemory> {
        let len = memory.as_ref().len() as u32;
        assert!(len.is_power_of_two() && len > Self::RESERVED);
        Ok(DirtyRing {
            memory: heap::boxed(memory)?,
            len,
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
        })
    }

    fn entry(&self, index: u32) -> &DirtyGfn {
        let entries: &[DirtyGfn] = (*self.memory).as_ref();
        &entries[(index & (self.len - 1)) as usize]
    }

    /// Whether the client must collect before the vCPU goes on.
    pub fn is_soft_full(&self) -> bool {
        let used = self
            .tail
            .load(Relaxed)
            .wrapping_sub(self.head.load(Acquire));
        used >= self.len - Self::RESERVED
    }

    pub(crate) fn push(&self, slot: u32, offset: u64) {
        let tail = self.tail.load(Relaxed);
        let entry = self.entry(tail);
        entry.slot.store(slot, Relaxed);
        entry.offset.store(offset, Relaxed);
        // Before the flag: what the client has collected, a reset must find.
        self.tail.store(tail.wrapping_add(1), Relaxed);
        entry.flags.store(DIRTY, Release);
    }

    /// Takes one collected entry from the head, if it is one of address space `space`.
    pub(crate) fn pop_reset(&self, space: u32) -> Option<(u32, u64)> {
        let head = self.head.load(Relaxed);
        let entry = self.entry(head);
        // The flag first: with it all that was written before it is seen.
        let collected = entry.flags.load(Acquire) & RESET != 0;
        if !collected || head == self.tail.load(Relaxed) {
            return None;
        }
        let slot = entry.slot.load(Relaxed);
        if slot >> 16 != space {
            return None;
        }
        let dirty = (slot & 0xffff, entry.offset.load(Relaxed));
        entry.flags.store(0, Release);
        self.head.store(head.wrapping_add(1), Release);
        Some(dirty)
    }

    /// Takes all collected entries from the head, as long as they are of address space `space`.
    fn reset(&self, space: u32) -> impl Iterator<Item = (u32, u64)> {
        iter::from_fn(move || self.pop_reset(space))
    }

    /// The entries of address space `space` that were not reset, whether collected or not. Called when the
    /// ring's vCPU pushes no more; changes nothing.
    fn unreset(&self, space: u32) -> impl Iterator<Item = (u32, u64)> {
        let (head, tail) = (self.head.load(Relaxed), self.tail.load(Relaxed));
        let entries = (0..tail.wrapping_sub(head)).map(move |i| self.entry(head.wrapping_add(i)));
        entries.filter_map(move |entry| {
            let slot = entry.slot.load(Relaxed);
            (slot >> 16 == space).then(|| (slot & 0xffff, entry.offset.load(Relaxed)))
        })
    }

    fn is_empty(&self) -> bool {
        self.head.load(Relaxed) == self.tail.load(Relaxed)
    }
}

/// Pages of slot `id` that are to be protected, within 64.
struct Near {
    id: u32,
    first: u64,
    mask: u64,
}

impl Near {
    /// Takes one more, if it is near.
    fn take(&mut self, id: u32, page: u64) -> bool {
        let distance = page.wrapping_sub(self.first);
        let near = id == self.id && distance < 64;
        if near {
            self.mask |= 1 << distance;
        }
        near
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// From now on slots that log get no bitmap; writes go to the rings of the vCPUs, which the
    /// client gives by [`crate::Vcpu::set_dirty_ring`]. To be called before there are slots.
    pub fn use_dirty_rings(&self) {
        self.log_mode.rings.store(true, SeqCst);
    }

    /// Takes all collected entries from all rings, and makes their pages fault on the next write:
    /// KVM_RESET_DIRTY_RINGS. Returns how many there were.
    pub fn reset_dirty_rings(&self) -> u64 {
        let rings = self.rings.lock(self.turn_wait());
        let mut total = 0;
        loop {
            // Entries of both address spaces may take turns in a ring.
            let taken: u64 = (0..self.spaces.len())
                .map(|space| {
                    let collected = rings.iter().flat_map(|ring| ring.reset(space as u32));
                    self.protect_again(space, collected)
                })
                .sum();
            total += taken;
            if taken == 0 {
                return total;
            }
        }
    }

    /// Makes these pages of the address space `index`, by slot and number in it, fault on the next write.
    /// Returns how many there were.
    fn protect_again(&self, index: usize, pages: impl Iterator<Item = (u32, u64)>) -> u64 {
        let space = &self.spaces[index];
        let mut op = RangeOp::begin(self, space);
        let mut taken = 0;
        // Pages that lie near each other often come one after the other: one walk protects them.
        let mut near: Option<Near> = None;
        for (id, page) in pages {
            taken += 1;
            if !op.look() {
                op.pass();
            }
            if near.as_mut().is_some_and(|near| near.take(id, page)) {
                continue;
            }
            let next = Near {
                id,
                first: page,
                mask: 1,
            };
            if let Some(before) = near.replace(next) {
                self.protect_near(&mut op, &before);
            }
        }
        if let Some(last) = near {
            self.protect_near(&mut op, &last);
        }
        // A page whose leaf is gone may still be written through a translation not flushed yet.
        if taken > 0 {
            op.about(&(Gfn(0)..Gfn(Tree::<P, F>::capacity())));
            op.finish();
        }
        taken
    }

    /// Slot changes wait for one of these. A page of a slot that has gone, or come again smaller, is nobody's.
    fn protect_near(&self, op: &mut RangeOp<'_, P, F>, near: &Near) {
        let change = op.outside(|| op.space.slots.change(self.turn_wait()));
        // The client can write to the ring: `first` may be any number.
        let in_slot = |slot: &&OwnedSlot| near.first < slot.pages();
        let Some(slot) = change.by_id(near.id).filter(in_slot) else {
            return;
        };
        let first = slot.base().add(near.first);
        let end = first.add(64 - u64::from(near.mask.leading_zeros()));
        let gfns = first..end.min(slot.gfns().end);
        op.about(&gfns);
        op.walk(&mut Walk::new(gfns), |tree, walk, taken, _| {
            taken.protect(tree, slot, walk, |gfn| {
                near.mask >> (gfn.0 - first.0) & 1 != 0
            });
        });
    }

    pub(crate) fn add_ring(&self, ring: Arc<DirtyRing>) -> Result<(), OutOfMemory> {
        let mut rings = self.rings.lock(self.turn_wait());
        rings.try_reserve(1).map_err(|_| OutOfMemory)?;
        rings.push(ring);
        Ok(())
    }

    /// The vCPU that had `ring` pushes to it no more. Waits, like a reset, if there are pages to protect.
    pub(crate) fn remove_ring(&self, ring: &Arc<DirtyRing>) {
        let mut rings = self.rings.lock(self.turn_wait());
        if let Some(i) = rings.iter().position(|other| Arc::ptr_eq(other, ring)) {
            rings.swap_remove(i);
        }
        if !ring.is_empty() {
            for space in 0..self.spaces.len() {
                self.protect_again(space, ring.unreset(space as u32));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> DirtyRing {
        let entries: [DirtyGfn; 128] = core::array::from_fn(|_| DirtyGfn::new());
        DirtyRing::new(entries).unwrap()
    }

    #[test]
    fn only_collected_entries_are_reset_and_in_order() {
        let ring = ring();
        ring.push(1, 10);
        ring.push(2, 20);
        assert_eq!(ring.pop_reset(0), None);
        ring.entry(1).flags.store(DIRTY | RESET, Release);
        assert_eq!(ring.pop_reset(0), None, "the one before is not collected");
        ring.entry(0).flags.store(DIRTY | RESET, Release);
        assert_eq!(ring.pop_reset(1), None, "another address space");
        assert_eq!(ring.pop_reset(0), Some((1, 10)));
        assert_eq!(ring.pop_reset(0), Some((2, 20)));
        assert_eq!(ring.pop_reset(0), None);
    }

    #[test]
    fn a_ring_is_soft_full_before_it_is_full() {
        let ring = ring();
        for page in 0..64 {
            assert!(!ring.is_soft_full());
            ring.push(0, page);
        }
        assert!(ring.is_soft_full());
        ring.entry(0).flags.store(RESET, Release);
        ring.pop_reset(0).unwrap();
        assert!(!ring.is_soft_full());
    }

    #[test]
    fn what_was_not_reset_is_known_whether_it_was_collected_or_not() {
        let ring = ring();
        ring.push(1, 10);
        ring.push(1 << 16 | 2, 20);
        ring.push(3, 30);
        assert_eq!(ring.entry(0).collect(), Some((1, 10)));
        assert_eq!(ring.pop_reset(0), Some((1, 10)));
        assert_eq!(ring.entry(1).collect(), Some((1 << 16 | 2, 20)));
        assert!(ring.unreset(0).eq([(3, 30)]));
        assert!(ring.unreset(1).eq([(2, 20)]));
        assert_eq!(ring.entry(2).page(), Some((3, 30)));
    }
}
