//! Builds the tables of a tree that no other thread can reach yet, from leaves in the order of their frames.

use super::{FrameCache, LeafCounts, NewTable, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::Format;
use crate::heap::OutOfMemory;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::Relaxed;

/// Fills an empty tree with leaves.
pub(crate) struct TableBuilder<'t, P: Platform, F: Format> {
    tree: &'t mut Tree<P, F>,
    frames: FrameCache,
    /// The table that contains the last leaf: the first guest frame that it maps, its level, and its frame.
    last: Option<(Gfn, Level, Pfn)>,
    /// The number of leaves in the tree, by level.
    leaves: LeafCounts,
}

impl<'t, P: Platform, F: Format> TableBuilder<'t, P, F> {
    pub(crate) fn new(tree: &'t mut Tree<P, F>) -> Self {
        let frames = FrameCache::new(tree.frames.clone());
        TableBuilder {
            tree,
            frames,
            last: None,
            leaves: LeafCounts::default(),
        }
    }

    /// Makes sure that [`Self::put`] has tables for at least one leaf. Do not call this under a table's lock.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn prepare(&mut self) -> Result<(), OutOfMemory> {
        let _ = (self.frames).fill(self.tree.platform(), FrameCache::BATCH);
        match self.frames.len() < Self::MOST {
            true => Err(OutOfMemory),
            false => Ok(()),
        }
    }

    /// The largest number of new tables that one leaf can need.
    const MOST: usize = F::TOP.0 as usize - 1;

    /// Stores `bits` as the leaf of `level` for `gfn`. If the prepared tables may not suffice, does nothing and returns
    /// `false`.
    pub(crate) fn put(&mut self, gfn: Gfn, level: Level, bits: u64) -> bool {
        let first = F::GRANULE.align_down(gfn, Level(level.0 + 1));
        let frame = match self.last {
            Some((start, of, frame)) if (start, of) == (first, level) => frame,
            _ if self.frames.len() < Self::MOST => return false,
            _ => self.table_for(gfn, level),
        };
        self.last = Some((first, level, frame));
        let table = self.tree.table(frame);
        // Relaxed: the tree is published later, together with the VM.
        table
            .entry(F::GRANULE.index(gfn, level))
            .store(bits, Relaxed);
        table.meta().count_leaves(1);
        self.leaves[level.0 as usize - 1] += 1;
        true
    }

    /// Returns the table of `level` on the path to `gfn`, and adds missing tables on this path.
    fn table_for(&mut self, gfn: Gfn, level: Level) -> Pfn {
        loop {
            let found = self.tree.find_at(gfn, level);
            if found.level == level {
                return found.table;
            }
            let mut table = NewTable::<P, F>::new(self.tree.platform(), self.frames.take());
            table.clear();
            found.entry.store(F::table(table.finish()), Relaxed);
        }
    }

    /// Ends the work. Returns the number of leaves in the tree, by level.
    pub(crate) fn finish(mut self) -> LeafCounts {
        self.frames.release(self.tree.platform());
        self.leaves
    }
}
