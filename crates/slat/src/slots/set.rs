//! The memslots of one address space at one moment: an index by guest frame, an index by backing address, and the other
//! data that a look-up must see at the same moment. Any thread that has a reference to a set may search it. Only the
//! holder of the writers' lock changes a set ([`super`]).

use core::ops::Range;

use super::index::{ByGfn, ByHva, ByPrivate, Index, Order, Spare};
use super::{Memslot, PrivateFrames};
use crate::addr::{Gfn, Hva, PAGE_SHIFT};
use crate::heap::OutOfMemory;
use crate::sync::atomic::Watch;

/// All slots of one address space at one moment. The struct is aligned so that no cache line contains parts of two
/// sets.
#[repr(align(128))]
pub(crate) struct SlotSet {
    by_gfn: Index<ByGfn>,
    by_hva: Index<ByHva>,
    /// The slots that have private backing.
    by_private: Index<ByPrivate>,
    /// The private frames: the same in all address spaces of a VM.
    pub(crate) private: PrivateFrames,
    /// Every change raises it. An MMIO entry that contains another generation is out of date.
    pub(crate) generation: u64,
    /// A lower bound of log2 of the smallest slot's number of pages.
    pub(crate) smallest: u32,
    alive: Watch,
}

/// Memory that a change of memslots needs in the indexes of both slot sets.
pub(super) struct Spares {
    by_gfn: Spare,
    by_hva: Spare,
    by_private: Spare,
}

impl Spares {
    pub(super) const NONE: Spares = Spares {
        by_gfn: Spare::NONE,
        by_hva: Spare::NONE,
        by_private: Spare::NONE,
    };

    /// Frees memory that a change has not used. Call after the change was made in both sets.
    pub(super) fn trim(&mut self) {
        self.by_gfn.trim();
        self.by_hva.trim();
        self.by_private.trim();
    }
}

impl SlotSet {
    /// A generation that no set has.
    pub(crate) const NEVER: u64 = u64::MAX;

    pub(super) fn new() -> Result<Self, OutOfMemory> {
        Ok(SlotSet {
            by_gfn: Index::new()?,
            by_hva: Index::new()?,
            by_private: Index::new()?,
            private: PrivateFrames::NONE,
            generation: 0,
            smallest: 0,
            alive: Watch::new(),
        })
    }

    /// Tells loom that the caller reads the set.
    #[inline(always)]
    pub(super) fn used(&self) {
        self.alive.used();
    }

    /// Returns the slot that contains `gfn`.
    #[inline]
    pub(crate) fn find(&self, gfn: Gfn) -> Option<&Memslot> {
        self.used();
        self.by_gfn.find(gfn.0)
    }

    /// Calls `visit` for every slot with a page in `range`, in ascending order, until `visit` returns `false`.
    pub(crate) fn in_gfns(&self, range: &Range<Gfn>, mut visit: impl FnMut(&Memslot) -> bool) {
        self.used();
        let pages = range.start.0..range.end.0;
        self.by_gfn.overlapping(&pages, &mut visit);
    }

    /// Returns the id of the first slot that has a page in `range` and for which `leaves` returns `false`.
    pub(super) fn overlap(&self, range: &Range<Gfn>, leaves: impl Fn(u32) -> bool) -> Option<u32> {
        let mut first = None;
        self.in_gfns(range, |slot| {
            first = Some(slot.id()).filter(|id| !leaves(*id));
            first.is_none()
        });
        first
    }

    /// Returns the id of a slot whose private backing contains one of the `size` bytes from `private` on, and for which
    /// `leaves` returns `false`.
    pub(super) fn private_overlap(
        &self,
        private: Hva,
        size: u64,
        leaves: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let first = private.0 >> PAGE_SHIFT;
        let mut found = None;
        let pages = first..first + (size >> PAGE_SHIFT);
        self.by_private.overlapping(&pages, &mut |slot| {
            found = Some(slot.id()).filter(|id| !leaves(*id));
            found.is_none()
        });
        found
    }

