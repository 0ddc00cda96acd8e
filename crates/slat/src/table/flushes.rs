//! Who still owes a flush, and of what.
//!
//! A range operation says which frames it is about before it changes anything there, and is a *debtor*
//! ([`Flushes::owe`]) from then on until its flush has been done. Whoever finds under the lock of a table
//! that something was taken away there, or has lost a right, finds its debtor, too, or else the flush has
//! been done: the debtor was entered before the change, and is struck out after the flush. So
//!
//! * an operation that finds nothing to do needs a flush only if another one owes one of the same frames, and
//!   a flush of its own frames is all that it ever needs: what others do elsewhere costs it nothing;
//! * where a format asks for break-before-make, an entry that was taken away *names its flush*: the number of
//!   the first one that began after the change. It may be replaced when no debtor is left who has been one
//!   since before that flush began, or after a flush of one's own with such a number ([`Flushed`]).
//!
//! # Order
//! *Change, then number.* The number in an entry is read after the entry was changed, and counted up before a
//! flush begins, with a fence in between on both sides: so a flush whose number is not below that in the
//! entry forgets what walkers had read there. *Number, then change.* A debtor has the next number from before
//! its first change, so none of its entries names a lower one.
//!
//! What a debtor says of itself needs no order of its own: it is written before the change, and read by somebody
//! who has seen the change under the lock of the table.
//!
//! There are as many places for debtors as a word has bits. Nobody waits for one: as long as there are more
//! debtors than that, those without a place count as debtors of everything.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::*, fence};
use core::cell::Cell;
use core::iter;
use core::ops::Range;

use crate::addr::{Gfn, Level};

/// The flushes of one VM.
pub(crate) struct Flushes {
    /// How many have begun.
    begun: AtomicU64,
    /// A bit for each place that is taken.
    taken: AtomicU64,
    places: [Place; PLACES],
    /// Debtors without a place.
    unplaced: AtomicU64,
}

const PLACES: usize = if cfg!(loom) { 3 } else { u64::BITS as usize };

/// One debtor's. Written by it alone.
#[derive(Default)]
struct Place {
    /// The frames it is about; none yet, if `end` is not above `start`.
    start: AtomicU64,
    end: AtomicU64,
    /// No entry that it has taken away and not flushed names a lower number.
    since: AtomicU64,
    /// It takes away what belongs to no slot any more.
    leaving: AtomicBool,
}

impl Place {
    fn set_gfns(&self, (start, end): (u64, u64)) {
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
    }

    fn gfns(&self) -> Range<Gfn> {
        Gfn(self.start.load(Relaxed))..Gfn(self.end.load(Relaxed))
    }
}

/// A flush that its owner has done.
#[derive(Clone, Default)]
pub(crate) struct Flushed {
    gfns: Range<Gfn>,
    number: u64,
}

impl Flushed {
    /// Whether it voids what walkers had read in an entry for `gfns` that names the flush `number`.
    pub(super) fn covers(&self, gfns: &Range<Gfn>, number: u64) -> bool {
        number <= self.number && self.gfns.start <= gfns.start && gfns.end <= self.gfns.end
    }
}

impl Default for Flushes {
    fn default() -> Self {
        Flushes {
            begun: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            places: core::array::from_fn(|_| Place::default()),
            unplaced: AtomicU64::new(0),
        }
    }
}

