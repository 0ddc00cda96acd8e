//! The trees of memslots: B+ trees that one thread at a time has alone to change, or any number look at.
//!
//! Who may do which, and when, is the business of their owner ([`super`]). An edit that needs nodes
//! takes them from a [`Stock`] that was filled before ([`Index::needs`]), so no edit fails.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem;
use core::ops::Range;

use super::Memslot;
use super::node::{ByGfn, Child, Item, Node, NodeMut, Open, OpenMut, Order, Room};
use super::node::{free, height, key, len, open, open_mut, page};
use crate::table::OutOfMemory;

/// Nodes with fewer children than this are merged with a neighbour where both fit in one.
const fn low<O: Order>() -> usize {
    O::WIDTH / 4
}

/// Nodes to be, for edits that must not fail.
pub(super) struct Stock<O: Order>(Vec<Room<O>>);

impl<O: Order> Stock<O> {
    pub(super) const EMPTY: Self = Stock(Vec::new());

    /// Makes sure of `nodes`.
    pub(super) fn fill(&mut self, nodes: usize) -> Result<(), OutOfMemory> {
        let missing = nodes.saturating_sub(self.0.len());
        if missing == 0 {
            return Ok(());
        }
        self.0.try_reserve(missing).map_err(|_| OutOfMemory)?;
        for _ in 0..missing {
            self.0.push(Room::new()?);
        }
        Ok(())
    }

    fn take(&mut self) -> Room<O> {
        self.0.pop().expect("filled before the edit")
    }
}

/// Those of the children of a node that have a page in `range`, or may have.
fn within<'a, O: Order, T: Item<O>>(
    node: &Node<'a, T>,
    range: &Range<u64>,
) -> impl Iterator<Item = &'a T> {
    let (start, end) = (range.start, range.end);
    let first = if O::DISJOINT {
        // Of those that begin before the range, only the last can reach into it.
        let not_above = |child: &T| page(child.key()) <= start;
        node.rank(start, not_above).saturating_sub(1)
    } else {
        0
    };
    let begun = node.children()[first..]
        .iter()
        .take_while(move |child| page(child.key()) < end);
    begun.filter(move |child| start < child.end())
}

/// A tree, and how its slots are ordered.
pub(crate) struct Index<O> {
    root: Option<Child>,
    order: PhantomData<O>,
}

impl Index<ByGfn> {
    /// The last slot that does not begin behind the guest frame `page`.
    ///
    /// # Safety
    /// - the tree is not changed while `'a` lasts.
    #[inline]
    pub(super) unsafe fn last_not_behind<'a>(&self, page: u64) -> Option<&'a Memslot> {
        let probe = key(page, 0);
        let mut node = self.root?.node;
        let leaf = loop {
            // SAFETY: the nodes of a tree are whole; the caller's promise.
            match unsafe { open(node) } {
                Open::Inner(inner) => {
                    node = inner.last_not_above(page, |child| child.key <= probe)?.node;
                }
                Open::Leaf(leaf) => break leaf,
            }
        };
        leaf.last_not_above(page, |slot| slot.base().0 <= page)
    }
}

impl<O: Order> Index<O> {
    pub(super) const EMPTY: Self = Index {
        root: None,
        order: PhantomData,
    };

    pub(super) fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Calls `visit` for every slot that has a page in `range`, in the order of keys, until it answers
    /// `false`. Whether all were visited.
    ///
    /// # Safety
    /// - the tree is not changed meanwhile.
    pub(super) unsafe fn overlapping(
        &self,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        // SAFETY: the caller's promise.
        let mut below = |root| unsafe { Self::overlapping_below(root, range, visit) };
        self.root.as_ref().is_none_or(&mut below)
    }

    /// # Safety
    /// - the tree is not changed meanwhile.
    unsafe fn overlapping_below(
        child: &Child,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { open(child.node) } {
            Open::Leaf(leaf) => within::<O, _>(&leaf, range).all(visit),
            // SAFETY: the caller's promise.
            Open::Inner(inner) => within::<O, _>(&inner, range)
                .all(|child| unsafe { Self::overlapping_below(child, range, visit) }),
        }
    }

