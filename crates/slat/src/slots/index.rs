//! An index of memslots, sorted by one key. An index contains all slots, or only those that have this key.
//!
//! The slots are stored in sorted leaves of up to [`LEAF`], and the leaves in a sorted *directory*. A look-up finds the
//! leaf by a binary search in the directory, and the slot in the leaf by interpolation. Among 32,764 slots it takes 80
//! to 100 ns (with a second binary search instead, 120 to 150 ns). A change moves slots within one leaf in memory. If
//! it splits or merges a leaf, it also moves directory entries: for 32,764 slots the directory has 1,000 to 2,000 of
//! them. Deleting one of these slots, or creating it again, takes 0.5 µs. If each change copied an array of all slots,
//! it would take 30 µs.
//!
//! An insertion may need a leaf or a larger directory. Their memory comes from a [`Spare`]. [`Spare::fill`] allocates
//! it in advance for all edits of a change, so no edit fails.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ops::Range;

use super::Memslot;
use crate::addr::{Gfn, Hva, PAGE_SHIFT};
use crate::heap::OutOfMemory;

/// The largest number of slots in a leaf.
pub(super) const LEAF: usize = if cfg!(loom) { 4 } else { 32 };
/// A leaf with fewer slots is merged with a neighbour, if all their slots fit in one leaf.
const LOW: usize = LEAF / 4;
/// The number of leaves of the smallest directory.
const DIRECTORY: usize = if cfg!(loom) { 1 } else { 4 };

/// All page numbers are below this limit, in every [`Order`].
pub(super) const PAGES: u64 = (1 << 48) - 1;

/// A sort order of slots: by guest frame, or by backing address.
pub(super) trait Order {
    /// Returns the number of the slot's first page, below [`PAGES`]: of the first guest frame, or of the first backing
    /// page, depending on the order. Guest frames have the size of the tables' granule. Backing pages have 4 KiB, which
    /// divides every granule.
    fn page(slot: &Memslot) -> u64;

    /// Returns the number of pages of the slot, of the same size as in [`Self::page`].
    fn pages(slot: &Memslot) -> u64;

    /// Returns the sort key. It contains the slot's id, because slots may share pages of their backing: so the key is
    /// unique.
    fn key(slot: &Memslot) -> u64 {
        debug_assert!(Self::page(slot) < PAGES && slot.id() >> 16 == 0);
        Self::page(slot) << 16 | u64::from(slot.id())
    }

    /// Returns the number of the page after the slot's last one.
    fn end(slot: &Memslot) -> u64 {
        Self::page(slot) + Self::pages(slot)
    }
}

/// The order by guest frame.
pub(super) enum ByGfn {}

/// The order by backing address.
pub(super) enum ByHva {}

/// The order by address of the private backing. Every slot in such an index has private backing.
pub(super) enum ByPrivate {}

impl Order for ByGfn {
    fn page(slot: &Memslot) -> u64 {
        slot.base().0
    }

    fn pages(slot: &Memslot) -> u64 {
        slot.pages()
    }
}

impl Order for ByHva {
    fn page(slot: &Memslot) -> u64 {
        slot.backing().0 >> PAGE_SHIFT
    }

    fn pages(slot: &Memslot) -> u64 {
        slot.size() >> PAGE_SHIFT
    }
}

impl Order for ByPrivate {
    fn page(slot: &Memslot) -> u64 {
        slot.private().unwrap_or(Hva(u64::MAX)).0 >> PAGE_SHIFT
    }

    fn pages(slot: &Memslot) -> u64 {
        slot.size() >> PAGE_SHIFT
    }
}

/// Slots with neighbouring keys, and their directory entry.
struct Leaf {
    /// The key of the first slot in the leaf.
    first: u64,
    /// The largest [`Order::end`] of the slots.
    end: u64,
    /// The largest [`Order::end`] of the slots of this leaf and of all leaves before it.
    reach: u64,
    /// The slots in ascending order, in memory that is allocated for [`LEAF`] slots. An index with several leaves has
    /// no empty leaf.
    slots: Vec<Memslot>,
}

impl Leaf {
    fn new<O: Order>(slots: Vec<Memslot>, reach: u64) -> Self {
        let mut leaf = Leaf {
            first: 0,
            end: 0,
            reach,
            slots,
        };
        leaf.update_first::<O>();
        leaf.update_end::<O>();
        leaf
    }

