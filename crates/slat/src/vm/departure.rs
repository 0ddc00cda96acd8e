//! Updates the leaves and logs of existing slots when a change of memslots deletes, moves or shrinks these slots, or
//! replaces a part of them by other slots.
//!
//! # The order
//! 1. *Moving*: if a slot moves and keeps its log, and the dirty bits of its leaves are part of that log, these bits
//!    are recorded in the log before the slot moves. From then on until step 6, no fault installs leaves of such slots.
//! 2. *Leaving*: from now on, invalidations wait until step 4, because they may not find the old slots whose leaves
//!    still exist.
//! 3. The new set is published, and the sequence is raised. A part of an old slot *stays* if a new slot maps the same
//!    frames to the same pages. Huge leaves that cross an edge of such a part are split. The leaves of all other parts
//!    are zapped.
//! 4. Invalidations need not wait any more. A thread that finds that no slot is leaving also finds this operation's
//!    flush ticket, which names the zapped frames that are not flushed yet.
//! 5. The change waits until no reader uses the old set, so that no mark is added to an old log. Then it copies the
//!    marks of each part whose dirty log was replaced by another one.
//! 6. Only when no reader uses the old set any more may faults install leaves of a moved slot again. Otherwise an
//!    operation that still uses the old set could find a dirty bit at a new frame of the slot, and record it as a write
//!    to another page.
//! 7. The slot writers' lock is released, so that other changes need not wait for the flush and for the freeing of
//!    tables.
//! 8. The operation flushes, and frees the detached tables.

use alloc::vec::Vec;
use core::ops::Range;

use super::edge::FRAMES_PER_EDGE;
use super::invalidate::Counted;
use super::range_op::space_for_broken;
use super::{DirtyLog, InProgress, LogKind, RangeOp, Space, Vm};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::slots::{Edit, Memslot, OwnedSlot, SlotSet, SlotsChange};
use crate::table::FrameCache;

/// The frames that an old slot and a new slot have in common, and that the same pages back in both.
struct Part<'s> {
    old: &'s Memslot,
    new: &'s Memslot,
    gfns: Range<Gfn>,
}

impl<'s> Part<'s> {
    /// Returns the part that `old` and `new` have in common. `None`: they have no frames in common, or other pages back
    /// them.
    fn of(old: &'s Memslot, new: &'s Memslot) -> Option<Self> {
        let gfns = old.common(new);
        let has_pages = !gfns.is_empty() && old.backs_alike(new);
        has_pages.then_some(Part { old, new, gfns })
    }

    /// Whether the leaves of the part may stay mapped when the new slot replaces the old one.
    fn stays(&self) -> bool {
        let kind = |slot: &Memslot| slot.log().map(DirtyLog::kind);
        let same_log = match (kind(self.old), kind(self.new)) {
            (Some(old), Some(new)) => old == new,
            _ => true,
        };
        same_log && self.old.limits() == self.new.limits()
    }

    /// Whether an invalidation of the part's memory is in progress. It may miss the part's leaves, because the new
    /// slots have another order than the old slots in which it has searched. Call after publishing the new slots.
    fn is_invalidated(&self, in_progress: &InProgress) -> bool {
        !self.is_in_place() && in_progress.covers(&self.old.hvas(&self.gfns))
    }

    /// Whether the old and the new slot have the same id and frames, and differ at most in their logs and limits.
    fn is_in_place(&self) -> bool {
        let same = |slot: &Memslot| (slot.id(), slot.gfns());
        same(self.old) == same(self.new)
    }

    /// Returns the start and the end of the part, each only if the old slot has frames beyond it.
    fn edges(&self) -> impl Iterator<Item = Gfn> {
        let old = self.old.gfns();
        let is_inside = move |edge: &Gfn| old.start < *edge && *edge < old.end;
        [self.gfns.start, self.gfns.end]
            .into_iter()
            .filter(is_inside)
    }

    /// Returns the old and the new slot's log if marks must be copied from the old log to the new one.
    fn logs(&self) -> Option<(&'s DirtyLog, &'s DirtyLog)> {
        let (old, new) = (self.old.log()?, self.new.log()?);
        let have_marks = old.has_bitmap() && new.has_bitmap();
        (have_marks && !self.new.logs_to(Some(old))).then_some((old, new))
    }

    /// Whether the new slot has another log than the old slot, and it is of the kind [`LogKind::Buffers`].
    fn begins_buffers(&self) -> bool {
        let new = self.new.log().filter(|_| !self.new.logs_to(self.old.log()));
        new.is_some_and(|log| log.kind() == LogKind::Buffers)
    }

