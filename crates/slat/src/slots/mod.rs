//! Memslots: which part of the guest's physical memory is backed by what.
//!
//! One address space has one [`Slots`]: two [`SlotSet`]s, each with all the slots in its own trees (by guest
//! frame, by backing address), which frames are private ([`attributes`]), and the MMIO generation. Readers
//! see the one that is published, by one pointer. A change is made in the other one, which then is
//! published in its place; so a reader sees the old or the new set whole, and the VM runs on the old one
//! meanwhile. The set that was replaced is left to those who still read it, and catches up at the
//! beginning of the next change, in place: a change costs a few moves within a node of each tree, twice.
//! As long as there are only a few slots ([`few`]), they stand in the sets themselves, without trees.
//! (KVM has two sets, too, since Linux 5.17; its slots are linked into both.)
//!
//! * Look-ups take no lock. The caller is inside a reader section ([`crate::sync::quiesce`]).
//! * Changes are serialized by [`Slots::change`]'s lock, held until the change is complete for its
//!   caller (zapped and flushed), as KVM's `slots_lock` is. The index by id is only used under it.
//! * The set aside is read by nobody who has come in, or passed a quiescent point, since the other one was
//!   published. [`SlotsChange::catch_up`] waits for all who have not: mostly the flush of the last
//!   change has done so. What that change has replaced is freed there, too.
//! * What a change needs is allocated before anything is changed, for both sets: they are built alike by
//!   the same edits, so what sufficed for one suffices for the other.

mod attributes;
mod few;
mod ids;
mod memslot;
mod node;
mod region;
mod steps;
mod tree;

pub(crate) use attributes::PrivateFrames;
pub use attributes::{AttributesError, MemoryAttributes};
pub(crate) use memslot::{Memslot, OwnedSlot};
pub(crate) use region::{Change, plan};
pub use region::{MAX_SLOTS, Region, RegionError, SlotFlags};

use alloc::boxed::Box;
use core::mem;
use core::ops::{Deref, Range};
use core::ptr::NonNull;

use crate::addr::{Gfn, Hva, PAGE_SHIFT};
use crate::heap;
use crate::stats::Counter;
use crate::sync::InSection;
use crate::sync::atomic::{AtomicPtr, Ordering::*, Watch};
use crate::sync::fair::{FairGuard, FairLock};
use crate::sync::quiesce::Readers;
use crate::table::OutOfMemory;
use few::Few;
use ids::Ids;
use node::{ByGfn, ByHva, ByPrivate, Order};
use tree::{Index, Stock};

/// All slots of one address space at one moment.
pub(crate) struct SlotSet {
    /// Empty as long as there have not been more than a few slots since there were none.
    by_gfn: Index<ByGfn>,
    /// The slots while that is empty.
    few: Few,
    /// Holds what `by_gfn` holds.
    by_hva: Index<ByHva>,
    /// The slots that have private backing.
    by_private: Index<ByPrivate>,
    /// The same in every address space of a VM.
    pub(crate) private: PrivateFrames,
    /// Raised by every change. An MMIO entry of another generation says nothing.
    pub(crate) generation: u64,
    alive: Watch,
    /// log2 of the pages of the smallest slot, or less: there were smaller ones.
    pub(crate) granule: u32,
}

impl SlotSet {
    /// A generation that no set has.
    pub(crate) const NEVER: u64 = u64::MAX;

    /// Where the slots are, if they are not in trees.
    #[inline]
    fn few(&self) -> Option<&Few> {
        self.by_gfn.is_empty().then_some(&self.few)
    }

    /// The slot that holds `gfn`.
    #[inline]
    pub(crate) fn find(&self, gfn: Gfn) -> Option<&Memslot> {
        self.last_not_behind(gfn).filter(|slot| slot.holds(gfn))
    }

