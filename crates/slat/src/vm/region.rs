//! Slot changes as invalidations: publish the new set, raise the sequence, zap, flush, return. A fault
//! that looked the old set up cannot install any more.

use super::{Leaving, RangeOp, Space, Vm};
use crate::addr::PAGE_SHIFT;
use crate::format::Format;
use crate::heap::Shared;
use crate::platform::Platform;
use crate::slots::{Change, OwnedSlot, Region, RegionError, SlotFlags, SlotsChange, plan};
use crate::table::Tree;

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
            return Ok(());
        };
        let new = match plan {
            Change::Delete => None,
            Change::Create | Change::Move | Change::Flags => Some(self.slot(region, &change)?),
        };
        change.catch_up(&self.readers, self.reader_wait());
        match plan {
            Change::Create => change.replace(id, new, &self.readers)?,
            Change::Delete | Change::Move => {
                let leaving = self.in_progress.slot_leaves();
                change.replace(id, new, &self.readers)?;
                self.zap_replaced(space, &change, leaving);
            }
            Change::Flags => {
                change.replace(id, new, &self.readers)?;
                self.in_progress.raise();
                let space = &self.spaces[space];
                let logs = |slot: &OwnedSlot| slot.log().is_some();
                let logged = change.replaced().is_some_and(logs);
                match change.by_id(id) {
                    Some(new) if logs(new) && !logged => self.begin_logging(space, new),
                    Some(new) if logged && !logs(new) => self.end_logging(space, new),
                    _ => {}
                }
            }
        }
        self.forget_old_mmio(&self.spaces[space], change.set().generation);
        Ok(())
    }

    /// After a set of `generation` was published. Where the generation has wrapped around as far as
    /// entries can hold it, entries as old as that must not be believed again.
    pub(super) fn forget_old_mmio(&self, space: &Space<P, F>, generation: u64) {
        if generation & ((1 << F::MMIO_GENERATION_BITS) - 1) == 0 {
            let section = self.section();
            space.tree.get(section.inside()).zap_mmio();
        }
    }

    fn zap_replaced(&self, space: usize, change: &SlotsChange<'_>, leaving: Leaving<'_>) {
        self.in_progress.raise();
        let mut op = RangeOp::begin(self, &self.spaces[space]);
        let gfns = change.replaced().map(|old| {
            op.zapping().1.zap(old, old.gfns());
            old.gfns()
        });
        // The operation is still counted: who sees that the slot has left sees that a flush is owed.
        drop(leaving);
        op.finish(gfns);
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