    /// Returns the work on the new slot's log that is needed because the part stays mapped. `None`: no work is needed.
    fn log_work(&self) -> Option<LogWork> {
        let log = self.new.share_log();
        let what = match (self.old.log(), &log) {
            (old, _) if self.new.logs_to(old) => None,
            (None, Some(new)) => (!new.initially_set).then_some(LogChange::Begins),
            (Some(_), None) => Some(LogChange::Ends),
            (Some(old), Some(_)) => match old.kind() {
                LogKind::Bitmap | LogKind::Buffers => Some(LogChange::Continues),
                LogKind::Rings => Some(LogChange::Begins),
                LogKind::DirtyBits => None,
            },
            (None, None) => None,
        };
        let base = self.new.base();
        what.map(|what| LogWork {
            id: self.new.id(),
            log,
            pages: self.gfns.start.0 - base.0..self.gfns.end.0 - base.0,
            what,
        })
    }
}

/// Work on the dirty log of a changed slot that must be done after the change is published.
pub(super) struct LogWork {
    pub(super) id: u32,
    /// The slot's log, if it has one.
    pub(super) log: Option<Shared<DirtyLog>>,
    /// The pages of the slot to which the work applies.
    pub(super) pages: Range<u64>,
    pub(super) what: LogChange,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LogChange {
    /// The pages were in no log before, or in a log that numbers its pages differently.
    Begins,
    /// The pages come from another log, and their marks are copied.
    Continues,
    /// The pages were in a log, and the new slot has none.
    Ends,
}

/// A change in progress that deletes, moves or replaces slots. The first four fields must be dropped in the order of
/// their declaration, also in a panic.
pub(super) struct Departure<'a, P: Platform, F: Format> {
    leaving: Option<Counted<'a>>,
    moving: Option<Counted<'a>>,
    change: SlotsChange<'a>,
    op: RangeOp<'a, P, F>,
    vm: &'a Vm<P, F>,
    /// Whether the dirty bits of a slot's leaves were recorded in its log before it moved.
    noted: bool,
    /// Whether marks of a part must be copied to another log.
    copies: bool,
    /// Whether a part gets another log of the kind [`LogKind::Buffers`] ([`super::drain`]).
    begins_buffers: bool,
    /// Frames for the tables that replace huge leaves across an edge of a part that stays.
    frames: FrameCache,
    broken: Vec<(Gfn, Level)>,
}

