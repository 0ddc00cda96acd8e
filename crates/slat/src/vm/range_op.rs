//! What every operation on a range of tables has in common: reader sections to walk in, a step at a time, the
//! flush that it owes ([`Flushes`](crate::table::Flushes)), and the tables to free after that.

use alloc::vec::Vec;
use core::mem::replace;
use core::ops::Range;

use super::{Section, Space, Vm};
use crate::addr::{Gfn, Hva, Level};
use crate::format::Format;
use crate::platform::{Platform, Stale};
use crate::slots::{Memslot, Place};
use crate::stats::Counters;
use crate::sync::{InSection, held};
use crate::table::{
    Debt, Flushed, Flushes, FrameCache, Freed, LeafCounts, Path, SplitWalk, Tree, Walk, Zapped,
};

/// One range operation: say what it is about ([`about`](Self::about)), walk the tree in steps, note what was
/// changed, and [`finish`](Self::finish).
#[must_use = "a range operation is finished with the flush it owes"]
pub(crate) struct RangeOp<'a, P: Platform, F: Format> {
    vm: &'a Vm<P, F>,
    pub(super) space: &'a Space<P, F>,
    section: Section<'a>,
    debt: Debt<'a>,
    taken: Taken,
}

/// What an operation has taken away and not flushed yet.
pub(crate) struct Taken {
    pub(super) zapped: Zapped,
    /// Leaves, by level, that lost a right or a mark that a TLB may hold.
    pub(super) changed: LeafCounts,
}

impl Taken {
    fn nothing() -> Self {
        Taken {
            zapped: Zapped::nothing(),
            changed: LeafCounts::default(),
        }
    }

    /// Goes on with a walk over frames of `slot`: zaps them. If the leaves' dirty bits are its log, they are not
    /// lost.
    pub(super) fn zap<P: Platform, F: Format>(
        &mut self,
        tree: &Tree<P, F>,
        slot: &Memslot,
        walk: &mut Walk,
    ) {
        match slot.log() {
            Some(log) if !log.kind().protects() => {
                let all = slot.gfns();
                tree.zap_noting(walk, &mut self.zapped, |gfn, level| {
                    log.mark_leaf(&all, gfn, level);
                });
            }
            _ => tree.zap(walk, &mut self.zapped),
        }
    }

    /// Goes on with a walk over frames of `slot`: makes the next write to those that `is_named` tells be noted.
    pub(super) fn protect<P: Platform, F: Format>(
        &mut self,
        tree: &Tree<P, F>,
        slot: &Memslot,
        walk: &mut Walk,
        is_named: impl Fn(Gfn) -> bool,
    ) {
        let named = |gfn, level| level > Level::PAGE || is_named(gfn);
        match slot.log() {
            Some(log) if !log.kind().protects() => {
                // The bit of a huge leaf stands for its other pages, too.
                let range = walk.range();
                let note = |gfn, level| {
                    let cleared = |gfn| range.contains(&gfn) && is_named(gfn);
                    log.mark_leaf_unless(&slot.gfns(), gfn, level, &cleared);
                };
                tree.clear_dirty(walk, named, note, &mut self.changed);
            }
            _ => tree.write_protect(walk, named, &mut self.changed),
        }
    }

    fn is_nothing(&self) -> bool {
        self.zapped.is_empty() && self.changed == LeafCounts::default()
    }

    /// What walkers may have of it.
    fn stale<F: Format>(&self) -> Stale {
        let has_leaves = |level: &Level| {
            let index = level.0 as usize - 1;
            self.zapped.leaves[index] + self.changed[index] > 0
        };
        let mut levels = (1..=LeafCounts::default().len() as u8)
            .map(Level)
            .filter(has_leaves);
        let tables = !self.zapped.detached.is_empty();
        let only = levels.next().filter(|_| levels.next().is_none());
        Stale {
            level: only.filter(|_| F::BREAK_BEFORE_MAKE && !tables),
            tables,
        }
    }
}

impl<'a, P: Platform, F: Format> RangeOp<'a, P, F> {
    /// Begins an operation that does not say yet what it is about. The caller is in no reader section.
    #[inline]
    pub(crate) fn begin(vm: &'a Vm<P, F>, space: &'a Space<P, F>) -> Self {
        RangeOp {
            vm,
            space,
            debt: vm.flushes.owe(),
            section: vm.section(),
            taken: Taken::nothing(),
        }
    }

    /// Begins an operation on `gfns`.
    pub(super) fn on(vm: &'a Vm<P, F>, space: &'a Space<P, F>, gfns: &Range<Gfn>) -> Self {
        let op = Self::begin(vm, space);
        op.about(gfns);
        op
    }

    /// It is about `gfns`, too. Before it looks at anything there.
    pub(super) fn about(&self, gfns: &Range<Gfn>) {
        let gfns = gfns.start..gfns.end.min(Gfn(Tree::<P, F>::capacity()));
        if !gfns.is_empty() {
            self.debt.covers(&gfns);
        }
    }

