//! Tables by guest frame: the interface for work that comes from the host or from slot changes, which knows frames
//! but no CPU.
//!
//! An MMU shows the leaves of a range of frames to a visitor, each as an [`At`], under the lock of its table. Every
//! operation on a range of frames is such a visitor ([`crate::vm::range_op`](crate::vm)), so it is written
//! once for all MMUs, and flushing and ending reader sections is written once for all operations.
//!
//! A [`Walk`] has a budget of entries to read. When that is used up, the walk stops between two entries; called
//! again, it resumes there, from the root down. The caller may end its reader section in between, so that no flush
//! or slot change waits for it long. The walk sees changes made meanwhile at entries that it has not reached, and no
//! changes at entries that it has passed: as it would in one section.
//!
//! In tables of level 1 a walk offers its visitor [`RUN`] entries at a time ([`Visit::run`]), for operations that
//! usually find all of them in the same state and can handle them together.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use alloc::string::String;
use core::ops::Range;

use super::clear::{Cleared, LockedTable};
use super::detached::tell_zapped;
use super::lookup::{descend, root_table};
use super::{Detached, Flushed, Path, Table, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf, all_gfns};
use crate::frame::{ENTRIES, TableMeta};
use crate::platform::Platform;
use crate::sync::held;

/// The number of level 1 entries that a visitor is offered at a time.
pub(crate) const RUN: usize = if cfg!(loom) { 2 } else { 16 };

/// What an operation does at entries. A closure is a visitor of single entries.
pub(crate) trait Visit {
    /// Visits an entry, under the lock of its table. Returns where the walk goes next.
    fn visit(&mut self, at: &At<'_>) -> Next;

    /// Visits adjacent level 1 entries, all in the walk's range, under the lock of their table; the first is for frame
    /// `first`. Returns `true` if it has done everything for all of them. `false`: it has done nothing, and the walk
    /// calls `visit` for each.
    #[inline]
    fn run(&mut self, _entries: &[AtomicU64; RUN], _first: Gfn) -> bool {
        false
    }
}

impl<V: FnMut(&At<'_>) -> Next> Visit for V {
    #[inline]
    fn visit(&mut self, at: &At<'_>) -> Next {
        self(at)
    }
}

/// Which entries a walk shows to its visitor, in addition to the leaves, and which tables it skips.
#[derive(Clone, Copy, Default)]
pub(crate) struct Show {
    /// Show entries that refer to a table, before the table is entered.
    pub(crate) tables: bool,
    /// Do not enter tables of level 1: nothing in them can be split. Of 64 GiB mapped by 4 KiB
    /// pages, 32,832 entries are read instead of 16.8 million.
    pub(crate) skip_last_level: bool,
    /// Do not enter tables of level 2 that contain no leaf: skips 1 GiB at a time of memory that is split already.
    pub(crate) skip_without_huge: bool,
    /// Show MMIO entries.
    pub(crate) mmio: bool,
}

impl Show {
    /// Shows tables, and skips the entries of level 1 tables.
    pub(crate) const TABLES: Show = Show {
        tables: true,
        skip_last_level: true,
        skip_without_huge: false,
        mmio: false,
    };
}

/// Where a walk goes after a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the table that the entry refers to now, if it refers to one.
    Descend,
    /// Skip to the next entry.
    Pass,
    /// Stop before this entry.
    Stop,
}

/// A visited entry. The walk holds the lock of its table.
pub(crate) struct At<'t> {
    pub(crate) entry: &'t AtomicU64,
    pub(crate) meta: &'t TableMeta,
    pub(crate) kept: Kept<'t>,
    /// The entry's bits when the visit began. Since then walkers may have set accessed and dirty.
    pub(crate) bits: u64,
    /// The first frame that the entry covers, which may be before the walk's range.
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
}

