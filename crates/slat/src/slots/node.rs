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
use core::mem::{self, ManuallyDrop};
use core::ptr::{self, NonNull};
use core::slice;

use super::Memslot;
use super::steps::{NEAR, Near, Steps};
use crate::addr::PAGE_SHIFT;
use crate::sync::atomic::Watch;
use crate::table::OutOfMemory;

/// Most children of a node.
const WIDEST: usize = if cfg!(loom) { 4 } else { 224 };

/// By what a tree is ordered.
pub(crate) trait Order {
    /// Most children of a node.
    const WIDTH: usize = if cfg!(loom) { 4 } else { 32 };

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

    fn page(slot: &Memslot) -> u64 {
        slot.base().0
    }

    /// Slots do not overlap here. A look-up knows the key of a page without an id, and so finds the node
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
        let private = slot
            .private()
            .expect("what is put here has private backing");
        private.0 >> PAGE_SHIFT
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

/// What all nodes begin with. The places stand behind it: first the children, then at least [`NEAR`]
/// that are above everything, so that a search needs no bound.
#[repr(C, align(64))]
pub(super) struct Header {
    steps: Steps,
    /// 0: the children are slots.
    height: u8,
    len: u8,
    places: u8,
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
        const { assert!(Self::PLACES <= u8::MAX as usize) };
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

    /// A node of height `height` with these children.
    pub(super) fn node<'a, T: Item<O>>(
        self,
        height: u8,
        children: impl IntoIterator<Item = T>,
    ) -> NodeMut<'a, O, T> {
        let node = ManuallyDrop::new(self).memory;
        let header = Header {
            steps: Steps::NONE,
            height,
            len: 0,
            places: Self::PLACES as u8,
            alive: Watch::new(),
        };
        // SAFETY: the memory is that of a header with so many places of either kind behind it, and nobody
        // else's.
        let mut made = unsafe {
            node.write(header);
            for place in 0..Self::PLACES {
                places::<T>(node).add(place).write(T::nowhere());
            }
            NodeMut::of(node)
        };
        made.extend(children);
        made
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
            let places = slice::from_raw_parts(places(node).as_ptr(), header.places.into());
            Node { header, places }
        }
    }

    pub(super) fn children(&self) -> &'a [T] {
        &self.places[..self.header.len.into()]
    }

    /// The last child that is not above `page`; `not_above` tells of each whether its page is. This is
    /// what a look-up does, again and again.
    #[inline(always)]
    pub(super) fn last_not_above(
        &self,
        page: u64,
        not_above: impl Fn(&T) -> bool,
    ) -> Option<&'a T> {
        let before = match self.header.steps.near(page) {
            Near::None => return None,
            Near::Crowd => return self.last_in_a_crowd(not_above),
            Near::From(before) => before,
        };
        let near = &self.places[before..before + NEAR];
        let rank = near
            .iter()
            .fold(before, |rank, child| rank + usize::from(not_above(child)));
        self.places.get(rank.wrapping_sub(1))
    }

    #[cold]
    #[inline(never)]
    fn last_in_a_crowd(&self, not_above: impl Fn(&T) -> bool) -> Option<&'a T> {
        let rank = self.children().partition_point(not_above);
        self.places.get(rank.checked_sub(1)?)
    }
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
    places: &'a mut [T],
    order: PhantomData<O>,
}

impl<O: Order, T: Item<O>> NodeMut<'_, O, T> {
    /// # Safety
    /// - as [`open_mut`]; the children are of type `T`.
    unsafe fn of(mut node: NonNull<Header>) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let header: &mut Header = node.as_mut();
            header.alive.owned();
            let count = header.places.into();
            let places = slice::from_raw_parts_mut(places::<T>(node).as_ptr(), count);
            places.iter().for_each(T::owned);
            NodeMut {
                node,
                header,
                places,
                order: PhantomData,
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.header.len.into()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == O::WIDTH
    }

    pub(super) fn children(&self) -> &[T] {
        &self.places[..self.len()]
    }

    /// As its parent would know it.
    pub(super) fn as_child(&self) -> Child {
        Child {
            key: self.places[0].key(),
            end: self.end(),
            node: self.node,
        }
    }

    /// The largest end of a child.
    pub(super) fn end(&self) -> u64 {
        self.children().iter().map(T::end).fold(0, u64::max)
    }

    /// How many children's keys are not above `key`.
    pub(super) fn rank(&self, key: u64) -> usize {
        self.children().partition_point(|child| child.key() <= key)
    }

    /// The child below which a slot with this key is, or would be put.
    pub(super) fn place(&self, key: u64) -> usize {
        self.rank(key).saturating_sub(1)
    }

    fn survey(&mut self) {
        let pages = self.places[..self.header.len.into()].iter();
        self.header
            .steps
            .survey(pages.map(|child| page(child.key())));
    }

    fn counted(&mut self, key: u64) {
        let len = self.len();
        if !self.header.steps.comes(page(key), len) {
            self.survey();
        }
    }

    /// Puts `item` behind the first `at` children; there is a place for it.
    pub(super) fn insert(&mut self, at: usize, item: T) {
        let (len, key) = (self.len(), item.key());
        debug_assert!(len < O::WIDTH);
        self.places[at..=len].rotate_right(1);
        self.places[at] = item;
        self.header.len += 1;
        self.counted(key);
    }

    /// Takes a child out.
    pub(super) fn remove(&mut self, at: usize) {
        let key = self.places[at].key();
        let len = self.len();
        self.places[at..len].rotate_left(1);
        self.places[len - 1] = T::nowhere();
        self.header.len -= 1;
        if self.header.steps.is_crowded() {
            self.survey();
        } else {
            self.header.steps.goes(page(key));
        }
    }

    /// Changes a child where it stands; its new key lies between those of its neighbours.
    pub(super) fn change<R>(&mut self, at: usize, change: impl FnOnce(&mut T) -> R) -> R {
        let before = self.places[at].key();
        let result = change(&mut self.places[at]);
        let key = self.places[at].key();
        if key != before {
            self.header.steps.goes(page(before));
            self.counted(key);
        }
        result
    }

    /// Puts `children` behind those there are.
    fn extend(&mut self, children: impl IntoIterator<Item = T>) {
        for child in children {
            self.places[usize::from(self.header.len)] = child;
            self.header.len += 1;
        }
        self.survey();
    }

    /// Keeps the first `left` children; the others go to a node of their own.
    pub(super) fn split(&mut self, left: usize, room: Room<O>) -> Self {
        let len = self.len();
        let others = self.places[left..len].iter_mut();
        let right = room.node(
            self.header.height,
            others.map(|place| mem::replace(place, T::nowhere())),
        );
        self.header.len = left as u8;
        self.survey();
        right
    }

    /// Takes over all children of the node behind this one, which have room here.
    pub(super) fn append(&mut self, other: Self) {
        let len = other.len();
        let others = other.places[..len].iter_mut();
        self.extend(others.map(|place| mem::replace(place, T::nowhere())));
        other.header.len = 0;
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
            OpenMut::Leaf(leaf) => ptr::drop_in_place(leaf.places),
            OpenMut::Inner(inner) => ptr::drop_in_place(inner.places),
        }
        node.drop_in_place();
        drop(Room::<O>::of(node));
    }
}
