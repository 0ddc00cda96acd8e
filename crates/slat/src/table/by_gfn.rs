//! The interface to an MMU's tables by guest frame, for operations that the host or a slot change requests. These
//! operations concern frames, not the accesses of a CPU.
//!
//! An MMU shows the leaves of a range of frames to a visitor, each as an [`At`], under the lock of its table. Every
//! operation on a range of frames is such a visitor ([`crate::vm::range_op`](crate::vm)). So the code of an operation
//! is the same for all MMUs, and the code that flushes and ends reader sections is the same for all operations.
//!
//! A [`Walk`] has a budget of entries to read. When the budget is used up, the walk stops between two entries. The next
//! call resumes at that frame, with a new walk from the root. The caller may end its reader section between two calls,
//! so that flushes and slot changes do not wait long for it. As in one long section, the walk sees changes of entries
//! that it has not reached yet, and does not see changes of entries that it has passed.
//!
//! In tables of level 1 a walk offers its visitor [`RUN`] entries at a time ([`Visit::run`]), for operations that can
//! handle them faster together if all of them are in the same state, which is common.

use alloc::string::String;

use super::{At, Detached, Flushed, Path, Walk};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Format, Leaf};
use crate::sync::atomic::AtomicU64;

/// The number of level 1 entries that a walk offers to [`Visit::run`] at a time.
pub(crate) const RUN: usize = if cfg!(loom) { 2 } else { 16 };

/// What an operation does at the entries of a walk. A closure is a visitor of single entries.
pub(crate) trait Visit {
    /// Visits an entry, under the lock of its table. Returns how the walk continues.
    fn visit(&mut self, at: &At<'_>) -> Next;

    /// Visits [`RUN`] adjacent level 1 entries, all in the walk's range, under the lock of their table. The first entry
    /// is for frame `first`. Returns `true` if it has handled all these entries. Returns `false` if it has done
    /// nothing: then the walk calls `visit` for each entry.
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

/// Which entries a walk shows to its visitor in addition to leaves, and which tables it skips.
#[derive(Clone, Copy, Default)]
pub(crate) struct Show {
    /// Show entries that refer to a table, before the table is entered.
    pub(crate) tables: bool,
    /// Do not enter tables of level 1, for operations that split huge leaves. For 64 GiB mapped by 4 KiB pages, the
    /// walk then reads 32,832 entries instead of 16.8 million.
    pub(crate) skip_last_level: bool,
    /// Do not enter tables of level 2 that contain no leaf. So memory whose leaves are already split is skipped, 1 GiB
    /// at a time.
    pub(crate) skip_without_huge: bool,
    /// Whether the walk shows MMIO entries.
    pub(crate) mmio: bool,
}

impl Show {
    /// Show entries that refer to tables, and enter all tables.
    pub(crate) const ENTERED: Show = Show {
        tables: true,
        skip_last_level: false,
        skip_without_huge: false,
        mmio: false,
    };

    /// Show entries that refer to tables, and do not enter level 1 tables.
    pub(crate) const TABLES: Show = Show {
        tables: true,
        skip_last_level: true,
        skip_without_huge: false,
        mmio: false,
    };
}

/// How a walk continues after a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the table to which the entry refers after the visit, if it refers to a table.
    Descend,
    /// Skip to the next entry.
    Pass,
    /// Stop before this entry.
    Stop,
}

/// An MMU's tables by guest frame, for operations that the host or a slot change requests. The caller of every method
/// is in a reader section.
pub(crate) trait ByGfn {
    /// The format of the MMU's entries.
    type Format: Format;

    /// Continues `walk`. Calls `visit` for every leaf that covers frames of the walk's range, and for the entries that
    /// `show` adds, in the order of gfn. (If the MMU has both a tree and shadow pages, the order is kept within each of
    /// the two.) Each call is under the lock of the entry's table, or of the MMU. Takes the lock of every table in
    /// which a fault could install something for the range, even if there is no entry to visit. Stops where `visit`
    /// returns [`Next::Stop`], or when the budget of `walk` is used up. The next call resumes with the same entry.
    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit);

