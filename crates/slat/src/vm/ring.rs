//! The dirty ring of a vCPU: KVM_CAP_DIRTY_LOG_RING (Documentation/virt/kvm/api.rst, 8.29), in memory shared with the
//! client.
//!
//! The vCPU is the only producer: it writes slot and offset, advances the tail, and then publishes the ring entry by a
//! `Release` store of the flag DIRTY. The client reads the ring entry after an `Acquire` load of the flag. When it has
//! collected the page, it sets the flag RESET, also with `Release`. [`Vm::reset_dirty_rings`], which only one thread
//! runs at a time, removes entries with RESET from the head of the ring, clears their flags, and write-protects their
//! pages again.
//!
//! The client can write anything to a ring entry at any time. So a reset reads each field only once, and trusts no
//! value. It ends at the index that the tail had when the reset began, whatever flags the client has set. A ring entry
//! that names no existing memslot or address space is removed and counted like any other (KVM: `kvm_reset_dirty_gfn`).
//!
//! No write is lost when a ring is full: a fault that would have to push a ring entry stops with
//! [`crate::Stop::DirtyRingFull`] before it changes anything.
//!
//! # Ownership
//! A [`DirtyRing`] owns its memory, alone or together with others, so the memory exists as long as the vCPU or the VM
//! has the ring. When a vCPU is dropped, or gets another ring, the VM drops the old ring. No reset will process the
//! entries in this ring that are not reset. So the VM write-protects their pages first, and the next write to them, by
//! any vCPU, is recorded again. A client that also owns the memory may still collect these entries.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::{fmt, iter};

use super::{RangeOp, Vm};
use crate::format::{Format, all_gfns};
use crate::heap::{self, OutOfMemory};
use crate::platform::Platform;
use crate::slots::OwnedSlot;
use crate::table::Walk;
use crate::trace::Event;

/// A ring entry, with the layout of `struct kvm_dirty_gfn`.
#[repr(C)]
pub struct DirtyGfn {
    flags: AtomicU32,
    /// The address space in the bits from 16 on, and the slot's id in the lower bits.
    slot: AtomicU32,
    /// The number of the page in the slot.
    offset: AtomicU64,
}

const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

/// The memslot in a ring entry: the number of the address space in the bits from 16 on, the slot's id in the lower
/// bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RingSlot(u32);

impl RingSlot {
    /// The largest number of address spaces that a ring entry can distinguish.
    pub(crate) const SPACES: usize = 1 << 16;

    pub(crate) const fn new(space: usize, id: u32) -> Self {
        debug_assert!(space < Self::SPACES && id >> 16 == 0);
        RingSlot((space as u32) << 16 | id)
    }

    /// Returns the index of the address space. If this value was read from a ring, the address space need not exist.
    fn space(self) -> usize {
        (self.0 >> 16) as usize
    }

    fn id(self) -> u32 {
        self.0 & 0xffff
    }
}

impl DirtyGfn {
    /// Makes an empty ring entry, which is all zero.
    pub fn new() -> Self {
        DirtyGfn {
            flags: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            offset: AtomicU64::new(0),
        }
    }

    /// Returns the page in the ring entry, for the client: a number with the address space in the bits from 16 on and
    /// the slot's id in the lower bits, and the page's number in the slot. `None`: the entry is empty, or its page was
    /// already collected.
    pub fn page(&self) -> Option<(u32, u64)> {
        let dirty = self.flags.load(Acquire) == DIRTY;
        dirty.then(|| (self.slot.load(Relaxed), self.offset.load(Relaxed)))
    }

