//! The nodes of the trees of memslots, and how they are searched.
//!
//! A leaf node holds the slots themselves, so that a look-up ends where its search ends; an inner node
//! knows the largest end below each child, which makes the tree an interval tree, too. Both begin with a
//! [`Header`] of one cache line that leads to the few keys a page can lie behind. Nodes never change once
//! they are published ([`super::edit`]).

use alloc::boxed::Box;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Range;
use core::ptr::NonNull;

use super::Memslot;
use crate::addr::{Gfn, PAGE_SHIFT};
use crate::heap;
use crate::sync::atomic::Watch;
use crate::table::OutOfMemory;

/// Children of a node. A set of at most this many slots is one node: one copy, as an array would be.
pub(super) const WIDTH: usize = if cfg!(loom) { 4 } else { 64 };
/// As many as a cache line has room for, with the rest of the header.
const STEPS: usize = 52;
/// Keys that a search compares, all of them: no branch predictor guesses where it ends.
const NEAR: usize = 4;

/// By what a tree is ordered.
pub(crate) trait Order {
    /// The slot's first page number in that space, below 2^48.
    fn page(slot: &Memslot) -> u64;

    /// Slots may share pages of their backing: what makes a key unique is the id.
    fn key(slot: &Memslot) -> u64 {
        key(Self::page(slot), slot.id())
    }

    /// The page behind its last one.
    fn end(slot: &Memslot) -> u64 {
        Self::page(slot) + slot.pages()
    }
}

/// By guest frame.
pub(crate) enum ByGfn {}

/// By backing address.
pub(crate) enum ByHva {}

impl Order for ByGfn {
    fn page(slot: &Memslot) -> u64 {
        slot.base().0
    }
}

impl Order for ByHva {
    fn page(slot: &Memslot) -> u64 {
        slot.backing().0 >> PAGE_SHIFT
    }
}

fn key(page: u64, id: u32) -> u64 {
    page << 16 | u64::from(id)
}

fn page(key: u64) -> u64 {
    key >> 16
}

/// What all nodes begin with: where a search has to look.
#[repr(C, align(64))]
pub(super) struct Header {
    /// Page of the first key.
    first: u64,
    /// How many keys lie before each step of `1 << shift` pages from `first` on.
    before: [u8; STEPS],
    shift: u8,
    /// A step has more than [`NEAR`] keys: they are searched without it.
    crowded: bool,
    /// 0: a leaf node.
    pub(super) height: u8,
    len: u8,
    alive: Watch,
}

