//! Walks over ranges of frames in steps: the progress of a walk, and the walk over a tree.

use core::mem::replace;
use core::ops::Range;

use super::by_gfn::{Next, RUN, Show, Visit};
use super::clear::{Cleared, LockedTable};
use super::lookup::root_table;
use super::{At, Kept, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, all_gfns, root_pages};
use crate::frame::TableMeta;
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::sync::held;

/// A walk over a range, with its progress.
pub(crate) struct Walk {
    range: Range<Gfn>,
    /// The next frame to visit; the end of the range when the walk is done.
    at: Gfn,
    /// For a walk over a tree and shadow pages ([`Self::both`]): the next frame to visit in the first of the two, if it
    /// is after `at`.
    ahead: Gfn,
    /// The number of entries that the walk may still read in this step.
    budget: u32,
    /// The number of entries that the walk has read.
    pub(crate) entries: u64,
}

impl Walk {
    /// Makes a walk over `range`, with a budget of 0.
    pub(crate) fn new(range: Range<Gfn>) -> Self {
        Walk {
            at: range.start,
            ahead: range.start,
            range,
            budget: 0,
            entries: 0,
        }
    }

    /// Makes a walk over `range` that has already visited the frames before `at`, with a budget of 0.
    pub(crate) fn resumed(range: Range<Gfn>, at: Gfn) -> Self {
        Walk {
            at: at.max(range.start),
            ..Walk::new(range)
        }
    }

    /// Runs `step`, which continues the walk with `budget`, and subtracts from `budget` what the step has used.
    pub(crate) fn with_budget(&mut self, budget: &mut u32, step: impl FnOnce(&mut Self)) {
        self.budget = *budget;
        step(self);
        *budget = self.budget;
    }

    /// Makes a walk whose budget suffices for all of `range` in one step.
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

    /// Returns the next frame to visit; the end of the range when the walk is done.
    pub(crate) fn at(&self) -> Gfn {
        self.at
    }

    /// Makes the walk resume at `gfn`, which it may have passed.
    pub(crate) fn go_to(&mut self, gfn: Gfn) {
        self.at = gfn.max(self.range.start);
    }

    /// Declares that the walk has visited the frames before `gfn`, so that it continues at `gfn`.
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

    /// Counts `entries` that the walk is about to read, or fewer if its budget does not suffice. Returns the number
    /// counted.
    pub(super) fn count_up_to(&mut self, entries: u32) -> u32 {
        let allowed = entries.min(self.budget);
        self.count(allowed);
        allowed
    }

    /// Runs `work` with this walk, whose range ends at `end` during the call.
    pub(crate) fn before(&mut self, end: Gfn, work: impl FnOnce(&mut Self)) {
        let all = self.range.end;
        self.range.end = all.min(end);
        work(self);
        self.range.end = all;
    }

    /// Continues a walk over two sets of tables. `first` visits the frames of the range in the first set, and `second`
    /// visits, in the second set, the frames that `first` has passed, each with a part of the budget. Afterwards
    /// [`Self::at`] is where `second` has stopped; `first` continues where it stopped itself.
    pub(crate) fn both(&mut self, first: impl FnOnce(&mut Self), second: impl FnOnce(&mut Self)) {
        let from = self.at;
        self.ahead = self.ahead.max(from);
        if self.ahead < self.range.end {
            let kept = self.budget / 2;
            self.budget -= kept;
            self.at = self.ahead;
            first(self);
            self.budget += kept;
            self.ahead = replace(&mut self.at, from);
        }
        self.before(self.ahead, second);
    }

    /// Counts the read of one entry, which is done even if the budget is used up.
    pub(crate) fn visits(&mut self) {
        self.spend(1);
        self.entries += 1;
    }

    /// Subtracts `budget` from the remaining budget, or all of it if less remains: for work that takes as long as
    /// reading `budget` entries.
    pub(crate) fn spend(&mut self, budget: u32) {
        let paid = budget.min(self.budget);
        held::looked_at(paid);
        self.budget -= paid;
    }
}

/// The frame before which a walk has stopped.
pub(super) struct Stopped {
    pub(super) at: Gfn,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Continues `walk` in each root table that covers a part of the range, until the walk is done or `step` returns
    /// [`Stopped`].
    pub(super) fn each_root(
        &self,
        walk: &mut Walk,
        mut step: impl FnMut(&mut Walk, Pfn, Range<Gfn>) -> Result<(), Stopped>,
    ) {
        let end = walk.range.end.min(all_gfns::<F>().end);
        let root_pages = root_pages::<F>();
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

    /// Implements [`ByGfn::walk`](super::ByGfn::walk).
    pub(super) fn walk_on(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        self.each_root(walk, |walk, root, gfns| {
            let mut walker = Walker {
                tree: self,
                show,
                walk,
                visit: &mut *visit,
            };
            walker.table(root, F::TOP, gfns, false)
        });
    }
}

/// Facts that are common to the entries of a table of level 1.
struct Pages<'t> {
    meta: &'t TableMeta,
    cleared: &'t Cleared,
    /// Whether the path to the table is write-protected.
    protected: bool,
}