    /// Like [`DirtyGfn::page`], but also marks the page as collected: the next reset write-protects the page and frees
    /// the ring entry.
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

/// A ring of [`DirtyGfn`], for one vCPU.
///
/// ```
/// # use slat_model::{HostMemory, SimPlatform};
/// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
/// # use slat::{Access, Config, Ept, Gpa, Region, SlotFlags, Vm};
/// # use std::sync::Arc;
/// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
/// use slat::{DirtyGfn, DirtyRing};
///
/// vm.use_dirty_rings();
/// # let region = Region::new(7, Gpa(0), 0x20_0000, backing).with_flags(SlotFlags::LOG_DIRTY_PAGES);
/// # vm.set_memory_region(0, &region)?;
/// # let mut vcpu = vm.create_vcpu()?;
/// let memory: Arc<[DirtyGfn]> = (0..128).map(|_| DirtyGfn::new()).collect();
/// vcpu.set_dirty_ring(Arc::new(DirtyRing::new(memory.clone())?))?;
/// # vcpu.enter(0).translate(Gpa(0x3000), Access::Write)?;
/// // The guest has written to page 3 of memslot 7.
/// assert_eq!(memory[0].collect(), Some((7, 3)));
/// assert_eq!(vm.reset_dirty_rings(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DirtyRing {
    memory: Box<dyn AsRef<[DirtyGfn]> + Send + Sync>,
    len: u32,
    /// The index of the first ring entry that was not reset yet. Only a reset changes it, and only one reset runs at a
    /// time.
    head: AtomicU32,
    /// The index at which the next ring entry will be pushed. Only the vCPU changes it.
    tail: AtomicU32,
    /// The value of `tail` when the current reset began: the reset removes no ring entry at or after this index.
    reset_end: AtomicU32,
}

/// The reason why a [`DirtyRing`] was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirtyRingError {
    /// The number of ring entries is not a power of two, or not greater than [`DirtyRing::RESERVED`].
    BadSize(usize),
    /// There was no heap memory.
    OutOfMemory,
}

impl From<OutOfMemory> for DirtyRingError {
    fn from(_: OutOfMemory) -> Self {
        DirtyRingError::OutOfMemory
    }
}

impl fmt::Display for DirtyRingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DirtyRingError::BadSize(entries) => write!(
                f,
                "a dirty ring of {entries} entries: give a power of two above {}",
                DirtyRing::RESERVED
            ),
            DirtyRingError::OutOfMemory => f.write_str("a dirty ring: no memory"),
        }
    }
}

impl core::error::Error for DirtyRingError {}

impl DirtyRing {
    /// The number of ring entries that are kept in reserve above the soft limit (KVM_DIRTY_RING_RSVD_ENTRIES).
    pub const RESERVED: u32 = if cfg!(loom) { 1 } else { 64 };

    /// Makes a ring in `memory`, whose entries are all zero. A client in the same process shares the ownership of the
    /// memory (`Arc<[DirtyGfn]>`). A client in another process maps the same pages.
    ///
    /// # Errors
    /// [`DirtyRingError`].
    pub fn new(
        memory: impl AsRef<[DirtyGfn]> + Send + Sync + 'static,
    ) -> Result<Self, DirtyRingError> {
        let entries = memory.as_ref().len();
        let len = u32::try_from(entries)
            .ok()
            .filter(|len| len.is_power_of_two() && *len > Self::RESERVED)
            .ok_or(DirtyRingError::BadSize(entries))?;
        Ok(DirtyRing {
            memory: heap::boxed(memory)?,
            len,
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            reset_end: AtomicU32::new(0),
        })
    }

    /// Returns the ring entry at `index` modulo the length of the ring.
    fn entry(&self, index: u32) -> &DirtyGfn {
        let entries: &[DirtyGfn] = (*self.memory).as_ref();
        &entries[(index & (self.len - 1)) as usize]
    }

    /// Returns whether the ring has reached its soft limit: then the client must collect ring entries and reset the
    /// ring before the vCPU runs again.
    pub fn is_soft_full(&self) -> bool {
        let used = self
            .tail
            .load(Relaxed)
            .wrapping_sub(self.head.load(Acquire));
        used >= self.len - Self::RESERVED
    }