    /// How many nodes it takes to insert a slot with this key.
    ///
    /// # Safety
    /// - the tree is not changed meanwhile.
    pub(super) unsafe fn needs(&self, key: u64) -> usize {
        let Some(root) = self.root else { return 1 };
        // One for each full node, from the leaf up to the first that is not; if all are, a root, too.
        let (mut full, mut levels) = (0, 0);
        let mut count = |len| {
            full = if len == O::WIDTH { full + 1 } else { 0 };
            levels += 1;
        };
        let mut node = root.node;
        // SAFETY: the caller's promise.
        while let Open::Inner(inner) = unsafe { open(node) } {
            count(inner.children().len());
            let rank = inner.rank(page(key), |child| child.key <= key);
            node = inner.children()[rank.saturating_sub(1)].node;
        }
        // SAFETY: as above.
        count(unsafe { len(node) });
        full + usize::from(full == levels)
    }

    /// From none, becomes a tree of so many slots as one node has room for.
    pub(super) fn plant<const N: usize>(&mut self, slots: &[Memslot; N], stock: &mut Stock<O>) {
        let mut sorted = slots.each_ref();
        sorted.sort_unstable_by_key(|slot| O::key(slot));
        let mut leaf = stock.take().node(0);
        leaf.fill(sorted.into_iter().map(Memslot::copy));
        assert!(self.root.replace(leaf.as_child()).is_none());
    }

