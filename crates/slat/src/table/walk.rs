//! The one walker. An operation is what it does at an entry: see [`super::ops`].
//!
//! A [`Walk`] goes as far as it is allowed to look, stops between two entries, and goes on from there when it
//! is called again: the caller's reader section may end in between, so that nobody waits long for it. What
//! changes in the tables meanwhile, the walk sees as it is when it comes there, and behind it not at all, as
//! in one section. It comes down from the root again each time.
//!
//! In tables of level 1 a walk offers its visitor [`RUN`] entries at a time ([`Visit::run`]), for
//! operations that find most entries in one ordinary state and then need no look at each.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use core::ops::Range;

use super::clear::{Cleared, Section};
use super::{ENTRIES, Table, TableMeta, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::sync::held;

/// Entries of level 1 that a visitor is offered at a time.
pub(crate) const RUN: usize = if cfg!(loom) { 2 } else { 16 };

/// What an operation does. A closure is a visitor that takes entries one by one.
pub(crate) trait Visit {
    /// At an entry, under the lock of its table.
    fn visit(&mut self, at: &At<'_>) -> Next;

    /// At neighbours of level 1 that all lie in the range, under the lock of their table: does all
    /// there is to do at them, or nothing and answers `false`. Then `visit` is called for each.
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

/// Which entries a walk shows to its visitor, beside the leaves.
#[derive(Clone, Copy, Default)]
pub(crate) struct Show {
    /// Entries that lead to a table, before the table is entered.
    pub(crate) tables: bool,
    /// Do not enter tables of level 1: nothing in them can be split. Of 64 GiB mapped by 4 KiB
    /// pages, 32,832 entries are read instead of 16.8 million.
    pub(crate) skip_last_level: bool,
    /// Do not enter tables of level 2 that hold no leaf: memory that is split already is passed over
    /// by 1 GiB.
    pub(crate) skip_without_huge: bool,
    /// MMIO entries, too.
    pub(crate) mmio: bool,
}

impl Show {
    /// Tables, but not what is in those of level 1.
    pub(crate) const TABLES: Show = Show {
        tables: true,
        skip_last_level: true,
        skip_without_huge: false,
        mmio: false,
    };
}

/// What follows a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the table that the entry leads to now, if it leads to one.
    Descend,
    /// Go on behind the entry.
    Pass,
    /// End the walk.
    Stop,
}

/// The entry at which a visitor stands. The lock of its table is held.
pub(crate) struct At<'t> {
    entry: &'t AtomicU64,
    pub(super) meta: &'t TableMeta,
    cleared: &'t Cleared,
    /// The entry as it was when the visit began; only accessed and dirty bits can have changed.
    pub(crate) bits: u64,
    /// First frame of the region that the entry covers (not clipped to the range).
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
}

impl At<'_> {
    pub(crate) fn decode<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level)
    }

    /// Whether all that the entry covers lies in `range`.
    pub(crate) fn is_inside(&self, range: &Range<Gfn>) -> bool {
        range.start <= self.gfn && self.gfn.0 + self.level.pages() <= range.end.0
    }

    /// Takes away the leaf or table that stands there.
    pub(crate) fn clear<F: Format>(&self) {
        self.entry.store(F::cleared(0), Release);
        self.gone::<F>();
    }

    /// Takes away the leaf that stands there, with the bits that hardware has set up to now.
    pub(crate) fn take<F: Format>(&self) -> u64 {
        let bits = self.entry.swap(F::cleared(0), AcqRel);
        self.gone::<F>();
        bits
    }

    fn gone<F: Format>(&self) {
        if F::BREAK_BEFORE_MAKE {
            self.cleared.add(self.level.index(self.gfn));
        }
        self.leaf_gone::<F>();
    }

    /// Notes that the leaf that stood here stands here no more.
    fn leaf_gone<F: Format>(&self) {
        if matches!(self.decode::<F>(), Entry::Leaf(_) | Entry::Broken(_)) {
            self.meta.count_leaves(-1);
        }
    }

    /// Replaces the huge leaf by a table, if it still is `old`; hardware may have set a bit in it.
    /// `Release`: a walker that sees the new table sees its entries, too.
    pub(crate) fn put_table<F: Format>(&self, old: u64, table: u64) -> Result<(), u64> {
        self.entry
            .compare_exchange(old, table, Release, Relaxed)
            .map(|_| self.leaf_gone::<F>())
    }

    /// Replaces a leaf by one with the same page, losing bits that hardware sets meanwhile.
    pub(crate) fn put(&self, leaf: u64) {
        overwrite(self.entry, leaf);
    }

    /// Replaces a leaf by `change` of it, losing no bit that hardware sets meanwhile.
    pub(crate) fn update<F: Format>(&self, change: impl Fn(u64) -> u64) {
        if F::is_settled(self.bits) {
            self.entry.store(change(self.bits), Relaxed);
        } else {
            let _ = self
                .entry
                .fetch_update(Relaxed, Relaxed, |bits| Some(change(bits)));
        }
    }
}

