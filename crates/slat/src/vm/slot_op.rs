//! Long operations on one memslot, a step at a time.
//!
//! A step has the writers' lock of the address space, so that the slot is what it was while its tables are
//! changed; between two steps a slot change may come, and waits no longer than a step takes. The slot may
//! be another one then: moved, gone, or with another log. It is looked up again for each step, and the
//! operation is over when the log it is about is not the slot's any more.

use core::ops::Range;

use super::range_op::{RangeOp, Taken};
use super::{DirtyLog, Space, Vm};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::heap::Shared;
use crate::platform::Platform;
use crate::slots::{Memslot, SlotsChange};
use crate::stats::Counters;
use crate::table::{FrameCache, Next, Tree, Walk, room_for_broken};

/// An operation on the slot `id` of an address space, as long as that logs to `log`, or does not log. Pages are
/// counted from the begin of the slot.
pub(super) struct SlotOp<'a, P: Platform, F: Format> {
    pub(super) vm: &'a Vm<P, F>,
    op: RangeOp<'a, P, F>,
    id: u32,
    log: Option<Shared<DirtyLog>>,
    /// `None` while this waits for the lock.
    change: Option<SlotsChange<'a>>,
}

impl<'a, P: Platform, F: Format> SlotOp<'a, P, F> {
    /// Begins with the first step, on the slot `id` as long as it logs to `log`, or does not log if that is
    /// `None`. `change` was begun in `space`.
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

    /// The slot as it is in this step. `None`: the operation is over.
    pub(super) fn slot(&self) -> Option<&Memslot> {
        slot_that_logs(self.change.as_ref()?, self.id, self.log.as_deref())
    }

    /// Ends the step and begins the next. In between, `meanwhile` is run with no lock held.
    fn pass_by<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        self.change = None;
        let (vm, space) = (self.vm, self.op.space);
        let (result, change) =
            (self.op).outside(|| (meanwhile(), space.slots.change(vm.turn_wait())));
        self.change = Some(change);
        result
    }

    /// Counts a look at something that is no entry.
    pub(super) fn look(&mut self) {
        if !self.op.look() {
            self.pass_by(|| ());
        }
    }

    /// Goes over `pages` by `step`, in as many steps as it takes; ends early when the operation is over.
    pub(super) fn walk(
        &mut self,
        pages: Range<u64>,
        mut step: impl FnMut(&Tree<P, F>, &Memslot, &mut Walk, &mut Taken),
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
            self.op.about(&(base.add(at)..base.add(end)));
            let mut walk = Walk::new(base.add(at)..base.add(end));
            (self.op).once(&mut walk, |tree, walk, taken, _| {
                step(tree, slot, walk, taken)
            });
            if walk.is_done() {
                return;
            }
            at = walk.at().0 - base.0;
            self.pass_by(|| ());
        }
    }

    /// Makes the next write to those of `pages` that `is_named` tells be noted.
    pub(super) fn protect(&mut self, pages: Range<u64>, is_named: impl Fn(u64) -> bool) {
        self.walk(pages, |tree, slot, walk, taken| {
            let base = slot.base();
            taken.protect(tree, slot, walk, |gfn| is_named(gfn.0 - base.0));
        });
    }

    /// Splits the huge leaves of `pages`, chunk by chunk, as far as there is memory; what stays huge is
    /// split by the first write to it.
    pub(super) fn split_eagerly(&mut self, pages: Range<u64>) {
        let policy = &self.vm.policy;
        if !policy.splits_eagerly() {
            return;
        }
        let Ok(mut broken) = room_for_broken::<F>() else {
            return;
        };
        let (how, chunk) = (policy.walk_for_split(), policy.split_chunk());
        let mut frames = FrameCache::default();
        let mut at = pages.start;
        while let Some(slot) = self.slot() {
            let base = slot.base();
            let start = base.add(at);
            let end = Gfn((start.0 / chunk + 1) * chunk).min(base.add(pages.end.min(slot.pages())));
            if start >= end {
                break;
            }
            self.op.about(&(start..end));
            // With less than a batch it goes as far as it can.
            let filled = frames.fill(&*self.vm.platform, FrameCache::BATCH);
            if filled.is_err() && frames.is_empty() {
                break;
            }
            let mut walk = Walk::new(start..end);
            (self.op).split_some(&mut walk, how, |_, _| true, &mut frames, &mut broken);
            at = walk.at().0 - base.0;
            self.pass_by(|| ());
        }
        frames.release(&*self.vm.platform);
    }

    /// Takes away the tables in whose place a huge leaf could stand, as the host is now. The host is asked with
    /// no lock held; what it says may be out of date then, which costs a fault or two.
    pub(super) fn collapse(&mut self) {
        const SOME: usize = 64;
        let mut at = 0;
        while let Some(slot) = self.slot() {
            let (gfns, backing) = (slot.gfns(), slot.backing());
            let (base, pages) = (slot.base(), slot.pages());
            let mut tables = [(Gfn(0), Level::PAGE); SOME];
            let mut count = 0;
            let mut walk = Walk::new(base.add(at)..base.add(pages));
            self.op.about(&walk.range());
            self.op.once(&mut walk, |tree, walk, _, _| {
                tree.visit_tables(walk, |at, _| {
                    let Some(table) = tables.get_mut(count) else {
                        return Next::Stop;
                    };
                    *table = (at.gfn, at.level);
                    count += 1;
                    Next::Descend
                });
            });
            let next = walk.at().0 - base.0;
            let tables = &mut tables[..count];
            let vm = self.vm;
            self.pass_by(|| {
                for (gfn, level) in tables.iter_mut() {
                    let hva = backing.add_pages(gfn.0 - base.0);
                    if vm.host_level(&gfns, *gfn, hva) < *level {
                        // No table is of this level.
                        *level = Level::PAGE;
                    }
                }
            });
            if let Some((first, _)) = tables.first() {
                let end = tables
                    .iter()
                    .map(|(gfn, level)| gfn.block(*level).end)
                    .max();
                let hull = first.0 - base.0..end.unwrap_or(*first).0 - base.0;
                self.walk(hull, |tree, _, walk, taken| {
                    tree.zap_tables(walk, &mut taken.zapped, |gfn, level, _| {
                        tables.contains(&(gfn, level))
                    });
                });
            }
            if next >= pages {
                return;
            }
            at = next;
        }
    }

    /// Ends the operation as a [`RangeOp`]; slot changes need not wait for its flush. The slot may have moved, and
    /// its old leaves may be zapped, but not flushed: no CPU uses those either when this returns.
    pub(super) fn finish(self) {
        drop(self.change);
        if let Some(gfns) = self.vm.flushes.due_of_leaving() {
            self.op.about(&gfns);
        }
        self.op.finish();
    }

    /// Flushes what it has changed up to now, and goes on.
    pub(super) fn flush(&mut self) {
        self.op.flush();
    }
}

/// The slot `id`, if it logs to `log`, or logs not and that is none.
fn slot_that_logs<'c>(
    change: &'c SlotsChange<'_>,
    id: u32,
    log: Option<&DirtyLog>,
) -> Option<&'c Memslot> {
    let slot: &Memslot = change.by_id(id)?;
    slot.logs_to(log).then_some(slot)
}
