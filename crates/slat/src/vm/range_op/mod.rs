//! The parts that operations on ranges of guest frames have in common: steps, each in its own reader section; a ticket
//! for the flush ([`crate::table::Flushes`]); the flush; and the tables to free after the flush. The changes that an
//! operation makes to entries are in [`ops`].

mod ops;

use alloc::vec::Vec;
use core::mem::replace;
use core::ops::Range;

use super::{Section, Space, Vm};
use crate::addr::{Gfn, Hva, Level};
use crate::format::{Format, all_gfns};
use crate::heap::OutOfMemory;
use crate::mmu::Mmu;
use crate::platform::{Platform, Stale};
use crate::policy::SplitWalk;
use crate::slots::{Memslot, Place, SlotSet};
use crate::stats::Counters;
use crate::sync::held;
use crate::table::{
    Detached, FlushTicket, Flushed, Flushes, FrameCache, Freed, LeafCounts, Path, Walk,
};
use crate::trace::Event;

pub(crate) use ops::{Collapsing, Step};

/// An operation on ranges of guest frames. The user names the frames by [`covers`](Self::covers), walks over them in
/// steps, and then calls [`finish`](Self::finish), which flushes.
#[must_use = "call `finish`, which flushes"]
pub(crate) struct RangeOp<'a, P: Platform, F: Format> {
    vm: &'a Vm<P, F>,
    pub(super) space: &'a Space<P, F>,
    pub(super) section: Section<'a>,
    ticket: FlushTicket<'a>,
    unflushed: Unflushed,
}

/// Counts of an operation's changes that are not flushed yet, and the tables to free after the flush.
pub(crate) struct Unflushed {
    /// The number of leaves zapped one by one, by level.
    pub(crate) zapped: LeafCounts,
    /// Tables that were detached as a whole. Their leaves are counted when the tables are freed.
    pub(crate) detached: Detached,
    /// The number of leaves, by level, that have lost a right or their dirty bit, so that a TLB may cache an older
    /// state.
    pub(crate) changed: LeafCounts,
    /// The number of entries that refer to a table and that the operation has write-protected.
    protected: u64,
    /// The number of tables replaced by a leaf, by the level of the leaf.
    collapsed: LeafCounts,
}

impl Unflushed {
    pub(crate) fn none() -> Self {
        Unflushed {
            zapped: LeafCounts::default(),
            detached: Detached::none(),
            changed: LeafCounts::default(),
            protected: 0,
            collapsed: LeafCounts::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let none = LeafCounts::default();
        let leaves = self.zapped == none && self.changed == none;
        leaves && self.protected == 0 && self.detached.is_empty()
    }

    /// Returns which kinds of cached entries the flush of these changes must invalidate.
    fn stale<F: Format>(&self) -> Stale {
        let has_leaves = |level: &Level| {
            let index = level.0 as usize - 1;
            self.zapped[index] + self.changed[index] > 0
        };
        let mut levels = (1..=LeafCounts::default().len() as u8)
            .map(Level)
            .filter(has_leaves);
        let tables = !self.detached.is_empty() || self.protected > 0;
        let only = levels.next().filter(|_| levels.next().is_none());
        Stale {
            level: only.filter(|_| F::BREAK_BEFORE_MAKE && !tables),
            tables,
        }
    }
}

impl<'a, P: Platform, F: Format> RangeOp<'a, P, F> {
    /// Begins an operation, which covers no frames yet. The caller is in no reader section.
    #[inline]
    pub(crate) fn begin(vm: &'a Vm<P, F>, space: &'a Space<P, F>) -> Self {
        RangeOp {
            vm,
            space,
            ticket: vm.flushes.need_flush(),
            section: vm.section(),
            unflushed: Unflushed::none(),
        }
    }

    /// Begins an operation that covers `gfns`. The caller is in no reader section.
    pub(super) fn on(vm: &'a Vm<P, F>, space: &'a Space<P, F>, gfns: &Range<Gfn>) -> Self {
        let op = Self::begin(vm, space);
        op.covers(gfns);
        op
    }

    /// Adds `gfns` to the frames that the operation covers and will flush. Call before the operation reads a page-table
    /// entry for these frames.
    pub(super) fn covers(&self, gfns: &Range<Gfn>) {
        let gfns = gfns.start..gfns.end.min(all_gfns::<F>().end);
        if !gfns.is_empty() {
            self.ticket.covers(&gfns);
        }
    }