    /// Pushes an entry for page `offset` of `slot`. Call from the ring's vCPU only. Returns the event to report to the
    /// platform.
    pub(crate) fn push(&self, slot: RingSlot, offset: u64) -> Event {
        let tail = self.tail.load(Relaxed);
        let entry = self.entry(tail);
        entry.slot.store(slot.0, Relaxed);
        entry.offset.store(offset, Relaxed);
        // Store the tail before the flag: otherwise the client could collect a ring entry that a reset does not find
        // yet.
        self.tail.store(tail.wrapping_add(1), Relaxed);
        entry.flags.store(DIRTY, Release);
        Event::DirtyRingPush {
            dirty_index: tail.wrapping_add(1),
            reset_index: self.head.load(Relaxed),
            slot: slot.0,
            offset,
        }
    }

    /// Begins a reset: notes the tail, so that the reset removes only entries that are in the ring now.
    pub(crate) fn begin_reset(&self) {
        self.reset_end.store(self.tail.load(Relaxed), Relaxed);
    }

    /// Removes the ring entry at the head and returns its slot and page, if the client has collected it and `takes`
    /// returns `true` for its slot. Otherwise returns `None`.
    pub(crate) fn pop_reset(&self, takes: impl Fn(RingSlot) -> bool) -> Option<(RingSlot, u64)> {
        let head = self.head.load(Relaxed);
        if head == self.reset_end.load(Relaxed) {
            return None;
        }
        let entry = self.entry(head);
        // Load the flag first, with `Acquire`: then the stores that the client or the vCPU made before it set the flag
        // are visible.
        if entry.flags.load(Acquire) & RESET == 0 {
            return None;
        }
        let slot = RingSlot(entry.slot.load(Relaxed));
        if !takes(slot) {
            return None;
        }
        let dirty = (slot, entry.offset.load(Relaxed));
        entry.flags.store(0, Release);
        self.head.store(head.wrapping_add(1), Release);
        Some(dirty)
    }

    /// Removes collected ring entries from the head, up to the first entry for whose slot `takes` returns `false`.
    fn reset(&self, takes: impl Fn(RingSlot) -> bool) -> impl Iterator<Item = (RingSlot, u64)> {
        iter::from_fn(move || self.pop_reset(&takes))
    }

    /// Iterates over the ring entries of address space `space` that were not reset, collected or not. Changes nothing.
    /// Call when the ring's vCPU does not push entries any more.
    fn unreset(&self, space: usize) -> impl Iterator<Item = (RingSlot, u64)> {
        let (head, tail) = (self.head.load(Relaxed), self.tail.load(Relaxed));
        let entries = (0..tail.wrapping_sub(head)).map(move |i| self.entry(head.wrapping_add(i)));
        entries.filter_map(move |entry| {
            let slot = RingSlot(entry.slot.load(Relaxed));
            (slot.space() == space).then(|| (slot, entry.offset.load(Relaxed)))
        })
    }

    fn is_empty(&self) -> bool {
        self.head.load(Relaxed) == self.tail.load(Relaxed)
    }
}

/// Pages of `slot` near each other, which one walk protects.
struct ProtectBatch {
    slot: RingSlot,
    first: u64,
    /// Bit n is set if page `first` + n is in the batch.
    mask: u64,
}

