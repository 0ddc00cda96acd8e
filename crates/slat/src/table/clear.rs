//! Clears entries, and decides when a valid entry may be installed in a cleared entry again.
//!
//! The module comment of [`super`], "Break-before-make", explains why this is correct. On formats that do not require
//! break-before-make, a cleared entry is 0, and all checks here are compiled away.

use crate::sync::atomic::Ordering::*;
use core::cell::Cell;

use super::{Flushed, Table, TableGuard, TableMeta, Tree};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::platform::Platform;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Returns whether a thread whose own last flush is `own` may replace the entry of `level` for `gfn`, which
    /// contains `bits`, by a valid entry. An install without the table's lock must use an exchange that compares the
    /// entry with `bits`.
    #[inline]
    pub(super) fn may_install(&self, bits: u64, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        // An entry that was just cleared does not name its flush yet. Only a thread without the lock can see it in this
        // state. It passes this check, but the later exchange, which compares the entry with `bits` under the lock,
        // fails.
        F::cleared_by(bits).is_none_or(|number| {
            !self
                .flushes
                .is_due(&F::GRANULE.block(gfn, level), number, own)
        })
    }

    /// Stores in the metadata `table` the number of the flush that the last broken leaf of the table needs. Call after
    /// breaking a leaf, while the table's lock is held.
    pub(super) fn broke(&self, table: &TableMeta) {
        table.broken.store(self.flushes.next(), Relaxed);
    }

    /// Returns whether a thread may replace the broken leaf of `level` for `gfn` by a valid entry: whether its own
    /// flush `own` suffices. The caller holds the lock of the table that contains the leaf and has the metadata
    /// `table`.
    pub(super) fn may_mend(table: &TableMeta, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        !F::BREAK_BEFORE_MAKE
            || own.covers(&F::GRANULE.block(gfn, level), table.broken.load(Relaxed))
    }
}

/// A range of indexes that contains all entries of a table that were cleared since its lock was taken. It is empty if
/// none was cleared.
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

/// A table whose lock a walk holds. Before the lock is released, the number of the flush is stored in all entries that
/// the walk has cleared.
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