    fn is_full(&self) -> bool {
        self.slots.len() == LEAF
    }

    fn update_first<O: Order>(&mut self) {
        self.first = self.slots.first().map_or(0, O::key);
    }

    fn update_end<O: Order>(&mut self) {
        self.end = self.slots.iter().map(O::end).max().unwrap_or(0);
    }

    /// Returns the number of slots with a key below `key`.
    #[inline]
    fn rank<O: Order>(&self, key: u64) -> usize {
        match self.slots.last() {
            // Fast path: slots are often added in ascending order.
            Some(last) if O::key(last) < key => self.slots.len(),
            _ => self.slots.partition_point(|slot| O::key(slot) < key),
        }
    }

    /// Tells loom that the caller is about to change the slots.
    fn owned(&self) {
        self.slots.iter().for_each(Memslot::owned);
    }
}

/// Memory that is allocated in advance for edits of an index in both slot sets.
pub(super) struct Spare {
    leaves: Vec<Vec<Memslot>>,
    directories: [Option<Directory>; 2],
}

/// Memory for a larger directory of an index.
struct Directory {
    /// The number of leaves for which the memory was allocated. The vector's own capacity is not used: the allocator
    /// may have rounded it up for only one of the two sets.
    capacity: usize,
    leaves: Vec<Leaf>,
}

impl Spare {
    pub(super) const NONE: Spare = Spare {
        leaves: Vec::new(),
        directories: [None, None],
    };

    /// Allocates the memory that `edits` need in both sets' copies of `index`. Each edit is the slot to remove, if any,
    /// and the slot to add, if any.
    pub(super) fn fill<'m, O: Order>(
        &mut self,
        index: &Index<O>,
        edits: impl Iterator<Item = (Option<&'m Memslot>, Option<&'m Memslot>)>,
    ) -> Result<(), OutOfMemory> {
        let splits = index.most_splits(edits);
        while self.leaves.len() < 2 * splits {
            self.leaves.try_reserve(1).map_err(|_| OutOfMemory)?;
            self.leaves.push(memory(LEAF)?);
        }
        let needed = index.leaves.len() + splits;
        if needed <= index.directory {
            return Ok(());
        }
        // Allocate two directories of the same size, so that those of both sets become full at the same time.
        let [left, right] = (self.directories.each_ref())
            .map(|spare| spare.as_ref().map(|directory| directory.capacity));
        if left != right || left < Some(needed) {
            self.directories = [None, None];
            let capacity = needed.next_power_of_two().max(2 * index.directory);
            let larger = || {
                let leaves = memory(capacity)?;
                Ok(Some(Directory { capacity, leaves }))
            };
            self.directories = [larger()?, larger()?];
        }
        Ok(())
    }

    /// Frees leaves that the edits of a change have not used. Call after both sets have been edited.
    pub(super) fn trim(&mut self) {
        const KEPT: usize = 2;
        if self.leaves.len() > KEPT {
            self.leaves = Vec::new();
        }
    }
}

fn memory<T>(capacity: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut memory = Vec::new();
    let reserved = memory.try_reserve_exact(capacity);
    reserved.map(|()| memory).map_err(|_| OutOfMemory)
}

/// The slots of a set in the order `O`.
pub(super) struct Index<O> {
    /// The leaves in ascending order of [`Leaf::first`]. There is at least one leaf.
    leaves: Vec<Leaf>,
    /// The number of leaves for which the directory has memory. It is the same in both sets.
    directory: usize,
    order: PhantomData<O>,
}

impl Index<ByGfn> {
    /// Returns the slot that contains `page`.
    #[inline]
    pub(super) fn find(&self, page: u64) -> Option<&Memslot> {
        let begun = self.leaves.partition_point(|leaf| leaf.first >> 16 <= page);
        let leaf = self.leaves.get(begun.wrapping_sub(1))?;
        // In the order by guest frame, slots do not share pages, so the last slot of the leaf has the largest end.
        if leaf.end <= page {
            return None;
        }
        // Interpolate. If all slots have the same size and distance, the first guess is right; otherwise a few steps
        // follow.
        let first = leaf.first >> 16;
        let part = (page - first) * leaf.slots.len() as u64 / (leaf.end - first);
        let mut at = part as usize;
        while page < ByGfn::page(&leaf.slots[at]) {
            at -= 1;
        }
        while let Some(next) = leaf.slots.get(at + 1)
            && ByGfn::page(next) <= page
        {
            at += 1;
        }
        Some(&leaf.slots[at]).filter(|slot| slot.holds(Gfn(page)))
    }
}

