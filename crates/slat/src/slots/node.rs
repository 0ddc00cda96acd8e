//! The nodes of the trees of memslots, and how they are searched.
//!
//! A leaf node holds the slots themselves, so that a look-up ends where its search ends; an inner node
//! knows the largest end below each child, which makes the tree an interval tree, too. Both begin with a
//! [`Header`] that leads to the few keys a page can lie behind. Nodes never change once
//! they are published ([`super::edit`]).

use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Range;
use core::ptr::NonNull;
use core::slice;

use super::Memslot;
use crate::addr::{Gfn, PAGE_SHIFT};
use crate::sync::atomic::Watch;
use crate::table::OutOfMemory;

/// Most children of a node.
const WIDEST: usize = if cfg!(loom) { 4 } else { 224 };
/// As many as four cache lines have room for, with the rest of the header.
const STEPS: usize = 244;
/// Keys that a search compares, all of them: no branch predictor guesses where it ends. A node has that
/// many more places than children.
const NEAR: usize = 4;

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
    /// As many as all slots, added in whatever order, need for a tree of two levels: every fault looks here,
    /// and has more of it than a change loses by copying wide nodes.
    const WIDTH: usize = WIDEST;

    fn page(slot: &Memslot) -> u64 {
        slot.base().0
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

fn key(page: u64, id: u32) -> u64 {
    page << 16 | u64::from(id)
}

fn page(key: u64) -> u64 {
    key >> 16
}

/// What all nodes begin with: where a search has to look. The children stand behind it, and behind them
/// [`NEAR`] that are above everything, so that a search needs no bound.
#[repr(C, align(64))]
pub(super) struct Header {
    /// Page of the first key.
    first: u64,
    shift: u8,
    /// A step has more than [`NEAR`] keys: they are searched without it.
    crowded: bool,
    /// 0: the children are slots.
    pub(super) height: u8,
    len: u8,
    /// How many keys lie before each step of `1 << shift` pages from `first` on.
    before: [u8; STEPS],
    alive: Watch,
}

impl Header {
    /// Of a node with keys at these pages, which ascend.
    fn survey(
        height: u8,
        pages: impl ExactSizeIterator<Item = u64>,
        first: u64,
        last: u64,
    ) -> Self {
        let len = pages.len() as u8;
        let mut shift = 0;
        while (last - first) >> shift >= STEPS as u64 {
            shift += 1;
        }
        let mut before = [0; STEPS];
        let (mut steps, mut first_in_step) = (0, 0);
        let mut crowded = false;
        for (i, page) in pages.enumerate() {
            let step = ((page - first) >> shift) as usize;
            if steps <= step {
                first_in_step = i;
            }
            while steps <= step {
                before[steps] = i as u8;
                steps += 1;
            }
            crowded |= i - first_in_step >= NEAR;
        }
        before[steps..].fill(len);
        Header {
            first,
            shift,
            crowded,
            height,
            len,
            before,
            alive: Watch::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len.into()
    }
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

/// Allocates a node and fills it with copies of `parts` (at least one item, at most [`WIDEST`]) and with
/// `nothing`s behind them.
fn make<T>(
    height: u8,
    parts: Parts<'_, T>,
    copy: impl Fn(&T) -> T,
    nothing: impl Fn() -> T,
    bounds: impl Fn(&T) -> (u64, u64),
) -> Result<Child, OutOfMemory> {
    let len = parts.iter().map(|part| part.len()).sum();
    assert!(0 < len && len <= WIDEST);
    // SAFETY: the layout has a size.
    let node = unsafe { alloc(layout::<T>(len)) }.cast::<Header>();
    let node = NonNull::new(node).ok_or(OutOfMemory)?;
    // SAFETY: that much was allocated behind the header; nobody else knows of it.
    let all =
        unsafe { slice::from_raw_parts_mut(children::<MaybeUninit<T>>(node).as_ptr(), len + NEAR) };
    let mut room = &mut *all;
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
    // SAFETY: filled just now.
    let items = unsafe { slice::from_raw_parts(children::<T>(node).as_ptr(), len) };
    let (first, last) = (bounds(&items[0]).0, bounds(&items[len - 1]).0);
    let pages = items.iter().map(|item| page(bounds(item).0));
    let header = Header::survey(height, pages, page(first), page(last));
    let ends = items.iter().map(|item| bounds(item).1);
    let end = ends.fold(0, u64::max);
    // SAFETY: allocated for it.
    unsafe { node.write(header) };
    Ok(Child {
        key: first,
        end,
        node,
    })
}

/// Of a node with `len` children.
fn layout<T>(len: usize) -> Layout {
    const { assert!(align_of::<T>() <= align_of::<Header>()) };
    let size = size_of::<Header>() + (len + NEAR) * size_of::<T>();
    Layout::from_size_align(size, align_of::<Header>()).expect("a node is small")
}

/// Where the children stand.
fn children<T>(node: NonNull<Header>) -> NonNull<T> {
    // SAFETY: a node has room for children behind its header.
    unsafe { node.add(1) }.cast()
}

/// What is in a node.
pub(super) struct Node<'a, T> {
    header: &'a Header,
    /// With those behind the last one.
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
            let places = slice::from_raw_parts(children(node).as_ptr(), header.len() + NEAR);
            Node { header, places }
        }
    }

    pub(super) fn children(&self) -> &'a [T] {
        &self.places[..self.header.len()]
    }

    pub(super) fn height(&self) -> u8 {
        self.header.height
    }

    /// The last child that is not above `page`; `not_above` tells of each whether its page is. This is
    /// what a look-up does, again and again.
    #[inline(always)]
    fn last_not_above(&self, page: u64, not_above: impl Fn(&T) -> bool) -> Option<&'a T> {
        let header = self.header;
        header.alive.used();
        let distance = page.checked_sub(header.first)?;
        if header.crowded {
            return self.last_in_a_crowd(not_above);
        }
        let step = (distance >> header.shift).min(STEPS as u64 - 1);
        let before = usize::from(header.before[step as usize]);
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

