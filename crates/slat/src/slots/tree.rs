//! A persistent B+tree of memslots: an edit copies the path it changes, the old version stays whole
//! for those who are reading it.
//!
//! One tree serves both indexes, by guest frame and by backing address. A key is the slot's first
//! page number in that space with the slot's id below it (`page << 16 | id`): slots may share backing
//! pages, ids make keys unique. Every inner entry knows the largest end below it, which makes the
//! tree an interval tree, too.
//!
//! Nothing here frees what a reader may see: an edit lists what it made and what it replaced
//! ([`Edit`]), and its owner decides when (see [`super`]).

use alloc::alloc::{Layout, alloc, dealloc};
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;

use super::Memslot;
use crate::addr::Gfn;
use crate::sync::atomic::Watch;
use crate::table::OutOfMemory;

/// Children of a node. A set of at most this many slots is one node: one copy, as an array would be.
const WIDTH: usize = if cfg!(loom) { 4 } else { 64 };
/// As many as the first cache line of a node has room for.
const STEPS: usize = 52;
/// Keys that a search compares, all of them: no branch predictor guesses where it ends.
const NEAR: usize = 4;
/// Nodes with fewer children than this are merged with a neighbour when both fit in one.
const LOW: usize = WIDTH / 4;

/// A root, `None` for the empty tree. Copying it copies no node.
pub(crate) type Root = Option<NonNull<Node>>;

#[derive(Clone, Copy)]
union Child {
    node: NonNull<Node>,
    slot: NonNull<Memslot>,
}

#[derive(Clone, Copy)]
struct Item {
    key: u64,
    /// First page behind the slot; in an inner node the largest of the subtree.
    end: u64,
    child: Child,
}

/// Laid out for a search: it reads the first cache line, the few entries that line leads to, and the
/// child.
#[repr(C, align(64))]
pub(crate) struct Node {
    /// Page of the first key.
    first: u64,
    /// How many keys lie before each step of `1 << shift` pages from `first` on.
    before: [u8; STEPS],
    shift: u8,
    /// A step has more than [`NEAR`] keys: they are searched without it.
    crowded: bool,
    /// 0: children are slots.
    height: u8,
    len: u8,
    /// Ascending; behind `len` with all ones for a key, so that a search needs no bound.
    entries: [Entry; WIDTH + NEAR],
    ends: [u64; WIDTH],
    alive: Watch,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    key: u64,
    child: Child,
}

pub(crate) fn key(page: u64, id: u32) -> u64 {
    page << 16 | id as u64
}

fn page(key: u64) -> u64 {
    key >> 16
}

impl Node {
    fn len(&self) -> usize {
        self.len.into()
    }

    fn item(&self, i: usize) -> Item {
        Item {
            key: self.key(i),
            end: self.ends[i],
            child: self.child(i),
        }
    }

    #[inline]
    fn key(&self, i: usize) -> u64 {
        self.entries[i].key
    }

    #[inline]
    fn child(&self, i: usize) -> Child {
        self.entries[i].child
    }

    /// How many keys are not above `probe`.
    #[inline]
    fn rank(&self, probe: u64) -> usize {
        if self.crowded {
            self.entries[..self.len()].partition_point(|entry| entry.key <= probe)
        } else {
            self.rank_near(probe)
        }
    }

    /// [`Node::rank`] in a node that is not crowded.
    #[inline]
    fn rank_near(&self, probe: u64) -> usize {
        let Some(distance) = page(probe).checked_sub(self.first) else {
            return 0;
        };
        let step = (distance >> self.shift).min(STEPS as u64 - 1);
        let before = usize::from(self.before[step as usize]);
        let near = &self.entries[before..before + NEAR];
        near.iter()
            .fold(before, |rank, entry| rank + usize::from(entry.key <= probe))
    }

