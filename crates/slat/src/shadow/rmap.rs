//! The reverse map: all entries and shadow pages that the MMU has made for each guest frame. In KVM, memslots contain a
//! `kvm_rmap_head` and counts for each frame, and there is a hash table of shadow pages. Here one radix tree over guest
//! frames contains all of this. So a memslot costs no memory before it is used, and creating, changing or deleting a
//! memslot does not change the reverse map.
//!
//! A node of level n has 512 [`RmapEntry`]s, one for each region that a page-table entry of level n covers. An
//! [`RmapEntry`] lists the leaves of that level that map the region (KVM: the rmap of the level), and the shadow pages
//! made from the region.

use alloc::boxed::Box;
use core::cell::Cell;
use core::ops::Range;

use super::list::{END, Link, List};
use super::pool::Pool;
use crate::addr::{Gfn, Level};
use crate::frame::ENTRIES;
use crate::heap::{Large, OutOfMemory};

/// An entry of the reverse map: the page-table entries and the shadow pages for one region.
pub(super) struct RmapEntry {
    /// The leaves and MMIO entries of the node's level that map the region, as [`EntryId`](super::page::EntryId)s.
    pub(super) leaves: List,
    /// The numbers of the shadow pages made for the region. A direct page is listed for the region that its table maps.
    /// A page of a guest table is listed for the frame (level 1) that contains the guest's table.
    pub(super) pages: List,
    /// The number of the node of the next lower level for this region, or [`END`].
    below: Cell<u32>,
}

impl RmapEntry {
    fn new() -> Self {
        RmapEntry {
            leaves: List::new(),
            pages: List::new(),
            below: Cell::new(END),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leaves.is_empty() && self.pages.is_empty() && self.below.get() == END
    }

    /// Returns the number of the node of the next lower level for this region, or [`END`] if there is none.
    pub(super) fn below(&self) -> u32 {
        self.below.get()
    }
}

/// A node, and its entries.
pub(super) type Node = Large<NodeState, RmapEntry, ENTRIES>;

/// The state of a node, without its entries.
pub(super) struct NodeState {
    /// The number of entries that are not empty.
    used: Cell<u16>,
    /// The number of shadow pages of guest tables that are listed in the node and below it.
    tables: Cell<u32>,
    /// The number of the node above, and the index in that node of the entry that refers to this node.
    above: Cell<(u32, u16)>,
    /// The node's link in the list of empty nodes; used while the node is empty.
    empty: Link,
}

impl Node {
    /// Makes an empty node.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn make() -> Result<Box<Self>, OutOfMemory> {
        let node = NodeState {
            used: Cell::new(0),
            tables: Cell::new(0),
            above: Cell::new((END, 0)),
            empty: Link::new(),
        };
        Self::new(node, RmapEntry::new)
    }

    pub(super) fn entry(&self, index: usize) -> &RmapEntry {
        &self.array[index]
    }
}

/// The reverse map: a radix tree. A node that becomes empty stays in the tree, because the guest often maps a zapped
/// region again. When another region needs a node and no spare node is left, an empty node is moved to that region.
pub(super) struct Rmap {
    pub(super) nodes: Pool<Node>,
    root: u32,
    top: Level,
    empty: List,
    /// The number of nodes on the list of empty nodes.
    empties: Cell<usize>,
}

impl Rmap {
    /// Makes a reverse map for the frames that tables with a root of level `top` translate. Call [`Rmap::begin`] before
    /// using it.
    pub(super) const fn new(top: Level) -> Self {
        Rmap {
            nodes: Pool::new(),
            root: END,
            top,
            empty: List::new(),
            empties: Cell::new(0),
        }
    }

    /// Takes a node from the pool as the root of the tree.
    pub(super) fn begin(&mut self) {
        self.root = self.nodes.take().expect("the pool is filled");
    }

    /// Returns the number and the level of the root node.
    pub(super) fn root(&self) -> (u32, Level) {
        (self.root, self.top)
    }

    /// Returns the number of nodes that can be made without an allocation. One empty node is not counted, because
    /// another node may have to be added below this node.
    pub(super) fn spare(&self) -> usize {
        self.nodes.spare() + self.empties.get().saturating_sub(1)
    }