impl Header {
    /// Of a node with keys at these pages, which ascend; there is one at least.
    fn survey(height: u8, len: usize, pages: impl Iterator<Item = u64> + Clone) -> Self {
        let first = pages.clone().next().expect("a node has children");
        let span = pages.clone().last().expect("a node has children") - first;
        let mut shift = 0;
        while span >> shift >= STEPS as u64 {
            shift += 1;
        }
        let mut before = [0; STEPS];
        pages.for_each(|page| before[((page - first) >> shift) as usize] += 1);
        let crowded = before.iter().any(|keys| usize::from(*keys) > NEAR);
        let mut sum = 0;
        for step in &mut before {
            sum += core::mem::replace(step, sum);
        }
        Header {
            first,
            before,
            shift,
            crowded,
            height,
            len: len as u8,
            alive: Watch::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// How many of the node's `children` are not above the place looked for, which is at `page`.
    #[inline]
    fn rank<T>(
        &self,
        page: u64,
        children: &[T; WIDTH + NEAR],
        not_above: impl Fn(&T) -> bool,
    ) -> usize {
        self.alive.used();
        if self.crowded {
            return self.rank_crowded(children, not_above);
        }
        let Some(distance) = page.checked_sub(self.first) else {
            return 0;
        };
        let step = (distance >> self.shift).min(STEPS as u64 - 1);
        let before = usize::from(self.before[step as usize]);
        let near = &children[before..before + NEAR];
        near.iter()
            .fold(before, |rank, child| rank + usize::from(not_above(child)))
    }

    #[cold]
    #[inline(never)]
    fn rank_crowded<T>(&self, children: &[T], not_above: impl Fn(&T) -> bool) -> usize {
        children[..self.len()].partition_point(not_above)
    }
}

/// A node whose children are slots.
#[repr(C)]
pub(super) struct Leaf {
    header: Header,
    /// In ascending order of keys; behind `len` [`Memslot::nowhere`], so that a search needs no bound.
    slots: [Memslot; WIDTH + NEAR],
}

/// A node whose children are nodes.
#[repr(C)]
pub(super) struct Inner {
    header: Header,
    /// As `Leaf::slots`.
    children: [Child; WIDTH + NEAR],
}

/// A whole node as its parent knows it.
#[derive(Clone, Copy)]
pub(super) struct Child {
    /// Its first.
    pub(super) key: u64,
    /// The largest page behind a slot below it.
    end: u64,
    pub(super) node: NonNull<Header>,
}

/// The content of a node to be, in up to three pieces: it is copied once, from where it stands.
pub(super) type Parts<'a, T> = [&'a [T]; 3];

/// Fills `room` with copies of `parts`, and what remains with `nothing`s.
fn fill<T>(
    mut room: &mut [MaybeUninit<T>],
    parts: Parts<'_, T>,
    copy: impl Fn(&T) -> T,
    nothing: impl Fn() -> T,
) {
    for part in parts {
        let (here, behind) = room.split_at_mut(part.len());
        for (place, item) in here.iter_mut().zip(part) {
            place.write(copy(item));
        }
        room = behind;
    }
    for place in room {
        place.write(nothing());
    }
}

impl Leaf {
    /// A node of these slots, which ascend by `O`; at least one and at most [`WIDTH`].
    pub(super) fn make<O: Order>(slots: Parts<'_, Memslot>) -> Result<Child, OutOfMemory> {
        let mut room = heap::room::<Leaf>()?;
        let all = slots.iter().flat_map(|part| part.iter());
        let len = slots.iter().map(|part| part.len()).sum();
        debug_assert!(len <= WIDTH);
        let first = all.clone().next().expect("a node has children");
        let (key, end) = (O::key(first), all.clone().map(O::end).max());
        let header = Header::survey(0, len, all.map(O::page));
        let node = room.as_mut_ptr();
        // SAFETY: the fields of memory that is the box's; uninitialised ones are only written.
        unsafe {
            (&raw mut (*node).header).write(header);
            let room =
                &mut *(&raw mut (*node).slots).cast::<[MaybeUninit<Memslot>; WIDTH + NEAR]>();
            fill(room, slots, Memslot::copy, Memslot::nowhere);
        }
        Ok(Child {
            key,
            end: end.unwrap_or(0),
            node: NonNull::from(Box::leak(room)).cast(),
        })
    }

    pub(super) fn slots(&self) -> &[Memslot] {
        &self.slots[..self.header.len()]
    }

    /// How many slots' keys are not above that of `slot`.
    pub(super) fn rank<O: Order>(&self, slot: &Memslot) -> usize {
        let key = O::key(slot);
        let not_above = |slot: &Memslot| O::key(slot) <= key;
        self.header.rank(O::page(slot), &self.slots, not_above)
    }
}

impl Inner {
    /// A node of these children of one height, as [`Leaf::make`].
    pub(super) fn make(height: u8, children: Parts<'_, Child>) -> Result<Child, OutOfMemory> {
        let mut room = heap::room::<Inner>()?;
        let all = children.iter().flat_map(|part| part.iter());
        let len = children.iter().map(|part| part.len()).sum();
        debug_assert!(len <= WIDTH && height > 0);
        let first = *all.clone().next().expect("a node has children");
        let end = all.clone().map(|child| child.end).max();
        let header = Header::survey(height, len, all.map(|child| page(child.key)));
        let nothing = Child {
            key: u64::MAX,
            ..first
        };
        let node = room.as_mut_ptr();
        // SAFETY: as in `Leaf::make`.
        unsafe {
            (&raw mut (*node).header).write(header);
            let room =
                &mut *(&raw mut (*node).children).cast::<[MaybeUninit<Child>; WIDTH + NEAR]>();
            fill(room, children, |child| *child, || nothing);
        }
        Ok(Child {
            key: first.key,
            end: end.unwrap_or(0),
            node: NonNull::from(Box::leak(room)).cast(),
        })
    }

    pub(super) fn children(&self) -> &[Child] {
        &self.children[..self.header.len()]
    }