/// Where the MMU of an entry keeps books about it.
#[derive(Clone, Copy)]
pub(crate) enum Kept<'t> {
    /// Which entries of its table were cleared.
    Cleared(&'t Cleared),
    /// Lists of entries.
    Listed(&'t dyn Listed),
}

/// A visited entry of an MMU that lists its entries, and is locked. The methods are given the same entry.
pub(crate) trait Listed {
    /// Takes the leaf or MMIO entry off its list. Call after it was cleared.
    fn unlist(&self);
    /// Does [`ByGfn::detach`].
    fn detach(&self, lower: Pfn, detached: &mut Detached);
    /// Does [`ByGfn::split`].
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;
}

impl At<'_> {
    /// Returns the meaning of [`bits`](Self::bits).
    pub(crate) fn decode<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level)
    }

    /// Returns whether `range` contains all frames that the entry covers.
    pub(crate) fn is_inside(&self, range: &Range<Gfn>) -> bool {
        range.start <= self.gfn && self.gfn.0 + self.level.pages() <= range.end.0
    }

    /// Clears the entry, which is a leaf or refers to a table.
    pub(crate) fn clear<F: Format>(&self) {
        overwrite(self.entry, F::cleared(0), Release);
        self.cleared::<F>();
    }

    /// Clears the entry, which is a leaf, and returns its bits, with those that hardware has set up to now.
    pub(crate) fn take<F: Format>(&self) -> u64 {
        let bits = self.entry.swap(F::cleared(0), AcqRel);
        self.cleared::<F>();
        bits
    }

    /// Notes that the entry was cleared.
    fn cleared<F: Format>(&self) {
        match self.kept {
            Kept::Cleared(cleared) if F::BREAK_BEFORE_MAKE => {
                cleared.add(self.level.index(self.gfn));
            }
            Kept::Cleared(_) => {}
            Kept::Listed(listed) => listed.unlist(),
        }
        self.leaf_removed::<F>();
    }

    /// Counts one leaf less in the table, if the entry was a leaf.
    fn leaf_removed<F: Format>(&self) {
        if matches!(self.decode::<F>(), Entry::Leaf(_) | Entry::Broken(_)) {
            self.meta.count_leaves(-1);
        }
    }

    /// Replaces the huge leaf `old` by the entry `table`. `Err`: a walker has set a bit in the leaf; the new bits.
    ///
    /// `Release`: a walker that sees the new table sees its entries, too.
    pub(crate) fn put_table<F: Format>(&self, old: u64, table: u64) -> Result<(), u64> {
        self.entry
            .compare_exchange(old, table, Release, Relaxed)
            .map(|_| self.leaf_removed::<F>())
    }

    /// Clears the entry, which is an MMIO entry. No flush is due: no TLB caches one.
    pub(crate) fn clear_mmio(&self) {
        self.put(0);
        if let Kept::Listed(listed) = self.kept {
            listed.unlist();
        }
    }

    /// Overwrites the entry with `bits`. Loses accessed and dirty bits that a walker sets at the same time.
    pub(crate) fn put(&self, bits: u64) {
        overwrite(self.entry, bits, Relaxed);
    }

    /// Applies `change` to the leaf in the entry. Loses no bit that a walker sets at the same time; but an accessed bit that is
    /// cleared without the lock meanwhile ([`super::age`]) may be set again.
    pub(crate) fn update<F: Format>(&self, change: impl Fn(u64) -> u64) {
        if F::is_settled(self.bits) {
            overwrite(self.entry, change(self.bits), Relaxed);
        } else {
            let _ = self
                .entry
                .fetch_update(Relaxed, Relaxed, |bits| Some(change(bits)));
        }
    }
}

/// A walk over a range, with its progress.
pub(crate) struct Walk {
    range: Range<Gfn>,
    /// The next frame; the end of the range when the walk is done.
    at: Gfn,
    /// The number of entries that it may still read in this step.
    budget: u32,
    /// The number of entries that it has read.
    pub(crate) entries: u64,
}

impl Walk {
    /// Makes a walk over `range`, with a budget of 0.
    pub(crate) fn new(range: Range<Gfn>) -> Self {
        Walk {
            at: range.start,
            range,
            budget: 0,
            entries: 0,
        }
    }

