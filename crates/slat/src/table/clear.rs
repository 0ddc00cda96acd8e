//! Taking something away, and when something else may be put in its place.
//!
//! The argument is that of the module above, "Break-before-make". On formats that do without, an entry
//! that was taken away is 0, and nothing here is left of the checks.

use crate::sync::atomic::Ordering::*;
use core::cell::Cell;

use super::{ENTRIES, Flushed, Table, TableGuard, TableMeta, Tree};
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::platform::Platform;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Whether a valid entry may be put where `bits` are, in the entry of `level` for `gfn`, by somebody who
    /// has done the flush `own` himself.
    #[inline]
    pub(super) fn may_install(&self, bits: u64, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        // 0 is seen only without the lock: then an exchange for what was seen fails.
        F::cleared_by(bits)
            .is_none_or(|number| !self.flushes.is_due(&gfn.block(level), number, own))
    }

    /// Call after a leaf in `table`, whose lock is held, was broken.
    pub(super) fn broke(&self, table: &TableMeta) {
        table.broken.store(self.flushes.next(), Relaxed);
    }

    /// Whether the leaf of `level` at `gfn`, broken in a table whose lock is held, may be mended by somebody who
    /// has done the flush `own` since he found it broken.
    pub(super) fn may_mend(table: &TableMeta, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        !F::BREAK_BEFORE_MAKE || own.covers(&gfn.block(level), table.broken.load(Relaxed))
    }
}

/// Which entries of a table were taken away while its lock is held: none, or all of them are in a range.
pub(super) struct Cleared {
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

/// A section of a walk under the lock of one table. At its end the entries that were taken away in it get
/// the number of their flush, one for all.
pub(super) struct Section<'w, P: Platform, F: Format> {
    tree: &'w Tree<P, F>,
    table: Table<'w, P>,
    pub(super) cleared: Cleared,
    _guard: TableGuard<'w>,
}

impl<'w, P: Platform, F: Format> Section<'w, P, F> {
    /// Takes the lock of `table`.
    #[inline]
    pub(super) fn new(tree: &'w Tree<P, F>, table: &Table<'w, P>) -> Self {
        Section {
            tree,
            table: Table { ..*table },
            cleared: Cleared {
                first: Cell::new(ENTRIES),
                end: Cell::new(0),
            },
            _guard: table.lock(),
        }
    }
}

impl<P: Platform, F: Format> Drop for Section<'_, P, F> {
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