    /// The child below which the key of `slot` is or would be.
    pub(super) fn place<O: Order>(&self, slot: &Memslot) -> usize {
        let key = O::key(slot);
        let not_above = |child: &Child| child.key <= key;
        let rank = self.header.rank(O::page(slot), &self.children, not_above);
        rank.saturating_sub(1)
    }
}

/// A node of either kind.
pub(super) enum Node<'a> {
    Leaf(&'a Leaf),
    Inner(&'a Inner),
}

/// # Safety
/// - `node` came from a `make`, and is not freed while `'a` lasts.
#[inline]
pub(super) unsafe fn open<'a>(node: NonNull<Header>) -> Node<'a> {
    // SAFETY: every node begins with a header, which tells its kind; the caller's promise.
    unsafe {
        if node.as_ref().height == 0 {
            Node::Leaf(node.cast().as_ref())
        } else {
            Node::Inner(node.cast().as_ref())
        }
    }
}

/// Frees one node, not what is below it.
///
/// # Safety
/// - as [`open`]; it is in no published tree, and no reader holds it.
pub(super) unsafe fn free(node: NonNull<Header>) {
    // SAFETY: leaked from a box of its kind; the caller's promise.
    unsafe {
        if node.as_ref().height == 0 {
            drop(Box::from_raw(node.cast::<Leaf>().as_ptr()));
        } else {
            drop(Box::from_raw(node.cast::<Inner>().as_ptr()));
        }
    }
}

/// A tree: a root, `None` for the empty one. Copying it copies no node.
pub(crate) struct Index<O> {
    pub(super) root: Option<NonNull<Header>>,
    order: PhantomData<O>,
}

impl<O> Clone for Index<O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<O> Copy for Index<O> {}

impl Index<ByGfn> {
    /// The slot that holds the guest frame `page`.
    ///
    /// # Safety
    /// - the tree is whole and no node of it is freed while `'a` lasts.
    #[inline]
    pub(super) unsafe fn find<'a>(self, page: u64) -> Option<&'a Memslot> {
        let probe = key(page, u16::MAX.into());
        let mut node = self.root?;
        loop {
            // SAFETY: the children of a whole node are whole nodes; the caller's promise.
            match unsafe { open(node) } {
                Node::Inner(inner) => {
                    let not_above = |child: &Child| child.key <= probe;
                    let rank = inner.header.rank(page, &inner.children, not_above);
                    let i = rank.checked_sub(1)?;
                    node = inner.children[i].node;
                }
                Node::Leaf(leaf) => {
                    // Slots do not overlap here: their pages are keys.
                    let not_above = |slot: &Memslot| slot.base().0 <= page;
                    let rank = leaf.header.rank(page, &leaf.slots, not_above);
                    let i = rank.checked_sub(1)?;
                    let slot = &leaf.slots[i];
                    return slot.holds(Gfn(page)).then_some(slot);
                }
            }
        }
    }
}

impl<O: Order> Index<O> {
    pub(super) fn new(root: Option<NonNull<Header>>) -> Self {
        Index {
            root,
            order: PhantomData,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self.root.is_none()
    }

    /// Calls `visit` for every slot that has a page in `range`, in the order of keys, until it answers
    /// `false`.
    ///
    /// # Safety
    /// - as [`Index::find`].
    pub(super) unsafe fn overlapping(
        self,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) {
        if let Some(root) = self.root {
            // SAFETY: the caller's promise.
            unsafe { Self::overlapping_below(root, range, visit) };
        }
    }

    /// Whether all were visited.
    ///
    /// # Safety
    /// - as [`Index::find`].
    unsafe fn overlapping_below(
        node: NonNull<Header>,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { open(node) } {
            Node::Leaf(leaf) => {
                let mut before = leaf
                    .slots()
                    .iter()
                    .take_while(|slot| O::page(slot) < range.end);
                before.all(|slot| O::end(slot) <= range.start || visit(slot))
            }
            Node::Inner(inner) => {
                let mut before = inner
                    .children()
                    .iter()
                    .take_while(|child| page(child.key) < range.end);
                before.all(|child| {
                    // SAFETY: the children of a whole node are whole nodes; the caller's promise.
                    child.end <= range.start
                        || unsafe { Self::overlapping_below(child.node, range, visit) }
                })
            }
        }
    }

    /// Frees the whole tree.
    ///
    /// # Safety
    /// - as [`free`], for every node.
    pub(super) unsafe fn free(self) {
        /// # Safety
        /// - as [`free`], for every node below `node`, too.
        unsafe fn free_below(node: NonNull<Header>) {
            // SAFETY: the caller's promise.
            unsafe {
                if let Node::Inner(inner) = open(node) {
                    inner
                        .children()
                        .iter()
                        .for_each(|child| free_below(child.node));
                }
                free(node);
            }
        }
        if let Some(root) = self.root {
            // SAFETY: the caller's promise.
            unsafe { free_below(root) };
        }
    }
}