impl<O: Order> Index<O> {
    /// Makes an index with memory for [`LEAF`] slots.
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let mut leaves = memory(DIRECTORY)?;
        leaves.push(Leaf::new::<O>(memory(LEAF)?, 0));
        Ok(Index {
            leaves,
            directory: DIRECTORY,
            order: PhantomData,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leaves[0].slots.is_empty()
    }

    /// Calls `visit` for every slot with a page in `range`, in the order of keys, until `visit` returns `false`.
    /// Returns whether all these slots were visited.
    pub(super) fn overlapping(
        &self,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        let first = self
            .leaves
            .partition_point(|leaf| leaf.reach <= range.start);
        let begun = self.leaves[first..]
            .iter()
            .take_while(|leaf| leaf.first >> 16 < range.end);
        let mut leaves = begun.filter(|leaf| range.start < leaf.end);
        leaves.all(|leaf| {
            let begun = leaf
                .slots
                .iter()
                .take_while(|slot| O::page(slot) < range.end);
            let mut slots = begun.filter(|slot| range.start < O::end(slot));
            slots.all(&mut *visit)
        })
    }

    /// Removes `old`, if given, and adds `new`, if given. `old` must be in the index. No other slot in the index may
    /// have the key of `new`. `spare` was [filled](Spare::fill) for this edit.
    pub(super) fn exchange(
        &mut self,
        old: Option<&Memslot>,
        new: Option<&Memslot>,
        spare: &mut Spare,
    ) {
        if let (Some(old), Some(new)) = (old, new)
            && let Some(at) = self.common_leaf(old, new)
        {
            return self.exchange_in(at, old, new);
        }
        // Add `new` first, while the leaves are still the same as when `spare` was filled.
        if let Some(new) = new {
            self.insert(new, spare);
        }
        if let Some(old) = old {
            self.remove(old);
        }
    }

    /// Returns the index of the leaf that contains the slot with the key `key`, if the index has such a slot.
    fn leaf_of(&self, key: u64) -> usize {
        let begun = self.leaves.partition_point(|leaf| leaf.first <= key);
        begun.saturating_sub(1)
    }

    /// Returns the index of the leaf for a new slot with the key `key`. If the key is between two leaves, chooses a
    /// leaf with space.
    fn leaf_for(&self, key: u64) -> usize {
        let at = self.leaf_of(key);
        let leaf = &self.leaves[at];
        let is_next = leaf.is_full()
            && leaf.rank::<O>(key) == LEAF
            && self.leaves.get(at + 1).is_some_and(|next| !next.is_full());
        at + usize::from(is_next)
    }

    /// Returns the largest number of leaves that `edits` ([`Spare::fill`]) can split.
    fn most_splits<'m>(
        &self,
        mut edits: impl Iterator<Item = (Option<&'m Memslot>, Option<&'m Memslot>)>,
    ) -> usize {
        let Some((old, new)) = edits.next() else {
            return 0;
        };
        let Some(second) = edits.next() else {
            // Exactly one edit: it finds the leaves as they are now, so look whether it needs a split.
            let stays = |new: &Memslot| old.is_some_and(|old| self.common_leaf(old, new).is_some());
            let splits =
                |new: &Memslot| !stays(new) && self.leaves[self.leaf_for(O::key(new))].is_full();
            return usize::from(new.is_some_and(splits));
        };
        // Several edits: later edits find leaves that earlier edits have changed, so count a split for each slot that
        // is added.
        let others = edits.filter(|(_, new)| new.is_some()).count();
        others + usize::from(new.is_some()) + usize::from(second.1.is_some())
    }

    /// Returns the index of the leaf that contains `old`, if `new` belongs to the same leaf because their keys are
    /// close. Otherwise `None`.
    fn common_leaf(&self, old: &Memslot, new: &Memslot) -> Option<usize> {
        let [old, new] = [old, new].map(|slot| self.leaf_of(O::key(slot)));
        (old == new).then_some(old)
    }

