//! The resources with which a fault or a split changes tables: frames that were allocated in advance, and the owner's
//! last flush.

use alloc::vec::Vec;

use super::{Flushed, Freed, NewFrame, Root, TableFrames};
use crate::addr::{Level, Pfn};
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::stats::Counters;

/// Frames for tables, allocated in advance, so that an install need not allocate, which could fail or wait.
pub(crate) struct FrameCache {
    frames: Vec<Pfn>,
    /// Where the frames are allocated and freed.
    source: Shared<TableFrames>,
}

impl FrameCache {
    /// The largest number of frames that one fault can need, for missing tables or splits on the path to its leaf:
    /// there are four tables below a root of level 5.
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
    /// [`OutOfMemory`]; frames that were allocated are kept.
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
        // `take` pops from the end of the list. So reverse the new frames: then `take` returns them in the order of
        // their allocation, which is often the order of their addresses.
        self.frames[before..].reverse();
        if self.frames.len() < frames {
            return Err(OutOfMemory);
        }
        Ok(())
    }

    /// Removes a frame and returns it.
    ///
    /// # Panics
    /// If the cache is empty: the caller must have filled it or checked it.
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
        // SAFETY: `fill` has allocated the frames, and they were never published.
        unsafe { self.source.free(platform, &self.frames[kept..]) };
        self.frames.truncate(kept);
    }
}

/// The resources for an install or a split on one path, and a record of the changes that were made.
pub(crate) struct Path<'a> {
    /// Frames for new tables. For each install of a vCPU there are at least [`FrameCache::FAULT`].
    pub(crate) frames: &'a mut FrameCache,
    /// The last flush that the owner of the path has done itself.
    pub(crate) flushed: Flushed,
    /// Whether the leaf to install is of level 1 only because of the policy `nx_huge_pages`. A level 1 table that is
    /// made for it is marked, so that NX recovery may zap it.
    pub(crate) nx_split: bool,
    /// The number of huge leaves split, by level.
    pub(crate) splits: LeafCounts,
    /// The number of leaves that splits have made, by level.
    pub(crate) pieces: LeafCounts,
    /// The number of level 1 tables made with `nx_split`.
    pub(crate) nx_splits: u64,
    /// The number of shadow pages that were made.
    pub(crate) shadow_pages: u64,
    /// Whether the access is a store of the guest: then a guest table of level 1 in the page may become unsynced. If
    /// the MMU itself sets a flag in a guest table, shadow pages stay correct, and this is `false`.
    pub(crate) stores: bool,
    /// Whether the leaf was installed without the right to write, because the page contains a tracked guest table. The
    /// client must report the write to the MMU after it.
    pub(crate) tracked: bool,
    /// The shadow page that is the root of this path, if the path is through the guest's tables.
    pub(crate) root: Option<Root>,
    /// The number of shadow pages that have become unsynced.
    pub(crate) unsynced: u64,
}

impl<'a> Path<'a> {
    /// Makes a path for an owner that has not flushed.
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
    /// Adds the zapped leaves and the freed tables in `freed` to the counters.
    pub(crate) fn leaves_zapped(&self, freed: &Freed) {
        for (gauge, n) in self.leaves().into_iter().zip(freed.leaves) {
            gauge.sub(n);
        }
        self.zapped.add(freed.leaves.iter().sum());
        self.nx_lpage_splits.sub(freed.nx_splits);
        self.mmu_shadow_zapped.add(freed.shadow_pages);
        self.mmu_unsync.sub(freed.unsynced);
    }

    /// Adds what was done on `path` to the counters.
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

/// Numbers of leaves by level: index 0 is level 1 (4 KiB), index 1 is level 2 (2 MiB), index 2 is level 3 (1 GiB).
pub(crate) type LeafCounts = [u64; 3];