/// A walk over a range, and how far it has come.
pub(crate) struct Walk {
    range: Range<Gfn>,
    /// Where it goes on; the end of the range when it is done.
    at: Gfn,
    /// How many entries it may look at before it stops.
    left: u32,
    /// How many it has looked at.
    pub(crate) entries: u64,
}

impl Walk {
    /// Over `range`, with no leave to look at anything yet.
    pub(crate) fn new(range: Range<Gfn>) -> Self {
        Walk {
            at: range.start,
            range,
            left: 0,
            entries: 0,
        }
    }

    /// Goes on by `step`, with leave to look at what is `left`, which is what is left of it then.
    pub(crate) fn with_leave(&mut self, left: &mut u32, step: impl FnOnce(&mut Self)) {
        self.left = *left;
        step(self);
        *left = self.left;
    }

    /// Over all of `range` at once.
    #[cfg(test)]
    pub(crate) fn unbroken(range: Range<Gfn>) -> Self {
        Walk {
            left: u32::MAX,
            ..Walk::new(range)
        }
    }

    /// All that it is to walk over, from the beginning.
    pub(crate) fn range(&self) -> Range<Gfn> {
        self.range.clone()
    }

    /// Where it goes on.
    pub(crate) fn at(&self) -> Gfn {
        self.at
    }

    /// It goes on at `gfn`, which it may have passed.
    pub(crate) fn go_to(&mut self, gfn: Gfn) {
        self.at = gfn.max(self.range.start);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.range.end
    }

    fn look(&mut self, entries: u32) {
        held::looked_at(entries);
        self.left -= entries;
        self.entries += u64::from(entries);
    }
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Goes on with `walk`: calls `visit` at every leaf of its range, and what `show` adds, in the order of
    /// gfn, each under the lock of its table. The lock of every table on the way is taken, also of tables in
    /// which nothing is visited. Where the visitor says [`Next::Stop`], or the walk has looked at as much as
    /// it may, it stops, and goes on with the same entry. The caller is inside a reader section.
    pub(crate) fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        let end = walk.range.end.min(Gfn(Self::capacity()));
        let root_pages = F::TOP.pages() * ENTRIES as u64;
        while walk.at < end {
            let start = walk.at;
            let next = Gfn((start.0 / root_pages + 1) * root_pages).min(end);
            let mut walker = Walker {
                tree: self,
                show,
                walk: &mut *walk,
                visit: &mut *visit,
            };
            if let Err(stopped) = walker.table(self.root_for(start), F::TOP, start..next) {
                walk.at = stopped.at;
                return;
            }
            walk.at = next;
        }
        walk.at = walk.range.end;
    }
}

/// A walk has stopped before the entry at this frame.
struct Stopped {
    at: Gfn,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// A table whose count of leaves is wrong: its level, the count, and how many there are. The
    /// caller is inside a reader section.
    pub(crate) fn miscounted(&self) -> Option<(Level, usize, usize)> {
        self.roots()
            .find_map(|root| self.miscounted_below(root, F::TOP))
    }