    /// Replaces `old` by `new` within the leaf `at`.
    fn exchange_in(&mut self, at: usize, old: &Memslot, new: &Memslot) {
        let leaf = &mut self.leaves[at];
        leaf.owned();
        let [from, to] = [old, new].map(|slot| leaf.rank::<O>(O::key(slot)));
        leaf.slots[from] = new.copy();
        if from < to {
            leaf.slots[from..to].rotate_left(1);
        } else {
            leaf.slots[to..=from].rotate_right(1);
        }
        leaf.update_first::<O>();
        if O::end(old) != O::end(new) {
            leaf.update_end::<O>();
            self.update_reach(at);
        }
    }

    fn insert(&mut self, slot: &Memslot, spare: &mut Spare) {
        let key = O::key(slot);
        let mut at = self.leaf_for(key);
        if self.leaves[at].is_full() {
            at = self.split(at, key, spare);
        }
        let leaf = &mut self.leaves[at];
        leaf.owned();
        leaf.slots.insert(leaf.rank::<O>(key), slot.copy());
        leaf.update_first::<O>();
        leaf.end = leaf.end.max(O::end(slot));
        self.update_reach(at);
    }

    /// Splits the leaf `at`. Returns the index of the leaf for a new slot with the key `key`.
    #[cold]
    fn split(&mut self, at: usize, key: u64, spare: &mut Spare) -> usize {
        let filled = "`Spare::fill` was called before";
        if self.leaves.len() == self.directory {
            let larger = spare.directories.iter_mut().find_map(Option::take);
            let mut larger = larger.expect(filled);
            larger.leaves.append(&mut self.leaves);
            self.leaves = larger.leaves;
            self.directory = larger.capacity;
        }
        let leaf = &mut self.leaves[at];
        leaf.owned();
        let rank = leaf.rank::<O>(key);
        // If the new slot is the last, leave this leaf full: slots are often added in ascending order.
        let kept = if rank == LEAF { LEAF } else { LEAF / 2 };
        let mut moved = spare.leaves.pop().expect(filled);
        moved.extend(leaf.slots.drain(kept..));
        leaf.update_end::<O>();
        let right = Leaf::new::<O>(moved, leaf.reach);
        self.leaves.insert(at + 1, right);
        self.update_reach(at);
        at + usize::from(kept <= rank)
    }

    fn remove(&mut self, slot: &Memslot) {
        let at = self.leaf_of(O::key(slot));
        let leaf = &mut self.leaves[at];
        leaf.owned();
        let removed = leaf.slots.remove(leaf.rank::<O>(O::key(slot)));
        debug_assert_eq!(removed.id(), slot.id());
        leaf.update_first::<O>();
        if leaf.end == O::end(slot) {
            leaf.update_end::<O>();
        }
        let is_low = leaf.slots.len() < LOW;
        self.update_reach(at);
        if is_low {
            self.merge(at);
        }
    }

    /// Merges the leaf `at` with a neighbour, if there is a neighbour, and one leaf has space for the slots of both
    /// leaves and one more slot.
    fn merge(&mut self, at: usize) {
        let left = at.saturating_sub(1);
        let Some([left, right]) = self.leaves.get_mut(left..left + 2) else {
            return;
        };
        // If there are other leaves, no leaf may be empty: a look-up in an empty leaf would not find the slot in the
        // leaf before it.
        let is_empty = left.slots.is_empty() || right.slots.is_empty();
        if is_empty || left.slots.len() + right.slots.len() < LEAF {
            left.owned();
            right.owned();
            left.slots.append(&mut right.slots);
            left.update_first::<O>();
            left.end = left.end.max(right.end);
            left.reach = right.reach;
            self.leaves.remove(at.max(1));
        }
    }

    /// Recomputes [`Leaf::reach`] from the leaf `at` on. Call after changing the end of the leaf `at`.
    fn update_reach(&mut self, at: usize) {
        let before = at.checked_sub(1).map(|before| &self.leaves[before]);
        let mut reach = before.map_or(0, |leaf| leaf.reach);
        for leaf in &mut self.leaves[at..] {
            reach = reach.max(leaf.end);
            if leaf.reach == reach {
                break;
            }
            leaf.reach = reach;
        }
    }
}