    /// The last slot that does not begin behind `gfn`.
    #[inline]
    fn last_not_behind(&self, gfn: Gfn) -> Option<&Memslot> {
        if gfn.0 >= node::PAGES {
            return None;
        }
        match self.few() {
            Some(few) => few.last_not_behind(gfn),
            // SAFETY: a set reached by `Slots::published` is not changed until the reader section, or
            // the writers' lock, ends.
            None => unsafe { self.by_gfn.last_not_behind(gfn.0) },
        }
    }

    /// Calls `visit` for every slot that has one of these guest `pages`, in ascending order, until it answers
    /// `false`.
    fn overlapping(&self, pages: &Range<u64>, mut visit: impl FnMut(&Memslot) -> bool) {
        match self.few() {
            Some(few) => _ = few.overlapping::<ByGfn>(pages).all(visit),
            // SAFETY: as in `last_not_behind`.
            None => _ = unsafe { self.by_gfn.overlapping(pages, &mut visit) },
        }
    }

    /// Calls `visit` for every slot with a page in `range`, in ascending order, until it answers `false`.
    pub(crate) fn in_gfns(&self, range: &Range<Gfn>, visit: impl FnMut(&Memslot) -> bool) {
        self.overlapping(&(range.start.0..range.end.0), visit);
    }

    /// The id of the first slot other than `except` that has a page in `range`.
    fn overlap(&self, range: &Range<Gfn>, except: u32) -> Option<u32> {
        let mut first = None;
        self.overlapping(&(range.start.0..range.end.0), |slot| {
            first = (slot.id() != except).then(|| slot.id());
            first.is_none()
        });
        first
    }

    /// Whether a slot has some of these `pages` for its private backing; that slot's id.
    fn private_taken(&self, private: Hva, pages: u64) -> Option<u32> {
        let first = private.0 >> PAGE_SHIFT;
        let mut found = None;
        // SAFETY: as in `last_not_behind`.
        unsafe {
            let pages = first..first + pages;
            self.by_private.overlapping(&pages, &mut |slot| {
                found = Some(slot.id());
                false
            });
        }
        found
    }

    /// Calls `visit` for every slot that `range` of the backing stands behind, with the frames it
    /// stands behind and its place, until it answers `false`: in the order of places, from `from` on. A slot that
    /// has both its backings there is visited for each.
    pub(crate) fn backed_by(
        &self,
        range: &Range<Hva>,
        from: Place,
        mut visit: impl FnMut(&Memslot, Range<Gfn>, Place) -> bool,
    ) {
        let pages = range.start.0 >> PAGE_SHIFT..range.end.0.div_ceil(1 << PAGE_SHIFT);
        let mut visit_shared = |slot: &Memslot| {
            let place = Place::shared(slot);
            place < from || visit(slot, slot.gfns_backed_by(range, slot.backing()), place)
        };
        let more = match self.few() {
            Some(few) => few.overlapping::<ByHva>(&pages).all(&mut visit_shared),
            // SAFETY: as in `last_not_behind`.
            None => unsafe { self.by_hva.overlapping(&pages, &mut visit_shared) },
        };
        if !more {
            return;
        }
        let mut visit_private = |slot: &Memslot| {
            let (place, private) = (Place::private(slot), slot.private());
            place < from
                || private
                    .is_none_or(|private| visit(slot, slot.gfns_backed_by(range, private), place))
        };
        // SAFETY: as in `last_not_behind`.
        unsafe { self.by_private.overlapping(&pages, &mut visit_private) };
    }
}

/// Where a backing of a slot stands among all backings: the shared ones first, each kind by address and id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    private: bool,
    key: u64,
}

impl Place {
    /// Of none; before all others.
    pub(crate) const FIRST: Place = Place {
        private: false,
        key: 0,
    };

    fn shared(slot: &Memslot) -> Self {
        Place {
            private: false,
            key: ByHva::key(slot),
        }
    }

    fn private(slot: &Memslot) -> Self {
        Place {
            private: true,
            key: ByPrivate::key(slot),
        }
    }
}