    fn miscounted_below(&self, frame: Pfn, level: Level) -> Option<(Level, usize, usize)> {
        let table = self.table(frame);
        let entries = || table.entries().iter().map(|entry| entry.load(Acquire));
        let guard = table.lock();
        let is_leaf =
            |bits: &u64| matches!(F::decode(*bits, level), Entry::Leaf(_) | Entry::Broken(_));
        let leaves = entries().filter(is_leaf).count();
        let counted = usize::from(table.meta().leaves.load(Relaxed));
        drop(guard);
        if leaves != counted {
            return Some((level, counted, leaves));
        }
        entries()
            .filter_map(|bits| F::next_table(bits, level))
            .find_map(|lower| self.miscounted_below(lower, level.below()))
    }
}

/// One walk.
struct Walker<'w, P: Platform, F: Format, V> {
    tree: &'w Tree<P, F>,
    show: Show,
    walk: &'w mut Walk,
    visit: &'w mut V,
}

impl<P: Platform, F: Format, V: Visit> Walker<'_, P, F, V> {
    /// The entries of a table of level 1.
    fn pages(&mut self, frame: Pfn, range: Range<Gfn>) -> Result<(), Stopped> {
        let table: Table<'_, P> = self.tree.table(frame);
        let first = Level::PAGE.index(range.start);
        let wanted = (range.end.0 - range.start.0) as usize;
        let allowed = match self.walk.left as usize {
            left if left >= wanted => wanted,
            // Whole runs, so that the next step begins with one.
            left @ RUN.. => left - left % RUN,
            left => left,
        };
        let entries = &table.entries()[first..first + allowed];
        let meta = table.meta();
        let section = Section::new(self.tree, &table);
        self.walk.look(allowed as u32);
        let (runs, rest) = entries.as_chunks::<RUN>();
        let mut gfn = range.start;
        for run in runs {
            if !self.visit.run(run, gfn) {
                self.each(run, gfn, meta, &section.cleared)?;
            }
            gfn = gfn.add(RUN as u64);
        }
        self.each(rest, gfn, meta, &section.cleared)?;
        let at = range.start.add(allowed as u64);
        if allowed == wanted {
            Ok(())
        } else {
            Err(Stopped { at })
        }
    }

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
                cleared,
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

    fn table(&mut self, frame: Pfn, level: Level, range: Range<Gfn>) -> Result<(), Stopped> {
        if level == Level::PAGE {
            return self.pages(frame, range);
        }
        let table: Table<'_, P> = self.tree.table(frame);
        let (entries, meta) = (table.entries(), table.meta());
        let mut section = Section::new(self.tree, &table);
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let next_gfn = gfn.add(level.pages());
            let below = range.start.max(gfn)..range.end.min(next_gfn);
            let stopped = Stopped { at: below.start };
            if self.walk.left == 0 {
                return Err(stopped);
            }
            self.walk.look(1);
            let entry = &entries[level.index(gfn)];
            let bits = entry.load(Acquire);
            if !F::is_absent(bits) || self.show.mmio && bits != 0 {
                let at = At {
                    entry,
                    meta,
                    cleared: &section.cleared,
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
                    && let Some(lower) = self.enters(entry, level)
                {
                    drop(section);
                    self.table(lower, level.below(), below)?;
                    section = Section::new(self.tree, &table);
                }
            }
            gfn = next_gfn;
        }
        Ok(())
    }

    /// The table that `entry` leads to now, if it is to be entered.
    fn enters(&self, entry: &AtomicU64, level: Level) -> Option<Pfn> {
        if self.show.skip_last_level && level == Level::MEGA {
            return None;
        }
        let Entry::Table(lower) = F::decode(entry.load(Relaxed), level) else {
            return None;
        };
        let split = self.show.skip_without_huge
            && level == Level::GIGA
            && self.tree.table(lower).meta().leaves.load(Relaxed) == 0;
        (!split).then_some(lower)
    }
}
