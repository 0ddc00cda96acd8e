//! Decides which operations need a flush, and of which frames.
//!
//! A range operation takes a *ticket* ([`Flushes::need_flush`]), and names the frames that the ticket covers before it
//! changes an entry for them. After its flush it drops the ticket, which *completes* the ticket. So if a thread that
//! holds the lock of a table finds that an entry was zapped or has lost a right, then either the flush for this change
//! is done, or the thread finds the ticket. It follows that
//!
//! * an operation that finds nothing to change needs a flush only if another ticket covers some of its frames, and then
//!   flushes only its own frames;
//! * on a format that requires break-before-make, a zapped entry *names its flush*: the number of the first flush that
//!   began after the change. The entry may be replaced if each ticket that covers it was taken, or renewed, after the
//!   flush with this number began. A thread that has itself done a flush of the entry with this number or a higher one
//!   ([`Flushed`]) may also replace it.
//!
//! # Order
//! *Change, then number.* An operation changes an entry, and then reads the counter of flushes to get the number for
//! the entry. A flush raises the counter, and then begins. Both have a fence in between. So a flush whose number is at
//! least the number in the entry voids what walkers had cached of the old entry. *Number, then change.* A ticket reads
//! the counter before the first change of its operation. So every entry that the operation zaps names this number or a
//! higher one.
//!
//! The fields of a [`TicketEntry`] need no ordering of their own: the owner writes them before it changes a page-table
//! entry under the lock of the table, and other threads read them after they have seen the change under the same lock.
//!
//! There are 64 ticket entries, one for each bit of a word. When all are in use, an operation does not wait: its ticket
//! has no entry, and counts as covering all frames.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::*, fence};
use core::cell::Cell;
use core::iter;
use core::ops::Range;

use crate::addr::Gfn;

/// The flushes of one VM.
pub(crate) struct Flushes {
    /// The number of flushes that have begun.
    begun: AtomicU64,
    /// Bit n is set while ticket entry n is in use.
    used: AtomicU64,
    entries: [TicketEntry; TICKET_ENTRIES],
    /// The number of tickets without an entry.
    unlisted: AtomicU64,
}

const TICKET_ENTRIES: usize = if cfg!(loom) { 3 } else { u64::BITS as usize };

/// The part of a ticket that other threads read. Only the owner of the ticket writes it.
#[derive(Default)]
struct TicketEntry {
    /// The frames that the ticket covers; no frames if `end` is not above `start`.
    start: AtomicU64,
    end: AtomicU64,
    /// Every entry that the owner has zapped and not flushed yet names this number or a higher one.
    since: AtomicU64,
    /// Whether the owner zaps leaves of a deleted or moved slot.
    of_leaving_slot: AtomicBool,
}

impl TicketEntry {
    fn set_gfns(&self, (start, end): (u64, u64)) {
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
    }

    fn gfns(&self) -> Range<Gfn> {
        Gfn(self.start.load(Relaxed))..Gfn(self.end.load(Relaxed))
    }
}

/// A record of a flush that the thread which owns the record has done itself.
#[derive(Clone, Default)]
pub(crate) struct Flushed {
    gfns: Range<Gfn>,
    number: u64,
}

impl Flushed {
    /// Returns whether this flush voids everything that walkers had cached of an entry that covers `gfns` and names
    /// flush `number`.
    pub(crate) fn covers(&self, gfns: &Range<Gfn>, number: u64) -> bool {
        number <= self.number && self.gfns.start <= gfns.start && gfns.end <= self.gfns.end
    }
}

impl Default for Flushes {
    fn default() -> Self {
        Flushes {
            begun: AtomicU64::new(0),
            used: AtomicU64::new(0),
            entries: core::array::from_fn(|_| TicketEntry::default()),
            unlisted: AtomicU64::new(0),
        }
    }
}