    /// Fills in what `rank` goes by, from the keys.
    fn survey(&mut self) {
        let pages = self.entries[..self.len()].iter().map(|e| page(e.key));
        let (Some(first), Some(last)) = (pages.clone().next(), pages.clone().next_back()) else {
            return;
        };
        self.first = first;
        self.shift = 0;
        while (last - first) >> self.shift >= STEPS as u64 {
            self.shift += 1;
        }
        let mut in_step = [0u8; STEPS];
        for page in pages {
            in_step[((page - first) >> self.shift) as usize] += 1;
        }
        let mut before = 0;
        for (step, keys) in self.before.iter_mut().zip(in_step) {
            *step = before;
            before += keys;
        }
        self.crowded = in_step.iter().any(|keys| usize::from(*keys) > NEAR);
    }

    /// # Safety
    /// - `i < self.len`, `self.height > 0`.
    #[inline]
    unsafe fn below(&self, i: usize) -> &Node {
        // SAFETY: the children of an inner node are nodes, which live as long as it does.
        unsafe { self.child(i).node.as_ref() }
    }
}

/// The slot that holds the guest frame `page`, in a tree by guest frame.
///
/// # Safety
/// - `root` is whole and nothing below it is freed while `'a` lasts.
#[inline]
pub(crate) unsafe fn find<'a>(root: Root, page: u64) -> Option<&'a Memslot> {
    let probe = key(page, 0xffff);
    // SAFETY: the caller's promise.
    let mut node: &'a Node = unsafe { root?.as_ref() };
    loop {
        node.alive.used();
        if node.crowded {
            // SAFETY: the caller's promise, which holds for what is below the root, too.
            return unsafe { find_crowded(node, page) };
        }
        let i = node.rank_near(probe).checked_sub(1)?;
        if node.height == 0 {
            // SAFETY: a child of a leaf node is a slot; the caller's promise.
            let slot = unsafe { node.child(i).slot.as_ref() };
            return slot.holds(Gfn(page)).then_some(slot);
        }
        // SAFETY: `rank` is at most `len`.
        node = unsafe { node.below(i) };
    }
}

/// [`find`] from a crowded node on. Apart, so that `find` keeps its few registers.
///
/// # Safety
/// - as [`find`].
#[cold]
#[inline(never)]
unsafe fn find_crowded(node: &Node, page: u64) -> Option<&Memslot> {
    let i = node.rank(key(page, 0xffff)).checked_sub(1)?;
    // SAFETY: children are of the kind the height tells, `rank` is at most `len`; the caller's promise.
    unsafe {
        if node.height > 0 {
            return find(Some(node.child(i).node), page);
        }
        let slot = node.child(i).slot.as_ref();
        slot.holds(Gfn(page)).then_some(slot)
    }
}

/// Calls `visit` for every slot that has a page in `range`, in the order of keys, until it answers
/// `false`. Returns whether all were visited.
///
/// # Safety
/// - as [`find`].
pub(crate) unsafe fn overlapping(
    root: Root,
    range: &Range<u64>,
    visit: &mut impl FnMut(&Memslot) -> bool,
) -> bool {
    let Some(node) = root else { return true };
    // SAFETY: the caller's promise.
    let node = unsafe { node.as_ref() };
    node.alive.used();
    for i in 0..node.len() {
        if node.key(i) >> 16 >= range.end {
            break;
        }
        if node.ends[i] <= range.start {
            continue;
        }
        // SAFETY: children are of the kind the height tells; the caller's promise.
        let more = unsafe {
            if node.height == 0 {
                visit(node.child(i).slot.as_ref())
            } else {
                overlapping(Some(node.child(i).node), range, visit)
            }
        };
        if !more {
            return false;
        }
    }
    true
}

/// What a change of the slot set made and replaced. Capacity is reserved first, so that noting a
/// node cannot fail.
#[derive(Default)]
pub(crate) struct Edit {
    made: Vec<NonNull<Node>>,
    replaced: Vec<NonNull<Node>>,
}