impl Leaf<'_> {
    /// A node of these slots, which ascend by `O`.
    pub(super) fn make<O: Order>(slots: Parts<'_, Memslot>) -> Result<Child, OutOfMemory> {
        let bounds = |slot: &Memslot| (O::key(slot), O::end(slot));
        make(0, slots, Memslot::copy, Memslot::nowhere, bounds)
    }

    /// How many slots' keys are not above that of `slot`.
    pub(super) fn rank<O: Order>(&self, slot: &Memslot) -> usize {
        let key = O::key(slot);
        self.children().partition_point(|slot| O::key(slot) <= key)
    }
}

impl Inner<'_> {
    /// A node of these children, which ascend and are of one height, one less than `height`.
    pub(super) fn make(height: u8, children: Parts<'_, Child>) -> Result<Child, OutOfMemory> {
        let nothing = || Child {
            key: u64::MAX,
            end: 0,
            node: NonNull::dangling(),
        };
        let bounds = |child: &Child| (child.key, child.end);
        make(height, children, |child| *child, nothing, bounds)
    }

    /// The child below which the key of `slot` is or would be.
    pub(super) fn place<O: Order>(&self, slot: &Memslot) -> usize {
        let key = O::key(slot);
        let rank = self.children().partition_point(|child| child.key <= key);
        rank.saturating_sub(1)
    }
}

/// A node of either kind.
pub(super) enum Open<'a> {
    Leaf(Leaf<'a>),
    Inner(Inner<'a>),
}

/// # Safety
/// - `node` came from a `make`, and is not freed while `'a` lasts.
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

/// Frees one node, not what is below it.
///
/// # Safety
/// - as [`open`]; it is in no published tree, and no reader holds it.
pub(super) unsafe fn free(node: NonNull<Header>) {
    /// # Safety
    /// - as above; the children are of type `T`.
    unsafe fn free_as<T>(node: NonNull<Header>) {
        // SAFETY: `make` has filled and allocated that much; the caller's promise.
        unsafe {
            let len = node.as_ref().len();
            NonNull::slice_from_raw_parts(children::<T>(node), len + NEAR).drop_in_place();
            node.drop_in_place();
            dealloc(node.as_ptr().cast(), layout::<T>(len));
        }
    }
    // SAFETY: the height tells the kind; the caller's promise.
    unsafe {
        if node.as_ref().height == 0 {
            free_as::<Memslot>(node);
        } else {
            free_as::<Child>(node);
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
        if page >= PAGES {
            return None;
        }
        let probe = key(page, u16::MAX.into());
        let mut node = self.root?;
        let leaf = loop {
            // SAFETY: the children of a whole node are whole nodes; the caller's promise.
            match unsafe { open(node) } {
                Open::Inner(inner) => {
                    node = inner.last_not_above(page, |child| child.key <= probe)?.node;
                }
                Open::Leaf(leaf) => break leaf,
            }
        };
        // Slots do not overlap here: their pages are keys.
        let slot = leaf.last_not_above(page, |slot| slot.base().0 <= page)?;
        slot.holds(Gfn(page)).then_some(slot)
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
    /// `false`. Whether all were visited.
    ///
    /// # Safety
    /// - as [`Index::find`].
    pub(super) unsafe fn overlapping(
        self,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        // SAFETY: the caller's promise.
        let mut below = |root| unsafe { Self::overlapping_below(root, range, visit) };
        self.root.is_none_or(&mut below)
    }

    /// # Safety
    /// - as [`Index::find`].
    unsafe fn overlapping_below(
        node: NonNull<Header>,
        range: &Range<u64>,
        visit: &mut impl FnMut(&Memslot) -> bool,
    ) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { open(node) } {
            Open::Leaf(leaf) => {
                let mut before = leaf
                    .children()
                    .iter()
                    .take_while(|slot| O::page(slot) < range.end);
                before.all(|slot| O::end(slot) <= range.start || visit(slot))
            }
            Open::Inner(inner) => {
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
                if let Open::Inner(inner) = open(node) {
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