/// The slots of one address space.
pub(crate) struct Slots {
    current: AtomicPtr<SlotSet>,
    /// Counts [`SlotsChange::replace`]; the writer adds to it.
    changes: Counter,
    writer: FairLock<Writer>,
}

struct Writer {
    /// The set that is not published.
    aside: NonNull<SlotSet>,
    /// What the set aside lacks.
    behind: Option<Behind>,
    by_id: Ids,
    /// How many slots there are.
    len: usize,
    /// In all of them.
    pages: u64,
    stocks: Stocks,
}

// SAFETY: the set aside belongs to the writer, apart from readers of the past; what is in it is
// `Send + Sync`.
unsafe impl Send for Writer {}

/// The last change, which one set has seen.
struct Behind {
    /// When this has passed, nobody reads the set aside.
    generation: u64,
    slot: Option<Replaced>,
}

/// What the index by id knows as `id` now, until the next change has caught up, stands in the place of `old`.
struct Replaced {
    id: u32,
    old: Option<OwnedSlot>,
}

/// Nodes for changes, a stock for each tree.
struct Stocks {
    by_gfn: Stock<ByGfn>,
    by_hva: Stock<ByHva>,
    by_private: Stock<ByPrivate>,
}

impl SlotSet {
    fn empty() -> Self {
        SlotSet {
            by_gfn: Index::EMPTY,
            few: Few::none(),
            by_hva: Index::EMPTY,
            by_private: Index::EMPTY,
            private: PrivateFrames::NONE,
            generation: 0,
            alive: Watch::new(),
            granule: 0,
        }
    }

    /// Gets what it takes to put `new` in the place of a slot, or of nothing, in two sets like this one.
    fn prepare(
        &self,
        replaces: bool,
        new: &Memslot,
        stocks: &mut Stocks,
    ) -> Result<(), OutOfMemory> {
        // SAFETY: nobody changes this set; the caller has it alone.
        unsafe {
            if new.private().is_some() {
                let needs = self.by_private.needs(ByPrivate::key(new));
                stocks.by_private.fill(2 * needs)?;
            }
            // One more than a few find room in one node, as the first slot of a tree does.
            let full = |few: &Few| !replaces && few.is_full();
            if self.few().is_none_or(full) {
                stocks.by_gfn.fill(2 * self.by_gfn.needs(ByGfn::key(new)))?;
                stocks.by_hva.fill(2 * self.by_hva.needs(ByHva::key(new)))?;
            }
        }
        Ok(())
    }

    /// Puts `new` in the place of `old`.
    fn exchange(&mut self, old: Option<&Memslot>, new: Option<&Memslot>, stocks: &mut Stocks) {
        if let (None, Some(slot)) = (old, new) {
            let granule = slot.pages().ilog2();
            self.granule = match self.few().is_some_and(Few::is_empty) {
                true => granule,
                false => self.granule.min(granule),
            };
        }
        if old.is_none() && new.is_some() && self.few().is_some_and(Few::is_full) {
            self.plant(stocks);
        }
        match self.few() {
            Some(_) => self.few.exchange(old, new),
            // SAFETY: `&mut self`: nobody else looks at this set.
            None => unsafe {
                self.by_gfn.exchange(old, new, &mut stocks.by_gfn);
                self.by_hva.exchange(old, new, &mut stocks.by_hva);
            },
        }
        let is_private = |slot: &&Memslot| slot.private().is_some();
        let (old, new) = (old.filter(is_private), new.filter(is_private));
        if old.or(new).is_some() {
            // SAFETY: as above.
            unsafe { self.by_private.exchange(old, new, &mut stocks.by_private) };
        }
    }

    /// The same once more, which `done` has seen already: a few slots are copied sooner than put in order.
    fn repeat(
        &mut self,
        old: Option<&Memslot>,
        new: Option<&Memslot>,
        done: &SlotSet,
        stocks: &mut Stocks,
    ) {
        match (self.few(), done.few()) {
            (Some(_), Some(few)) if self.by_private.is_empty() && done.by_private.is_empty() => {
                self.few.clone_from(few);
                self.granule = done.granule;
            }
            _ => self.exchange(old, new, stocks),
        }
    }

