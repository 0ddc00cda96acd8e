//! The nodes of the trees of memslots, and how they are searched.
//!
//! A leaf node holds the slots themselves, so that a look-up ends where its search ends; an inner node
//! knows the largest end below each child, which makes the tree an interval tree, too. Both begin with a
//! [`Header`] whose [`Steps`] lead to the few keys a page can lie behind.
//!
//! A node is looked at through [`open`], by anybody while nobody changes it, and changed through
//! [`open_mut`], by one who has the tree alone.

use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ptr::{self, NonNull};
use core::slice;

use super::Memslot;
use super::steps::{NEAR, Near, Steps};
use crate::addr::{Hva, PAGE_SHIFT};
use crate::sync::atomic::Watch;
use crate::table::OutOfMemory;

/// Most children of a node.
const WIDEST: usize = if cfg!(loom) { 4 } else { 224 };

/// By what a tree is ordered.
pub(crate) trait Order {
    /// Most children of a node.
    const WIDTH: usize = if cfg!(loom) { 4 } else { 32 };

    /// No two slots share a page: their ends ascend as their keys do.
    const DISJOINT: bool = false;

    /// The slot's first page number in that space, below [`PAGES`].
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

/// By address of the private backing, which every slot in such a tree has.
pub(crate) enum ByPrivate {}

impl Order for ByGfn {
    /// As many as all slots, added in whatever order, need for a tree of two levels: every fault looks here.
    const WIDTH: usize = WIDEST;
    const DISJOINT: bool = true;

    fn page(slot: &Memslot) -> u64 {
        slot.base().0
    }

    /// A look-up knows the key of a page without an id, and so finds the node
    /// that an insertion finds.
    fn key(slot: &Memslot) -> u64 {
        key(Self::page(slot), 0)
    }
}

impl Order for ByHva {
    fn page(slot: &Memslot) -> u64 {
        slot.backing().0 >> PAGE_SHIFT
    }
}

impl Order for ByPrivate {
    fn page(slot: &Memslot) -> u64 {
        slot.private().unwrap_or(Hva(u64::MAX)).0 >> PAGE_SHIFT
    }
}

/// Page numbers of either space are below this, and so are keys below those behind the children.
pub(super) const PAGES: u64 = (1 << 48) - 1;

pub(super) fn key(page: u64, id: u32) -> u64 {
    page << 16 | u64::from(id)
}

pub(super) fn page(key: u64) -> u64 {
    key >> 16
}

/// What all nodes begin with. The places stand behind it: first the children, then [`NEAR`] that are
/// above everything, so that a search needs no bound, then those that are not filled.
#[repr(C, align(64))]
pub(super) struct Header {
    steps: Steps,
    /// 0: the children are slots.
    height: u8,
    len: u8,
    alive: Watch,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Header>() == 256);

/// A node as its parent knows it, or the owner of its tree.
#[derive(Clone, Copy)]
pub(super) struct Child {
    /// Of its first. Not less: a page before it can lie in the last slot of the node before this one.
    pub(super) key: u64,
    /// The largest page behind a slot below it.
    pub(super) end: u64,
    pub(super) node: NonNull<Header>,
}

/// What a node of a tree of order `O` has in its places.
pub(super) trait Item<O> {
    fn key(&self) -> u64;
    fn end(&self) -> u64;
    /// Above everything.
    fn nowhere() -> Self;
    /// Nobody else looks at it now.
    fn owned(&self) {}
}

impl<O: Order> Item<O> for Memslot {
    fn key(&self) -> u64 {
        O::key(self)
    }

    fn end(&self) -> u64 {
        O::end(self)
    }

    fn nowhere() -> Self {
        Memslot::nowhere()
    }

    fn owned(&self) {
        Memslot::owned(self);
    }
}

impl<O> Item<O> for Child {
    fn key(&self) -> u64 {
        self.key
    }

    fn end(&self) -> u64 {
        self.end
    }

    fn nowhere() -> Self {
        Child {
            key: u64::MAX,
            end: 0,
            node: NonNull::dangling(),
        }
    }
}

/// 0 for a node whose children are slots.
///
/// # Safety
/// - as [`open`].
pub(super) unsafe fn height(node: NonNull<Header>) -> u8 {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref().height }
}

