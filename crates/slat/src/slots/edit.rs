//! Edits of the trees of memslots: an edit copies the path it changes, the old version stays whole for
//! those who are reading it.
//!
//! Nothing here frees what a reader may see: an edit lists what it made and what it replaced, and its
//! owner decides when ([`super`]).

use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;
use core::slice;

use super::node::{self, Child, Header, Index, Inner, Leaf, Open, Order, Parts, open};
use super::{Memslot, OwnedSlot};
use crate::table::OutOfMemory;

/// Nodes with fewer children than this are merged with a neighbour when both fit in one.
const fn low<O: Order>() -> usize {
    O::WIDTH / 4
}

/// What a change of the slot set made and replaced. Capacity is reserved first, so that noting a
/// node cannot fail.
pub(super) struct Edit {
    made: Vec<NonNull<Header>>,
    replaced: Vec<NonNull<Header>>,
}

impl Edit {
    /// More than four edits of a tree of 2^16 slots can touch.
    const CAPACITY: usize = 96;

    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let (mut made, mut replaced) = (Vec::new(), Vec::new());
        for list in [&mut made, &mut replaced] {
            list.try_reserve_exact(Self::CAPACITY)
                .map_err(|_| OutOfMemory)?;
        }
        Ok(Edit { made, replaced })
    }

    /// Frees what was made: the change does not take place.
    pub(super) fn abort(self) {
        for node in self.made {
            // SAFETY: never published.
            unsafe { node::free(node) };
        }
    }

    /// The change was published; what remains is what it replaced, to be freed by [`node::free`] when no
    /// reader can hold it any more.
    pub(super) fn commit(self) -> impl Iterator<Item = NonNull<Header>> {
        self.replaced.into_iter()
    }

    /// How many nodes `commit` would give.
    pub(super) fn replaced(&self) -> usize {
        self.replaced.len()
    }

    fn leaf<O: Order>(&mut self, slots: Parts<'_, Memslot>) -> Result<Child, OutOfMemory> {
        let made = Leaf::make::<O>(slots)?;
        self.made.push(made.node);
        Ok(made)
    }

    fn inner(&mut self, height: u8, children: Parts<'_, Child>) -> Result<Child, OutOfMemory> {
        let made = Inner::make(height, children)?;
        self.made.push(made.node);
        Ok(made)
    }

    /// One node of `items`, made by `make`, or two if they are too many. `at` is what has changed.
    fn one_or_two<O: Order, T>(
        &mut self,
        items: Parts<'_, T>,
        at: usize,
        make: impl Fn(&mut Self, Parts<'_, T>) -> Result<Child, OutOfMemory>,
    ) -> Result<(Child, Option<Child>), OutOfMemory> {
        let len: usize = items.iter().map(|part| part.len()).sum();
        if len <= O::WIDTH {
            return Ok((make(self, items)?, None));
        }
        // Slots are often added in ascending order: leave the left node nearly full then.
        let mut left = if at + 1 >= O::WIDTH {
            O::WIDTH - low::<O>()
        } else {
            len / 2
        };
        let halves = items.map(|part| {
            let halves = part.split_at(left.min(part.len()));
            left -= halves.0.len();
            halves
        });
        let left = make(self, halves.map(|(left, _)| left))?;
        let right = make(self, halves.map(|(_, right)| right))?;
        Ok((left, Some(right)))
    }

    /// `new`, or nothing, in the place of `old`, or of nothing.
    ///
    /// # Safety
    /// - as [`Edit::insert`], [`Edit::remove`], [`Edit::replace`].
    pub(super) unsafe fn exchange<O: Order>(
        &mut self,
        index: Index<O>,
        old: Option<&OwnedSlot>,
        new: Option<&OwnedSlot>,
    ) -> Result<Index<O>, OutOfMemory> {
        // SAFETY: the caller's promise.
        unsafe {
            match (old, new) {
                (Some(old), Some(new)) => self.replace(index, old, new),
                (Some(old), None) => self.remove(index, old),
                (None, Some(new)) => self.insert(index, new),
                (None, None) => Ok(index),
            }
        }
    }

    /// Inserts a slot; its key is not in the tree.
    ///
    /// # Safety
    /// - the tree is whole and nothing of it is freed meanwhile.
    unsafe fn insert<O: Order>(
        &mut self,
        index: Index<O>,
        slot: &Memslot,
    ) -> Result<Index<O>, OutOfMemory> {
        let Some(root) = index.root else {
            let only = self.leaf::<O>([slice::from_ref(slot), &[], &[]])?;
            return Ok(Index::new(Some(only.node)));
        };
        // SAFETY: the caller's promise.
        let (left, right) = unsafe { self.insert_below::<O>(root, slot)? };
        let Some(right) = right else {
            return Ok(Index::new(Some(left.node)));
        };
        // SAFETY: made just now.
        let height = unsafe { left.node.as_ref().height } + 1;
        let root = self.inner(height, [&[left, right], &[], &[]])?;
        Ok(Index::new(Some(root.node)))
    }

    /// # Safety
    /// - as [`Edit::insert`].
    unsafe fn insert_below<O: Order>(
        &mut self,
        node: NonNull<Header>,
        slot: &Memslot,
    ) -> Result<(Child, Option<Child>), OutOfMemory> {
        self.replaced.push(node);
        // SAFETY: the caller's promise.
        match unsafe { open(node) } {
            Open::Leaf(leaf) => {
                let at = leaf.rank::<O>(slot);
                let (before, behind) = leaf.children().split_at(at);
                let slots = [before, slice::from_ref(slot), behind];
                self.one_or_two::<O, _>(slots, at, Self::leaf::<O>)
            }
            Open::Inner(inner) => {
                let at = inner.place::<O>(slot);
                let children = inner.children();
                // SAFETY: a child of a whole node is whole; the caller's promise.
                let new = match unsafe { self.insert_below::<O>(children[at].node, slot)? } {
                    (left, None) => &[left][..],
                    (left, Some(right)) => &[left, right],
                };
                let children = [&children[..at], new, &children[at + 1..]];
                let height = inner.height();
                self.one_or_two::<O, _>(children, at + 1, |edit, children| {
                    edit.inner(height, children)
                })
            }
        }
    }

    /// Puts `new` in the place of `old`, which is in the tree; the key of `new` is not, unless it is that of
    /// `old`. A slot that changes its flags, or moves without passing another, costs one path.
    ///
    /// # Safety
    /// - as [`Edit::insert`].
    unsafe fn replace<O: Order>(
        &mut self,
        index: Index<O>,
        old: &Memslot,
        new: &Memslot,
    ) -> Result<Index<O>, OutOfMemory> {
        let root = index
            .root
            .expect("a slot is replaced in the tree that holds it");
        // SAFETY: the caller's promise; what `remove` gives is whole.
        unsafe {
            match self.replace_below::<O>(root, old, new)? {
                Some(child) => Ok(Index::new(Some(child.node))),
                None => {
                    let without = self.remove(index, old)?;
                    self.insert(without, new)
                }
            }
        }
    }

    /// `None`: there is another slot between the two, or may be.
    ///
    /// # Safety
    /// - as [`Edit::replace`].
    unsafe fn replace_below<O: Order>(
        &mut self,
        node: NonNull<Header>,
        old: &Memslot,
        new: &Memslot,
    ) -> Result<Option<Child>, OutOfMemory> {
        // SAFETY: the caller's promise.
        let made = match unsafe { open(node) } {
            Open::Leaf(leaf) => {
                let at = leaf.rank::<O>(old) - 1;
                if !(at..=at + 1).contains(&leaf.rank::<O>(new)) {
                    return Ok(None);
                }
                let (before, behind) = leaf.children().split_at(at);
                self.leaf::<O>([before, slice::from_ref(new), &behind[1..]])?
            }
            Open::Inner(inner) => {
                let at = inner.place::<O>(old);
                if inner.place::<O>(new) != at {
                    return Ok(None);
                }
                let children = inner.children();
                // SAFETY: a child of a whole node is whole; the caller's promise.
                let below = unsafe { self.replace_below::<O>(children[at].node, old, new)? };
                let Some(below) = below else { return Ok(None) };
                let below = slice::from_ref(&below);
                self.inner(
                    inner.height(),
                    [&children[..at], below, &children[at + 1..]],
                )?
            }
        };
        self.replaced.push(node);
        Ok(Some(made))
    }

    /// Removes `slot`, which is in the tree.
    ///
    /// # Safety
    /// - as [`Edit::insert`].
    unsafe fn remove<O: Order>(
        &mut self,
        index: Index<O>,
        slot: &Memslot,
    ) -> Result<Index<O>, OutOfMemory> {
        let root = index
            .root
            .expect("a slot is removed from the tree that holds it");
        // SAFETY: the caller's promise.
        let Some(child) = (unsafe { self.remove_below::<O>(root, slot)? }) else {
            return Ok(Index::new(None));
        };
        let mut top = child.node;
        // A root with one child is replaced by it.
        // SAFETY: `top` and what is below it are whole.
        while let Open::Inner(inner) = unsafe { open(top) }
            && let [only] = inner.children()
        {
            self.replaced.push(top);
            top = only.node;
        }
        Ok(Index::new(Some(top)))
    }

    /// # Safety
    /// - as [`Edit::remove`].
    unsafe fn remove_below<O: Order>(
        &mut self,
        node: NonNull<Header>,
        slot: &Memslot,
    ) -> Result<Option<Child>, OutOfMemory> {
        self.replaced.push(node);
        // SAFETY: the caller's promise.
        match unsafe { open(node) } {
            Open::Leaf(leaf) => {
                let at = leaf.rank::<O>(slot) - 1;
                let slots = leaf.children();
                debug_assert_eq!(O::key(&slots[at]), O::key(slot));
                if slots.len() == 1 {
                    return Ok(None);
                }
                self.leaf::<O>([&slots[..at], &[], &slots[at + 1..]])
                    .map(Some)
            }
            Open::Inner(inner) => {
                let at = inner.place::<O>(slot);
                let all = inner.children();
                // SAFETY: a child of a whole node is whole; the caller's promise.
                let (new, gone) = match unsafe { self.remove_below::<O>(all[at].node, slot)? } {
                    None if all.len() == 1 => return Ok(None),
                    None => (None, at..at + 1),
                    // SAFETY: the children are whole, and so is what was made in the place of one.
                    Some(new) => unsafe { self.merged::<O>(all, at, new)? },
                };
                let new = new.as_slice();
                let children = [&all[..gone.start], new, &all[gone.end..]];
                self.inner(inner.height(), children).map(Some)
            }
        }
    }

    /// `new` comes in the place of `children[at]`. If it has become small and fits in one node with a
    /// neighbour, it is merged with that: what comes, and in the place of which children.
    ///
    /// # Safety
    /// - the nodes are whole.
    unsafe fn merged<O: Order>(
        &mut self,
        children: &[Child],
        at: usize,
        new: Child,
    ) -> Result<(Option<Child>, Range<usize>), OutOfMemory> {
        // SAFETY: the caller's promise.
        let len = |child: &Child| unsafe { child.node.as_ref() }.len();
        let neighbour = if at > 0 { at - 1 } else { 1 };
        let fits = |other: &&Child| len(&new) < low::<O>() && len(&new) + len(other) <= O::WIDTH;
        let Some(other) = children.get(neighbour).filter(fits) else {
            return Ok((Some(new), at..at + 1));
        };
        let (left, right) = if neighbour < at {
            (other.node, new.node)
        } else {
            (new.node, other.node)
        };
        // SAFETY: the caller's promise.
        let merged = match unsafe { (open(left), open(right)) } {
            (Open::Leaf(left), Open::Leaf(right)) => {
                self.leaf::<O>([left.children(), right.children(), &[]])?
            }
            (Open::Inner(a), Open::Inner(b)) => {
                self.inner(a.height(), [a.children(), b.children(), &[]])?
            }
            _ => unreachable!("the children of a node have one height"),
        };
        self.replaced.extend([left, right]);
        let first = at.min(neighbour);
        Ok((Some(merged), first..first + 2))
    }
}