    /// The few slots, as many as there can be, go to trees.
    #[cold]
    #[inline(never)]
    fn plant(&mut self, stocks: &mut Stocks) {
        let few = mem::replace(&mut self.few, Few::none());
        self.by_gfn.plant(few.all(), &mut stocks.by_gfn);
        self.by_hva.plant(few.all(), &mut stocks.by_hva);
    }
}

impl Drop for SlotSet {
    fn drop(&mut self) {
        // SAFETY: `&mut self`.
        unsafe {
            self.by_gfn.clear();
            self.by_hva.clear();
            self.by_private.clear();
        }
    }
}

impl Slots {
    pub(crate) fn new() -> Result<Self, OutOfMemory> {
        let published = heap::boxed(SlotSet::empty())?;
        let aside = heap::boxed(SlotSet::empty())?;
        Ok(Slots {
            current: AtomicPtr::new(Box::into_raw(published)),
            changes: Counter::default(),
            writer: FairLock::new(Writer {
                aside: NonNull::from(Box::leak(aside)),
                behind: None,
                by_id: Ids::EMPTY,
                len: 0,
                pages: 0,
                stocks: Stocks {
                    by_gfn: Stock::EMPTY,
                    by_hva: Stock::EMPTY,
                    by_private: Stock::EMPTY,
                },
            }),
        })
    }

    /// How many slots were created, deleted, moved, or given other flags.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// The set as it is now.
    #[inline(always)]
    pub(crate) fn current<'s>(&'s self, _: InSection<'s>) -> &'s SlotSet {
        // SAFETY: the reader stays in its section as long as the answer is used.
        unsafe { self.published() }
    }

    /// The set as it is now.
    ///
    /// # Safety
    /// - as long as the answer is used, the caller is in a reader section, or holds the writers' lock and
    ///   does not catch up.
    #[inline]
    unsafe fn published(&self) -> &SlotSet {
        // Sequentially consistent, as the reader's word and the swap are: a writer that finds a
        // reader outside knows that it will load the new set when it comes in.
        // SAFETY: the pointer is never null, and a replaced set is changed only when every reader
        // section that could have loaded it has ended, by the holder of the writers' lock.
        let set = unsafe { &*self.current.load(SeqCst) };
        set.alive.used();
        set
    }

    /// Begins a change: whoever holds the result is the only one who changes these slots. Others have their
    /// turns before, in the order in which they called this.
    pub(crate) fn change(&self, wait: impl FnMut(u32)) -> SlotsChange<'_> {
        SlotsChange {
            slots: self,
            writer: self.writer.lock(wait),
        }
    }
}

/// The right to change the slots of one address space.
pub(crate) struct SlotsChange<'a> {
    slots: &'a Slots,
    writer: FairGuard<'a, Writer>,
}