    /// Makes a walk over `range` of which everything before `at` is done, with a budget of 0.
    pub(crate) fn resumed(range: Range<Gfn>, at: Gfn) -> Self {
        Walk {
            at: at.max(range.start),
            ..Walk::new(range)
        }
    }

    /// Runs `step`, which continues the walk with `budget`, and subtracts what it used.
    pub(crate) fn with_budget(&mut self, budget: &mut u32, step: impl FnOnce(&mut Self)) {
        self.budget = *budget;
        step(self);
        *budget = self.budget;
    }

    /// Makes a walk that needs only one step for all of `range`.
    #[cfg(test)]
    pub(crate) fn unbroken(range: Range<Gfn>) -> Self {
        Walk {
            budget: u32::MAX,
            ..Walk::new(range)
        }
    }

    /// Returns the whole range of the walk.
    pub(crate) fn range(&self) -> Range<Gfn> {
        self.range.clone()
    }

    /// Returns the next frame; the end of the range when the walk is done.
    pub(crate) fn at(&self) -> Gfn {
        self.at
    }

    /// Makes the walk resume at `gfn`, which it may have passed.
    pub(crate) fn go_to(&mut self, gfn: Gfn) {
        self.at = gfn.max(self.range.start);
    }

    /// Makes the walk go on at `gfn`, up to which it has done its work.
    pub(crate) fn stop_at(&mut self, gfn: Gfn) {
        self.at = gfn.min(self.range.end);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.range.end
    }

    /// Returns whether the budget is used up.
    pub(crate) fn is_spent(&self) -> bool {
        self.budget == 0
    }

    /// Counts `entries` that the walk is about to read.
    fn count(&mut self, entries: u32) {
        held::looked_at(entries);
        self.budget -= entries;
        self.entries += u64::from(entries);
    }

    /// Counts the visit of one entry, which is not left out if the budget is used up.
    pub(crate) fn visits(&mut self) {
        self.spend(1);
        self.entries += 1;
    }

    /// Takes as much of `budget` as is left for work that takes as long as reading so many entries.
    pub(crate) fn spend(&mut self, budget: u32) {
        let paid = budget.min(self.budget);
        held::looked_at(paid);
        self.budget -= paid;
    }
}

/// An MMU, as work that comes from the host or from slot changes uses it. The caller of every method is in a reader
/// section.
pub(crate) trait ByGfn {
    /// The format of its entries.
    type Format: Format;

    /// Continues `walk`: calls `visit` for every leaf that covers frames of its range, and for the entries that `show`
    /// adds, in the order of gfn, each under the lock of its table, or of the MMU. Takes that lock wherever a fault could
    /// install something in the range, even if there is no entry to visit. Stops where `visit` returns [`Next::Stop`], or
    /// when the budget of `walk` is used up; the next call resumes with the same entry.
    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit);

    /// Returns how many leaves of the range have the accessed bit set; clears it if `clear`. Continues `walk`, and stops when
    /// its budget is used up, as [`Self::walk`] does, but need not take a lock.
    fn age(&self, walk: &mut Walk, clear: bool) -> u64 {
        let mut young = 0;
        self.walk(walk, Show::default(), &mut |at: &At<'_>| {
            if Self::Format::clear_accessed(at.bits) != at.bits {
                young += 1;
                if clear {
                    at.update::<Self::Format>(Self::Format::clear_accessed);
                }
            }
            Next::Pass
        });
        young
    }

    /// Zaps the leaf at `at`.
    fn zap(&self, at: &At<'_>);

    /// Zaps the leaf at `at`, and returns it with the bits that hardware has set up to now.
    fn take(&self, at: &At<'_>) -> u64;

    /// Clears the entry `at`, which refers to the table in the frame `lower`, and adds the table to `detached`,
    /// together with all leaves and tables that nothing else refers to then.
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached);

    /// Replaces the huge leaf `at` by a table, in a frame from `path`, of leaves of the next lower level that mean the
    /// same. `path` has a frame for it, and the MMU is prepared for one more table. On formats with break-before-make it only breaks the leaf; the frame is used
    /// later, by [`Self::mend`].
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;

    /// Installs the pieces of the broken leaf of `level` at `gfn`: the second half of break-before-make. Call after a
    /// flush of the leaf, which `path` has in `flushed`. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left there. `false`: another leaf in the same table was broken after the
    /// flush, and it may be this one; flush again and retry.
    #[must_use]
    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool;

    /// Replaces the table in the frame `lower`, to which the entry `at` refers, by the huge leaf `leaf`, which maps all that
    /// the table maps, and adds the table to `detached`. On formats with break-before-make it makes the entry a broken
    /// leaf; [`Self::restore`] installs it after a flush. An MMU that cannot have a leaf there clears the entry.
    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse {
        let _ = leaf;
        self.detach(at, lower, detached);
        Collapse::Zapped
    }

    /// Installs the broken leaf of `level` at `gfn` as a whole, after the flush `own` of it: the second half of
    /// [`Self::collapse`] on formats with break-before-make. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left there; `false` as for [`Self::mend`].
    #[must_use]
    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let _ = (gfn, level, own);
        true
    }

    /// Zaps the oldest of the tables that the MMU may zap to stay within a limit, with its leaves, and adds it to
    /// `detached`. Calls `zapped` for every leaf, with its first frame, level, and bits. Returns whether there is one.
    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        let _ = (detached, zapped);
        false
    }

    /// Returns whether the table in `frame` exists only because of NX; then recovery may zap it.
    fn is_nx_table(&self, frame: Pfn) -> bool;

    /// Checks what the MMU knows of its own tables, such as the number of leaves in each, against the entries.
    ///
    /// # Errors
    /// The first thing that is wrong.
    fn check(&self) -> Result<(), String>;
}