impl Edit {
    /// More than four edits of a tree of 2^16 slots can touch.
    const CAPACITY: usize = 96;

    pub(crate) fn new() -> Result<Self, OutOfMemory> {
        let mut edit = Edit::default();
        edit.made
            .try_reserve_exact(Self::CAPACITY)
            .and_then(|()| edit.replaced.try_reserve_exact(Self::CAPACITY))
            .map_err(|_| OutOfMemory)?;
        Ok(edit)
    }

    /// Frees what was made: the change does not take place.
    pub(crate) fn abort(&mut self) {
        self.replaced.clear();
        for node in self.made.drain(..) {
            // SAFETY: made by `make`, never published.
            unsafe { free_node(node) };
        }
    }

    /// The change was published; what remains is what it replaced, to be freed by [`free_node`] when
    /// no reader can hold it any more.
    pub(crate) fn commit(&mut self) -> impl Iterator<Item = NonNull<Node>> + '_ {
        self.made.clear();
        self.replaced.drain(..)
    }

    /// How many nodes `commit` would give.
    pub(crate) fn replaced(&self) -> usize {
        self.replaced.len()
    }

    fn make(&mut self, height: u8, items: &[Item]) -> Result<Item, OutOfMemory> {
        debug_assert!(!items.is_empty() && items.len() <= WIDTH);
        // SAFETY: the layout has a size.
        let node = unsafe { alloc(Layout::new::<Node>()) }.cast::<Node>();
        let node = NonNull::new(node).ok_or(OutOfMemory)?;
        let nothing = Entry {
            key: u64::MAX,
            child: Child { node },
        };
        let mut new = Node {
            first: 0,
            before: [0; STEPS],
            shift: 0,
            crowded: false,
            height,
            len: items.len() as u8,
            entries: [nothing; WIDTH + NEAR],
            ends: [0; WIDTH],
            alive: Watch::new(),
        };
        for (i, item) in items.iter().enumerate() {
            new.entries[i] = Entry {
                key: item.key,
                child: item.child,
            };
            new.ends[i] = item.end;
        }
        new.survey();
        // SAFETY: freshly allocated for a `Node`.
        unsafe { node.write(new) };
        self.made.push(node);
        Ok(Item {
            key: items[0].key,
            end: items.iter().map(|i| i.end).max().unwrap_or(0),
            child: Child { node },
        })
    }

    /// Inserts a slot; its key is not in the tree.
    ///
    /// # Safety
    /// - as [`find`]; `slot` lives as long as a tree that holds it.
    pub(crate) unsafe fn insert(
        &mut self,
        root: Root,
        key: u64,
        end: u64,
        slot: NonNull<Memslot>,
    ) -> Result<Root, OutOfMemory> {
        let item = Item {
            key,
            end,
            child: Child { slot },
        };
        let Some(root) = root else {
            return Ok(Some(node_of(self.make(0, &[item])?)));
        };
        // SAFETY: the caller's promise.
        let (left, right) = unsafe { self.insert_below(root, item)? };
        match right {
            None => Ok(Some(node_of(left))),
            Some(right) => {
                // SAFETY: `left` is an inner item made just now.
                let height = unsafe { left.child.node.as_ref().height } + 1;
                Ok(Some(node_of(self.make(height, &[left, right])?)))
            }
        }
    }

    /// # Safety
    /// - as [`Edit::insert`].
    unsafe fn insert_below(
        &mut self,
        node: NonNull<Node>,
        item: Item,
    ) -> Result<(Item, Option<Item>), OutOfMemory> {
        // SAFETY: the caller's promise.
        let old = unsafe { node.as_ref() };
        let mut items = Items::of(old);
        let rank = old.rank(item.key);
        if old.height == 0 {
            items.splice(rank, 0, &[item]);
        } else {
            let i = rank.saturating_sub(1);
            // SAFETY: `i < len`, inner node; the caller's promise.
            let (left, right) = unsafe { self.insert_below(old.child(i).node, item)? };
            match right {
                None => items.splice(i, 1, &[left]),
                Some(right) => items.splice(i, 1, &[left, right]),
            }
        }
        self.replaced.push(node);
        if items.len <= WIDTH {
            return Ok((self.make(old.height, items.all())?, None));
        }
        // Slots are often added in ascending order: leave the left node nearly full then.
        let at = if rank + 1 >= WIDTH {
            WIDTH - LOW
        } else {
            items.len / 2
        };
        let (left, right) = items.all().split_at(at);
        Ok((
            self.make(old.height, left)?,
            Some(self.make(old.height, right)?),
        ))
    }

    /// Removes the slot with `key`, which is in the tree.
    ///
    /// # Safety
    /// - as [`find`].
    pub(crate) unsafe fn remove(&mut self, root: Root, key: u64) -> Result<Root, OutOfMemory> {
        let root = root.expect("a slot is removed from the tree that holds it");
        // SAFETY: the caller's promise.
        let Some(mut top) = (unsafe { self.remove_below(root, key)? }).map(node_of) else {
            return Ok(None);
        };
        // A root with one child is replaced by it.
        // SAFETY: `top` and what is below it are whole.
        while let node = unsafe { top.as_ref() }
            && node.height > 0
            && node.len == 1
        {
            self.replaced.push(top);
            // SAFETY: an inner node's child is a node.
            top = unsafe { node.child(0).node };
        }
        Ok(Some(top))
    }

    /// # Safety
    /// - as [`Edit::remove`].
    unsafe fn remove_below(
        &mut self,
        node: NonNull<Node>,
        key: u64,
    ) -> Result<Option<Item>, OutOfMemory> {
        // SAFETY: the caller's promise.
        let old = unsafe { node.as_ref() };
        let mut items = Items::of(old);
        let i = old.rank(key) - 1;
        self.replaced.push(node);
        if old.height == 0 {
            debug_assert_eq!(old.key(i), key);
            items.splice(i, 1, &[]);
        } else {
            // SAFETY: `i < len`, inner node; the caller's promise.
            match unsafe { self.remove_below(old.child(i).node, key)? } {
                None => items.splice(i, 1, &[]),
                Some(below) => {
                    items.splice(i, 1, &[below]);
                    // SAFETY: all items of an inner node lead to whole nodes.
                    unsafe { self.merge(&mut items, i, old.height - 1)? };
                }
            }
        }
        if items.len == 0 {
            return Ok(None);
        }
        Ok(Some(self.make(old.height, items.all())?))
    }

    /// Merges the `i`-th child with a neighbour if it has become small and both fit in one node.
    ///
    /// # Safety
    /// - every item leads to a whole node of `height`.
    unsafe fn merge(&mut self, items: &mut Items, i: usize, height: u8) -> Result<(), OutOfMemory> {
        // SAFETY: the caller's promise.
        let node_at = |items: &Items, i: usize| unsafe { items.items[i].child.node };
        // SAFETY: as above.
        let len_at = |items: &Items, i: usize| unsafe { node_at(items, i).as_ref().len() };
        if len_at(items, i) >= LOW || items.len < 2 {
            return Ok(());
        }
        let left = if i > 0 { i - 1 } else { i };
        if len_at(items, left) + len_at(items, left + 1) > WIDTH {
            return Ok(());
        }
        let (a, b) = (node_at(items, left), node_at(items, left + 1));
        // SAFETY: as above.
        let mut both = Items::of(unsafe { a.as_ref() });
        // SAFETY: as above.
        both.splice(both.len, 0, Items::of(unsafe { b.as_ref() }).all());
        let merged = self.make(height, both.all())?;
        self.replaced.extend([a, b]);
        items.splice(left, 2, &[merged]);
        Ok(())
    }
}