/// Whether `a` and `b` have a frame in common. Neither is empty.
pub(crate) fn overlap(a: &Range<Gfn>, b: &Range<Gfn>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Flushes {
    /// Enters a debtor. It has to say what it is about ([`Debt::covers`]).
    pub(crate) fn owe(&self) -> Debt<'_> {
        let debt = Debt {
            flushes: self,
            index: self.take_place(),
            gfns: Cell::new(Self::NO_GFNS),
        };
        match debt.place() {
            Some(place) => {
                place.set_gfns(Self::NO_GFNS);
                place.leaving.store(false, Relaxed);
                debt.renew();
            }
            None => _ = self.unplaced.fetch_add(1, Relaxed),
        }
        debt
    }

    const NO_GFNS: (u64, u64) = (u64::MAX, 0);

    fn take_place(&self) -> Option<usize> {
        loop {
            let free = (!self.taken.load(Relaxed)).trailing_zeros() as usize;
            if free >= PLACES {
                return None;
            }
            // Acquire: what is written to the place now comes after what its last owner wrote.
            if self.taken.fetch_or(1 << free, Acquire) & 1 << free == 0 {
                return Some(free);
            }
        }
    }

    /// The lowest number of a flush that begins from now on; what the caller has changed before is voided by it.
    pub(crate) fn next(&self) -> u64 {
        fence(SeqCst);
        self.begun.load(SeqCst) + 1
    }

    /// The number of a flush that begins now.
    pub(crate) fn begin(&self) -> u64 {
        let number = self.begun.fetch_add(1, SeqCst) + 1;
        fence(SeqCst);
        number
    }

    /// What a flush of `gfns` that began with `number` and has ended allows its owner.
    pub(crate) fn done(gfns: Range<Gfn>, number: u64) -> Flushed {
        Flushed { gfns, number }
    }

    /// Whether a TLB may hold what stood in an entry for `gfns` which was taken away and names `number`, as
    /// far as somebody knows who has done the flush `own`. The lock of its table is held.
    #[inline]
    pub(crate) fn is_due(&self, gfns: &Range<Gfn>, number: u64, own: &Flushed) -> bool {
        let owes =
            |place: &Place| place.since.load(SeqCst) <= number && overlap(&place.gfns(), gfns);
        !own.covers(gfns, number)
            && (self.debtors().any(|(_, place)| owes(place)) || self.has_unplaced())
    }

    fn has_unplaced(&self) -> bool {
        self.unplaced.load(Acquire) != 0
    }

    /// Those with a place.
    fn debtors(&self) -> impl Iterator<Item = (usize, &Place)> {
        // Acquire: who is not there any more has flushed.
        let mut taken = self.taken.load(Acquire);
        iter::from_fn(move || {
            let index = taken.trailing_zeros() as usize;
            let place = self.places.get(index)?;
            taken &= taken - 1;
            Some((index, place))
        })
    }

    /// The frames that belonged to slots which have left, and are not flushed yet.
    pub(crate) fn due_of_leaving(&self) -> Option<Range<Gfn>> {
        if self.has_unplaced() {
            return Some(Gfn(0)..Gfn(u64::MAX));
        }
        let leaving = self
            .debtors()
            .filter(|(_, place)| place.leaving.load(Relaxed));
        leaving
            .map(|(_, place)| place.gfns())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .filter(|gfns| !gfns.is_empty())
    }
}

/// That its owner owes a flush of what it is about; struck out when dropped.
pub(crate) struct Debt<'a> {
    flushes: &'a Flushes,
    index: Option<usize>,
    /// Begin and end.
    gfns: Cell<(u64, u64)>,
}

impl Debt<'_> {
    fn place(&self) -> Option<&Place> {
        self.index.map(|index| &self.flushes.places[index])
    }

    /// It is about `gfns`, too. To be called before anything in them is changed.
    pub(crate) fn covers(&self, gfns: &Range<Gfn>) {
        let (start, end) = self.gfns.get();
        let hull = (start.min(gfns.start.0), end.max(gfns.end.0));
        self.gfns.set(hull);
        if let Some(place) = self.place() {
            place.set_gfns(hull);
        }
    }

    /// What it takes away belongs to no slot any more.
    pub(crate) fn leaves(&self) {
        if let Some(place) = self.place() {
            place.leaving.store(true, Relaxed);
        }
    }

    /// All that it has taken away up to now was flushed.
    pub(crate) fn renew(&self) {
        if let Some(place) = self.place() {
            // A number from before is lower: that holds up somebody else for nothing, at worst. Release: who
            // sees the new one finds the flush done.
            let next = self.flushes.begun.load(Relaxed) + 1;
            place.since.store(next, Release);
        }
    }

    /// The frames it is about.
    pub(crate) fn gfns(&self) -> Range<Gfn> {
        let (start, end) = self.gfns.get();
        Gfn(start)..Gfn(end)
    }

    /// Whether somebody else owes a flush of some of these frames. A huge leaf that was taken away may reach into
    /// them out of the frames that the other one is about.
    pub(crate) fn others_owe(&self, largest: Level) -> bool {
        let Range { start, end } = self.gfns();
        if start >= end {
            return false;
        }
        let end = end.add(largest.pages() - 1).align_down(largest);
        let reach = start.align_down(largest)..end;
        let mut others = (self.flushes.debtors()).filter(|(i, _)| Some(*i) != self.index);
        let unplaced = self.flushes.unplaced.load(Acquire) - u64::from(self.index.is_none());
        unplaced != 0 || others.any(|(_, place)| overlap(&place.gfns(), &reach))
    }
}

