//! Updates the leaves and logs of existing slots when a change of memslots deletes, moves or shrinks these slots, or
//! replaces a part of them by other slots.
//!
//! # The order
//! 1. *Moving*: if a slot moves and keeps its log, and that log is kept in the leaves' dirty bits, the bits are noted
//!    before the slot moves. Until step 6 no fault installs a leaf there whose dirty bit may be set.
//! 2. *Leaving*: from now on an invalidation that does not find a slot waits until its leaves are zapped.
//! 3. The new set is published, and the sequence is raised. Huge leaves that cross an edge of a part that stays are
//!    split. The other leaves of the old slots are zapped.
//! 4. The slots stop leaving. A thread that then finds that no slot is leaving also finds the operation's flush ticket,
//!    which covers the zapped frames.
//! 5. The change waits until no reader uses the old set, so that no mark is added to an old log. Then it copies the
//!    marks of each part that goes from one dirty log to another.
//! 6. A moving slot counts as moving until no reader uses the old set. An operation that still uses the old set would
//!    take a dirty bit at the new frames of the slot for the bit of another page.
//! 7. The lock of the slots is released, so that other changes wait neither for the flush nor until the tables are
//!    freed.
//! 8. The operation flushes.

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

/// The frames that both an old slot and a new slot contain, backed by the same pages.
struct Part<'s> {
    old: &'s Memslot,
    new: &'s Memslot,
    gfns: Range<Gfn>,
}

impl<'s> Part<'s> {
    /// Returns the part that `old` and `new` have in common. `None`: they have none.
    fn of(old: &'s Memslot, new: &'s Memslot) -> Option<Self> {
        let gfns = old.common(new);
        let has_pages = !gfns.is_empty() && old.backs_alike(new);
        has_pages.then_some(Part { old, new, gfns })
    }

    /// Whether the leaves of the old slot may stay for the new slot.
    fn stays(&self) -> bool {
        let kind = |slot: &Memslot| slot.log().map(DirtyLog::kind);
        let same_log = match (kind(self.old), kind(self.new)) {
            (Some(old), Some(new)) => old == new,
            _ => true,
        };
        same_log && self.old.limits() == self.new.limits()
    }

    /// Whether an invalidation in progress may miss the old slots' leaves, because it looks for leaves by the new
    /// slots. Call after publishing the new slots.
    fn is_invalidated(&self, in_progress: &InProgress) -> bool {
        !self.is_in_place() && in_progress.covers(&self.old.hvas(&self.gfns))
    }

    /// Whether the old and the new slot differ in their logs and limits only.
    fn is_in_place(&self) -> bool {
        let same = |slot: &Memslot| (slot.id(), slot.gfns());
        same(self.old) == same(self.new)
    }

    /// Returns the boundaries of the part beyond which the old slot has frames: its first frame, and the frame after
    /// its last.
    fn edges(&self) -> impl Iterator<Item = Gfn> {
        let old = self.old.gfns();
        let is_inside = move |edge: &Gfn| old.start < *edge && *edge < old.end;
        [self.gfns.start, self.gfns.end]
            .into_iter()
            .filter(is_inside)
    }

    /// Returns both logs if marks have to be copied from the first to the second.
    fn logs(&self) -> Option<(&'s DirtyLog, &'s DirtyLog)> {
        let (old, new) = (self.old.log()?, self.new.log()?);
        let have_marks = old.has_bitmap() && new.has_bitmap();
        (have_marks && !self.new.logs_to(Some(old))).then_some((old, new))
    }

    /// Whether the new slot's log is of the kind that walkers' buffers are drained to, and is not the old slot's log.
    fn begins_buffers(&self) -> bool {
        let new = self.new.log().filter(|_| !self.new.logs_to(self.old.log()));
        new.is_some_and(|log| log.kind() == LogKind::Buffers)
    }

    /// Returns the work that a part that stays causes in the log of the new slot.
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

/// The work on a slot's log that has to be done after the change of the slot is published.
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

/// The change in progress of slots that are leaving: that are deleted, moved or replaced. The first fields are declared
/// in the order in which they have to be dropped, also in a panic.
pub(super) struct Departure<'a, P: Platform, F: Format> {
    leaving: Option<Counted<'a>>,
    moving: Option<Counted<'a>>,
    change: SlotsChange<'a>,
    op: RangeOp<'a, P, F>,
    vm: &'a Vm<P, F>,
    /// Whether the dirty bits of a slot were noted.
    noted: bool,
    /// Whether marks of a part have to be copied.
    copies: bool,
    /// Whether a part gets a log that walkers' buffers are drained to ([`super::drain`]).
    begins_buffers: bool,
    /// Frames of tables for the splits of leaves that cross an edge of a part that stays.
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
            // All frames below `at` are done.
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

/// Calls `visit` for each part that slots of `set` have in common with `old`, in ascending order.
fn each_part(old: &Memslot, set: &SlotSet, mut visit: impl FnMut(&Part<'_>)) {
    set.in_gfns(&old.gfns(), |new| {
        if let Some(part) = Part::of(old, new) {
            visit(&part);
        }
        true
    });
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
    /// Zaps the leaves of a deleted or moved slot in `gfns`, and the shadow pages of tables there. Does not note dirty
    /// bits: either the log was deleted with the slot, or the log contains these bits already ([`Self::zap_noted`]).
    /// Call after publishing the set without these frames.
    fn zap_gone(&mut self, gfns: &Range<Gfn>) {
        if !gfns.is_empty() {
            self.zap_unnoted(gfns);
            self.forget_tables(gfns);
        }
    }
}
