//! Slot changes as invalidations: publish the new set, raise the sequence, zap, flush, return. A fault
//! that looked the old set up cannot install any more.

use super::{DirtyLog, Leaving, RangeOp, Space, Vm};
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
        let mut change = slots.change(self.lock_wait());
        let id = region.slot;
        let plan = plan(&change, region, Tree::<P, F>::capacity())?;
        change.catch_up(&self.readers, self.reader_wait());
        match plan {
            Change::Nothing => return Ok(()),
            Change::Create(new) => {
                let new = self.logging(new, None)?;
                change.replace(id, Some(new), &self.readers)?;
            }
            Change::Delete => {
                let leaving = self.in_progress.slot_leaves();
                change.replace(id, None, &self.readers)?;
                self.zap_replaced(space, &change, leaving);
            }
            Change::Move { to, log } => {
                // KVM keeps the log of a slot that moves: what was written there is still to be told.
                let to = self.logging(to, log)?;
                let leaving = self.in_progress.slot_leaves();
                change.replace(id, Some(to), &self.readers)?;
                self.zap_replaced(space, &change, leaving);
            }
            Change::Flags { new, log } => {
                let logged = log.is_some();
                let new = self.logging(new, log)?;
                change.replace(id, Some(new.clone()), &self.readers)?;
                self.in_progress.raise();
                let space = &self.spaces[space];
                match (logged, new.log().is_some()) {
                    (false, true) => self.begin_logging(space, &new),
                    (true, false) => self.end_logging(space, &new),
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
            let _section = self.section();
            space.tree.zap_mmio();
        }
    }

    fn zap_replaced(&self, space: usize, change: &SlotsChange<'_>, leaving: Leaving<'_>) {
        self.in_progress.raise();
        let mut op = RangeOp::begin(self, &self.spaces[space]);
        let gfns = change.replaced().map(|old| {
            op.zap(old, old.gfns());
            old.gfns()
        });
        // The operation is still counted: who sees that the slot has left sees that a flush is owed.
        drop(leaving);
        op.finish(gfns);
    }

    /// The slot with a log if its flags ask for one; `old` if it has one already.
    fn logging(
        &self,
        slot: OwnedSlot,
        old: Option<Shared<DirtyLog>>,
    ) -> Result<OwnedSlot, RegionError> {
        if !slot.flags().has(SlotFlags::LOG_DIRTY_PAGES) {
            return Ok(slot);
        }
        let log = match old {
            Some(log) => log,
            None => Shared::try_new(self.new_log(slot.pages())?)?,
        };
        Ok(slot.logging_to(log))
    }
}