impl Drop for Debt<'_> {
    fn drop(&mut self) {
        match self.index {
            Some(index) => _ = self.flushes.taken.fetch_and(!(1 << index), Release),
            None => _ = self.flushes.unplaced.fetch_sub(1, Release),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn gfns(start: u64, end: u64) -> Range<Gfn> {
        Gfn(start)..Gfn(end)
    }

    fn owe(flushes: &Flushes, range: Range<Gfn>) -> Debt<'_> {
        let debt = flushes.owe();
        debt.covers(&range);
        debt
    }

    #[test]
    fn an_operation_elsewhere_owes_nothing_here() {
        let flushes = Flushes::default();
        let here = owe(&flushes, gfns(0, 8));
        let elsewhere = owe(&flushes, gfns(1 << 20, 1 << 21));
        assert!(!here.others_owe(Level::GIGA) && !elsewhere.others_owe(Level::GIGA));
        let beside = owe(&flushes, gfns(8, 9));
        assert!(!here.others_owe(Level::PAGE));
        assert!(
            here.others_owe(Level::MEGA),
            "a huge leaf may reach here from there"
        );
        drop(beside);
        assert!(!here.others_owe(Level::MEGA));
    }

    #[test]
    fn an_entry_is_due_until_its_debtor_or_the_asker_has_flushed() {
        let flushes = Flushes::default();
        let nobody = Flushed::default();
        let debt = owe(&flushes, gfns(0, 8));
        let named = flushes.next();
        assert!(flushes.is_due(&gfns(3, 4), named, &nobody));
        // Somebody who has flushed knows of what was named before, and of those frames only.
        let own = Flushes::done(gfns(3, 4), flushes.begin());
        assert!(!flushes.is_due(&gfns(3, 4), named, &own));
        assert!(flushes.is_due(&gfns(2, 4), named, &own));
        assert!(flushes.is_due(&gfns(3, 4), flushes.next(), &own));
        // Others come and go.
        drop(owe(&flushes, gfns(0, 8)));
        let later = owe(&flushes, gfns(0, 8));
        assert!(flushes.is_due(&gfns(3, 4), named, &nobody));
        drop(debt);
        assert!(!flushes.is_due(&gfns(3, 4), named, &nobody));
        assert!(flushes.is_due(&gfns(3, 4), flushes.next(), &nobody));
        flushes.begin();
        later.renew();
        assert!(!flushes.is_due(&gfns(3, 4), flushes.next() - 1, &nobody));
    }

    #[test]
    fn a_debtor_without_a_place_owes_everything() {
        let flushes = Flushes::default();
        let far = |i: u64| Gfn(i << 30)..Gfn((i << 30) + 1);
        let mut debts: Vec<_> = (0..PLACES as u64).map(|i| owe(&flushes, far(i))).collect();
        let nobody = Flushed::default();
        assert!(!flushes.is_due(&far(100), flushes.next(), &nobody));
        let more = owe(&flushes, far(101));
        more.leaves();
        assert_eq!(more.gfns(), far(101));
        assert!(flushes.is_due(&far(100), flushes.next(), &nobody));
        assert!(debts[0].others_owe(Level::GIGA) && !more.others_owe(Level::GIGA));
        assert!(
            flushes
                .due_of_leaving()
                .is_some_and(|gfns| gfns.contains(&Gfn(101 << 30)))
        );
        drop(more);
        assert!(!debts[0].others_owe(Level::GIGA) && flushes.due_of_leaving().is_none());
        debts.pop();
        assert!(owe(&flushes, far(7)).others_owe(Level::GIGA));
    }

    #[test]
    fn what_slots_that_left_owe_is_known() {
        let flushes = Flushes::default();
        let _other = owe(&flushes, gfns(0, 100));
        assert_eq!(flushes.due_of_leaving(), None);
        let (first, second) = (owe(&flushes, gfns(10, 20)), owe(&flushes, gfns(40, 50)));
        first.leaves();
        second.leaves();
        assert_eq!(flushes.due_of_leaving(), Some(gfns(10, 50)));
        drop(first);
        assert_eq!(flushes.due_of_leaving(), Some(gfns(40, 50)));
    }
}
