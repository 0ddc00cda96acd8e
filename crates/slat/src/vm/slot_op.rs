//! Long operations on one memslot, in steps.
//!
//! A step holds the slot writers' lock of the address space, so that the slot does not change during the step. Slot
//! changes run between two steps, and so wait for at most one step. They may move or delete the slot, or give it
//! another log. So each step looks up the slot again, and the operation ends early if the slot was deleted or has
//! another log than when the operation began.

use core::ops::Range;

use super::range_op::{RangeOp, Step, space_for_broken};
use super::{DirtyLog, Space, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::heap::Shared;
use crate::mmu::Mmu;
use crate::platform::Platform;
use crate::slots::{Memslot, SlotsChange};
use crate::stats::Counters;
use crate::table::{FrameCache, Walk};

/// An operation on slot `id` of an address space. It continues as long as the slot logs to `log`, or, if `log` is
/// `None`, does not log. Pages are numbered from the start of the slot.
pub(super) struct SlotOp<'a, P: Platform, F: Format> {
    pub(super) vm: &'a Vm<P, F>,
    pub(super) op: RangeOp<'a, P, F>,
    id: u32,
    log: Option<Shared<DirtyLog>>,
    /// Holds the slot writers' lock; `None` between two steps.
    change: Option<SlotsChange<'a>>,
}

impl<'a, P: Platform, F: Format> SlotOp<'a, P, F> {
    /// Begins an operation on slot `id`, which logs to `log` (`None`: does not log), and the operation's first step.
    /// `change` holds the slot writers' lock of `space`.
    pub(super) fn begin(
        vm: &'a Vm<P, F>,
        space: &'a Space<P, F>,
        change: SlotsChange<'a>,
        id: u32,
        log: Option<Shared<DirtyLog>>,
    ) -> Self {
        SlotOp {
            vm,
            op: RangeOp::begin(vm, space),
            id,
            log,
            change: Some(change),
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        self.op.counters()
    }

    /// Returns the slot as it is in this step. `None`: the slot was deleted or has another log, so the operation must
    /// end.
    pub(super) fn slot(&self) -> Option<&Memslot> {
        slot_that_logs(self.change.as_ref()?, self.id, self.log.as_deref())
    }

    /// Ends the step, runs `meanwhile` with no lock held, and begins the next step.
    pub(super) fn pass_by<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        self.change = None;
        let (vm, space) = (self.vm, self.op.space);
        let (result, change) =
            (self.op).outside(|| (meanwhile(), space.slots.change(vm.turn_wait())));
        self.change = Some(change);
        result
    }

    /// Counts a read other than that of a page-table entry, for example of a bitmap word. Begins another step when the
    /// budget of this step is used up.
    pub(super) fn look(&mut self) {
        if !self.op.look() {
            self.pass_by(|| ());
        }
    }

    /// Calls `work` to walk over the pages `pages` of the slot, in as many steps as needed. Ends early if the slot was
    /// deleted or has another log.
    pub(super) fn walk(
        &mut self,
        pages: Range<u64>,
        mut work: impl FnMut(&mut Step<'_, Mmu<P, F>>, &Memslot, &mut Walk),
    ) {
        let mut at = pages.start;
        while at < pages.end {
            let change = self.change.as_ref();
            let slot = change.and_then(|c| slot_that_logs(c, self.id, self.log.as_deref()));
            let Some(slot) = slot else {
                return;
            };
            let base = slot.base();
            let end = pages.end.min(slot.pages());
            let gfns = base.add(pages.start)..base.add(end);
            self.op.covers(&gfns);
            let mut walk = Walk::resumed(gfns, base.add(at));
            (self.op).once(&mut walk, |step, walk| work(step, slot, walk));
            if walk.is_done() {
                return;
            }
            at = walk.at().0 - base.0;
            self.pass_by(|| ());
        }
    }

    /// Makes the slot's log record the next write to the pages of `pages` for which `is_named` returns `true`.
    pub(super) fn protect(&mut self, pages: Range<u64>, is_named: impl Fn(u64) -> bool) {
        self.walk(pages, |step, slot, walk| {
            let base = slot.base();
            step.protect(slot, walk, |gfn| is_named(gfn.0 - base.0));
        });
    }

    /// Like [`Self::protect`], but for all `pages`. Uses [`Step::protect_from_above`] if the policy
    /// `hierarchical_protect` is on.
    pub(super) fn protect_all(&mut self, pages: Range<u64>) {
        match self.vm.policy.hierarchical_protect().is_on() {
            true => self.walk(pages, |step, slot, walk| {
                step.protect_from_above(slot, walk)
            }),
            false => self.protect(pages, |_| true),
        }
    }

    /// Reverts the protection of `pages` from above by [`Self::protect_all`]. For a slot that has ended logging. Does
    /// nothing while there is a snapshot, which needs the protection.
    pub(super) fn lift_protection(&mut self, pages: Range<u64>) {
        let vm = self.vm;
        self.walk(pages, |step, _, walk| {
            match vm.is_saving(vm.in_progress.sequence()) {
                true => walk.stop_at(walk.range().end),
                false => step.lift_protection(walk),
            }
        });
    }

    /// Splits the huge leaves of `pages`, in chunks (policy `eager_page_split_chunk`), as long as there is memory for
    /// tables. A leaf that is not split now is split by the first write to it.
    pub(super) fn split_eagerly(&mut self, pages: Range<u64>) {
        let policy = &self.vm.policy;
        if !policy.eager_page_split().is_on() {
            return;
        }
        let Ok(mut broken) = space_for_broken::<F>() else {
            return;
        };
        let (how, chunk) = (policy.split_walk(), policy.split_chunk());
        let mut frames = FrameCache::new(self.vm.frames.clone());
        let mut at = pages.start;
        while let Some(slot) = self.slot() {
            let base = slot.base();
            let start = base.add(at);
            let end = Gfn((start.0 / chunk + 1) * chunk).min(base.add(pages.end.min(slot.pages())));
            if start >= end {
                break;
            }
            self.op.covers(&(start..end));
            // If there is memory for fewer frames than a batch, split as many leaves as there are frames for.
            let filled = self.op.prepare(&mut frames, FrameCache::BATCH);
            if filled.is_err() && frames.is_empty() {
                break;
            }
            let mut walk = Walk::new(start..end);
            (self.op).split_some(&mut walk, how, |_, _| true, &mut frames, &mut broken);
            let next = walk.at().0 - base.0;
            if filled.is_err() && next == at {
                break;
            }
            at = next;
            self.pass_by(|| ());
        }
        frames.release(&*self.vm.platform);
    }

    /// Releases the slot writers' lock, then ends the operation like [`RangeOp::finish`]: slot changes need not wait
    /// for the flush. If the slot was moved during the operation, this also waits until no CPU uses leaves of its old
    /// frames.
    pub(super) fn finish(self) {
        drop(self.change);
        if let Some(gfns) = self.vm.flushes.due_of_leaving_slots() {
            self.op.covers(&gfns);
        }
        self.op.finish();
    }

    /// Flushes the changes that the operation has made so far, in the middle of a step. Then the operation continues.
    pub(super) fn flush(&mut self) {
        self.op.flush();
    }
}

/// Returns slot `id` if it logs to `log`; if `log` is `None`, returns the slot if it does not log.
fn slot_that_logs<'c>(
    change: &'c SlotsChange<'_>,
    id: u32,
    log: Option<&DirtyLog>,
) -> Option<&'c Memslot> {
    let slot: &Memslot = change.by_id(id)?;
    slot.logs_to(log).then_some(slot)
}