/// What [`ByGfn::split`] did.
pub(crate) enum Split {
    /// The leaf was replaced by a table of its pieces.
    InPlace,
    /// The leaf was made [`Entry::Broken`].
    Broken,
    /// Nothing was split: what the MMU has allocated ahead is used up.
    Unprepared,
}

/// What [`ByGfn::collapse`] did.
pub(crate) enum Collapse {
    /// The table was replaced by the leaf.
    InPlace,
    /// The entry was made [`Entry::Broken`].
    Broken,
    /// The entry was cleared.
    Zapped,
}

impl<P: Platform, F: Format> ByGfn for Tree<P, F> {
    type Format = F;

    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        self.each_root(walk, |walk, root, gfns| {
            let mut walker = Walker {
                tree: self,
                show,
                walk,
                visit: &mut *visit,
            };
            walker.table(root, F::TOP, gfns)
        });
    }

    fn age(&self, walk: &mut Walk, clear: bool) -> u64 {
        self.age_unlocked(walk, clear)
    }

    #[inline]
    fn zap(&self, at: &At<'_>) {
        match P::WANTS_ZAPPED {
            true => _ = self.take(at),
            false => at.clear::<F>(),
        }
    }

    #[inline]
    fn take(&self, at: &At<'_>) -> u64 {
        let bits = at.take::<F>();
        tell_zapped::<P, F>(&*self.platform, bits, at.level);
        bits
    }

    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached) {
        at.clear::<F>();
        detached.push(&self.table(lower), at.level.below());
    }

    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split {
        if F::BREAK_BEFORE_MAKE {
            at.update::<F>(F::broken);
            self.broke(at.meta);
            return Split::Broken;
        }
        let frame = path.frames.take();
        let mut bits = at.bits;
        loop {
            // SAFETY: the frame is this path's, and not published before the exchange.
            unsafe { self.fill_below(frame, at.level, bits) };
            match at.put_table::<F>(bits, F::table(frame)) {
                Ok(()) => break,
                Err(now) => bits = now,
            }
        }
        path.split(at.level, ENTRIES);
        Split::InPlace
    }

    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool {
        let found = descend::<P, F>(&self.platform, self.key(gfn), level);
        if found.level > level {
            return true;
        }
        let is_broken = |now| matches!(now, Entry::Broken(_));
        let bits = self.put_table(&self.table(found.table), level, gfn, path, is_broken);
        !is_broken(F::decode(bits, level))
    }

    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse {
        let bits = F::leaf(leaf, at.level);
        // Nothing is cleared: until the flush, walkers use either the leaf or the table, which mean the same.
        let (bits, collapse) = match F::BREAK_BEFORE_MAKE {
            true => (F::broken(bits), Collapse::Broken),
            false => (bits, Collapse::InPlace),
        };
        at.entry.store(bits, Release);
        at.meta.count_leaves(1);
        if F::BREAK_BEFORE_MAKE {
            self.broke(at.meta);
        }
        detached.push(&self.table(lower), at.level.below());
        collapse
    }

    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let found = descend::<P, F>(&self.platform, self.key(gfn), level);
        if found.level > level {
            return true;
        }
        let guard = self.table(found.table).lock();
        // Its rights may have changed since it was broken.
        let Entry::Broken(leaf) = F::decode(found.entry.load(Relaxed), level) else {
            return true;
        };
        let may = Self::may_mend(guard.meta, gfn, level, own);
        if may {
            overwrite(found.entry, F::leaf(leaf, level), Release);
        }
        may
    }

    fn is_nx_table(&self, frame: Pfn) -> bool {
        self.table(frame).meta().nx_split.load(Relaxed)
    }

    fn check(&self) -> Result<(), String> {
        self.roots()
            .try_for_each(|root| self.check_below(root, F::TOP))
    }
}

