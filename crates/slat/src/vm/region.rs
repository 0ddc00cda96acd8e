//! Slot changes: publish the new set, raise the sequence, zap, flush, return. As with an invalidation
//! ([`super::invalidate`]), no fault that has found a slot in the old set can install its leaf any more.

use super::departure::Departure;
use super::{RangeOp, Space, Vm};
use crate::addr::{Gpa, PAGE_SHIFT};
use crate::format::{Format, all_gfns};
use crate::heap::Shared;
use crate::platform::Platform;
use crate::slots::{Change, OwnedSlot, Region, RegionError, SlotFlags, SlotsChange, check, plan};
use crate::table::Walk;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Creates or moves a memslot of address space `space`, or changes its flags: KVM_SET_USER_MEMORY_REGION, with its rules
    /// and errors, but that size 0 does not delete ([`Self::remove_memory_region`]). When this returns no CPU uses the old
    /// state.
    ///
    /// Not for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`RegionError`]; nothing was changed. [`RegionError::Empty`] for size 0, without a wait for other slot changes.
    pub fn set_memory_region(&self, space: usize, region: &Region) -> Result<(), RegionError> {
        let slots = &self
            .spaces
            .get(space)
            .ok_or(RegionError::NoSuchSpace(space))?
            .slots;
        let checked = check(region)?;
        let mut change = slots.change(self.turn_wait());
        let id = region.slot;
        let Some(plan) = plan(&change, checked, all_gfns::<F>().end.0)? else {
            // Nothing to change. But another thread may have begun the slot's log, and not have protected it all yet.
            self.wait_for_begin(change, id);
            return Ok(());
        };
        let new = Some(self.slot(region, &change)?);
        change.catch_up(&self.readers, self.reader_wait());
        let space = &self.spaces[space];
        self.forget_old_mmio(space, &change);
        let gfns = region.gpa.gfn()..Gpa(region.gpa.0 + region.size).gfn();
        match plan {
            Change::Create => {
                let pages_before = change.pages();
                change.replace(id, new, &self.readers)?;
                self.budget.memory_changed(pages_before, change.pages());
                self.flush_slots_that_left(&gfns);
            }
            Change::Move => {
                self.depart(space, change, id, new)?;
                self.flush_slots_that_left(&gfns);
            }
            Change::Flags => {
                change.replace(id, new, &self.readers)?;
                self.in_progress.raise();
                let logs = |slot: Option<&OwnedSlot>| slot.is_some_and(|slot| slot.log().is_some());
                match (logs(change.replaced()), logs(change.by_id(id))) {
                    (false, true) => self.begin_logging(space, change, id),
                    (true, false) => self.end_logging(space, change, id),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Deletes memslot `slot` of address space `space`, and its dirty log: KVM_SET_USER_MEMORY_REGION with size 0. When this
    /// returns no CPU uses its memory, and the host may have it back. A fault whose
    /// [`resolve`](crate::Platform::resolve) is under way then installs nothing of what it returns.
    ///
    /// Not for a vCPU between [`crate::Vcpu::enter`] and [`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`RegionError::NoSuchSpace`], [`RegionError::NothingToDelete`], [`RegionError::OutOfMemory`]; nothing was changed.
    pub fn remove_memory_region(&self, space: usize, slot: u32) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let mut change = space.slots.change(self.turn_wait());
        if change.by_id(slot).is_none() {
            return Err(RegionError::NothingToDelete(slot));
        }
        change.catch_up(&self.readers, self.reader_wait());
        self.forget_old_mmio(space, &change);
        self.depart(space, change, slot, None)
    }

    /// Deletes slot `id`, or moves it: then `new` is in its place.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`]; nothing was changed.
    fn depart(
        &self,
        space: &Space<P, F>,
        change: SlotsChange<'_>,
        id: u32,
        new: Option<OwnedSlot>,
    ) -> Result<(), RegionError> {
        let moves = new.is_some();
        let mut departure = Departure::begin(self, space, change, id, moves);
        let replaced = departure.replace(new);
        departure.end();
        replaced
    }

    /// Checks `region` as [`Vm::set_memory_region`] does, and changes nothing.
    ///
    /// # Errors
    /// As for [`Vm::set_memory_region`], but never [`RegionError::OutOfMemory`].
    pub fn check_memory_region(&self, space: usize, region: &Region) -> Result<(), RegionError> {
        let space = (self.spaces.get(space)).ok_or(RegionError::NoSuchSpace(space))?;
        let checked = check(region)?;
        let change = space.slots.change(self.turn_wait());
        plan(&change, checked, all_gfns::<F>().end.0).map(|_| ())
    }

    /// Call before publishing a set, with its lock. If the set's generation wraps around in the bits that an MMIO entry has
    /// for it, zaps all MMIO entries: old ones would become valid again. Faults may install others meanwhile, of the
    /// generation before, which is the last to come again.
    pub(super) fn forget_old_mmio(&self, space: &Space<P, F>, change: &SlotsChange<'_>) {
        if (change.set().generation + 1) & ((1 << F::MMIO_GENERATION_BITS) - 1) == 0 {
            let mut op = RangeOp::begin(self, space);
            op.walk(&mut Walk::new(all_gfns::<F>()), |step, walk| {
                step.zap_mmio(walk);
            });
        }
    }

    /// Makes the slot that `region` asks for. If it logs, it keeps the log that slot already has, as in KVM, where a
    /// moved slot keeps its bitmap: pages in it are still to be reported.
    fn slot(&self, region: &Region, change: &SlotsChange<'_>) -> Result<OwnedSlot, RegionError> {
        let log = if region.flags.has(SlotFlags::LOG_DIRTY_PAGES) {
            let log = change.by_id(region.slot).and_then(|old| old.share_log());
            let new = || Ok(Shared::try_new(self.new_log(region.size >> PAGE_SHIFT)?)?);
            Some(log.map_or_else(new, Ok::<_, RegionError>)?)
        } else {
            None
        };
        Ok(OwnedSlot::new(region, log))
    }
}
