//! The one walker. An operation is what it does at an entry: see [`super::ops`].

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::{Table, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format};
use crate::platform::Platform;

/// Which entries a walk shows to its visitor, beside the leaves.
#[derive(Clone, Copy, Default)]
pub(crate) struct Show {
    /// Entries that lead to a table, before the table is entered.
    pub(crate) tables: bool,
    /// Do not enter tables of level 1: nothing in them can be split. Of 64 GiB mapped by 4 KiB
    /// pages, 32,832 entries are read instead of 16.8 million.
    pub(crate) skip_last_level: bool,
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

    /// Replaces the entry. `Release`: a walker that sees a new table sees its entries, too.
    pub(crate) fn set(&self, bits: u64) {
        self.entry.store(bits, Release);
    }

    /// Replaces the entry if it still is `old`; hardware may have set a bit in it.
    pub(crate) fn exchange(&self, old: u64, new: u64) -> Result<(), u64> {
        self.entry
            .compare_exchange(old, new, Release, Relaxed)
            .map(|_| ())
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
    ) {
        let range = range.start..range.end.min(Gfn(Self::capacity()));
        if range.start < range.end {
            self.walk_table(self.root, F::TOP, range, show, visit);
        }
    }

    /// `false`: the visitor said [`Next::Stop`].
    fn walk_table(
        &self,
        frame: Pfn,
        level: Level,
        range: Range<Gfn>,
        show: Show,
        visit: &mut impl FnMut(&At<'_>) -> Next,
    ) -> bool {
        let table: Table<'_, P> = self.table(frame);
        let entries = table.entries();
        let mut guard = table.lock();
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let entry = &entries[level.index(gfn)];
            let bits = entry.load(Acquire);
            let next_gfn = gfn.add(level.pages());
            if !F::is_absent(bits) {
                let at = At {
                    entry,
                    bits,
                    gfn,
                    level,
                };
                let is_table = matches!(F::decode(bits, level), Entry::Table(_));
                let next = if !is_table || show.tables {
                    visit(&at)
                } else {
                    Next::Descend
                };
                if next == Next::Stop {
                    return false;
                }
                if next == Next::Descend
                    && level > Level::PAGE
                    && !(show.skip_last_level && level == Level::MEGA)
                    && let Entry::Table(lower) = F::decode(entry.load(Relaxed), level)
                {
                    drop(guard);
                    let below = range.start.max(gfn)..range.end.min(next_gfn);
                    if !self.walk_table(lower, level.below(), below, show, visit) {
                        return false;
                    }
                    guard = table.lock();
                }
            }
            gfn = next_gfn;
        }
        drop(guard);
        true
    }
}