impl ProtectBatch {
    /// Adds `page` of `slot` to the batch if `mask` has a bit for it. Returns whether the page was added.
    fn add(&mut self, slot: RingSlot, page: u64) -> bool {
        let distance = page.wrapping_sub(self.first);
        let fits = slot == self.slot && distance < 64;
        if fits {
            self.mask |= 1 << distance;
        }
        fits
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Makes all logs that begin from now on write to the vCPUs' rings instead of a bitmap. The client gives each vCPU
    /// its ring by [`crate::Vcpu::set_dirty_ring`]. Call this before creating slots.
    pub fn use_dirty_rings(&self) {
        self.log_mode.rings.store(true, SeqCst);
    }

    /// Removes all collected ring entries from all rings, and write-protects their pages, so that the next write to
    /// each is recorded: KVM_RESET_DIRTY_RINGS. Returns the number of ring entries removed.
    pub fn reset_dirty_rings(&self) -> u64 {
        let rings = self.rings.lock(self.turn_wait());
        rings.iter().for_each(|ring| ring.begin_reset());
        let spaces = self.spaces.len();
        let mut total = 0;
        loop {
            // For each address space in turn: `ring.reset` stops at an entry of another address space. So repeat the
            // rounds until no ring has a collected entry. Entries that name no existing address space are removed in
            // the turn of the first address space.
            let reset: u64 = (0..spaces)
                .map(|space| {
                    let takes = |slot: RingSlot| {
                        slot.space() == space || space == 0 && slot.space() >= spaces
                    };
                    let collected = rings.iter().flat_map(|ring| ring.reset(takes));
                    self.protect_again(space, collected)
                })
                .sum();
            total += reset;
            if reset == 0 {
                let done = rings.iter().map(|ring| Event::DirtyRingReset {
                    dirty_index: ring.tail.load(Relaxed),
                    reset_index: ring.head.load(Relaxed),
                });
                done.for_each(|event| self.platform.trace(event));
                return total;
            }
        }
    }

    /// Write-protects `pages` of address space `index`, each given by its slot and its number in the slot, so that the
    /// next write to each is recorded. Returns the number of pages, including pages of slots that do not exist.
    fn protect_again(&self, index: usize, pages: impl Iterator<Item = (RingSlot, u64)>) -> u64 {
        let space = &self.spaces[index];
        let mut op = RangeOp::begin(self, space);
        let mut count = 0;
        // Consecutive ring entries often name pages near each other: collect these in a batch, which one walk protects.
        let mut batch: Option<ProtectBatch> = None;
        for (slot, page) in pages {
            count += 1;
            if !op.look() {
                op.pass();
            }
            if batch.as_mut().is_some_and(|batch| batch.add(slot, page)) {
                continue;
            }
            let next = ProtectBatch {
                slot,
                first: page,
                mask: 1,
            };
            if let Some(before) = batch.replace(next) {
                self.protect_batch(&mut op, index, &before);
            }
        }
        if let Some(last) = batch {
            self.protect_batch(&mut op, index, &last);
        }
        // Flush even if a page has no leaf: the guest may still write to it through a translation that another thread
        // has zapped and not flushed yet.
        if count > 0 {
            op.covers(&all_gfns::<F>());
            op.finish();
        }
        count
    }

    /// Write-protects the pages of `batch`. `op` is an operation on address space `index`, and the slot writers' lock
    /// is held. Ignores pages of another address space, and pages that are not in their slot, because the slot was
    /// deleted, or created again with fewer pages.
    fn protect_batch(&self, op: &mut RangeOp<'_, P, F>, index: usize, batch: &ProtectBatch) {
        if batch.slot.space() != index {
            return;
        }
        let change = op.outside(|| op.space.slots.change(self.turn_wait()));
        // Check `first`: the client can write any number to the ring.
        let in_slot = |slot: &&OwnedSlot| batch.first < slot.pages();
        let Some(slot) = change.by_id(batch.slot.id()).filter(in_slot) else {
            return;
        };
        let first = slot.base().add(batch.first);
        let end = first.add(64 - u64::from(batch.mask.leading_zeros()));
        let gfns = first..end.min(slot.gfns().end);
        op.covers(&gfns);
        op.walk(&mut Walk::new(gfns), |step, walk| {
            step.protect(slot, walk, |gfn| batch.mask >> (gfn.0 - first.0) & 1 != 0);
        });
    }

    /// Adds the ring of a vCPU to the list of rings, so that resets process it.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn add_ring(&self, ring: Arc<DirtyRing>) -> Result<(), OutOfMemory> {
        let mut rings = self.rings.lock(self.turn_wait());
        rings.try_reserve(1).map_err(|_| OutOfMemory)?;
        rings.push(ring);
        Ok(())
    }