    /// Calls `seen`, for some leaves at a time, for all leaves that cover frames of the walk's range. Clears their
    /// accessed bits if `clear`. Continues `walk`, and stops when its budget is used up, like [`Self::walk`], but need
    /// not take a lock.
    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged));

    /// Zaps the leaf `at`.
    fn zap(&self, at: &At<'_>);

    /// Zaps the leaf `at`, and returns its bits, including those that hardware has set until then.
    fn take(&self, at: &At<'_>) -> u64;

    /// Clears the entry `at`, which refers to the table in the frame `lower`. Adds the table to `detached`, with all
    /// leaves and tables below it to which no other entry refers.
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached);

    /// Replaces the huge leaf `at` by a table of equivalent leaves of the next lower level (the *pieces*). The table's
    /// frame comes from `path`, which must have one, and the MMU must be prepared for one more table. On formats with
    /// break-before-make this only *breaks* the leaf, which becomes [`Entry::Broken`](crate::format::Entry::Broken);
    /// [`Self::mend`] installs the table later.
    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split;

    /// Replaces the broken leaf of `level` for `gfn` by a table of its pieces: the second half of break-before-make.
    /// Call after a flush of the leaf, which the caller has stored in `path.flushed`. Does nothing if the leaf was
    /// zapped meanwhile.
    ///
    /// Returns whether there is no broken leaf for `gfn` any more. `false`: a leaf in the same table was broken after
    /// the flush, and this may be the leaf for `gfn`. Flush again and retry.
    #[must_use]
    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool;

    /// Replaces the table in the frame `lower`, to which the entry `at` refers, by the huge leaf `leaf`, which maps all
    /// pages that the table maps. Adds the table to `detached`. On formats with break-before-make the entry becomes a
    /// broken leaf first, and [`Self::restore`] makes the leaf valid after a flush. An MMU that cannot install a huge
    /// leaf in place clears the entry.
    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse;

    /// Makes the broken leaf of `level` for `gfn` valid, without splitting it: the second half of [`Self::collapse`] on
    /// formats with break-before-make. Call after the caller's flush `own` of the leaf. Does nothing if the leaf was
    /// zapped meanwhile.
    ///
    /// Returns whether there is no broken leaf for `gfn` any more, like [`Self::mend`].
    #[must_use]
    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        let _ = (gfn, level, own);
        true
    }

    /// Whether a write-protected entry that refers to a table protects everything below it ([`super::protect`]).
    fn protects_tables(&self) -> bool {
        false
    }

    /// Gives the right to write back to entries that refer to tables and cover only frames of the walk's range. Call
    /// when no dirty log needs these entries protected any more. Leaves keep their rights. Continues `walk` like
    /// [`Self::walk`].
    fn lift(&self, walk: &mut Walk) {
        walk.stop_at(walk.range().end);
    }

    /// Zaps the oldest shadow page, for an MMU whose number of shadow pages is limited, and adds it to `detached`.
    /// Calls `zapped` for every leaf in it, with the leaf's first frame, level, and bits. Returns `false` if there is
    /// none.
    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        let _ = (detached, zapped);
        false
    }

    /// Returns whether the table in `frame` exists only because of the policy `nx_huge_pages`, so that NX recovery may
    /// zap it.
    fn is_nx_table(&self, frame: Pfn) -> bool;

    /// Compares what the MMU records about its tables, such as the number of leaves in each, with the entries.
    ///
    /// # Errors
    /// A description of the first inconsistency.
    fn check(&self) -> Result<(), String>;
}

/// Up to 64 adjacent entries of one table that [`ByGfn::age`] has read. In the masks, bit n is for the entry n after the
/// first one.
#[derive(Clone, Copy)]
pub(crate) struct Aged {
    /// The lowest guest frame that the first entry translates.
    pub(crate) gfn: Gfn,
    pub(crate) level: Level,
    /// Mask of the entries that are leaves.
    pub(crate) mapped: u64,
    /// Mask of the leaves whose accessed bit was set.
    pub(crate) young: u64,
}

impl Aged {
    /// The largest number of entries that one value describes.
    pub(crate) const MOST: usize = u64::BITS as usize;
}

/// The result of [`ByGfn::split`].
pub(crate) enum Split {
    /// The leaf was replaced by a table of its pieces.
    InPlace,
    /// The leaf was made [`Entry::Broken`](crate::format::Entry::Broken).
    Broken,
    /// Nothing was split, because all frames that were allocated in advance are used up.
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