    /// Returns the entry of `level` for `gfn`. `None`: the tree has no node for it, so nothing is listed for the
    /// region.
    pub(super) fn find(&self, gfn: Gfn, level: Level) -> Option<&RmapEntry> {
        let (mut number, mut at) = self.root();
        while at > level {
            number = self.nodes.get(number).entry(at.index(gfn)).below();
            if number == END {
                return None;
            }
            at = at.below();
        }
        Some(self.nodes.get(number).entry(level.index(gfn)))
    }

    /// Applies `change` to the entry of `level` for `gfn`. Adds the missing nodes on the path to the entry.
    ///
    /// # Panics
    /// If a node is missing and none is spare: the caller must have checked [`Rmap::spare`].
    pub(super) fn change(&self, gfn: Gfn, level: Level, change: impl FnOnce(&RmapEntry)) {
        let (mut number, mut at) = self.root();
        while at > level {
            let index = at.index(gfn);
            let mut below = self.nodes.get(number).entry(index).below();
            if below == END {
                below = self.new_node(number);
                let node = self.nodes.get(below);
                node.above.set((number, index as u16));
                self.empties.set(self.empties.get() + 1);
                self.empty
                    .push(below, |number| &self.nodes.get(number).empty);
                self.change_in(number, index, |entry| entry.below.set(below));
            }
            (number, at) = (below, at.below());
        }
        self.change_in(number, level.index(gfn), change);
    }

    /// Adds `change` to the number of shadow pages of the guest table in frame `gfn`, in all nodes on the path to the
    /// frame, which must exist.
    pub(super) fn count_table(&self, gfn: Gfn, change: i32) {
        let (mut number, mut at) = self.root();
        loop {
            let node = self.nodes.get(number);
            node.tables
                .set(node.tables.get().wrapping_add_signed(change));
            if at == Level::PAGE {
                return;
            }
            number = node.entry(at.index(gfn)).below();
            at = at.below();
        }
    }

    /// Returns whether the region of `level` that contains `gfn` contains a guest table that has a shadow page.
    pub(super) fn has_tables(&self, gfn: Gfn, level: Level) -> bool {
        match self.find(gfn, level) {
            Some(entry) if level == Level::PAGE => !entry.pages.is_empty(),
            Some(entry) if entry.below() != END => self.nodes.get(entry.below()).tables.get() > 0,
            _ => false,
        }
    }

    /// Returns the first frame in `range` that contains a guest table that has a shadow page.
    pub(super) fn first_table(&self, range: &Range<Gfn>) -> Option<Gfn> {
        self.first_table_in(self.root(), Gfn(0), range)
    }

    /// Like [`Self::first_table`], but searches only node `number`, of `level`, whose first frame is `start`, and the
    /// nodes below it.
    fn first_table_in(
        &self,
        (number, level): (u32, Level),
        start: Gfn,
        range: &Range<Gfn>,
    ) -> Option<Gfn> {
        let node = self.nodes.get(number);
        if node.tables.get() == 0 {
            return None;
        }
        let regions = (0..ENTRIES).map(|index| (index, start.add(index as u64 * level.pages())));
        let mut inside =
            regions.filter(|(_, gfn)| gfn.add(level.pages()) > range.start && *gfn < range.end);
        inside.find_map(|(index, gfn)| {
            let entry = node.entry(index);
            match entry.below() {
                _ if level == Level::PAGE => (!entry.pages.is_empty()).then_some(gfn),
                END => None,
                below => self.first_table_in((below, level.below()), gfn, range),
            }
        })
    }

    /// Applies `change` to entry `index` of node `number`, and updates the counts of used entries and of empty nodes.
    pub(super) fn change_in(&self, number: u32, index: usize, change: impl FnOnce(&RmapEntry)) {
        let node = self.nodes.get(number);
        let entry = node.entry(index);
        let was_empty = entry.is_empty();
        change(entry);
        let link = |number| &self.nodes.get(number).empty;
        match (was_empty, entry.is_empty()) {
            (true, false) => {
                if node.used.get() == 0 && number != self.root {
                    self.empty.remove(number, link);
                    self.empties.set(self.empties.get() - 1);
                }
                node.used.set(node.used.get() + 1);
            }
            (false, true) => {
                node.used.set(node.used.get() - 1);
                if node.used.get() == 0 && number != self.root {
                    self.empty.push(number, link);
                    self.empties.set(self.empties.get() + 1);
                }
            }
            _ => {}
        }
    }

