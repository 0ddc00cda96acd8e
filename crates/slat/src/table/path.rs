//! The resources with which a fault or a split changes tables: frames allocated ahead, and its last flush.

use alloc::vec::Vec;

use super::{Flushed, Freed, NewFrame, Root, TableFrames};
use crate::addr::{Level, Pfn};
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::stats::Counters;

/// Frames for tables, allocated ahead, so that an install needs no allocation, which could fail or wait.
pub(crate) struct FrameCache {
    frames: Vec<Pfn>,
    /// Allocates and frees the frames.
    source: Shared<TableFrames>,
}

impl FrameCache {
    /// The largest number of frames that one fault can need: for the missing tables, or for the splits, on the path
    /// to its leaf. Below a root of level 5 there are four tables.
    pub(crate) const FAULT: usize = 4;
    /// The number of frames that a range operation allocates at a time.
    pub(crate) const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

    /// Makes an empty cache of frames from `source`.
    pub(crate) fn new(source: Shared<TableFrames>) -> Self {
        let frames = Vec::new();
        FrameCache { frames, source }
    }

    /// Allocates frames until the cache contains `frames` frames.
    ///
    /// # Errors
    /// [`OutOfMemory`] if there are still fewer; the frames that were allocated are kept.
    pub(crate) fn fill(
        &mut self,
        platform: &impl Platform,
        frames: usize,
    ) -> Result<(), OutOfMemory> {
        let Some(missing) = frames.checked_sub(self.frames.len()).filter(|n| *n > 0) else {
            return Ok(());
        };
        self.frames
            .try_reserve_exact(missing)
            .map_err(|_| OutOfMemory)?;
        let before = self.frames.len();
        let FrameCache {
            frames: all,
            source,
        } = self;
        source.allocate(platform, missing, |frame| all.push(frame));
        // `take` pops from the end of the list. Because the list is reversed, `take` returns frames in the order of
        // allocation, which is often that of their addresses.
        self.frames[before..].reverse();
        if self.frames.len() < frames {
            return Err(OutOfMemory);
        }
        Ok(())
    }

    /// Removes a frame and returns it.
    ///
    /// # Panics
    /// If the cache is empty: the caller has filled the cache, or has checked.
    pub(crate) fn take(&mut self) -> NewFrame {
        let frame = self.frames.pop();
        NewFrame::of(frame.expect("the cache is filled before a fault"))
    }

    /// Puts back a frame that was taken and not used.
    pub(crate) fn give_back(&mut self, frame: NewFrame) {
        self.frames.push(frame.release());
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Frees all frames.
    pub(crate) fn release(&mut self, platform: &impl Platform) {
        self.keep(platform, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns whether there are enough frames for one fault.
    pub(crate) fn serves_a_fault(&self) -> bool {
        self.frames.len() >= Self::FAULT
    }

    /// Frees all but `frames` frames.
    pub(crate) fn keep(&mut self, platform: &impl Platform, frames: usize) {
        let kept = frames.min(self.frames.len());
        // SAFETY: the frames were allocated by `fill` and never published.
        unsafe { self.source.free(platform, &self.frames[kept..]) };
        self.frames.truncate(kept);
    }
}

/// The resources for an install or a split on one path, and a record of the changes that were made.
pub(crate) struct Path<'a> {
    /// Frames for new tables. Each path that a vCPU begins has [`FrameCache::FAULT`] of them.
    pub(crate) frames: &'a mut FrameCache,
    /// The last flush that the owner of the path has done itself.
    pub(crate) flushed: Flushed,
    /// Whether the leaf is small only because of the policy `nx_huge_pages`: recovery may zap a level 1 table made for
    /// it.
    pub(crate) nx_split: bool,
    /// The number of huge leaves split, by level.
    pub(crate) splits: LeafCounts,
    /// The number of leaves that splits have made, by level.
    pub(crate) pieces: LeafCounts,
    /// The number of level 1 tables made with `nx_split`.
    pub(crate) nx_splits: u64,
    /// The number of shadow pages made.
    pub(crate) shadow_pages: u64,
    /// Whether the access is a store of the guest, after which a table of level 1 may be unsynced. Otherwise the MMU
    /// may be setting a flag in a table, whose shadow pages then remain correct.
    pub(crate) stores: bool,
    /// Whether the leaf was installed without the right to write, because the page contains a table of the guest. After
    /// the write, the client reports it to the MMU.
    pub(crate) tracked: bool,
    /// The root of the shadow pages on the path through the guest's tables.
    pub(crate) root: Option<Root>,
    /// The number of shadow pages that have become unsynced.
    pub(crate) unsynced: u64,
}

impl<'a> Path<'a> {
    /// Makes a path for an owner that has done no flush.
    pub(crate) fn new(frames: &'a mut FrameCache) -> Self {
        Path {
            frames,
            flushed: Flushed::default(),
            nx_split: false,
            splits: LeafCounts::default(),
            pieces: LeafCounts::default(),
            nx_splits: 0,
            shadow_pages: 0,
            stores: false,
            tracked: false,
            root: None,
            unsynced: 0,
        }
    }

    /// Records that a leaf of `level` was split into `pieces` leaves of the next lower level.
    pub(crate) fn split(&mut self, level: Level, pieces: usize) {
        let index = level.0 as usize - 1;
        self.splits[index] += 1;
        self.pieces[index - 1] += pieces as u64;
    }
}

impl Counters {
    /// Counts `freed`: the leaves that were zapped, and the tables of NX splits among them.
    pub(crate) fn leaves_zapped(&self, freed: &Freed) {
        for (gauge, n) in self.leaves().into_iter().zip(freed.leaves) {
            gauge.sub(n);
        }
        self.zapped.add(freed.leaves.iter().sum());
        self.nx_lpage_splits.sub(freed.nx_splits);
        self.mmu_shadow_zapped.add(freed.shadow_pages);
        self.mmu_unsync.sub(freed.unsynced);
    }

    /// Counts the splits done on `path`.
    pub(crate) fn path_done(&self, path: &Path<'_>) {
        if path.splits != LeafCounts::default() {
            let gauges = self.leaves();
            for level in 1..3 {
                gauges[level].sub(path.splits[level]);
                gauges[level - 1].add(path.pieces[level - 1]);
                self.splits.add(path.splits[level]);
            }
        }
        self.nx_lpage_splits.add(path.nx_splits);
        self.mmu_cache_miss.add(path.shadow_pages);
        self.mmu_unsync.add(path.unsynced);
    }
}

/// Leaves by level: index 0 counts 4 KiB, 1 counts 2 MiB, 2 counts 1 GiB.
pub(crate) type LeafCounts = [u64; 3];
