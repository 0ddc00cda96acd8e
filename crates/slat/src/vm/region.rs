//! Slot changes as invalidations: publish the new set, raise the sequence, zap, flush, return. A fault
//! that looked the old set up cannot install any more.

use super::{RangeOp, Space, Vm};
use crate::addr::{Gfn, Gpa, PAGE_SHIFT};
use crate::format::Format;
use crate::heap::Shared;
use crate::platform::Platform;
use crate::slots::{Change, OwnedSlot, Region, RegionError, SlotFlags, SlotsChange, plan};
use crate::table::{Tree, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Creates, deletes, moves a memslot or changes its flags: KVM_SET_USER_MEMORY_REGION, with its
    /// rules and errors. When this returns no CPU uses the old state.
    ///
    /// The caller is no vCPU inside [`crate::Vcpu::enter`]/[`crate::Vcpu::leave`].
    ///
    /// # Errors
    /// [`RegionError`]; nothing was changed.
    pub fn set_memory_region(&self, space: usize, region: &Region) -> Result<(), RegionError> {
        let slots = &self
            .spaces
            .get(space)
            .ok_or(RegionError::NoSuchSpace(space))?
            .slots;
        let mut change = slots.change(self.turn_wait());
        let id = region.slot;
        let Some(plan) = plan(&change, region, Tree::<P, F>::capacity())? else {
            // Somebody else may have begun the log that is asked for, and not be done.
            self.wait_for_begin(change, id);
            return Ok(());
        };
        let new = match plan {
            Change::Delete => None,
            Change::Create | Change::Move | Change::Flags => Some(self.slot(region, &change)?),
        };
        change.catch_up(&self.readers, self.reader_wait());
        let space = &self.spaces[space];
        let gfns = region.gpa.gfn()..Gpa(region.gpa.0 + region.size).gfn();
        match plan {
            Change::Create => {
                change.replace(id, new, &self.readers)?;
                self.forget_old_mmio(space, &change);
                self.flush_slots_that_left(&gfns);
            }
            Change::Delete | Change::Move => {
                let mut op = RangeOp::begin(self, space);
                op.of_leaving_slot();
                let moving = (plan == Change::Move).then(|| self.in_progress.slot_moves());
                let moved = change.by_id(id).filter(|_| plan == Change::Move);
                let noted = moved.is_some_and(|old| op.zap_noted(old));
                let leaving = self.in_progress.slot_leaves();
                let replaced = change.replace(id, new, &self.readers);
                if let (Ok(()), Some(old)) = (&replaced, change.replaced()) {
                    self.in_progress.raise();
                    op.zap_unnoted(old);
                }
                self.forget_old_mmio(space, &change);
                // The operation still owes its flush: who sees that the slot has left sees that, too.
                drop(leaving);
                if noted {
                    // Another zap that knows the slot at its old place would take a dirty bit at its new place
                    // for that of another page. As long as the slot is moving, faults bring no leaf back.
                    op.wait_for_readers();
                }
                drop(moving);
                // Nobody needs to wait for it, or for the tables to be freed, to change slots.
                drop(change);
                op.finish();
                replaced?;
                if plan == Change::Move {
                    self.flush_slots_that_left(&gfns);
                }
            }
            Change::Flags => {
                change.replace(id, new, &self.readers)?;
                self.in_progress.raise();
                self.forget_old_mmio(space, &change);
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

    /// After a set was published, before its lock is released. Where the generation has wrapped around as far as
    /// entries can hold it, entries as old as that must not be believed again.
    pub(super) fn forget_old_mmio(&self, space: &Space<P, F>, change: &SlotsChange<'_>) {
        if change.set().generation & ((1 << F::MMIO_GENERATION_BITS) - 1) == 0 {
            let mut walk = Walk::new(Gfn(0)..Gfn(Tree::<P, F>::capacity()));
            let mut op = RangeOp::begin(self, space);
            op.walk(&mut walk, |tree, walk, _, _| tree.zap_mmio(walk));
        }
    }

    /// The slot that `region` asks for. If it logs, it goes on with the log there is:
    /// KVM keeps that of a slot that moves, too, as what was written is still to be told.
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
