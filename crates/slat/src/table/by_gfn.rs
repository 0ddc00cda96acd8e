//! The interface to tables by guest frame, for operations that the host or a slot change requests. These operations
//! know frames, and no CPU.
//!
//! An MMU shows the leaves of a range of frames to a visitor, each as an [`At`], under the lock of its table. Every
//! operation on a range of frames is such a visitor ([`crate::vm::range_op`](crate::vm)). So an operation is written
//! once for all MMUs, and flushing and ending reader sections is written once for all operations.
//!
//! A [`Walk`] has a budget of entries to read. When the budget is used up, the walk stops between two entries. The next
//! call resumes there, from the root down. The caller may end its reader section in between, so that no flush or slot
//! change waits long for it. The walk sees changes that are made meanwhile at entries that it has not reached, and no
//! changes at entries that it has passed, as in one section.
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

/// The action of an operation at the entries of a walk. A closure is a visitor of single entries.
pub(crate) trait Visit {
    /// Visits an entry, under the lock of its table. Returns where the walk goes next.
    fn visit(&mut self, at: &At<'_>) -> Next;

    /// Visits adjacent level 1 entries, all in the walk's range, under the lock of their table. The first is for frame
    /// `first`. Returns `true` if it has handled all of these entries. Returns `false` if it has done nothing; then the
    /// walk calls `visit` for each entry.
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

/// The entries that a walk shows to its visitor in addition to the leaves, and the tables that it skips.
#[derive(Clone, Copy, Default)]
pub(crate) struct Show {
    /// Show entries that refer to a table, before the table is entered.
    pub(crate) tables: bool,
    /// Do not enter tables of level 1: nothing in them can be split. Of 64 GiB mapped by 4 KiB
    /// pages, 32,832 entries are read instead of 16.8 million.
    pub(crate) skip_last_level: bool,
    /// Do not enter tables of level 2 that contain no leaf. This skips memory that is already split, 1 GiB at a time.
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

/// An MMU as seen by operations that the host or a slot change requests. The caller of every method is in a reader
/// section.
pub(crate) trait ByGfn {
    /// The format of the MMU's entries.
    type Format: Format;

    /// Continues `walk`. Calls `visit` for every leaf that covers frames of the range, and for the entries that `show`
    /// adds, in the order of gfn. (An MMU with a tree and shadow pages shows the entries of each of the two in that
    /// order.) Each call is under the lock of the entry's table, or of the MMU. Takes that lock wherever a fault could
    /// install something in the range, even if there is no entry to visit. Stops where `visit` returns [`Next::Stop`],
    /// or when the budget of `walk` is used up. The next call resumes with the same entry.
    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit);

    /// Calls `seen`, for some leaves at a time, for all leaves that cover frames of the range. Clears their accessed
    /// bits if `clear`. Continues `walk`, and stops when its budget is used up, like [`Self::walk`], but need not take
    /// a lock.
    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged));

    /// Zaps the leaf at `at`.
    fn zap(&self, at: &At<'_>);

    /// Zaps the leaf at `at`, and returns the leaf with the bits that hardware has set up to now.
    fn take(&self, at: &At<'_>) -> u64;

    /// Clears the entry `at`, which refers to the table in the frame `lower`. Adds the table to `detached`, with all
    /// leaves and tables to which nothing else refers then.
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached);

    /// Replaces the huge leaf `at` by a table, in a frame from `path`, of equivalent leaves of the next lower level.
    /// `path` has a frame for the table, and the MMU is prepared for one more table. On formats with break-before-make
    /// this only breaks the leaf; [`Self::mend`] uses the frame later.
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;

    /// Installs the pieces of the broken leaf of `level` at `gfn`: the second half of break-before-make. Call after a
    /// flush of the leaf, which is in `flushed` of `path`. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left at `gfn`. `false`: another leaf in the same table was broken after the
    /// flush, and the leaf found may be that one; flush again and retry.
    #[must_use]
    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool;

    /// Replaces the table in the frame `lower`, to which the entry `at` refers, by the huge leaf `leaf`, which maps all
    /// pages that the table maps. Adds the table to `detached`. On formats with break-before-make this makes the entry
    /// a broken leaf, and [`Self::restore`] makes the leaf valid after a flush. An MMU that cannot have a leaf there
    /// clears the entry.
    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse;

    /// Makes the broken leaf of `level` at `gfn` valid as a whole, after its flush `own`: the second half of
    /// [`Self::collapse`] on formats with break-before-make. Does nothing if the leaf was zapped meanwhile.
    ///
    /// Returns whether no broken leaf is left at `gfn`. `false` means the same as for [`Self::mend`].
    #[must_use]
    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let _ = (gfn, level, own);
        true
    }

    /// Whether walkers obey the write protection of an entry that refers to a table ([`super::protect`]).
    fn protects_tables(&self) -> bool {
        false
    }

    /// Gives the right to write back to entries that refer to tables and cover only frames of the range: no log needs
    /// them protected any more, and leaves keep their rights. Continues `walk` like [`Self::walk`].
    fn lift(&self, walk: &mut Walk) {
        walk.stop_at(walk.range().end);
    }

    /// Zaps the oldest table that the MMU may zap to stay within a limit, with the table's leaves, and adds it to
    /// `detached`. Calls `zapped` for every leaf, with its first frame, level, and bits. Returns whether there is such
    /// a table.
    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        let _ = (detached, zapped);
        false
    }

    /// Returns whether the table in `frame` exists only because of NX, so that recovery may zap it.
    fn is_nx_table(&self, frame: Pfn) -> bool;

    /// Checks the MMU's records of its own tables, such as the number of leaves in each, against the entries.
    ///
    /// # Errors
    /// A description of the first inconsistency.
    fn check(&self) -> Result<(), String>;
}

/// Adjacent entries of a level that [`ByGfn::age`] has found. In the masks, bit n is for entry n.
#[derive(Clone, Copy)]
pub(crate) struct Aged {
    /// The first frame of the first entry.
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
    /// The entries that are leaves.
    pub(crate) mapped: u64,
    /// The leaves whose accessed bit was set.
    pub(crate) young: u64,
}

impl Aged {
    /// The largest number of entries.
    pub(crate) const MOST: usize = u64::BITS as usize;
}

/// The result of [`ByGfn::split`].
pub(crate) enum Split {
    /// The leaf was replaced by a table of its pieces.
    InPlace,
    /// The leaf was made [`Entry::Broken`](crate::format::Entry::Broken).
    Broken,
    /// Nothing was split, because all frames that were allocated ahead are used.
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