/// How many children a node has.
///
/// # Safety
/// - as [`open`].
pub(super) unsafe fn len(node: NonNull<Header>) -> usize {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref().len.into() }
}

/// Where the places are.
fn places<T>(node: NonNull<Header>) -> NonNull<T> {
    // SAFETY: a node has places behind its header.
    unsafe { node.add(1) }.cast()
}

/// Of a node with so many places, whatever its children are.
fn layout(places: usize) -> Layout {
    const {
        assert!(align_of::<Memslot>() <= align_of::<Header>());
        assert!(align_of::<Child>() <= align_of::<Header>());
    }
    let place = size_of::<Memslot>().max(size_of::<Child>());
    let size = size_of::<Header>() + places * place;
    Layout::from_size_align(size, align_of::<Header>()).expect("a node is small")
}

/// Memory for one node of a tree of order `O`.
pub(super) struct Room<O: Order> {
    memory: NonNull<Header>,
    order: PhantomData<O>,
}

impl<O: Order> Room<O> {
    const PLACES: usize = O::WIDTH + NEAR;

    pub(super) fn new() -> Result<Self, OutOfMemory> {
        const { assert!(O::WIDTH <= u8::MAX as usize) };
        // SAFETY: the layout has a size.
        let memory = unsafe { alloc(layout(Self::PLACES)) }.cast();
        NonNull::new(memory).map(Self::of).ok_or(OutOfMemory)
    }

    fn of(memory: NonNull<Header>) -> Self {
        Room {
            memory,
            order: PhantomData,
        }
    }

    /// A node of height `height` without children.
    pub(super) fn node<'a, T: Item<O>>(self, height: u8) -> NodeMut<'a, O, T> {
        let node = ManuallyDrop::new(self).memory;
        let header = Header {
            steps: Steps::NONE,
            height,
            len: 0,
            alive: Watch::new(),
        };
        // SAFETY: the memory is that of a header with enough places of either kind behind it, and nobody
        // else's.
        unsafe {
            node.write(header);
            for place in 0..NEAR {
                places::<T>(node).add(place).write(T::nowhere());
            }
            NodeMut::of(node)
        }
    }
}

impl<O: Order> Drop for Room<O> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.memory.as_ptr().cast(), layout(Self::PLACES)) };
    }
}

/// What is in a node.
pub(super) struct Node<'a, T> {
    header: &'a Header,
    /// With those behind the last child.
    places: &'a [T],
}

/// Children of this kind.
pub(super) type Leaf<'a> = Node<'a, Memslot>;
/// Children of that kind.
pub(super) type Inner<'a> = Node<'a, Child>;

impl<'a, T> Node<'a, T> {
    /// # Safety
    /// - as [`open`]; the children are of type `T`.
    #[inline]
    unsafe fn of(node: NonNull<Header>) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let header: &Header = node.as_ref();
            header.alive.used();
            let filled = usize::from(header.len) + NEAR;
            let places = slice::from_raw_parts(places(node).as_ptr(), filled);
            Node { header, places }
        }
    }

    pub(super) fn children(&self) -> &'a [T] {
        &self.places[..self.header.len.into()]
    }

    /// How many children are not above `page`; `not_above` tells of each whether it is not.
    #[inline(always)]
    pub(super) fn rank(&self, page: u64, not_above: impl Fn(&T) -> bool) -> usize {
        rank(&self.header.steps, self.places, page, not_above)
    }

    /// The last child that is not above `page`.
    #[inline(always)]
    pub(super) fn last_not_above(
        &self,
        page: u64,
        not_above: impl Fn(&T) -> bool,
    ) -> Option<&'a T> {
        let rank = self.rank(page, not_above);
        self.places.get(rank.wrapping_sub(1))
    }
}

/// How many of the children in these places are not above something that lies in `page`; `not_above` tells
/// of each whether it is not. This is what a look-up does, again and again.
#[inline(always)]
fn rank<T>(steps: &Steps, places: &[T], page: u64, not_above: impl Fn(&T) -> bool) -> usize {
    let before = match steps.near(page) {
        Near::None => return 0,
        Near::Crowd => return rank_in_a_crowd(places, not_above),
        Near::From(before) => before,
    };
    let near = &places[before..before + NEAR];
    near.iter()
        .fold(before, |rank, child| rank + usize::from(not_above(child)))
}