impl<'a, P: Platform, F: Format> Departure<'a, P, F> {
    /// Begins the departure (steps 1 and 2) of the slots that `edits` replace.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn begin(
        vm: &'a Vm<P, F>,
        space: &'a Space<P, F>,
        change: SlotsChange<'a>,
        edits: &[Edit],
    ) -> Result<Self, OutOfMemory> {
        let edges = edges(change.set(), edits);
        let mut frames = FrameCache::new(vm.frames.clone());
        let mut broken = Vec::new();
        if edges > 0 {
            broken = space_for_broken::<F>()?;
            let filled = frames.fill(&*vm.platform, edges * FRAMES_PER_EDGE);
            if let Err(error) = filled {
                frames.release(&*vm.platform);
                return Err(error);
            }
        }
        let mut op = RangeOp::begin(vm, space);
        let replaced = |edit: &Edit| change.by_id(edit.id).is_some();
        let in_place = |edit: &Edit| {
            let part = change.by_id(edit.id).zip(edit.new.as_deref());
            let part = part.and_then(|(old, new)| Part::of(old, new));
            part.is_some_and(|part| part.is_in_place() && part.stays())
        };
        let leaves = edits.iter().any(|edit| replaced(edit) && !in_place(edit));
        let leaving = leaves.then(|| {
            op.of_leaving_slot();
            vm.in_progress.slot_leaves()
        });
        let moved = |edit: &Edit| -> Option<&OwnedSlot> {
            let (old, new) = (change.by_id(edit.id)?, edit.new.as_ref()?);
            (old.base() != new.base() && new.logs_to(old.log())).then_some(old)
        };
        let moves = edits.iter().any(|edit| moved(edit).is_some());
        let moving = moves.then(|| vm.in_progress.slot_moves());
        let mut noted = false;
        for old in edits.iter().filter_map(moved) {
            noted |= op.zap_noted(old);
        }
        Ok(Departure {
            leaving,
            moving,
            change,
            op,
            vm,
            noted,
            copies: false,
            begins_buffers: false,
            frames,
            broken,
        })
    }

    /// Makes `edits` (steps 3 and 4). Adds the remaining work on logs to `work`, which has enough capacity.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed.
    pub(super) fn replace(
        &mut self,
        edits: &mut [Edit],
        work: &mut Vec<LogWork>,
    ) -> Result<(), OutOfMemory> {
        let (vm, pages_before) = (self.vm, self.change.pages());
        self.change.replace(edits, &vm.readers)?;
        vm.in_progress.raise();
        let (op, set) = (&mut self.op, self.change.set());
        for old in self.change.replaced() {
            each_part(old, set, |part| {
                for edge in part.edges().take_while(|_| part.stays()) {
                    op.split_over(edge, &mut self.frames, &mut self.broken);
                    op.zap_over(edge, old);
                }
            });
            // All frames of the old slot below `at` are done.
            let mut at = old.gfns().start;
            each_part(old, set, |part| {
                self.copies |= part.logs().is_some();
                self.begins_buffers |= part.begins_buffers();
                let stays = part.stays() && !part.is_invalidated(&vm.in_progress);
                op.zap_gone(&(at..part.gfns.start));
                if !stays {
                    op.zap_part(old, &part.gfns);
                } else if let Some(more) = part.log_work() {
                    work.push(more);
                }
                at = part.gfns.end;
            });
            op.zap_gone(&(at..old.gfns().end));
        }
        vm.budget.memory_changed(pages_before, self.change.pages());
        self.leaving = None;
        Ok(())
    }

    /// Ends the departure (steps 5 to 8).
    pub(super) fn end(mut self) {
        if self.noted || self.copies || self.begins_buffers {
            self.op.wait_for_readers();
        }
        let (vm, change) = (self.vm, &self.change);
        if vm.is_saving(vm.in_progress.sequence()) {
            (self.op)
                .outside(|| (change.replaced()).for_each(|old| keep_gone(vm, old, change.set())));
        }
        if self.copies {
            for old in self.change.replaced() {
                each_part(old, self.change.set(), |part| {
                    if let Some((from, to)) = part.logs() {
                        let page = |slot: &Memslot| part.gfns.start.0 - slot.base().0;
                        let pages = part.gfns.end.0 - part.gfns.start.0;
                        to.copy_marks(from, page(old), page(part.new), pages);
                    }
                });
            }
        }
        drop(self.moving);
        drop(self.change);
        self.frames.release(&*self.vm.platform);
        self.op.finish();
    }
}

/// Calls `visit` for each part that `old` has in common with a slot of `set`, in ascending order.
fn each_part(old: &Memslot, set: &SlotSet, mut visit: impl FnMut(&Part<'_>)) {
    set.in_gfns(&old.gfns(), |new| {
        if let Some(part) = Part::of(old, new) {
            visit(&part);
        }
        true
    });
}

/// Gives the platform the pages of `old`, a slot that was replaced, that are in no part that slots of `set` have in
/// common with it ([`super::snapshot`]).
fn keep_gone<P: Platform, F: Format>(vm: &Vm<P, F>, old: &Memslot, set: &SlotSet) {
    let mut at = old.gfns().start;
    each_part(old, set, |part| {
        vm.keep_old_pages_of(old, &(at..part.gfns.start));
        at = part.gfns.end;
    });
    vm.keep_old_pages_of(old, &(at..old.gfns().end));
}

/// Returns the number of edges inside slots of `set` of the parts that stay when `edits` are made.
fn edges(set: &SlotSet, edits: &[Edit]) -> usize {
    let mut edges = 0;
    for new in edits.iter().filter_map(|edit| edit.new.as_deref()) {
        set.in_gfns(&new.gfns(), |old| {
            let part = Part::of(old, new).filter(Part::stays);
            edges += part.map_or(0, |part| part.edges().count());
            true
        });
    }
    edges
}

impl<P: Platform, F: Format> RangeOp<'_, P, F> {
    /// Zaps the leaves of a deleted or moved slot in `gfns`, and the shadow pages of guest tables in `gfns`. Does not
    /// record dirty bits: either the slot's log is deleted, too, or these bits are already in the log
    /// ([`Self::zap_noted`]). Call after publishing the set in which the slot does not contain these frames.
    fn zap_gone(&mut self, gfns: &Range<Gfn>) {
        if !gfns.is_empty() {
            self.zap_unnoted(gfns);
            self.forget_tables(gfns);
        }
    }
}
