//! Taking something away, and when something else may be put in its place.
//!
//! The argument is that of the module above, "Break-before-make". On formats that do without, an entry
//! that was taken away is 0, and nothing here is left of the checks.

use crate::sync::atomic::{AtomicU64, Ordering::*};
use core::cell::Cell;

use super::{ENTRIES, Table, TableGuard, Ticket, Tickets, Tree, Zapped};
use crate::format::Format;
use crate::platform::Platform;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Whether a valid entry may be put where `bits` are.
    #[inline]
    pub(super) fn may_install(&self, bits: u64) -> bool {
        // 0 is seen only without the lock: then an exchange for what was seen fails.
        F::cleared_by(bits).is_none_or(|flush| self.flushes.is_complete(Ticket(flush)))
    }

    /// Takes `entry` of a table away whose lock is held; needs the flush that it adds to the answer.
    pub(super) fn clear(&self, entry: &AtomicU64) -> Zapped {
        let mut zapped = Zapped::nothing();
        entry.store(F::cleared(0), Release);
        // Drawn after the change.
        let ticket = self.flushes.need();
        if F::BREAK_BEFORE_MAKE {
            entry.store(F::cleared(ticket.0), Relaxed);
        }
        zapped.tickets.add(ticket);
        zapped
    }

    /// Call after a leaf in `table`, whose lock is held, was broken.
    pub(super) fn broke(&self, table: &super::TableMeta) {
        table.broken.store(self.flushes.need().0, Relaxed);
    }

    /// Whether the leaves that were broken in a table, whose lock is held, may be mended.
    pub(super) fn may_mend(&self, table: &super::TableMeta) -> bool {
        let ticket = Ticket(table.broken.load(Relaxed));
        !F::BREAK_BEFORE_MAKE || self.flushes.is_complete(ticket)
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
    drawn: &'w Cell<Tickets>,
    _guard: TableGuard<'w>,
}

impl<'w, P: Platform, F: Format> Section<'w, P, F> {
    /// Takes the lock of `table`. The ticket is added to `drawn`.
    #[inline]
    pub(super) fn new(
        tree: &'w Tree<P, F>,
        table: &Table<'w, P>,
        drawn: &'w Cell<Tickets>,
    ) -> Self {
        Section {
            tree,
            table: Table { ..*table },
            cleared: Cleared {
                first: Cell::new(ENTRIES),
                end: Cell::new(0),
            },
            drawn,
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
        let ticket = self.tree.flushes.need();
        for entry in &self.table.entries()[first..end] {
            if entry.load(Relaxed) == F::cleared(0) {
                entry.store(F::cleared(ticket.0), Relaxed);
            }
        }
        let mut drawn = self.drawn.get();
        drawn.add(ticket);
        self.drawn.set(drawn);
    }
}
