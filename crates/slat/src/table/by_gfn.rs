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

use alloc::string::String;

use super::{At, Detached, Flushed, Path, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Format, Leaf};
use crate::sync::atomic::AtomicU64;

/// The number of level 1 entries that a visitor is offered at a time.
pub(crate) const RUN: usize = if cfg!(loom) { 2 } else { 16 };

/// The work of an operation at entries. A closure is a visitor of single entries.
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
    /// Shows tables, and enters them.
    pub(crate) const ENTERED: Show = Show {
        tables: true,
        skip_last_level: false,
        skip_without_huge: false,
        mmio: false,
    };

    /// Shows tables, and skips the entries of level 1 tables.
    pub(crate) const TABLES: Show = Show {
        tables: true,
        skip_last_level: true,
        skip_without_huge: false,
        mmio: false,
    };
}

/// The next step of a walk after a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the table that the entry refers to now, if it refers to one.
    Descend,
    /// Skip to the next entry.
    Pass,
    /// Stop before this entry.
    Stop,
}

/// An MMU, as work that comes from the host or from slot changes uses it. The caller of every method is in a reader
/// section.
pub(crate) trait ByGfn {
    /// The format of its entries.
    type Format: Format;

    /// Continues `walk`: calls `visit` for every leaf that covers frames of its range, and for the entries that `show`
    /// adds, in the order of gfn (of two MMUs, in that of each), each under the lock of its table, or of the MMU.
    /// Takes that lock wherever a fault could install something in the range, even if there is no entry to visit.
    /// Stops where `visit` returns [`Next::Stop`], or when the budget of `walk` is used up; the next call resumes
    /// with the same entry.
    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit);

    /// Calls `seen` for all leaves that cover frames of the range, some at a time, and clears their accessed
    /// bits if `clear`. Continues `walk`, and stops when its budget is used up, as [`Self::walk`] does, but
    /// need not take a lock.
    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged));

    /// Zaps the leaf at `at`.
    fn zap(&self, at: &At<'_>);

    /// Zaps the leaf at `at`, and returns it with the bits that hardware has set up to now.
    fn take(&self, at: &At<'_>) -> u64;

    /// Clears the entry `at`, which refers to the table in the frame `lower`, and adds the table to `detached`,
    /// together with all leaves and tables that nothing else refers to then.
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached);

    /// Replaces the huge leaf `at` by a table, in a frame from `path`, of leaves of the next lower level that mean the
    /// same. `path` has a frame for it, and the MMU is prepared for one more table. On formats with break-before-make
    /// it only breaks the leaf; the frame is used later, by [`Self::mend`].
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;

    /// Installs the pieces of the broken leaf of `level` at `gfn`: the second half of break-before-make. Call after a
    /// flush of the leaf, which `path` has in `flushed`. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left there. `false`: another leaf in the same table was broken after the
    /// flush, and it may be this one; flush again and retry.
    #[must_use]
    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool;

    /// Replaces the table in the frame `lower`, to which the entry `at` refers, by the huge leaf `leaf`, which maps all
    /// that the table maps, and adds the table to `detached`. On formats with break-before-make it makes the entry a
    /// broken leaf; [`Self::restore`] installs it after a flush. An MMU that cannot have a leaf there clears the entry.
    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse;

    /// Installs the broken leaf of `level` at `gfn` as a whole, after the flush `own` of it: the second half of
    /// [`Self::collapse`] on formats with break-before-make. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left there; `false` as for [`Self::mend`].
    #[must_use]
    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let _ = (gfn, level, own);
        true
    }

    /// Whether walkers obey an entry that refers to a table when it is write-protected ([`super::protect`]).
    fn protects_tables(&self) -> bool {
        false
    }

    /// Gives entries that refer to tables, and cover only frames of the range, the right to write back: no log needs
    /// them protected any more, and leaves keep the rights they have. Continues `walk` like [`Self::walk`].
    fn lift(&self, walk: &mut Walk) {
        walk.stop_at(walk.range().end);
    }

    /// Zaps the oldest of the tables that the MMU may zap to stay within a limit, with its leaves, and adds it to
    /// `detached`. Calls `zapped` for every leaf, with its first frame, level, and bits. Returns whether there is one.
    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        let _ = (detached, zapped);
        false
    }

    /// Returns whether the table in `frame` exists only because of NX; then recovery may zap it.
    fn is_nx_table(&self, frame: Pfn) -> bool;

    /// Checks the MMU's books about its own tables, such as the number of leaves in each, against the entries.
    ///
    /// # Errors
    /// The first thing that is wrong.
    fn check(&self) -> Result<(), String>;
}

/// Adjacent entries of a level, as [`ByGfn::age`] has found them. In the masks, bit n is for the n-th of them.
#[derive(Clone, Copy)]
pub(crate) struct Aged {
    /// The first frame of the first entry.
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
    /// The entries that are leaves.
    pub(crate) mapped: u64,
    /// Leaves that had the accessed bit.
    pub(crate) young: u64,
}

impl Aged {
    /// The most entries.
    pub(crate) const MOST: usize = u64::BITS as usize;
}

/// The result of [`ByGfn::split`].
pub(crate) enum Split {
    /// The leaf was replaced by a table of its pieces.
    InPlace,
    /// The leaf was made [`Entry::Broken`](crate::format::Entry::Broken).
    Broken,
    /// Nothing was split, because the frames that were allocated ahead are used up.
    Unprepared,
}

/// The result of [`ByGfn::collapse`].
pub(crate) enum Collapse {
    /// The table was replaced by the leaf.
    InPlace,
    /// The entry was made [`Entry::Broken`](crate::format::Entry::Broken).
    Broken,
    /// The entry was cleared.
    Zapped,
}
