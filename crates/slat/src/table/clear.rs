//! Clears entries, and decides when a valid entry may be installed there again.
//!
//! The module comment of [`super`], "Break-before-make", explains why this is right. On formats that do not require
//! break-before-make, a cleared entry is 0, and all checks here are compiled away.

use crate::sync::atomic::Ordering::*;
use core::cell::Cell;

use super::{Flushed, Table, TableGuard, TableMeta, Tree};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::platform::Platform;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Returns whether a thread that has done the flush `own` may install a valid entry over the entry of `level` for
    /// `gfn`, which contains `bits`. An install without the table's lock must use an exchange that compares the entry
    /// with `bits`.
    #[inline]
    pub(super) fn may_install(&self, bits: u64, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        // A cleared entry that does not name its flush yet is visible only without the lock. It passes this check, but
        // then the exchange with `bits`, under the lock, fails.
        F::cleared_by(bits).is_none_or(|number| {
            !self
                .flushes
                .is_due(&F::GRANULE.block(gfn, level), number, own)
        })
    }

    /// Stores in the metadata of `table` which flush its last broken leaf needs. Call after breaking a leaf in
    /// `table`, while its lock is held.
    pub(super) fn broke(&self, table: &TableMeta) {
        table.broken.store(self.flushes.next(), Relaxed);
    }

    /// Returns whether this thread, which has done the flush `own` after it broke the leaf of `level` at `gfn`, may
    /// mend it. The caller holds the lock of `table`, which contains the leaf.
    pub(super) fn may_mend(table: &TableMeta, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        !F::BREAK_BEFORE_MAKE
            || own.covers(&F::GRANULE.block(gfn, level), table.broken.load(Relaxed))
    }
}

/// A range of indexes that contains all entries of a table that were cleared since its lock was taken; empty if there
/// are none.
pub(crate) struct Cleared {
    first: Cell<usize>,
    end: Cell<usize>,
}

impl Cleared {
    #[inline]
    pub(super) fn add(&self, index: usize) {
        self.first.set(self.first.get().min(index));
        self.end.set(self.end.get().max(index + 1));
    }
}

/// A table whose lock a walk holds. Before the walk releases the lock, all entries that it has cleared get the number
/// of their flush.
pub(super) struct LockedTable<'w, P: Platform, F: Format> {
    tree: &'w Tree<P, F>,
    table: Table<'w, P, F>,
    pub(super) cleared: Cleared,
    _guard: TableGuard<'w>,
}

impl<'w, P: Platform, F: Format> LockedTable<'w, P, F> {
    /// Takes the lock of `table`.
    #[inline]
    pub(super) fn new(tree: &'w Tree<P, F>, table: &Table<'w, P, F>) -> Self {
        LockedTable {
            tree,
            table: Table { ..*table },
            cleared: Cleared {
                first: Cell::new(F::GRANULE.entries()),
                end: Cell::new(0),
            },
            _guard: table.lock(),
        }
    }
}

impl<P: Platform, F: Format> Drop for LockedTable<'_, P, F> {
    #[inline]
    fn drop(&mut self) {
        let (first, end) = (self.cleared.first.get(), self.cleared.end.get());
        if !F::BREAK_BEFORE_MAKE || first >= end {
            return;
        }
        let number = self.tree.flushes.next();
        for entry in &self.table.entries()[first..end] {
            if entry.load(Relaxed) == F::cleared(0) {
                entry.store(F::cleared(number), Relaxed);
            }
        }
    }
}