#[cold]
#[inline(never)]
fn rank_in_a_crowd<T>(places: &[T], not_above: impl Fn(&T) -> bool) -> usize {
    places.partition_point(not_above)
}

/// A node of either kind.
pub(super) enum Open<'a> {
    Leaf(Leaf<'a>),
    Inner(Inner<'a>),
}

/// # Safety
/// - `node` came from a [`Room`], and is neither freed nor changed while `'a` lasts.
#[inline]
pub(super) unsafe fn open<'a>(node: NonNull<Header>) -> Open<'a> {
    // SAFETY: the height tells the kind; the caller's promise.
    unsafe {
        if node.as_ref().height == 0 {
            Open::Leaf(Node::of(node))
        } else {
            Open::Inner(Node::of(node))
        }
    }
}

/// A node for the one who has it alone.
pub(super) struct NodeMut<'a, O, T: Item<O>> {
    node: NonNull<Header>,
    header: &'a mut Header,
    order: PhantomData<(O, T)>,
}

impl<O: Order, T: Item<O>> NodeMut<'_, O, T> {
    /// # Safety
    /// - as [`open_mut`]; the children are of type `T`.
    unsafe fn of(mut node: NonNull<Header>) -> Self {
        // SAFETY: the caller's promise.
        let header: &mut Header = unsafe { node.as_mut() };
        header.alive.owned();
        let opened = NodeMut {
            node,
            header,
            order: PhantomData,
        };
        opened.places().iter().for_each(T::owned);
        opened
    }

    /// The places that are filled.
    fn places(&self) -> &[T] {
        // SAFETY: so many are, and this is the only way to them as long as `self` is there.
        unsafe { slice::from_raw_parts(places(self.node).as_ptr(), self.len() + NEAR) }
    }

    fn places_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(places(self.node).as_ptr(), self.len() + NEAR) }
    }

    pub(super) fn len(&self) -> usize {
        self.header.len.into()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == O::WIDTH
    }

    pub(super) fn children(&self) -> &[T] {
        &self.places()[..self.len()]
    }

    /// As its parent would know it.
    pub(super) fn as_child(&self) -> Child {
        Child {
            key: self.places()[0].key(),
            end: self.end(),
            node: self.node,
        }
    }

    /// The largest end of a child.
    pub(super) fn end(&self) -> u64 {
        let ends = self.children().iter().map(T::end);
        if O::DISJOINT {
            ends.last().unwrap_or(0)
        } else {
            ends.fold(0, u64::max)
        }
    }

    /// How many children's keys are not above `key`.
    pub(super) fn rank(&self, key: u64) -> usize {
        let not_above = |child: &T| child.key() <= key;
        rank(&self.header.steps, self.places(), page(key), not_above)
    }

    /// The child below which a slot with this key is, or would be put.
    pub(super) fn place(&self, key: u64) -> usize {
        self.rank(key).saturating_sub(1)
    }

    /// Whether `key` is below that of the child behind the one at `at`, if there is one.
    fn ends_before(&self, at: usize, key: u64) -> bool {
        let next = self.children().get(at + 1);
        next.is_none_or(|next| key < next.key())
    }

    /// Whether a child with this key could stand in the place of the one at `at`.
    pub(super) fn fits(&self, at: usize, key: u64) -> bool {
        let above = |before: usize| self.places()[before].key() < key;
        at.checked_sub(1).is_none_or(above) && self.ends_before(at, key)
    }

    /// Whether [`place`](Self::place) is `at` for this key.
    pub(super) fn is_place(&self, at: usize, key: u64) -> bool {
        (at == 0 || self.places()[at].key() <= key) && self.ends_before(at, key)
    }

    fn survey(&mut self) {
        // SAFETY: as in `places`; a separate borrow, so that the header can be changed beside it.
        let children =
            unsafe { slice::from_raw_parts(places::<T>(self.node).as_ptr(), self.len()) };
        let pages = children.iter().map(|child| page(child.key()));
        self.header.steps.survey(pages);
    }

    /// Puts `item` behind the first `at` children; there is a place for it. The others move up by one.
    pub(super) fn insert(&mut self, at: usize, item: T) {
        let (key, len) = (item.key(), self.len());
        assert!(at <= len && len < O::WIDTH);
        // SAFETY: a node that is not full has a place more than are filled.
        unsafe {
            let place = places::<T>(self.node).add(at);
            place.add(1).copy_from(place, len + NEAR - at);
            place.write(item);
        }
        self.header.len += 1;
        if !self.header.steps.comes(page(key), len + 1) {
            self.survey();
        }
    }

    /// Takes a child out. Those behind it move down by one.
    pub(super) fn remove(&mut self, at: usize) {
        let len = self.len();
        assert!(at < len);
        self.header.len -= 1;
        // SAFETY: the place is filled; what was the last one counts as filled no more.
        let gone = unsafe {
            let place = places::<T>(self.node).add(at);
            let gone = place.read();
            place.copy_from(place.add(1), len + NEAR - at - 1);
            gone
        };
        if self.header.steps.is_crowded() {
            self.survey();
        } else {
            self.header.steps.goes(page(gone.key()));
        }
    }

    /// Changes a child where it stands; its new key lies between those of its neighbours.
    pub(super) fn change<R>(&mut self, at: usize, change: impl FnOnce(&mut T) -> R) -> R {
        let len = self.len();
        let child = &mut self.places_mut()[at];
        let before = child.key();
        let result = change(child);
        let key = child.key();
        if key != before && !self.header.steps.moves(page(before), page(key), len) {
            self.survey();
        }
        result
    }

    /// Puts `items`, whose keys ascend, behind the children there are, all of which they are above.
    pub(super) fn fill(&mut self, items: impl ExactSizeIterator<Item = T>) {
        let (len, count) = (self.len(), items.len());
        assert!(len + count <= O::WIDTH);
        // SAFETY: this node has so many places more than are filled.
        unsafe {
            let behind = places::<T>(self.node).add(len);
            behind.add(count).copy_from(behind, NEAR);
            for (at, item) in items.take(count).enumerate() {
                behind.add(at).write(item);
                self.header.len += 1;
            }
        }
        assert_eq!(self.len(), len + count);
        self.survey();
    }

    /// Keeps the first `left` children; the others go to a node of their own.
    pub(super) fn split(&mut self, left: usize, room: Room<O>) -> Self {
        let mut right = room.node(self.header.height);
        right.take_over(self, left);
        self.survey();
        right
    }

    /// Takes over all children of the node behind this one, which have room here.
    pub(super) fn append(&mut self, mut other: Self) {
        self.take_over(&mut other, 0);
    }

    /// Puts the children of `other` from the place `from` on behind those there are.
    fn take_over(&mut self, other: &mut Self, from: usize) {
        let (len, count) = (self.len(), other.len() - from);
        assert!(len + count <= O::WIDTH);
        // SAFETY: this node has so many places more than are filled; what is moved away is filled no more.
        unsafe {
            let behind = places::<T>(self.node).add(len);
            let moved = places::<T>(other.node).add(from);
            behind.add(count).copy_from(behind, NEAR);
            behind.copy_from_nonoverlapping(moved, count);
            moved.copy_from(moved.add(count), NEAR);
        }
        self.header.len += count as u8;
        other.header.len = from as u8;
        self.survey();
    }
}