/// A walk has stopped before the entry for this frame.
pub(super) struct Stopped {
    pub(super) at: Gfn,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Continues `walk` in each table of the root that has a part of its range, until it is done or `step` has stopped.
    pub(super) fn each_root(
        &self,
        walk: &mut Walk,
        mut step: impl FnMut(&mut Walk, Pfn, Range<Gfn>) -> Result<(), Stopped>,
    ) {
        let end = walk.range.end.min(all_gfns::<F>().end);
        let root_pages = F::TOP.pages() * ENTRIES as u64;
        while walk.at < end {
            let start = walk.at;
            let next = Gfn((start.0 / root_pages + 1) * root_pages).min(end);
            let root = root_table::<F>(self.context(), start);
            if let Err(stopped) = step(walk, root, start..next) {
                walk.at = stopped.at;
                return;
            }
            walk.at = next;
        }
        walk.at = walk.range.end;
    }

    /// Like [`ByGfn::check`], for the table of `level` in `frame` and those below it.
    fn check_below(&self, frame: Pfn, level: Level) -> Result<(), String> {
        let table = self.table(frame);
        let guard = table.lock();
        table.check_count::<F>(level)?;
        drop(guard);
        let lower = |entry: &AtomicU64| F::next_table(entry.load(Acquire), level);
        (table.entries().iter())
            .filter_map(lower)
            .try_for_each(|lower| self.check_below(lower, level.below()))
    }
}

impl<P: Platform> Table<'_, P> {
    /// Checks that the table, which has `level` and whose lock is held, counts its leaves right.
    ///
    /// # Errors
    /// Both numbers.
    pub(crate) fn check_count<F: Format>(&self, level: Level) -> Result<(), String> {
        let is_leaf = |entry: &&AtomicU64| {
            let entry = F::decode(entry.load(Acquire), level);
            matches!(entry, Entry::Leaf(_) | Entry::Broken(_))
        };
        let leaves = self.entries().iter().filter(is_leaf).count();
        let counted = usize::from(self.meta().leaves.load(Relaxed));
        match leaves == counted {
            true => Ok(()),
            false => Err(alloc::format!(
                "a table of level {} counts {counted} leaves, but has {leaves}",
                level.0
            )),
        }
    }
}

/// One step of a walk.
struct Walker<'w, P: Platform, F: Format, V> {
    tree: &'w Tree<P, F>,
    show: Show,
    walk: &'w mut Walk,
    visit: &'w mut V,
}