    /// Calls `visit` for every slot that a part of `range` backs, with the frames that it backs and the [`Place`] of
    /// the backing, until `visit` returns `false`. Visits slots in the order of their places, beginning with `from`. A
    /// slot is visited twice if parts of both its shared and its private backing are in `range`.
    pub(crate) fn backed_by(
        &self,
        range: &Range<Hva>,
        from: Place,
        mut visit: impl FnMut(&Memslot, Range<Gfn>, Place) -> bool,
    ) {
        self.used();
        let pages = range.start.0 >> PAGE_SHIFT..range.end.0.div_ceil(1 << PAGE_SHIFT);
        let mut visit_shared = |slot: &Memslot| {
            let place = Place::shared(slot);
            place < from || visit(slot, slot.gfns_backed_by(range, slot.backing()), place)
        };
        if !self.by_hva.overlapping(&pages, &mut visit_shared) {
            return;
        }
        let mut visit_private = |slot: &Memslot| {
            let (place, private) = (Place::private(slot), slot.private());
            place < from
                || private
                    .is_none_or(|private| visit(slot, slot.gfns_backed_by(range, private), place))
        };
        self.by_private.overlapping(&pages, &mut visit_private);
    }

    /// Allocates the memory that `edits` need in both slot sets.
    pub(super) fn prepare<'m>(
        &self,
        edits: impl Iterator<Item = (Option<&'m Memslot>, Option<&'m Memslot>)> + Clone,
        spares: &mut Spares,
    ) -> Result<(), OutOfMemory> {
        spares.by_gfn.fill(&self.by_gfn, edits.clone())?;
        spares.by_hva.fill(&self.by_hva, edits.clone())?;
        let private = edits.filter(|(_, new)| new.is_some_and(|new| new.private().is_some()));
        spares.by_private.fill(&self.by_private, private)
    }

    /// Removes `old`, if given, and adds `new`, if given. The caller has called [`Self::prepare`] for this edit.
    pub(super) fn exchange(
        &mut self,
        old: Option<&Memslot>,
        new: Option<&Memslot>,
        spares: &mut Spares,
    ) {
        self.alive.owned();
        if let Some(slot) = new {
            let size = slot.pages().ilog2();
            self.smallest = match self.by_gfn.is_empty() {
                true => size,
                false => self.smallest.min(size),
            };
        }
        self.by_gfn.exchange(old, new, &mut spares.by_gfn);
        self.by_hva.exchange(old, new, &mut spares.by_hva);
        let is_private = |slot: &&Memslot| slot.private().is_some();
        let (old, new) = (old.filter(is_private), new.filter(is_private));
        self.by_private.exchange(old, new, &mut spares.by_private);
    }

    /// Copies all fields from `other` except the slots.
    pub(super) fn clone_rest(&mut self, other: &SlotSet) {
        self.alive.owned();
        self.private.clone_from(&other.private);
        self.generation = other.generation;
    }
}

/// Position of a slot's backing among all backings: first the shared backings, then the private ones, each kind by
/// address and id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    private: bool,
    key: u64,
}

impl Place {
    /// A place before all backings.
    pub(crate) const FIRST: Place = Place {
        private: false,
        key: 0,
    };

    /// Returns the address that backs the first page of `slot`, in the backing (shared or private) to which this place
    /// belongs.
    pub(crate) fn backing_of(self, slot: &Memslot) -> Hva {
        let private = slot.private().filter(|_| self.private);
        private.unwrap_or(slot.backing())
    }

    /// Returns whether `gfn` uses the backing of `slot` to which this place belongs: `attributes` tell which frames are
    /// private. Also returns a range of frames around `gfn` with the same result.
    pub(crate) fn backs(
        self,
        slot: &Memslot,
        gfn: Gfn,
        attributes: &PrivateFrames,
    ) -> (bool, Range<Gfn>) {
        if slot.private().is_none() {
            return (true, slot.gfns());
        }
        let (is_private, alike) = attributes.around(gfn);
        (is_private == self.private, alike)
    }

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
