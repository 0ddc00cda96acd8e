//! A few slots, which are searched as quickly as a tree is, and changed sooner.

use core::ops::Range;

use super::Memslot;
use super::node::{ByHva, Order};
use crate::addr::Gfn;

/// By guest frame, in the set itself: a VM with a few slots has no tree.
pub(super) struct Few {
    len: usize,
    /// The first `len` of them ascend; the others say nothing.
    slots: [Memslot; Few::MOST],
}

impl Few {
    /// With one more, one node has room for all.
    const MOST: usize = ByHva::WIDTH - 1;

    pub(super) fn none() -> Self {
        Few {
            len: 0,
            slots: core::array::from_fn(|_| Memslot::nowhere()),
        }
    }

    #[inline]
    pub(super) fn slots(&self) -> &[Memslot] {
        &self.slots[..self.len]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == Self::MOST
    }

    /// The slots, if it is full.
    pub(super) fn all(&self) -> &[Memslot; Few::MOST] {
        assert!(self.is_full());
        &self.slots
    }

    /// The last slot that does not begin behind `gfn`.
    #[inline]
    pub(super) fn last_not_behind(&self, gfn: Gfn) -> Option<&Memslot> {
        let rank = self.slots().partition_point(|slot| slot.base() <= gfn);
        self.slots().get(rank.wrapping_sub(1))
    }

    /// Those that have one of these `pages`, in the order of `O`.
    pub(super) fn overlapping<O: Order>(
        &self,
        pages: &Range<u64>,
    ) -> impl Iterator<Item = &Memslot> {
        let (start, end) = (pages.start, pages.end);
        let overlaps = |slot: &Memslot| start < O::end(slot) && O::page(slot) < end;
        let mut order = [0; Few::MOST];
        let mut count = 0;
        for (i, slot) in self
            .slots()
            .iter()
            .enumerate()
            .filter(|(_, slot)| overlaps(slot))
        {
            // They are few, and fewer lie in the range: inserted where they belong.
            let key = |at: usize| O::key(&self.slots[order[at] as usize]);
            let mut at = count;
            while at > 0 && O::key(slot) < key(at - 1) {
                at -= 1;
            }
            order.copy_within(at..count, at + 1);
            order[at] = i as u8;
            count += 1;
        }
        let order = order.into_iter().take(count);
        order.map(|i| &self.slots[i as usize])
    }

    /// Becomes like another one.
    pub(super) fn clone_from(&mut self, other: &Few) {
        for (slot, other) in self.slots.iter_mut().zip(other.slots()) {
            slot.owned();
            *slot = other.copy();
        }
        self.len = other.len;
    }

    /// Puts `new` in the place of `old`; for one more there is room.
    pub(super) fn exchange(&mut self, old: Option<&Memslot>, new: Option<&Memslot>) {
        let base = |slot: Option<&Memslot>| slot.map_or(Gfn(u64::MAX), Memslot::base);
        let (old_base, new_base) = (base(old), base(new));
        // The place that becomes free, and the one where `new` is wanted: a slot that is not there is behind
        // all others.
        let (mut from, mut to) = (0, 0);
        for slot in self.slots() {
            slot.owned();
            from += usize::from(slot.base() <= old_base);
            to += usize::from(slot.base() <= new_base);
        }
        if old.is_some() {
            from -= 1;
            to -= usize::from(old_base <= new_base);
        }
        if let Some(new) = new {
            self.slots[from] = new.copy();
        }
        if from < to {
            self.slots[from..=to].rotate_left(1);
        } else {
            self.slots[to..=from].rotate_right(1);
        }
        self.len = self.len + usize::from(new.is_some()) - usize::from(old.is_some());
    }
}
