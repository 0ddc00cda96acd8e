//! A memslot that leaves its place: it is deleted, or it moves.
//!
//! # The order
//! 1. *Moving*: where the leaves' dirty bits are the slot's log, they are noted at the old place, and until 5 no fault installs a
//!    leaf that would have more of them.
//! 2. *Leaving*: from now on an invalidation that does not find the slot waits until its leaves are zapped.
//! 3. The new set is published, the sequence raised, and what the slot had mapped is zapped.
//! 4. The slot is gone from there. Whoever finds no slot leaving finds the ticket of the operation, which covers its frames.
//! 5. An operation that still uses the old set would take a dirty bit at the slot's new frames for that of another page. So a slot
//!    that was moving is so until no reader uses the old set.
//! 6. The lock of the slots is released: other changes need not wait for the flush, or until the tables are freed.
//! 7. The flush.

use super::invalidate::Counted;
use super::{RangeOp, Space, Vm};
use crate::format::Format;
use crate::platform::Platform;
use crate::slots::{OwnedSlot, RegionError, SlotsChange};

/// A slot that is leaving. The fields are in the order in which they end, also in a panic.
pub(super) struct Departure<'a, P: Platform, F: Format> {
    leaving: Option<Counted<'a>>,
    moving: Option<Counted<'a>>,
    change: SlotsChange<'a>,
    op: RangeOp<'a, P, F>,
    vm: &'a Vm<P, F>,
    /// Its dirty bits were noted.
    noted: bool,
    id: u32,
}

impl<'a, P: Platform, F: Format> Departure<'a, P, F> {
    /// Begins (1, 2) for slot `id`, which moves if `moves`.
    pub(super) fn begin(
        vm: &'a Vm<P, F>,
        space: &'a Space<P, F>,
        change: SlotsChange<'a>,
        id: u32,
        moves: bool,
    ) -> Self {
        let mut op = RangeOp::begin(vm, space);
        op.of_leaving_slot();
        let moving = moves.then(|| vm.in_progress.slot_moves());
        let moved = change.by_id(id).filter(|_| moves);
        let noted = moved.is_some_and(|old| op.zap_noted(old));
        Departure {
            leaving: Some(vm.in_progress.slot_leaves()),
            moving,
            change,
            op,
            vm,
            noted,
            id,
        }
    }

    /// Puts `new` in the place of the slot (3, 4).
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`]; nothing was changed.
    pub(super) fn replace(&mut self, new: Option<OwnedSlot>) -> Result<(), RegionError> {
        let (vm, pages_before) = (self.vm, self.change.pages());
        let replaced = self.change.replace(self.id, new, &vm.readers);
        if let (Ok(()), Some(old)) = (&replaced, self.change.replaced()) {
            vm.in_progress.raise();
            self.op.zap_unnoted(old);
            self.op.forget_tables(&old.gfns());
            vm.budget.memory_changed(pages_before, self.change.pages());
        }
        self.leaving = None;
        Ok(replaced?)
    }

    /// Ends (5 to 7).
    pub(super) fn end(mut self) {
        if self.noted {
            self.op.wait_for_readers();
        }
        drop(self.moving);
        drop(self.change);
        self.op.finish();
    }
}