/// Returns whether `a` and `b` have a frame in common. Neither is empty.
pub(crate) fn overlap(a: &Range<Gfn>, b: &Range<Gfn>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Flushes {
    /// Takes a ticket that covers no frames yet. Call [`FlushTicket::covers`] before changing an entry for some frames.
    pub(crate) fn need_flush(&self) -> FlushTicket<'_> {
        let ticket = FlushTicket {
            flushes: self,
            index: self.take_entry(),
            gfns: Cell::new(Self::NO_GFNS),
        };
        match ticket.entry() {
            Some(entry) => {
                entry.set_gfns(Self::NO_GFNS);
                entry.of_leaving_slot.store(false, Relaxed);
                ticket.renew();
            }
            None => _ = self.unlisted.fetch_add(1, Relaxed),
        }
        ticket
    }

    const NO_GFNS: (u64, u64) = (u64::MAX, 0);

    /// Reserves a ticket entry and returns its index. `None`: all ticket entries are in use.
    fn take_entry(&self) -> Option<usize> {
        loop {
            let free = (!self.used.load(Relaxed)).trailing_zeros() as usize;
            if free >= TICKET_ENTRIES {
                return None;
            }
            // Acquire: the new owner's writes to the ticket entry are ordered after the last owner's.
            if self.used.fetch_or(1 << free, Acquire) & 1 << free == 0 {
                return Some(free);
            }
        }
    }

    /// Returns the lowest number of a flush that begins from now on. Such a flush voids everything that walkers had
    /// cached of entries that the caller has changed before this call.
    pub(crate) fn next(&self) -> u64 {
        fence(SeqCst);
        self.begun.load(SeqCst) + 1
    }

    /// Counts the beginning of a flush, and returns its number.
    pub(crate) fn begin(&self) -> u64 {
        let number = self.begun.fetch_add(1, SeqCst) + 1;
        fence(SeqCst);
        number
    }

    /// Returns the record of a flush of `gfns` that has the number `number`. Call after the flush has ended.
    pub(crate) fn done(gfns: Range<Gfn>, number: u64) -> Flushed {
        Flushed { gfns, number }
    }

    /// Returns whether the flush of a zapped entry is still due, so that a TLB may cache its old translation. The entry
    /// covers `gfns` and names flush `number`; `own` is the calling thread's last own flush. The caller holds the lock
    /// of the table.
    #[inline]
    pub(crate) fn is_due(&self, gfns: &Range<Gfn>, number: u64, own: &Flushed) -> bool {
        let needs = |entry: &TicketEntry| {
            entry.since.load(SeqCst) <= number && overlap(&entry.gfns(), gfns)
        };
        !own.covers(gfns, number)
            && (self.listed().any(|(_, entry)| needs(entry)) || self.has_unlisted())
    }

    /// Returns whether there is a ticket without an entry.
    fn has_unlisted(&self) -> bool {
        self.unlisted.load(Acquire) != 0
    }

    /// Iterates over the tickets that have an entry, with its index.
    fn listed(&self) -> impl Iterator<Item = (usize, &TicketEntry)> {
        // Acquire: if a ticket is not in use any more, its flush has been done.
        let mut used = self.used.load(Acquire);
        iter::from_fn(move || {
            let index = used.trailing_zeros() as usize;
            let entry = self.entries.get(index)?;
            used &= used - 1;
            Some((index, entry))
        })
    }

    /// Returns a range that contains all frames of deleted or moved slots whose flush is not done yet. `None`: there
    /// are no such frames.
    pub(crate) fn due_of_leaving_slots(&self) -> Option<Range<Gfn>> {
        if self.has_unlisted() {
            return Some(Gfn(0)..Gfn(u64::MAX));
        }
        let leaving = self
            .listed()
            .filter(|(_, entry)| entry.of_leaving_slot.load(Relaxed));
        leaving
            .map(|(_, entry)| entry.gfns())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .filter(|gfns| !gfns.is_empty())
    }
}

/// Tells other threads that the ticket's owner needs a flush of the frames that the ticket covers. The owner drops the
/// ticket after this flush.
pub(crate) struct FlushTicket<'a> {
    flushes: &'a Flushes,
    /// The index of the ticket's [`TicketEntry`]. `None`: it has no entry.
    index: Option<usize>,
    /// The first frame that the ticket covers, and the frame after the last one.
    gfns: Cell<(u64, u64)>,
}

impl FlushTicket<'_> {
    fn entry(&self) -> Option<&TicketEntry> {
        self.index.map(|index| &self.flushes.entries[index])
    }

    /// Adds `gfns` to the frames that the ticket covers. Call before changing an entry for these frames.
    pub(crate) fn covers(&self, gfns: &Range<Gfn>) {
        let (start, end) = self.gfns.get();
        let hull = (start.min(gfns.start.0), end.max(gfns.end.0));
        self.gfns.set(hull);
        if let Some(entry) = self.entry() {
            entry.set_gfns(hull);
        }
    }

    /// Declares that the owner zaps leaves of a deleted or moved slot
    /// ([`Flushes::due_of_leaving_slots`]).
    pub(crate) fn of_leaving_slot(&self) {
        if let Some(entry) = self.entry() {
            entry.of_leaving_slot.store(true, Relaxed);
        }
    }

    /// Call after a flush of everything that the owner of the ticket has changed so far. The ticket then counts as
    /// taken anew.
    pub(crate) fn renew(&self) {
        if let Some(entry) = self.entry() {
            // This load may return an old, lower number: then another thread may at worst do a needless flush. Release:
            // a thread that sees the new number in `since` also sees the effects of the flush.
            let next = self.flushes.begun.load(Relaxed) + 1;
            entry.since.store(next, Release);
        }
    }

    /// Returns the frames that the ticket covers.
    pub(crate) fn gfns(&self) -> Range<Gfn> {
        let (start, end) = self.gfns.get();
        Gfn(start)..Gfn(end)
    }

    /// Returns whether another operation needs a flush of some of these frames. The other operation may also have
    /// zapped a huge leaf, of at most `largest` pages, that maps frames of its ticket and these frames.
    pub(crate) fn others_need(&self, largest: u64) -> bool {
        let Range { start, end } = self.gfns();
        if start >= end {
            return false;
        }
        let aligned = |gfn: Gfn| Gfn(gfn.0 & !(largest - 1));
        let reach = aligned(start)..aligned(end.add(largest - 1));
        let mut others = (self.flushes.listed()).filter(|(i, _)| Some(*i) != self.index);
        let unlisted = self.flushes.unlisted.load(Acquire) - u64::from(self.index.is_none());
        unlisted != 0 || others.any(|(_, entry)| overlap(&entry.gfns(), &reach))
    }
}

