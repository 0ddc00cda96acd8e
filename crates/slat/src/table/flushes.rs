//! Which flushes are needed.
//!
//! Whoever takes something away draws a ticket *after* the change. A flush that begins later completes
//! it, with all tickets drawn before: their ranges are not remembered, so it is a flush of its own range
//! only if no ticket but those of its own operation is open, and of everything otherwise.
//!
//! An operation that finds nothing to take away may still need a flush: that of another one which was
//! there first and has not flushed yet. Where tickets are drawn once for a whole range operation, it is
//! counted (`zapping`) from before its first look at an entry until it has drawn its ticket.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// The tickets of one VM.
#[derive(Default)]
pub(crate) struct Flushes {
    /// Range operations that may have taken something away and have not drawn its ticket yet.
    zapping: AtomicUsize,
    /// The last ticket drawn; the first is 1.
    needed: AtomicU64,
    /// All tickets up to this one are complete.
    complete: AtomicU64,
}

/// Stands for all that its owner has taken away before it was drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(pub(crate) u64);

/// The tickets that one operation has drawn.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tickets {
    first: u64,
    last: u64,
    count: u64,
}

impl Tickets {
    pub(crate) const NONE: Tickets = Tickets {
        first: 0,
        last: 0,
        count: 0,
    };

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a ticket drawn after all of these.
    pub(crate) fn add(&mut self, ticket: Ticket) {
        if self.is_empty() {
            self.first = ticket.0;
        }
        self.last = ticket.0;
        self.count += 1;
    }

    /// Adds tickets that were drawn after all of these.
    pub(crate) fn append(&mut self, later: Tickets) {
        if self.is_empty() {
            *self = later;
        } else if !later.is_empty() {
            self.last = later.last;
            self.count += later.count;
        }
    }

    /// Whether these are all tickets above `complete`, up to `last`.
    fn are_all(&self, complete: u64, last: Ticket) -> bool {
        let no_gap = self.last.wrapping_sub(self.first) + 1 == self.count;
        no_gap && self.last == last.0 && self.first <= complete + 1
    }
}

impl Flushes {
    /// Draws a ticket for what the caller has just taken away.
    pub(crate) fn need(&self) -> Ticket {
        Ticket(self.needed.fetch_add(1, SeqCst) + 1)
    }

    /// Whether all that a ticket stands for was flushed.
    #[inline]
    pub(crate) fn is_complete(&self, ticket: Ticket) -> bool {
        self.complete.load(SeqCst) >= ticket.0
    }

    pub(crate) fn begin_zapping(&self) {
        self.zapping.fetch_add(1, SeqCst);
    }

    pub(crate) fn end_zapping(&self) {
        self.zapping.fetch_sub(1, SeqCst);
    }

    /// Whether nothing that was taken away may still be in use.
    pub(crate) fn all_complete(&self) -> bool {
        self.account().1
    }

    /// The last ticket, and whether all that was taken away was flushed.
    pub(crate) fn account(&self) -> (Ticket, bool) {
        // In this order: an operation draws its ticket first, and is no longer counted after that.
        let quiet = self.zapping.load(SeqCst) == 0;
        let last = Ticket(self.needed.load(SeqCst));
        (last, quiet && self.is_complete(last))
    }

    /// Whether of the tickets up to `last` none is open but `own`.
    pub(crate) fn is_only(&self, last: Ticket, own: Tickets) -> bool {
        let complete = self.complete.load(SeqCst);
        complete >= last.0 || own.are_all(complete, last)
    }

    /// All tickets up to `last` are complete: a flush that began after they were drawn has ended.
    pub(crate) fn complete(&self, last: Ticket) {
        self.complete.fetch_max(last.0, SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_flush_of_its_own_range_completes_only_its_own_tickets() {
        let flushes = Flushes::default();
        let mut own = Tickets::NONE;
        own.add(flushes.need());
        own.add(flushes.need());
        let (last, all) = flushes.account();
        assert!(!all && flushes.is_only(last, own) && !flushes.is_only(last, Tickets::NONE));
        // Somebody else's between two of its own, before, and after.
        let other = flushes.need();
        own.add(flushes.need());
        assert!(!flushes.is_only(flushes.account().0, own));
        flushes.complete(other);
        let mut late = Tickets::NONE;
        late.add(Ticket(4));
        assert!(flushes.is_only(flushes.account().0, late));
        late.add(flushes.need());
        assert!(flushes.is_only(flushes.account().0, late));
        flushes.need();
        assert!(!flushes.is_only(flushes.account().0, late));
    }

    #[test]
    fn a_ticket_is_complete_with_all_before_it() {
        let flushes = Flushes::default();
        let (first, second) = (flushes.need(), flushes.need());
        flushes.complete(first);
        assert!(flushes.is_complete(first) && !flushes.is_complete(second));
        assert!(!flushes.all_complete());
        flushes.complete(second);
        flushes.begin_zapping();
        assert!(!flushes.all_complete());
        flushes.end_zapping();
        assert!(flushes.all_complete());
    }
}