/// A node of either kind, to be changed.
pub(super) enum OpenMut<'a, O: Order> {
    Leaf(NodeMut<'a, O, Memslot>),
    Inner(NodeMut<'a, O, Child>),
}

/// # Safety
/// - `node` came from a [`Room`] of order `O`; while `'a` lasts nobody else looks at it, and it is not freed.
pub(super) unsafe fn open_mut<'a, O: Order>(node: NonNull<Header>) -> OpenMut<'a, O> {
    // SAFETY: the height tells the kind; the caller's promise.
    unsafe {
        if node.as_ref().height == 0 {
            OpenMut::Leaf(NodeMut::of(node))
        } else {
            OpenMut::Inner(NodeMut::of(node))
        }
    }
}

/// Frees one node, not what is below it.
///
/// # Safety
/// - as [`open_mut`]; it is in no tree any more.
pub(super) unsafe fn free<O: Order>(node: NonNull<Header>) {
    // SAFETY: the caller's promise; the node is a header and its places, all of them filled.
    unsafe {
        match open_mut::<O>(node) {
            OpenMut::Leaf(mut leaf) => ptr::drop_in_place(leaf.places_mut()),
            OpenMut::Inner(mut inner) => ptr::drop_in_place(inner.places_mut()),
        }
        node.drop_in_place();
        drop(Room::<O>::of(node));
    }
}