    /// Returns a node that the caller can add below node `above`: a spare node, or, if there is none, an empty node
    /// other than `above`, which this function removes from the tree.
    fn new_node(&self, above: u32) -> u32 {
        if let Some(number) = self.nodes.take() {
            return number;
        }
        let link = |number| &self.nodes.get(number).empty;
        let other = self.empty.iter(link).find(|number| *number != above);
        let number = other.expect("nodes are allocated before the MMU is locked");
        let node = self.nodes.get(number);
        self.empty.remove(number, link);
        self.empties.set(self.empties.get() - 1);
        let (above, index) = node.above.get();
        self.change_in(above, index.into(), |entry| entry.below.set(END));
        number
    }

    /// Returns whether every node counts its entries correctly, and the list of empty nodes contains exactly the nodes
    /// without entries.
    pub(super) fn counts_right(&self) -> bool {
        let link = |number| &self.nodes.get(number).empty;
        let is_empty = |number: &u32| self.nodes.get(*number).used.get() == 0;
        self.empty.iter(link).all(|number| is_empty(&number))
            && self.empty.iter(link).count() == self.empties.get()
            && self.counts_right_below(self.root, self.top)
    }

    fn counts_right_below(&self, number: u32, level: Level) -> bool {
        let node = self.nodes.get(number);
        let used = node.array.iter().filter(|entry| !entry.is_empty()).count();
        used == usize::from(node.used.get())
            && node.array.iter().all(|entry| match entry.below() {
                END => true,
                below => self.counts_right_below(below, level.below()),
            })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::pool::More;
    use super::*;

    fn rmap(nodes: usize) -> Result<Rmap, OutOfMemory> {
        let mut rmap = Rmap::new(Level(4));
        let more = More::allocate(rmap.nodes.ask(nodes)?, Node::make)?;
        let _ = rmap.nodes.add(more);
        rmap.begin();
        Ok(rmap)
    }

    #[test]
    fn an_empty_node_serves_another_region_when_none_is_left() {
        let rmap = rmap(4).unwrap();
        let link = Link::new();
        let push = |entry: &RmapEntry| entry.leaves.push(1, |_| &link);
        let remove = |entry: &RmapEntry| entry.leaves.remove(1, |_| &link);
        let far = Gfn(1 << 30);
        for gfn in [Gfn(5), far, Gfn(6)] {
            rmap.change(gfn, Level::PAGE, push);
            assert!(
                rmap.find(gfn, Level::PAGE)
                    .is_some_and(|entry| !entry.is_empty())
            );
            assert!(rmap.counts_right());
            rmap.change(gfn, Level::PAGE, remove);
            assert!(rmap.counts_right());
        }
        assert!(rmap.find(far, Level::PAGE).is_none());
    }

    #[test]
    fn a_node_that_is_empty_is_not_put_below_itself() {
        let rmap = rmap(4).unwrap();
        let link = Link::new();
        rmap.change(Gfn(5), Level::PAGE, |entry| entry.leaves.push(1, |_| &link));
        rmap.change(Gfn(5), Level::PAGE, |entry| {
            entry.leaves.remove(1, |_| &link)
        });
        // The node of level 1 is empty. When the node is moved to another region, the node of level 2 becomes empty,
        // too.
        rmap.change(Gfn(512), Level::PAGE, |entry| {
            entry.leaves.push(1, |_| &link)
        });
        assert!(rmap.counts_right());
        assert!(rmap.find(Gfn(5), Level::PAGE).is_none());
        let (found, level) = (rmap.find(Gfn(512), Level::PAGE), Level::MEGA);
        assert!(found.is_some_and(|entry| !entry.is_empty()));
        assert!(
            rmap.find(Gfn(512), level)
                .is_some_and(|entry| entry.leaves.is_empty())
        );
    }
}
