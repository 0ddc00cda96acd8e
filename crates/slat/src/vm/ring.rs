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

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use alloc::sync::Arc;
use core::ptr::NonNull;

use super::{RangeOp, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::platform::Platform;
use crate::table::{OutOfMemory, Tree};

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

/// A ring of [`DirtyGfn`].
pub struct DirtyRing {
    entries: NonNull<DirtyGfn>,
    len: u32,
    /// First entry not reset yet; moved by `reset`, whose calls are serialized.
    head: AtomicU32,
    /// Behind the last entry; moved by the vCPU.
    tail: AtomicU32,
}

// SAFETY: entries are atomics, the indexes have one writer each (see the module).
unsafe impl Send for DirtyRing {}
// SAFETY: as above.
unsafe impl Sync for DirtyRing {}

impl DirtyRing {
    /// Entries kept free beyond the soft limit (KVM_DIRTY_RING_RSVD_ENTRIES).
    pub const RESERVED: u32 = if cfg!(loom) { 1 } else { 64 };

    /// A ring over `len` entries at `entries`, all zero.
    ///
    /// # Panics
    /// If `len` is not a power of two above [`DirtyRing::RESERVED`].
    ///
    /// # Safety
    /// - the memory is valid for `len` entries, and for atomic access, as long as the ring lives.
    pub unsafe fn new(entries: NonNull<DirtyGfn>, len: u32) -> Self {
        assert!(len.is_power_of_two() && len > Self::RESERVED);
        DirtyRing {
            entries,
            len,
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
        }
    }

    fn entry(&self, index: u32) -> &DirtyGfn {
        // SAFETY: masked into the ring (`len` is a power of two); the promise of `new`.
        unsafe { &*self.entries.as_ptr().add((index & (self.len - 1)) as usize) }
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
        let rings = self.rings.lock(self.lock_wait());
        let mut total = 0;
        loop {
            // Entries of both address spaces may take turns in a ring.
            let taken: u64 = (0..self.spaces.len())
                .map(|i| self.reset_space(i, &rings))
                .sum();
            total += taken;
            if taken == 0 {
                return total;
            }
        }
    }

    fn reset_space(&self, index: usize, rings: &[Arc<DirtyRing>]) -> u64 {
        let space = &self.spaces[index];
        let change = space.slots.change(self.lock_wait());
        let mut op = RangeOp::begin(self, space);
        let mut taken = 0;
        for ring in rings {
            while let Some((id, offset)) = ring.pop_reset(index as u32) {
                taken += 1;
                // An entry of a slot that has gone, or come again smaller, is nobody's.
                if let Some(slot) = change.by_id(id).filter(|slot| offset < slot.pages()) {
                    op.protect_pages(slot, offset, 1);
                }
            }
        }
        // A page whose leaf is gone may still be written through a translation not flushed yet.
        let everything = Gfn(0)..Gfn(Tree::<P, F>::capacity());
        op.finish((taken > 0).then_some(everything));
        taken
    }

    pub(crate) fn add_ring(&self, ring: Arc<DirtyRing>) -> Result<(), OutOfMemory> {
        let mut rings = self.rings.lock(self.lock_wait());
        rings.try_reserve(1).map_err(|_| OutOfMemory)?;
        rings.push(ring);
        Ok(())
    }
}

#[cfg(test)]
impl DirtyGfn {
    pub(crate) fn new() -> Self {
        DirtyGfn {
            flags: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            offset: AtomicU64::new(0),
        }
    }

    /// What the client does with the next entry: slot and page, if there is one.
    #[cfg(loom)]
    pub(crate) fn collect(&self) -> Option<(u32, u64)> {
        if self.flags.load(Acquire) != DIRTY {
            return None;
        }
        let dirty = (self.slot.load(Relaxed), self.offset.load(Relaxed));
        self.flags.store(DIRTY | RESET, Release);
        Some(dirty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(entries: &mut [DirtyGfn]) -> DirtyRing {
        // SAFETY: the entries outlive the ring in each test.
        unsafe { DirtyRing::new(NonNull::from(&mut entries[0]), entries.len() as u32) }
    }

    fn entries() -> [DirtyGfn; 128] {
        core::array::from_fn(|_| DirtyGfn::new())
    }

    #[test]
    fn only_collected_entries_are_reset_and_in_order() {
        let mut entries = entries();
        let ring = ring(&mut entries);
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
        let mut entries = entries();
        let ring = ring(&mut entries);
        for page in 0..64 {
            assert!(!ring.is_soft_full());
            ring.push(0, page);
        }
        assert!(ring.is_soft_full());
        ring.entry(0).flags.store(RESET, Release);
        ring.pop_reset(0).unwrap();
        assert!(!ring.is_soft_full());
    }
}