    /// Declares that the operation zaps leaves of a slot that is being deleted or moved ([`Flushes`]).
    pub(super) fn of_leaving_slot(&self) {
        self.ticket.of_leaving_slot();
    }

    pub(super) fn counters(&self) -> &'a Counters {
        self.section.counters()
    }

    /// Begins a step. Returns the step, and the number of page-table entries that may still be read in this reader
    /// section.
    fn step(&mut self) -> (Step<'_, Mmu<P, F>>, &mut u32) {
        let (section, budget) = self.section.inside_with_budget();
        let step = Step::new(&self.space.mmu, &mut self.unflushed, section);
        (step, budget)
    }

    /// Ends the reader section and begins another, so that flushes that wait for the end of this section can continue.
    /// Does not flush.
    pub(super) fn pass(&mut self) {
        self.vm.platform.trace(Event::Yield);
        self.section.outside(|_| ());
    }

    /// Ends the reader section, runs `meanwhile`, and begins another section.
    pub(super) fn outside<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        self.section.outside(|_| meanwhile())
    }

    /// Counts a read other than that of a page-table entry, for example of a bitmap word. Returns `false` when the
    /// budget of this reader section is used up.
    pub(super) fn look(&mut self) -> bool {
        let (_, budget) = self.section.inside_with_budget();
        *budget = budget.saturating_sub(1);
        *budget > 0
    }

    /// Calls `step` to continue `walk` until the walk is done. Each call is in its own reader section.
    pub(crate) fn walk(
        &mut self,
        walk: &mut Walk,
        mut step: impl FnMut(&mut Step<'_, Mmu<P, F>>, &mut Walk),
    ) {
        loop {
            self.once(walk, &mut step);
            if walk.is_done() {
                return;
            }
            self.pass();
        }
    }

    /// Calls `work` once to continue `walk`, as far as the budget of this reader section allows.
    pub(super) fn once(
        &mut self,
        walk: &mut Walk,
        work: impl FnOnce(&mut Step<'_, Mmu<P, F>>, &mut Walk),
    ) {
        let (mut step, budget) = self.step();
        walk.with_budget(budget, |walk| work(&mut step, walk));
    }

    /// For each slot that has frames in `range`, calls `work` with a walk over these frames, until all walks are done.
    /// Works in steps: each step has its own reader section, and uses the slots that are published then.
    pub(super) fn walk_slots(
        &mut self,
        range: &Range<Gfn>,
        mut work: impl FnMut(&mut Step<'_, Mmu<P, F>>, &Memslot, &mut Walk),
    ) {
        self.covers(range);
        let mut at = range.start;
        while at < range.end {
            let space = self.space;
            let (mut step, budget) = self.step();
            let slots = space.slots.current(step.section());
            let mut stopped = range.end;
            slots.in_gfns(&(at..range.end), |slot| {
                let gfns = slot.gfns();
                let here = gfns.start.max(range.start)..gfns.end.min(range.end);
                let mut walk = Walk::resumed(here, at);
                walk.with_budget(budget, |walk| work(&mut step, slot, walk));
                stopped = match walk.is_done() {
                    true => range.end,
                    false => walk.at(),
                };
                walk.is_done()
            });
            at = stopped;
            if at < range.end {
                self.pass();
            }
        }
    }

    /// Like [`Self::walk_slots`], but visits each slot that a part of `hvas` backs, and passes the [`Place`] of that
    /// backing, too. Calls `found` whenever a step finds such a slot, before `work`.
    pub(super) fn walk_backed_by(
        &mut self,
        hvas: &Range<Hva>,
        mut found: impl FnMut(),
        mut work: impl FnMut(&mut Step<'_, Mmu<P, F>>, &Memslot, Place, &mut Walk),
    ) {
        // The slot (by its place in the order of backings) and the page of the slot at which the next step begins.
        let mut at = Some((Place::FIRST, 0));
        while let Some((place, page)) = at.take() {
            let ticket = &self.ticket;
            let (section, budget) = self.section.inside_with_budget();
            let mut step = Step::new(&self.space.mmu, &mut self.unflushed, section);
            let slots = self.space.slots.current(section);
            slots.backed_by(hvas, place, |slot, gfns, here| {
                found();
                let start = match here == place {
                    true => slot.base().add(page),
                    false => gfns.start,
                };
                if start >= gfns.end {
                    return true;
                }
                ticket.covers(&gfns);
                let mut walk = Walk::resumed(gfns, start);
                walk.with_budget(budget, |walk| work(&mut step, slot, here, walk));
                if !walk.is_done() {
                    at = Some((here, walk.at().0 - slot.base().0));
                }
                walk.is_done()
            });
            if at.is_some() {
                self.pass();
            }
        }
    }

    /// Calls [`Mmu::prepare`], which allocates the memory for an install of `tables` new tables.
    ///
    /// # Errors
    /// The errors of [`Mmu::prepare`].
    pub(super) fn prepare(
        &mut self,
        frames: &mut FrameCache,
        tables: usize,
    ) -> Result<(), OutOfMemory> {
        let mmu = self.space.mmu.get(self.section.inside());
        mmu.prepare(frames, tables)
    }

    /// Returns [`Mmu::tracking_begun`].
    pub(super) fn tracking_begun(&self) -> u64 {
        self.space.mmu.get(self.section.inside()).tracking_begun()
    }

    /// Returns whether the MMU can map the frames from `gfn` on by a leaf of `level`.
    pub(super) fn may_map(&self, gfn: Gfn, level: Level) -> bool {
        let mmu = self.space.mmu.get(self.section.inside());
        mmu.mappable_level(gfn, level) == level
    }

    /// Runs `work` as one step in a new reader section, with the current slots and the MMU. Between the last section
    /// and the new one, threads that waited for the end of the last section can continue.
    pub(super) fn alone<R>(
        &mut self,
        work: impl FnOnce(&mut Step<'_, Mmu<P, F>>, &SlotSet, &Mmu<P, F>) -> R,
    ) -> R {
        self.pass();
        let (space, (mut step, _)) = (self.space, self.step());
        let section = step.section();
        work(
            &mut step,
            space.slots.current(section),
            space.mmu.get(section),
        )
    }

    /// Zaps the oldest shadow page. Returns whether there was a shadow page.
    pub(super) fn zap_oldest(&mut self) -> bool {
        self.alone(|step, slots, _| step.zap_oldest(slots))
    }

    /// Zaps the leaves in `range` of all slots.
    pub(crate) fn zap_slots(&mut self, range: &Range<Gfn>) {
        self.walk_slots(range, |step, slot, walk| step.zap(slot, walk));
    }

    /// Call before `slot` moves, while no fault installs its leaves ([`InProgress::slot_moves`]). If dirty bits are
    /// part of the slot's log, which moves with the slot, zaps the slot's leaves and records their dirty bits in the
    /// log: after the move these bits would count for other pages. Returns whether dirty bits are part of the log.
    ///
    /// [`InProgress::slot_moves`]: super::InProgress::slot_moves
    pub(super) fn zap_noted(&mut self, slot: &Memslot) -> bool {
        let noted = slot.log().is_some_and(|log| !log.kind().protects());
        if noted {
            self.zap_part(slot, &slot.gfns());
        }
        noted
    }

    /// Waits until no operation and no vCPU uses a slot set that was replaced before the call.
    pub(super) fn wait_for_readers(&mut self) {
        let vm = self.vm;
        self.section
            .outside(|_| vm.readers.synchronize(vm.reader_wait()));
    }

    /// Zaps the leaves in `gfns` without recording their dirty bits in a log.
    pub(super) fn zap_unnoted(&mut self, gfns: &Range<Gfn>) {
        self.covers(gfns);
        self.walk(&mut Walk::new(gfns.clone()), |step, walk| {
            step.zap_unnoted(walk);
        });
    }

    /// Zaps the leaves in `gfns`, which are frames of `slot`. If dirty bits are part of the slot's log, records the
    /// leaves' dirty bits in the log.
    pub(super) fn zap_part(&mut self, slot: &Memslot, gfns: &Range<Gfn>) {
        self.covers(gfns);
        self.walk(&mut Walk::new(gfns.clone()), |step, walk| {
            step.zap(slot, walk);
        });
    }

    /// Like [`Self::zap_part`], but only for the leaves for which `wanted` returns `true`.
    pub(super) fn zap_some(
        &mut self,
        gfns: &Range<Gfn>,
        slot: &Memslot,
        wanted: impl Fn(Gfn, Level) -> bool,
    ) {
        self.covers(gfns);
        self.walk(&mut Walk::new(gfns.clone()), |step, walk| {
            step.zap_some(slot, walk, &wanted);
        });
    }

    /// Continues `walk` for one step, and splits the huge leaves for which `wanted` returns `true`, into tables from
    /// `frames`. Stops when no frames are left. `broken` is scratch memory with capacity for as many leaves as `frames`
    /// has frames; it is empty before and after the call.
    pub(super) fn split_some(
        &mut self,
        walk: &mut Walk,
        how: SplitWalk,
        wanted: impl Fn(Gfn, Level) -> bool,
        frames: &mut FrameCache,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        let before = walk.entries;
        let counters = self.counters();
        self.once(walk, |step, walk| {
            with_path(frames, counters, |path| {
                step.split(walk, how, wanted, path, broken);
            });
        });
        counters.split_entries_visited.add(walk.entries - before);
        self.mend_all(broken, false, |op, gfn, level, flushed| {
            with_path(frames, counters, |path| {
                path.flushed = flushed.clone();
                op.step().0.mend(gfn, level, path)
            })
        });
        broken.clear();
    }

    /// Completes the break-before-make of tables that a walk replaces by leaves: flushes, and installs the leaves.
    /// `broken` lists the entries in the order of gfn.
    pub(super) fn restore(&mut self, broken: &[(Gfn, Level)]) {
        self.mend_all(broken, true, |op, gfn, level, flushed| {
            op.step().0.restore(gfn, level, flushed)
        });
    }

    /// Flushes the range of the entries `broken`, which are in the order of gfn and were made invalid by
    /// break-before-make. Then calls `mend` for each, with the flush. If `mend` returns `false`, calls it again after
    /// another flush. `tables` tells whether the entries referred to tables before. This is not the operation's own
    /// flush: the frames of its ticket are flushed later.
    fn mend_all(
        &mut self,
        broken: &[(Gfn, Level)],
        tables: bool,
        mut mend: impl FnMut(&mut Self, Gfn, Level, &Flushed) -> bool,
    ) {
        let vm = self.vm;
        let flush = |op: &mut Self, gfns| {
            let level = None;
            (op.section).outside(|counters| vm.flush(gfns, Stale { level, tables }, counters))
        };
        let (Some((first, _)), Some((last, level))) = (broken.first(), broken.last()) else {
            return;
        };
        let block = |gfn: &Gfn, level: &Level| F::GRANULE.block(*gfn, *level);
        let mut flushed = flush(self, *first..block(last, level).end);
        for (gfn, level) in broken.iter().rev() {
            while !mend(self, *gfn, *level, &flushed) {
                flushed = flush(self, block(gfn, level));
            }
        }
    }

    /// Flushes the frames that the operation covers, if they need a flush, and begins another reader section for the
    /// rest of the operation.
    pub(super) fn flush(&mut self) {
        let unflushed = replace(&mut self.unflushed, Unflushed::none());
        let (vm, ticket) = (self.vm, &self.ticket);
        self.section.outside(|counters| {
            vm.flush_if_needed(ticket, &unflushed, counters);
            ticket.renew();
            vm.free(unflushed, counters);
        });
    }

    /// Ends the operation. When this returns, no CPU uses a translation of the covered frames that any thread zapped
    /// before the call. Returns the flush; it covers no frames if no flush was needed.
    pub(crate) fn finish(self) -> Flushed {
        let ended = self.section.end();
        let counters = ended.counters();
        let flushed = (self.vm).flush_if_needed(&self.ticket, &self.unflushed, counters);
        drop(self.ticket);
        self.vm.free(self.unflushed, counters);
        flushed
    }
}

/// Allocates the list `broken` for [`RangeOp::split_some`]. If the format requires break-before-make, its capacity is
/// that of a batch of frames; otherwise 0.
///
/// # Errors
/// [`OutOfMemory`].
pub(super) fn space_for_broken<F: Format>() -> Result<Vec<(Gfn, Level)>, OutOfMemory> {
    let mut leaves = Vec::new();
    if F::BREAK_BEFORE_MAKE {
        let space = leaves.try_reserve_exact(FrameCache::BATCH);
        space.map_err(|_| OutOfMemory)?;
    }
    Ok(leaves)
}

/// Runs `then` with a [`Path`] whose tables come from `frames`. Adds the numbers of split leaves to `counters`.
#[inline]
fn with_path<R>(
    frames: &mut FrameCache,
    counters: &Counters,
    then: impl FnOnce(&mut Path<'_>) -> R,
) -> R {
    let mut path = Path::new(frames);
    let result = then(&mut path);
    counters.path_done(&path);
    result
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Flushes `gfns` from the TLBs of all CPUs. When this returns, no CPU uses a translation of `gfns` that any thread
    /// zapped before the call, and no reader can reach a table that was detached before. `stale` tells which kinds of
    /// cached entries must be flushed. The caller is outside every reader section.
    pub(crate) fn flush(&self, gfns: Range<Gfn>, stale: Stale, counters: &Counters) -> Flushed {
        let number = match F::BREAK_BEFORE_MAKE || self.shadows_nested() {
            true => self.flushes.begin(),
            false => 0,
        };
        // A CPU that walks shadow tables caches virtual addresses, not guest frames, so flush everything.
        let gfns = match self.shadows_nested() && self.budget.was_used() {
            true => all_gfns::<F>(),
            false => gfns,
        };
        self.platform.trace(Event::FlushBegin(gfns.clone()));
        // Wait for the readers first: after that, no fault in progress can add a leaf to a detached table. Then flush
        // the hardware's TLBs, so that they contain no leaves of detached tables.
        self.readers.synchronize(self.reader_wait());
        held::assert_none("to flush");
        self.platform.flush(self.id, gfns.clone(), stale);
        self.platform.trace(Event::FlushEnd(gfns.clone()));
        counters.remote_tlb_flush.add(1);
        Flushes::done(gfns, number)
    }

    /// Flushes the frames that `ticket` covers, if the ticket's operation has made changes (`unflushed`), or another
    /// operation still needs a flush of these frames. Returns the flush, if there was one. The caller is outside every
    /// reader section.
    fn flush_if_needed(
        &self,
        ticket: &FlushTicket<'_>,
        unflushed: &Unflushed,
        counters: &Counters,
    ) -> Flushed {
        if ticket.gfns().is_empty() {
            return Flushed::default();
        }
        counters.remote_tlb_flush_requests.add(1);
        let stale = match ticket.others_need(F::GRANULE.pages(F::MAX_LEAF)) {
            true => Stale::ANYTHING,
            false if unflushed.is_empty() => return Flushed::default(),
            false => unflushed.stale::<F>(),
        };
        self.flush(ticket.gfns(), stale, counters)
    }

    /// Frees the detached tables, and counts the zapped leaves. Call after the flush.
    fn free(&self, unflushed: Unflushed, counters: &Counters) {
        let mut freed = Freed {
            leaves: unflushed.zapped,
            ..Freed::default()
        };
        if !unflushed.detached.is_empty() {
            // SAFETY: the flush was after the tables were detached: all readers have passed a quiescent point since,
            // and the hardware's TLBs were flushed.
            freed += unsafe {
                unflushed
                    .detached
                    .free::<P, F>(&*self.platform, &self.frames)
            };
        }
        for (gauge, collapsed) in counters.leaves().into_iter().zip(unflushed.collapsed) {
            gauge.add(collapsed);
            counters.collapses.add(collapsed);
        }
        counters.leaves_zapped(&freed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::format::Stage2;
    use crate::table::heap_platform::Heap;
    use crate::vm::Config;
    use alloc::boxed::Box;
    use alloc::sync::Arc;
    use std::sync::mpsc;

    /// A thread that changes an entry during another thread's flush must flush itself: a walker may have read the old
    /// entry after that flush.
    #[test]
    fn a_flush_covers_nothing_that_changes_while_it_waits() {
        let heap = Arc::new(Heap::default());
        let vm = Vm::<_, Stage2<48>>::new(heap.clone(), Config::default()).unwrap();
        let (flushes, (sender, changed)) = (vm.flushes.clone(), mpsc::channel());
        let change = move || sender.send(flushes.next()).unwrap();
        assert!(heap.in_flush.set(Box::new(change)).is_ok());
        let (gfns, before) = (Gfn(0)..Gfn(512), vm.flushes.next());
        let flush = |counters| vm.flush(gfns.clone(), Stale::ANYTHING, counters);
        let flushed = vm.section().outside(flush);
        let meanwhile = changed.recv().unwrap();
        assert!(flushed.covers(&gfns, before) && !flushed.covers(&gfns, meanwhile));
    }
}