    /// What it takes away belongs to no slot any more.
    pub(super) fn of_leaving_slot(&self) {
        self.debt.leaves();
    }

    pub(super) fn counters(&self) -> &'a Counters {
        self.section.counters()
    }

    /// What one step works with, and the proof that its section lasts.
    fn step(&mut self) -> (InSection<'_>, &mut Taken, &mut u32) {
        let (inside, left) = self.section.inside_with_leave();
        (inside, &mut self.taken, left)
    }

    /// Lets those pass who wait for this thread. What was taken away stays to be flushed.
    pub(super) fn pass(&mut self) {
        self.section.outside(|_| ());
    }

    /// Runs `meanwhile` between this section and the next.
    pub(super) fn outside<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        self.section.outside(|_| meanwhile())
    }

    /// Counts a look at something that is no entry. `false`: it was one too many for this section.
    pub(super) fn look(&mut self) -> bool {
        let (_, left) = self.section.inside_with_leave();
        *left = left.saturating_sub(1);
        *left > 0
    }

    /// Goes on with `walk` by `step`, which is shown the slots only through the proof it is given, until the
    /// walk is done; others pass in between.
    pub(crate) fn walk(
        &mut self,
        walk: &mut Walk,
        mut step: impl FnMut(&Tree<P, F>, &mut Walk, &mut Taken, InSection<'_>),
    ) {
        loop {
            self.once(walk, &mut step);
            if walk.is_done() {
                return;
            }
            self.pass();
        }
    }

    /// Goes on with `walk` by `step` as far as this section may.
    pub(super) fn once(
        &mut self,
        walk: &mut Walk,
        step: impl FnOnce(&Tree<P, F>, &mut Walk, &mut Taken, InSection<'_>),
    ) {
        let space = self.space;
        let (inside, taken, left) = self.step();
        walk.with_leave(left, |walk| {
            step(space.tree.get(inside), walk, taken, inside)
        });
    }

    /// Calls `step` for each slot with frames in `range`, as the slots are when it comes to them, with a walk
    /// over those, until that is done; others pass in between.
    pub(super) fn walk_slots(
        &mut self,
        range: &Range<Gfn>,
        mut step: impl FnMut(&Tree<P, F>, &Memslot, &mut Walk, &mut Taken),
    ) {
        self.about(range);
        let mut at = range.start;
        while at < range.end {
            let space = self.space;
            let (inside, taken, left) = self.step();
            let tree = space.tree.get(inside);
            let mut stopped = range.end;
            space
                .slots
                .current(inside)
                .in_gfns(&(at..range.end), |slot| {
                    let gfns = slot.gfns();
                    let mut walk = Walk::new(gfns.start.max(at)..gfns.end.min(range.end));
                    walk.with_leave(left, |walk| step(tree, slot, walk, taken));
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

    /// The same for each slot that `hvas` stand behind. `found` is called when the operation comes to a slot,
    /// before anything is done there.
    pub(super) fn walk_backed_by(
        &mut self,
        hvas: &Range<Hva>,
        mut found: impl FnMut(),
        mut step: impl FnMut(&Tree<P, F>, &Memslot, &mut Walk, &mut Taken),
    ) {
        // Where it goes on: at a slot, and a page of it.
        let mut at = Some((Place::FIRST, 0));
        while let Some((place, page)) = at.take() {
            let space = self.space;
            let debt = &self.debt;
            let (inside, left) = self.section.inside_with_leave();
            let taken = &mut self.taken;
            let tree = space.tree.get(inside);
            space
                .slots
                .current(inside)
                .backed_by(hvas, place, |slot, gfns, here| {
                    found();
                    let start = match here == place {
                        true => gfns.start.max(slot.base().add(page)),
                        false => gfns.start,
                    };
                    if start >= gfns.end {
                        return true;
                    }
                    debt.covers(&gfns);
                    let mut walk = Walk::new(start..gfns.end);
                    walk.with_leave(left, |walk| step(tree, slot, walk, taken));
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

    /// Zaps the part of every slot that lies in `range`.
    pub(super) fn zap_slots(&mut self, range: &Range<Gfn>) {
        self.walk_slots(range, |tree, slot, walk, taken| taken.zap(tree, slot, walk));
    }

    /// Before `slot` moves: if its leaves' dirty bits are its log, which goes with it, they are noted while it is
    /// known which pages they mean. No fault brings the leaves back meanwhile ([`InProgress::slot_moves`]). Returns
    /// whether they are its log.
    ///
    /// [`InProgress::slot_moves`]: super::InProgress::slot_moves
    pub(super) fn zap_noted(&mut self, slot: &Memslot) -> bool {
        let noted = slot.log().is_some_and(|log| !log.kind().protects());
        if noted {
            self.about(&slot.gfns());
            let mut walk = Walk::new(slot.gfns());
            self.walk(&mut walk, |tree, walk, taken, _| {
                taken.zap(tree, slot, walk)
            });
        }
        noted
    }

    /// Waits until no operation, and no vCPU, goes by slots that were replaced before the call.
    pub(super) fn wait_for_readers(&mut self) {
        let vm = self.vm;
        self.section
            .outside(|_| vm.readers.synchronize(vm.reader_wait()));
    }

    /// After `slot` has left the set: its log is not read any more, or was noted.
    pub(super) fn zap_unnoted(&mut self, slot: &Memslot) {
        self.about(&slot.gfns());
        let mut walk = Walk::new(slot.gfns());
        self.walk(&mut walk, |tree, walk, taken, _| {
            tree.zap(walk, &mut taken.zapped)
        });
    }

    /// Goes on with the split of the huge leaves of a walk for which `wanted` says so, with tables from `frames`, for
    /// one step, or as long as there are frames. `broken` has room for as many leaves.
    pub(super) fn split_some(
        &mut self,
        walk: &mut Walk,
        how: SplitWalk,
        wanted: impl Fn(Gfn, Level) -> bool,
        frames: &mut FrameCache,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        let before = walk.entries;
        let space = self.space;
        let counters = self.counters();
        let (inside, _, left) = self.step();
        let tree = space.tree.get(inside);
        with_path(frames, counters, |path| {
            walk.with_leave(left, |walk| tree.split(walk, how, wanted, path, broken));
        });
        counters.split_entries_visited.add(walk.entries - before);
        let mut flushed = match (broken.first(), broken.last()) {
            (Some((first, _)), Some((last, level))) => self.void(*first..last.block(*level).end),
            _ => return,
        };
        while let Some((gfn, level)) = broken.pop() {
            while !with_path(frames, counters, |path| {
                path.flushed = flushed.clone();
                space.tree.get(self.inside()).mend(gfn, level, path)
            }) {
                flushed = self.void(gfn.block(level));
            }
        }
    }

    pub(super) fn inside(&self) -> InSection<'_> {
        self.section.inside()
    }

    /// Voids what walkers have of leaves that were broken in `gfns`. What was taken away stays to be flushed.
    fn void(&mut self, gfns: Range<Gfn>) -> Flushed {
        let vm = self.vm;
        let leaves = Stale {
            level: None,
            tables: false,
        };
        self.section
            .outside(|counters| vm.flush(gfns, leaves, counters))
    }

    /// Flushes what it is about if anybody owes that, and goes on. Others who wait for this thread pass.
    pub(super) fn flush(&mut self) {
        let taken = replace(&mut self.taken, Taken::nothing());
        let (vm, space, debt) = (self.vm, self.space, &self.debt);
        self.section.outside(|counters| {
            vm.settle(debt, &taken, counters);
            debt.renew();
            vm.free(space, taken.zapped, counters);
        });
    }

    /// Ends the operation: when this returns, no CPU uses what was taken away, before the call and by
    /// whomever, of the frames that it is about.
    pub(super) fn finish(mut self) {
        let counters = self.section.end();
        self.vm.settle(&self.debt, &self.taken, counters);
        drop(self.debt);
        self.vm.free(self.space, self.taken.zapped, counters);
    }
}

/// Runs `then` on its way through the tables: it takes new ones from `frames`, and `counters` count what
/// it has split.
#[inline]
pub(crate) fn with_path<R>(
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
    /// Makes sure that no CPU uses a translation of `gfns` that was taken away before this call, by whomever.
    /// The caller is outside every reader section.
    pub(crate) fn flush(&self, gfns: Range<Gfn>, stale: Stale, counters: &Counters) -> Flushed {
        let number = match F::BREAK_BEFORE_MAKE {
            true => self.flushes.begin(),
            false => 0,
        };
        // First the software side: after it no late fault can still add a leaf to a detached table.
        // Then the hardware: it forgets what it may have walked there. Then nobody can reach them.
        self.readers.synchronize(self.reader_wait());
        held::assert_none("to flush");
        self.platform.flush(self.id, gfns.clone(), stale);
        counters.remote_tlb_flush.add(1);
        Flushes::done(gfns, number)
    }

    /// Flushes what `debt` is about, if its operation has `taken` something there or somebody else owes a flush of
    /// it. The caller is outside every reader section.
    fn settle(&self, debt: &Debt<'_>, taken: &Taken, counters: &Counters) {
        if debt.gfns().is_empty() {
            return;
        }
        counters.remote_tlb_flush_requests.add(1);
        let others = debt.others_owe(F::MAX_LEAF);
        if others {
            self.flush(debt.gfns(), Stale::ANYTHING, counters);
        } else if !taken.is_nothing() {
            self.flush(debt.gfns(), taken.stale::<F>(), counters);
        }
    }

    /// Frees the tables that were taken out, after the flush.
    fn free(&self, space: &Space<P, F>, zapped: Zapped, counters: &Counters) {
        let mut gone = Freed {
            leaves: zapped.leaves,
            nx_splits: 0,
        };
        if !zapped.detached.is_empty() {
            // SAFETY: to free tables takes no section.
            let tree = unsafe { space.tree.unguarded() };
            // SAFETY: all readers have passed since the tables were detached, and hardware is flushed.
            gone += unsafe { tree.free(zapped.detached) };
        }
        counters.gone(&gone);
    }
}
