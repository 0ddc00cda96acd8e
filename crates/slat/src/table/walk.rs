//! The one walker. An operation is what it does at an entry: see [`super::ops`].
//!
//! In tables of level 1 a walk offers its visitor [`RUN`] entries at a time ([`Visit::run`]), for
//! operations that find most entries in one ordinary state and then need no look at each.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use core::cell::Cell;
use core::ops::Range;

use super::clear::{Cleared, Section};
use super::{ENTRIES, Table, TableMeta, Tickets, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format};
use crate::platform::Platform;

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

impl<P: Platform, F: Format> Tree<P, F> {
    /// Calls `visit` at every leaf of `range`, and what `show` adds, in the order of gfn, each under
    /// the lock of its table. The lock of every table on the way is taken, also of tables in which
    /// nothing is visited. The caller is inside a reader section.
    pub(crate) fn walk(
        &self,
        range: Range<Gfn>,
        show: Show,
        visit: &mut impl FnMut(&At<'_>) -> Next,
    ) -> Walked {
        self.walk_with(range, show, visit)
    }

    /// [`Tree::walk`] with any visitor.
    pub(super) fn walk_with(
        &self,
        range: Range<Gfn>,
        show: Show,
        visit: &mut impl Visit,
    ) -> Walked {
        let mut entries = 0;
        let drawn = Cell::new(Tickets::NONE);
        let end = range.end.min(Gfn(Self::capacity()));
        let mut gfn = range.start;
        let root_pages = F::TOP.pages() * ENTRIES as u64;
        while gfn < end {
            let next = Gfn((gfn.0 / root_pages + 1) * root_pages).min(end);
            let mut walker = Walker {
                tree: self,
                show,
                entries: 0,
                drawn: &drawn,
                visit: &mut *visit,
            };
            let more = walker.table(self.root_for(gfn), F::TOP, gfn..next);
            entries += walker.entries;
            if !more {
                break;
            }
            gfn = next;
        }
        Walked {
            entries,
            tickets: drawn.get(),
        }
    }
}

/// What a walk did.
pub(crate) struct Walked {
    /// How many entries were looked at.
    pub(crate) entries: u64,
    /// Drawn for what was taken away, where that is done table by table.
    pub(super) tickets: Tickets,
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
    /// Looked at so far.
    entries: u64,
    drawn: &'w Cell<Tickets>,
    visit: &'w mut V,
}

impl<P: Platform, F: Format, V: Visit> Walker<'_, P, F, V> {
    /// The entries of a table of level 1. `false`: the visitor said [`Next::Stop`].
    fn pages(&mut self, frame: Pfn, range: Range<Gfn>) -> bool {
        let table: Table<'_, P> = self.tree.table(frame);
        let first = Level::PAGE.index(range.start);
        let entries = &table.entries()[first..first + (range.end.0 - range.start.0) as usize];
        let meta = table.meta();
        let section = Section::new(self.tree, &table, self.drawn);
        self.entries += entries.len() as u64;
        let (runs, rest) = entries.as_chunks::<RUN>();
        let mut gfn = range.start;
        for run in runs {
            if !self.visit.run(run, gfn) && !self.each(run, gfn, meta, &section.cleared) {
                return false;
            }
            gfn = gfn.add(RUN as u64);
        }
        self.each(rest, gfn, meta, &section.cleared)
    }

    fn each(
        &mut self,
        entries: &[AtomicU64],
        first: Gfn,
        meta: &TableMeta,
        cleared: &Cleared,
    ) -> bool {
        entries.iter().zip(first.0..).all(|(entry, gfn)| {
            let bits = entry.load(Relaxed);
            if F::is_absent(bits) && !(self.show.mmio && bits != 0) {
                return true;
            }
            let at = At {
                entry,
                meta,
                cleared,
                bits,
                gfn: Gfn(gfn),
                level: Level::PAGE,
            };
            self.visit.visit(&at) != Next::Stop
        })
    }

    /// `false`: the visitor said [`Next::Stop`].
    fn table(&mut self, frame: Pfn, level: Level, range: Range<Gfn>) -> bool {
        if level == Level::PAGE {
            return self.pages(frame, range);
        }
        let table: Table<'_, P> = self.tree.table(frame);
        let (entries, meta) = (table.entries(), table.meta());
        let mut section = Section::new(self.tree, &table, self.drawn);
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let entry = &entries[level.index(gfn)];
            let bits = entry.load(Acquire);
            let next_gfn = gfn.add(level.pages());
            self.entries += 1;
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
                    return false;
                }
                if next == Next::Descend
                    && let Some(lower) = self.enters(entry, level)
                {
                    drop(section);
                    let below = range.start.max(gfn)..range.end.min(next_gfn);
                    if !self.table(lower, level.below(), below) {
                        return false;
                    }
                    section = Section::new(self.tree, &table, self.drawn);
                }
            }
            gfn = next_gfn;
        }
        true
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