/// The items of one node while they change.
struct Items {
    len: usize,
    items: [Item; WIDTH + 1],
}

impl Items {
    fn of(node: &Node) -> Items {
        Items {
            len: node.len(),
            items: core::array::from_fn(|i| node.item(i.min(WIDTH - 1))),
        }
    }

    fn all(&self) -> &[Item] {
        &self.items[..self.len]
    }

    /// Replaces `gone` items from `at` on by `new`.
    fn splice(&mut self, at: usize, gone: usize, new: &[Item]) {
        self.items.copy_within(at + gone..self.len, at + new.len());
        self.items[at..at + new.len()].copy_from_slice(new);
        self.len = self.len + new.len() - gone;
    }
}

fn node_of(item: Item) -> NonNull<Node> {
    // SAFETY: called for items that `make` returned.
    unsafe { item.child.node }
}

/// Frees one node, not what is below it.
///
/// # Safety
/// - `node` was made by an edit, is in no published tree, and no reader holds it.
pub(crate) unsafe fn free_node(node: NonNull<Node>) {
    // SAFETY: allocated and initialised by `make`, with this layout; the caller's promise.
    unsafe {
        node.drop_in_place();
        dealloc(node.as_ptr().cast(), Layout::new::<Node>());
    }
}

/// Frees a whole tree, not its slots.
///
/// # Safety
/// - as [`free_node`], for every node below `root`.
pub(crate) unsafe fn free_tree(root: Root) {
    let Some(node) = root else { return };
    // SAFETY: the caller's promise.
    unsafe {
        let inner = node.as_ref();
        if inner.height > 0 {
            for i in 0..inner.len() {
                free_tree(Some(inner.child(i).node));
            }
        }
        free_node(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Hva;
    use crate::slots::SlotFlags;
    use std::vec::Vec;

    /// Slots of one page at these pages, in a tree; every search is compared with the list.
    fn finds_all(pages: &[u64]) {
        let mut edit = Edit::new().unwrap();
        let mut root = None;
        let slots: Vec<_> = (0..)
            .zip(pages)
            .map(|(id, page)| {
                NonNull::from(alloc::boxed::Box::leak(alloc::boxed::Box::new(Memslot {
                    id,
                    flags: SlotFlags(0),
                    base: Gfn(*page),
                    pages: 1,
                    backing: Hva(0),
                    private: None,
                    dirty: None,
                    alive: Watch::new(),
                })))
            })
            .collect();
        for (slot, page) in slots.iter().zip(pages) {
            // SAFETY: the slots live until the end of the test; the keys differ.
            unsafe {
                let key = slot.as_ref().gfn_key();
                root = edit.insert(root, key, page + 1, *slot).unwrap();
            }
            // Nobody else reads the tree: what was replaced goes at once.
            for node in edit.commit() {
                // SAFETY: no longer in the tree.
                unsafe { free_node(node) };
            }
        }
        for page in pages
            .iter()
            .flat_map(|page| page.saturating_sub(2)..page + 3)
        {
            // SAFETY: the tree is whole.
            let found = unsafe { find(root, page) }.map(|slot| slot.base.0);
            assert_eq!(found, pages.contains(&page).then_some(page));
        }
        // SAFETY: nobody uses the tree or the slots any more.
        unsafe {
            free_tree(root);
            for slot in slots {
                drop(alloc::boxed::Box::from_raw(slot.as_ptr()));
            }
        }
    }

    #[test]
    fn slots_are_found_however_they_lie() {
        let regular: Vec<u64> = (0..5000).map(|i| 100 + i * 3).collect();
        finds_all(&regular);
        let crowded: Vec<u64> = (0..200).chain((1 << 34)..(1 << 34) + 200).collect();
        finds_all(&crowded);
        let spread: Vec<u64> = (0..44).map(|i| 1 << i).collect();
        finds_all(&spread);
        let mut scattered: Vec<u64> = (0..1000u64).map(|i| i * 0x9e37_79b1 % (1 << 40)).collect();
        finds_all(&scattered);
        scattered.reverse();
        finds_all(&scattered);
    }
}