    /// Removes the ring of a vCPU from the list of rings. Write-protects the pages of its entries that are not reset,
    /// and flushes if there are any. Call when the vCPU does not push to the ring any more.
    pub(crate) fn remove_ring(&self, ring: &Arc<DirtyRing>) {
        let mut rings = self.rings.lock(self.turn_wait());
        if let Some(i) = rings.iter().position(|other| Arc::ptr_eq(other, ring)) {
            rings.swap_remove(i);
        }
        if !ring.is_empty() {
            for space in 0..self.spaces.len() {
                self.protect_again(space, ring.unreset(space));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tests::assert_refuses;

    fn ring() -> DirtyRing {
        let entries: [DirtyGfn; 128] = core::array::from_fn(|_| DirtyGfn::new());
        DirtyRing::new(entries).unwrap()
    }

    /// Removes an entry of address space `space` like a reset, but protects no page.
    fn pop_reset(ring: &DirtyRing, space: usize) -> Option<(u32, u64)> {
        ring.begin_reset();
        let popped = ring.pop_reset(|slot| slot.space() == space);
        popped.map(|(slot, page)| (slot.id(), page))
    }

    #[test]
    fn a_ring_slot_holds_address_space_and_id() {
        let last = RingSlot::new(RingSlot::SPACES - 1, 0xffff);
        assert_eq!((last.space(), last.id()), (RingSlot::SPACES - 1, 0xffff));
        assert_refuses(|| RingSlot::new(RingSlot::SPACES, 0));
        assert_refuses(|| RingSlot::new(0, 1 << 16));
    }

    #[test]
    fn only_collected_entries_are_reset_and_in_order() {
        let ring = ring();
        ring.push(RingSlot::new(0, 1), 10);
        ring.push(RingSlot::new(0, 2), 20);
        assert_eq!(pop_reset(&ring, 0), None);
        ring.entry(1).flags.store(DIRTY | RESET, Release);
        assert_eq!(pop_reset(&ring, 0), None, "the one before is not collected");
        ring.entry(0).flags.store(DIRTY | RESET, Release);
        assert_eq!(pop_reset(&ring, 1), None, "another address space");
        assert_eq!(pop_reset(&ring, 0), Some((1, 10)));
        assert_eq!(pop_reset(&ring, 0), Some((2, 20)));
        assert_eq!(pop_reset(&ring, 0), None);
    }

    /// A reset ends even if the client sets RESET in entries that were not pushed, or as fast as entries are pushed.
    #[test]
    fn a_reset_ends_where_the_tail_was_when_it_began() {
        let ring = ring();
        for entry in 0..128 {
            ring.entry(entry).flags.store(RESET, Release);
        }
        ring.push(RingSlot::new(0, 1), 10);
        ring.entry(0).collect().unwrap();
        ring.begin_reset();
        ring.push(RingSlot::new(0, 1), 11);
        ring.entry(1).collect().unwrap();
        assert_eq!(ring.reset(|_| true).count(), 1);
        ring.begin_reset();
        assert_eq!(ring.reset(|_| true).count(), 1);
    }

    #[test]
    fn a_ring_is_soft_full_before_it_is_full() {
        let ring = ring();
        for page in 0..64 {
            assert!(!ring.is_soft_full());
            ring.push(RingSlot::new(0, 0), page);
        }
        assert!(ring.is_soft_full());
        ring.entry(0).flags.store(RESET, Release);
        pop_reset(&ring, 0).unwrap();
        assert!(!ring.is_soft_full());
    }

    #[test]
    fn what_was_not_reset_is_known_whether_it_was_collected_or_not() {
        let ring = ring();
        let (first, other, last) = (
            RingSlot::new(0, 1),
            RingSlot::new(1, 2),
            RingSlot::new(0, 3),
        );
        ring.push(first, 10);
        ring.push(other, 20);
        ring.push(last, 30);
        assert_eq!(ring.entry(0).collect(), Some((1, 10)));
        assert_eq!(pop_reset(&ring, 0), Some((1, 10)));
        assert_eq!(ring.entry(1).collect(), Some((1 << 16 | 2, 20)));
        assert!(ring.unreset(0).eq([(last, 30)]));
        assert!(ring.unreset(1).eq([(other, 20)]));
        assert_eq!(ring.entry(2).page(), Some((3, 30)));
    }
}