/// The state of one step of a walk.
struct Walker<'w, P: Platform, F: Format, V> {
    tree: &'w Tree<P, F>,
    show: Show,
    walk: &'w mut Walk,
    visit: &'w mut V,
}

impl<P: Platform, F: Format, V: Visit> Walker<'_, P, F, V> {
    /// Walks over `range` in the level 1 table in `frame`. `protected` tells whether the path to the table is
    /// write-protected.
    fn pages(&mut self, frame: Pfn, range: Range<Gfn>, protected: bool) -> Result<(), Stopped> {
        let table = self.tree.table(frame);
        let first = F::GRANULE.index(range.start, Level::PAGE);
        let wanted = (range.end.0 - range.start.0) as usize;
        let allowed = match self.walk.budget as usize {
            budget if budget >= wanted => wanted,
            // Read only whole runs, so that the next step begins with a whole run.
            budget @ RUN.. => budget - budget % RUN,
            budget => budget,
        };
        let entries = &table.entries()[first..first + allowed];
        let meta = table.meta();
        let locked = LockedTable::new(self.tree, &table);
        let all = Pages {
            meta,
            cleared: &locked.cleared,
            protected,
        };
        self.walk.count(allowed as u32);
        let (runs, rest) = entries.as_chunks::<RUN>();
        let mut gfn = range.start;
        for run in runs {
            if !self.visit.run(run, gfn) {
                self.each(run, gfn, &all)?;
            }
            gfn = gfn.add(RUN as u64);
        }
        self.each(rest, gfn, &all)?;
        let at = range.start.add(allowed as u64);
        if allowed == wanted {
            Ok(())
        } else {
            Err(Stopped { at })
        }
    }

    /// Visits the level 1 entries `entries` one by one. The first entry is for frame `first`.
    fn each(&mut self, entries: &[AtomicU64], first: Gfn, all: &Pages<'_>) -> Result<(), Stopped> {
        entries.iter().zip(first.0..).try_for_each(|(entry, gfn)| {
            let bits = entry.load(Relaxed);
            if F::is_absent(bits) && !(self.show.mmio && bits != 0) {
                return Ok(());
            }
            let at = At {
                entry,
                meta: all.meta,
                kept: Kept::Cleared(all.cleared),
                bits,
                gfn: Gfn(gfn),
                level: Level::PAGE,
                below_protected: all.protected,
            };
            match self.visit.visit(&at) {
                Next::Stop => Err(Stopped { at: at.gfn }),
                Next::Descend | Next::Pass => Ok(()),
            }
        })
    }

    /// Walks over `range` in the table of `level` in `frame`, and in the tables below it. `protected` tells whether the
    /// path to the table is write-protected.
    fn table(
        &mut self,
        frame: Pfn,
        level: Level,
        range: Range<Gfn>,
        protected: bool,
    ) -> Result<(), Stopped> {
        if level == Level::PAGE {
            return self.pages(frame, range, protected);
        }
        let table = self.tree.table(frame);
        let (entries, meta) = (table.entries(), table.meta());
        let mut locked = LockedTable::new(self.tree, &table);
        let mut gfn = F::GRANULE.align_down(range.start, level);
        while gfn < range.end {
            let next_gfn = gfn.add(F::GRANULE.pages(level));
            let below = range.start.max(gfn)..range.end.min(next_gfn);
            let stopped = Stopped { at: below.start };
            if self.walk.budget == 0 {
                return Err(stopped);
            }
            self.walk.count(1);
            let entry = &entries[F::GRANULE.index(gfn, level)];
            let bits = entry.load(Acquire);
            if !F::is_absent(bits) || self.show.mmio && bits != 0 {
                let at = At {
                    entry,
                    meta,
                    kept: Kept::Cleared(&locked.cleared),
                    bits,
                    gfn,
                    level,
                    below_protected: protected,
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
                    && let Some((lower, bits)) = self.table_to_enter(entry, level)
                {
                    drop(locked);
                    let protected = protected || F::is_protected(bits);
                    self.table(lower, level.below(), below, protected)?;
                    locked = LockedTable::new(self.tree, &table);
                }
            }
            gfn = next_gfn;
        }
        Ok(())
    }

    /// Returns the table to which `entry` refers now, and the bits of the entry. `None`: the entry does not refer to a
    /// table, or the walk skips this table.
    fn table_to_enter(&self, entry: &AtomicU64, level: Level) -> Option<(Pfn, u64)> {
        if self.show.skip_last_level && level == Level::MEGA {
            return None;
        }
        let bits = entry.load(Relaxed);
        let Entry::Table(lower) = F::decode(bits, level) else {
            return None;
        };
        let is_split = self.show.skip_without_huge
            && level == Level::GIGA
            && self.tree.table(lower).meta().leaves.load(Relaxed) == 0;
        (!is_split).then_some((lower, bits))
    }
}