    /// Puts `new`, or nothing, in the place of `old`, or of nothing. `old` is in the tree; the key of `new` is
    /// not, unless it is that of `old`.
    ///
    /// # Safety
    /// - nobody else looks at the tree.
    pub(super) unsafe fn exchange(
        &mut self,
        old: Option<&Memslot>,
        new: Option<&Memslot>,
        stock: &mut Stock<O>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if let (Some(root), Some(old), Some(new)) = (&mut self.root, old, new)
                && Self::replace(root, old, new)
            {
                return;
            }
            // In this order: where it takes which nodes is known.
            if let Some(new) = new {
                self.insert(new, stock);
            }
            if let Some(old) = old {
                self.remove(old);
            }
        }
    }

    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn insert(&mut self, slot: &Memslot, stock: &mut Stock<O>) {
        let Some(root) = &mut self.root else {
            let mut leaf = stock.take().node(0);
            leaf.insert(0, slot.copy());
            self.root = Some(leaf.as_child());
            return;
        };
        // SAFETY: the caller's promise.
        if let Some(right) = unsafe { Self::insert_below(root, slot, stock) } {
            // SAFETY: as above.
            let height = unsafe { height(root.node) } + 1;
            let mut above = stock.take().node(height);
            above.insert(0, *root);
            above.insert(1, right);
            *root = above.as_child();
        }
    }

    /// What has come behind `at`, if that was full.
    ///
    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn insert_below(at: &mut Child, slot: &Memslot, stock: &mut Stock<O>) -> Option<Child> {
        let key = O::key(slot);
        at.key = at.key.min(key);
        at.end = at.end.max(O::end(slot));
        // SAFETY: the caller's promise.
        match unsafe { open_mut::<O>(at.node) } {
            OpenMut::Leaf(leaf) => {
                let rank = leaf.rank(key);
                Self::put(at, leaf, rank, slot.copy(), stock)
            }
            OpenMut::Inner(mut inner) => {
                let below = inner.place(key);
                // SAFETY: the caller's promise.
                let right = inner.change(below, |child| unsafe {
                    Self::insert_below(child, slot, stock)
                })?;
                Self::put(at, inner, below + 1, right, stock)
            }
        }
    }

    /// Puts `item` behind the first `rank` children of `at`. What has come behind it, if that was full.
    fn put<T: Item<O>>(
        at: &mut Child,
        mut left: NodeMut<'_, O, T>,
        rank: usize,
        item: T,
        stock: &mut Stock<O>,
    ) -> Option<Child> {
        if !left.is_full() {
            left.insert(rank, item);
            return None;
        }
        // Slots are often added in ascending order: leave the left node nearly full then.
        let keeps = if rank == O::WIDTH {
            O::WIDTH - low::<O>()
        } else {
            O::WIDTH / 2
        };
        let mut right = left.split(keeps, stock.take());
        if rank <= keeps {
            left.insert(rank, item);
        } else {
            right.insert(rank - keeps, item);
        }
        at.end = left.end();
        Some(right.as_child())
    }

    /// Puts `new` where `old` stands, if it would stand there, too: a slot that changes its flags, or moves
    /// without passing another. Whether it did.
    ///
    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn replace(at: &mut Child, old: &Memslot, new: &Memslot) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { open_mut::<O>(at.node) } {
            OpenMut::Leaf(mut leaf) => {
                let place = leaf.rank(O::key(old)) - 1;
                if !leaf.fits(place, O::key(new)) {
                    return false;
                }
                leaf.change(place, |slot| *slot = new.copy());
                Self::replaced(at, &leaf, old, new);
            }
            OpenMut::Inner(mut inner) => {
                let place = inner.place(O::key(old));
                if !inner.is_place(place, O::key(new)) {
                    return false;
                }
                // SAFETY: the caller's promise.
                if !inner.change(place, |child| unsafe { Self::replace(child, old, new) }) {
                    return false;
                }
                Self::replaced(at, &inner, old, new);
            }
        }
        true
    }

    /// `new` stands below `at`, which is this node, in the place of `old`.
    fn replaced<T: Item<O>>(
        at: &mut Child,
        node: &NodeMut<'_, O, T>,
        old: &Memslot,
        new: &Memslot,
    ) {
        at.end = at.end.max(O::end(new));
        if O::key(new) != O::key(old) {
            Self::without(at, node, old);
        }
    }

    /// `gone` is not below `at` any more, which is this node.
    fn without<T: Item<O>>(at: &mut Child, node: &NodeMut<'_, O, T>, gone: &Memslot) {
        if let Some(first) = node.children().first() {
            at.key = first.key();
        }
        if at.end == O::end(gone) {
            at.end = node.end();
        }
    }

    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn remove(&mut self, slot: &Memslot) {
        let root = self.root.as_mut().expect("the slot is in the tree");
        // SAFETY: the caller's promise.
        unsafe {
            Self::remove_below(root, slot);
            // A root with one child is replaced by it, one without goes.
            while let OpenMut::Inner(inner) = open_mut::<O>(root.node)
                && let [only] = inner.children()
            {
                let above = mem::replace(&mut root.node, only.node);
                free::<O>(above);
            }
            if len(root.node) == 0 {
                free::<O>(root.node);
                self.root = None;
            }
        }
    }

    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn remove_below(at: &mut Child, slot: &Memslot) {
        let key = O::key(slot);
        // SAFETY: the caller's promise.
        match unsafe { open_mut::<O>(at.node) } {
            OpenMut::Leaf(mut leaf) => {
                let place = leaf.rank(key) - 1;
                debug_assert_eq!(O::key(&leaf.children()[place]), key);
                leaf.remove(place);
                Self::without(at, &leaf, slot);
            }
            OpenMut::Inner(mut inner) => {
                let place = inner.place(key);
                // SAFETY: the caller's promise.
                unsafe {
                    inner.change(place, |child| Self::remove_below(child, slot));
                    Self::mend(&mut inner, place);
                }
                Self::without(at, &inner, slot);
            }
        }
    }

    /// A child that has become empty goes; one that has become small is merged with a neighbour, if the
    /// two do not fill a node.
    ///
    /// # Safety
    /// - as [`Index::exchange`].
    unsafe fn mend(inner: &mut NodeMut<'_, O, Child>, place: usize) {
        let here = inner.children()[place];
        // SAFETY: the caller's promise; what is freed is in the tree no more.
        unsafe {
            if len(here.node) == 0 {
                inner.remove(place);
                free::<O>(here.node);
                return;
            }
            let first = place.saturating_sub(1);
            let Some(&[left, right]) = inner.children().get(first..first + 2) else {
                return;
            };
            if len(here.node) >= low::<O>() || len(left.node) + len(right.node) >= O::WIDTH {
                return;
            }
            match (open_mut::<O>(left.node), open_mut::<O>(right.node)) {
                (OpenMut::Leaf(mut left), OpenMut::Leaf(right)) => left.append(right),
                (OpenMut::Inner(mut left), OpenMut::Inner(right)) => left.append(right),
                _ => unreachable!("the children of a node have one height"),
            }
            inner.change(first, |child| child.end = left.end.max(right.end));
            inner.remove(first + 1);
            free::<O>(right.node);
        }
    }

    /// Frees all nodes.
    ///
    /// # Safety
    /// - as [`Index::exchange`].
    pub(super) unsafe fn clear(&mut self) {
        /// # Safety
        /// - as above.
        unsafe fn free_below<O: Order>(child: &Child) {
            // SAFETY: the caller's promise; children go before their parent.
            unsafe {
                if let OpenMut::Inner(inner) = open_mut::<O>(child.node) {
                    inner
                        .children()
                        .iter()
                        .for_each(|child| free_below::<O>(child));
                }
                free::<O>(child.node);
            }
        }
        if let Some(root) = self.root.take() {
            // SAFETY: the caller's promise.
            unsafe { free_below::<O>(&root) };
        }
    }
}