impl SlotsChange<'_> {
    #[inline]
    pub(crate) fn by_id(&self, id: u32) -> Option<&OwnedSlot> {
        self.writer.by_id.get(id)
    }

    pub(crate) fn set(&self) -> &SlotSet {
        // SAFETY: the writers' lock is held; to catch up borrows `self` mutably.
        unsafe { self.slots.published() }
    }

    /// Pages in all slots together.
    pub(crate) fn pages(&self) -> u64 {
        self.writer.pages
    }

    pub(crate) fn len(&self) -> usize {
        self.writer.len
    }

    /// Before the set aside can be changed: waits for those who still read it, and repeats the last
    /// change in it. `wait(round, token)` passes time for the reader with `token`; the caller is inside
    /// no reader section.
    #[inline]
    pub(crate) fn catch_up(&mut self, readers: &Readers, wait: impl FnMut(u32, usize)) {
        let writer = &mut *self.writer;
        let behind = writer.behind.as_ref();
        if behind.is_some_and(|behind| !readers.all_passed(behind.generation)) {
            readers.synchronize(wait);
        }
        let Some(behind) = writer.behind.take() else {
            return;
        };
        // SAFETY: the writers' lock is held, and the set that is changed below is the other one.
        let current = unsafe { self.slots.published() };
        // SAFETY: it is not published, and everybody who was inside when it was has passed.
        let aside = unsafe { writer.aside.as_mut() };
        aside.alive.owned();
        if let Some(Replaced { id, old }) = behind.slot {
            let new = writer.by_id.get(id).map(Deref::deref);
            aside.repeat(old.as_deref(), new, current, &mut writer.stocks);
        }
        aside.private.clone_from(&current.private);
        aside.generation = current.generation;
    }

    /// Publishes a set in which `new` (or nothing) stands in the place of the slot `id`. The caller has
    /// [caught up](Self::catch_up).
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    #[inline]
    pub(crate) fn replace(
        &mut self,
        id: u32,
        new: Option<OwnedSlot>,
        readers: &Readers,
    ) -> Result<(), OutOfMemory> {
        let writer = &mut *self.writer;
        if new.is_some() {
            writer.by_id.make_place(id)?;
        }
        let place = writer.by_id.place(id).expect("of a slot that is there");
        if let Some(new) = &new {
            // The set aside is like this one.
            // SAFETY: the writers' lock is held.
            let set = unsafe { self.slots.published() };
            set.prepare(place.is_some(), new, &mut writer.stocks)?;
        }
        // From here on nothing fails.
        let old = mem::replace(place, new);
        let (was, is) = (old.as_deref(), place.as_deref());
        let pages = |slot: Option<&Memslot>| slot.map_or(0, |slot| slot.pages());
        writer.pages = writer.pages + pages(is) - pages(was);
        writer.len = writer.len + usize::from(is.is_some()) - usize::from(was.is_some());
        let aside = unread(&mut writer.aside, &writer.behind);
        aside.exchange(was, is, &mut writer.stocks);
        self.slots.changes.add(1);
        self.publish(Some(Replaced { id, old }), readers);
        Ok(())
    }

    /// The slot in whose place another one, or nothing, was put by [`replace`](Self::replace).
    pub(crate) fn replaced(&self) -> Option<&OwnedSlot> {
        let last = self.writer.behind.as_ref()?;
        last.slot.as_ref()?.old.as_ref()
    }

    /// Publishes a set with the same slots and other private frames. The caller has
    /// [caught up](Self::catch_up).
    pub(crate) fn set_private(&mut self, private: PrivateFrames, readers: &Readers) {
        let writer = &mut *self.writer;
        unread(&mut writer.aside, &writer.behind).private = private;
        self.publish(None, readers);
    }

    /// Swaps the sets.
    #[inline]
    fn publish(&mut self, slot: Option<Replaced>, readers: &Readers) {
        let writer = &mut *self.writer;
        unread(&mut writer.aside, &writer.behind).generation += 1;
        let replaced = self.slots.current.swap(writer.aside.as_ptr(), SeqCst);
        writer.aside = NonNull::new(replaced).expect("a set is always published");
        writer.behind = Some(Behind {
            // A reader that enters from now on sees the new set; those inside have passed when the next
            // generation has.
            generation: readers.next_generation(),
            slot,
        });
    }
}

/// The set aside, which nobody reads once it has caught up.
fn unread<'a>(aside: &'a mut NonNull<SlotSet>, behind: &Option<Behind>) -> &'a mut SlotSet {
    assert!(behind.is_none(), "a change begins with `catch_up`");
    // SAFETY: as above.
    unsafe { aside.as_mut() }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: no reader is left. Both sets came from boxes, and are two.
        unsafe {
            drop(Box::from_raw(self.current.load(Relaxed)));
            drop(Box::from_raw(self.writer.get_mut().aside.as_ptr()));
        }
    }
}

#[cfg(test)]
mod tests;