impl<P: Platform, F: Format, V: Visit> Walker<'_, P, F, V> {
    /// Walks over `range` in the level 1 table in `frame`.
    fn pages(&mut self, frame: Pfn, range: Range<Gfn>) -> Result<(), Stopped> {
        let table: Table<'_, P> = self.tree.table(frame);
        let first = Level::PAGE.index(range.start);
        let wanted = (range.end.0 - range.start.0) as usize;
        let allowed = match self.walk.budget as usize {
            budget if budget >= wanted => wanted,
            // Whole runs, so that the next step begins with one.
            budget @ RUN.. => budget - budget % RUN,
            budget => budget,
        };
        let entries = &table.entries()[first..first + allowed];
        let meta = table.meta();
        let locked = LockedTable::new(self.tree, &table);
        self.walk.count(allowed as u32);
        let (runs, rest) = entries.as_chunks::<RUN>();
        let mut gfn = range.start;
        for run in runs {
            if !self.visit.run(run, gfn) {
                self.each(run, gfn, meta, &locked.cleared)?;
            }
            gfn = gfn.add(RUN as u64);
        }
        self.each(rest, gfn, meta, &locked.cleared)?;
        let at = range.start.add(allowed as u64);
        if allowed == wanted {
            Ok(())
        } else {
            Err(Stopped { at })
        }
    }

    /// Visits level 1 entries one by one; the first is for frame `first`.
    fn each(
        &mut self,
        entries: &[AtomicU64],
        first: Gfn,
        meta: &TableMeta,
        cleared: &Cleared,
    ) -> Result<(), Stopped> {
        entries.iter().zip(first.0..).try_for_each(|(entry, gfn)| {
            let bits = entry.load(Relaxed);
            if F::is_absent(bits) && !(self.show.mmio && bits != 0) {
                return Ok(());
            }
            let at = At {
                entry,
                meta,
                kept: Kept::Cleared(cleared),
                bits,
                gfn: Gfn(gfn),
                level: Level::PAGE,
            };
            match self.visit.visit(&at) {
                Next::Stop => Err(Stopped { at: at.gfn }),
                Next::Descend | Next::Pass => Ok(()),
            }
        })
    }

    /// Walks over `range` in the table of `level` in `frame`, and in the tables below it.
    fn table(&mut self, frame: Pfn, level: Level, range: Range<Gfn>) -> Result<(), Stopped> {
        if level == Level::PAGE {
            return self.pages(frame, range);
        }
        let table: Table<'_, P> = self.tree.table(frame);
        let (entries, meta) = (table.entries(), table.meta());
        let mut locked = LockedTable::new(self.tree, &table);
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let next_gfn = gfn.add(level.pages());
            let below = range.start.max(gfn)..range.end.min(next_gfn);
            let stopped = Stopped { at: below.start };
            if self.walk.budget == 0 {
                return Err(stopped);
            }
            self.walk.count(1);
            let entry = &entries[level.index(gfn)];
            let bits = entry.load(Acquire);
            if !F::is_absent(bits) || self.show.mmio && bits != 0 {
                let at = At {
                    entry,
                    meta,
                    kept: Kept::Cleared(&locked.cleared),
                    bits,
                    gfn,
                    level,
                };
                let is_table = matches!(F::decode(bits, level), Entry::Table(_));
                let next = if !is_table || self.show.tables {
                    self.visit.visit(&at)
                } else {
                    Next::Descend
                };
                if next == Next::Stop {
                    return Err(stopped);
                }
                if next == Next::Descend
                    && let Some(lower) = self.table_to_enter(entry, level)
                {
                    drop(locked);
                    self.table(lower, level.below(), below)?;
                    locked = LockedTable::new(self.tree, &table);
                }
            }
            gfn = next_gfn;
        }
        Ok(())
    }

    /// Returns the table that `entry` refers to now. `None`: it refers to none, or the walk skips the table.
    fn table_to_enter(&self, entry: &AtomicU64, level: Level) -> Option<Pfn> {
        if self.show.skip_last_level && level == Level::MEGA {
            return None;
        }
        let Entry::Table(lower) = F::decode(entry.load(Relaxed), level) else {
            return None;
        };
        let is_split = self.show.skip_without_huge
            && level == Level::GIGA
            && self.tree.table(lower).meta().leaves.load(Relaxed) == 0;
        (!is_split).then_some(lower)
    }
}