impl Drop for FlushTicket<'_> {
    fn drop(&mut self) {
        match self.index {
            Some(index) => _ = self.flushes.used.fetch_and(!(1 << index), Release),
            None => _ = self.flushes.unlisted.fetch_sub(1, Release),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::Level;
    use std::vec::Vec;

    fn gfns(start: u64, end: u64) -> Range<Gfn> {
        Gfn(start)..Gfn(end)
    }

    fn need(flushes: &Flushes, range: Range<Gfn>) -> FlushTicket<'_> {
        let ticket = flushes.need_flush();
        ticket.covers(&range);
        ticket
    }

    #[test]
    fn an_operation_on_other_frames_needs_no_flush_of_these() {
        let flushes = Flushes::default();
        let here = need(&flushes, gfns(0, 8));
        let elsewhere = need(&flushes, gfns(1 << 20, 1 << 21));
        assert!(
            !here.others_need(Level::GIGA.pages()) && !elsewhere.others_need(Level::GIGA.pages())
        );
        let beside = need(&flushes, gfns(8, 9));
        assert!(!here.others_need(1));
        assert!(
            here.others_need(Level::MEGA.pages()),
            "a huge leaf may reach here from there"
        );
        drop(beside);
        assert!(!here.others_need(Level::MEGA.pages()));
    }

    #[test]
    fn an_entry_is_due_until_its_ticket_is_completed_or_the_caller_has_flushed() {
        let flushes = Flushes::default();
        let nothing = Flushed::default();
        let ticket = need(&flushes, gfns(0, 8));
        let named = flushes.next();
        assert!(flushes.is_due(&gfns(3, 4), named, &nothing));
        // A thread's own flush counts only for entries whose frames it covers and which name this flush or an earlier
        // one.
        let own = Flushes::done(gfns(3, 4), flushes.begin());
        assert!(!flushes.is_due(&gfns(3, 4), named, &own));
        assert!(flushes.is_due(&gfns(2, 4), named, &own));
        assert!(flushes.is_due(&gfns(3, 4), flushes.next(), &own));
        // Other tickets for the same frames, completed before or taken later, make no difference.
        drop(need(&flushes, gfns(0, 8)));
        let later = need(&flushes, gfns(0, 8));
        assert!(flushes.is_due(&gfns(3, 4), named, &nothing));
        drop(ticket);
        assert!(!flushes.is_due(&gfns(3, 4), named, &nothing));
        assert!(flushes.is_due(&gfns(3, 4), flushes.next(), &nothing));
        flushes.begin();
        later.renew();
        assert!(!flushes.is_due(&gfns(3, 4), flushes.next() - 1, &nothing));
    }

    #[test]
    fn a_ticket_without_an_entry_covers_everything() {
        let flushes = Flushes::default();
        let far = |i: u64| Gfn(i << 30)..Gfn((i << 30) + 1);
        let mut tickets: Vec<_> = (0..TICKET_ENTRIES as u64)
            .map(|i| need(&flushes, far(i)))
            .collect();
        let nothing = Flushed::default();
        assert!(!flushes.is_due(&far(100), flushes.next(), &nothing));
        let more = need(&flushes, far(101));
        more.of_leaving_slot();
        assert_eq!(more.gfns(), far(101));
        assert!(flushes.is_due(&far(100), flushes.next(), &nothing));
        assert!(
            tickets[0].others_need(Level::GIGA.pages()) && !more.others_need(Level::GIGA.pages())
        );
        assert!(
            flushes
                .due_of_leaving_slots()
                .is_some_and(|gfns| gfns.contains(&Gfn(101 << 30)))
        );
        drop(more);
        assert!(
            !tickets[0].others_need(Level::GIGA.pages())
                && flushes.due_of_leaving_slots().is_none()
        );
        tickets.pop();
        assert!(need(&flushes, far(7)).others_need(Level::GIGA.pages()));
    }

    #[test]
    fn the_unflushed_frames_of_deleted_or_moved_slots_are_known() {
        let flushes = Flushes::default();
        let _other = need(&flushes, gfns(0, 100));
        assert_eq!(flushes.due_of_leaving_slots(), None);
        let (first, second) = (need(&flushes, gfns(10, 20)), need(&flushes, gfns(40, 50)));
        first.of_leaving_slot();
        second.of_leaving_slot();
        assert_eq!(flushes.due_of_leaving_slots(), Some(gfns(10, 50)));
        drop(first);
        assert_eq!(flushes.due_of_leaving_slots(), Some(gfns(40, 50)));
    }
}
