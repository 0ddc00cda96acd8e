//! Tables that were removed from an MMU, and that will be freed after a flush.

use super::{LeafCounts, Table, TableFrames};
use crate::addr::{Level, Pfn};
use crate::format::{Entry, Format};
use crate::platform::{Platform, ZappedLeaf};
use crate::sync::atomic::Ordering::Relaxed;

/// Counts of leaves and tables that were freed together.
#[derive(Clone, Copy, Default)]
pub(crate) struct Freed {
    /// The number of leaves, by level.
    pub(crate) leaves: LeafCounts,
    /// The number of level 1 tables that existed only because of `nx_huge_pages`.
    pub(crate) nx_splits: u64,
    /// The number of shadow pages.
    pub(crate) shadow_pages: u64,
    /// The number of freed shadow pages that were not synced with the guest's table.
    pub(crate) unsynced: u64,
}

impl core::ops::AddAssign for Freed {
    fn add_assign(&mut self, other: Freed) {
        for (count, more) in self.leaves.iter_mut().zip(other.leaves) {
            *count += more;
        }
        self.nx_splits += other.nx_splits;
        self.shadow_pages += other.shadow_pages;
        self.unsynced += other.unsynced;
    }
}

/// Owns subtrees to which no entry refers any more, but that walkers may still be reading.
#[must_use = "detached tables are lost unless they are freed after the flush"]
pub(crate) struct Detached {
    /// The first table of a list, packed by [`Self::pack`]; the metadata of each table contain the next table.
    head: u64,
    /// Counts of leaves that were zapped one by one when their table was detached, so that the table does not contain
    /// them any more.
    pub(crate) zapped: Freed,
}

impl Detached {
    const END: u64 = u64::MAX;
    const LEVEL_SHIFT: u32 = 56;

    pub(crate) const fn none() -> Self {
        Detached {
            head: Self::END,
            zapped: Freed {
                leaves: [0; 3],
                nx_splits: 0,
                shadow_pages: 0,
                unsynced: 0,
            },
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == Self::END
    }

    /// Packs a frame and the level of its table into one word. The frame number fits below [`Self::LEVEL_SHIFT`]: in no
    /// format does it have more than 44 bits (RISC-V's).
    fn pack(frame: Pfn, level: Level) -> u64 {
        debug_assert_eq!(frame.0 >> Self::LEVEL_SHIFT, 0, "the frame has more bits");
        frame.0 | (level.0 as u64) << Self::LEVEL_SHIFT
    }

    fn unpack(word: u64) -> (Pfn, Level) {
        (
            Pfn(word & ((1 << Self::LEVEL_SHIFT) - 1)),
            Level((word >> Self::LEVEL_SHIFT) as u8),
        )
    }

    /// Adds a table of `level`, with all tables below it. Call after clearing the last entry that referred to the
    /// table.
    pub(crate) fn push<P: Platform, F: Format>(&mut self, table: &Table<'_, P, F>, level: Level) {
        table.meta().next.store(self.head, Relaxed);
        self.head = Detached::pack(table.frame, level);
    }

    /// Frees the tables, and returns the numbers of leaves and tables.
    ///
    /// # Safety
    /// - The tables are of format `F`, and belong to the VM of `frames` on `platform`.
    /// - Since the tables were detached, every reader has passed a quiescent point, and the hardware's TLBs were
    ///   flushed: no walker can reach the tables.
    pub(crate) unsafe fn free<P: Platform, F: Format>(
        self,
        platform: &P,
        frames: &TableFrames,
    ) -> Freed {
        let mut freeing = Freeing {
            platform,
            frames,
            batch: [Pfn(0); FREE_BATCH],
            len: 0,
            freed: self.zapped,
        };
        let mut head = self.head;
        while head != Detached::END {
            let (frame, level) = Detached::unpack(head);
            head = Table::<P, F>::new(platform, frame)
                .meta()
                .next
                .load(Relaxed);
            // SAFETY: the table is of format `F` and of this VM, and no page walker can reach it, as this function's `#
            // Safety` asks of its caller.
            unsafe { freeing.subtree::<F>(frame, level) };
        }
        // SAFETY: the requirements of this function hold for all tables that `freeing` has collected.
        unsafe { freeing.finish() }
    }
}

/// Calls [`Platform::zapped`] for the leaf `bits` of `level`. Does nothing if the platform does not want this, or if
/// `bits` are not a leaf.
#[inline]
pub(crate) fn tell_zapped<P: Platform, F: Format>(platform: &P, bits: u64, level: Level) {
    if !P::WANTS_ZAPPED {
        return;
    }
    if let Entry::Leaf(leaf) | Entry::Broken(leaf) = F::decode(bits, level) {
        platform.zapped(ZappedLeaf {
            pfn: leaf.pfn,
            level,
            accessed: leaf.accessed,
            dirty: leaf.dirty || !F::SETS_DIRTY && (leaf.write || leaf.may_write),
        });
    }
}

const FREE_BATCH: usize = 64;

/// Frees tables in batches.
struct Freeing<'a, P: Platform> {
    platform: &'a P,
    frames: &'a TableFrames,
    batch: [Pfn; FREE_BATCH],
    len: usize,
    freed: Freed,
}

impl<P: Platform> Freeing<'_, P> {
    /// Frees a table of `level` and all tables below it.
    ///
    /// # Safety
    /// - The requirements of [`Detached::free`] hold for the table and all tables below it.
    unsafe fn subtree<F: Format>(&mut self, frame: Pfn, level: Level) {
        let table = Table::<P, F>::new(self.platform, frame);
        let meta = table.meta();
        let tells = P::WANTS_ZAPPED && meta.leaves.load(Relaxed) > 0;
        if level > Level::PAGE || tells {
            for entry in table.entries() {
                let bits = entry.load(Relaxed);
                match F::next_table(bits, level) {
                    // SAFETY: a table below a table that no walker can reach cannot be reached, either.
                    Some(lower) => unsafe { self.subtree::<F>(lower, level.below()) },
                    None => tell_zapped::<P, F>(self.platform, bits, level),
                }
            }
        }
        if level <= F::MAX_LEAF {
            self.freed.leaves[level.0 as usize - 1] += u64::from(meta.leaves.load(Relaxed));
        }
        self.freed.nx_splits += u64::from(meta.nx_split.load(Relaxed));
        self.batch[self.len] = frame;
        self.len += 1;
        if self.len == FREE_BATCH {
            // SAFETY: no page walker can reach these tables, as this function's `# Safety` asks of its caller, and no
            // list contains them any more.
            unsafe { self.frames.free(self.platform, &self.batch) };
            self.len = 0;
        }
    }

    /// Frees the remaining frames, which are fewer than a batch.
    ///
    /// # Safety
    /// - The requirements of [`Detached::free`] hold for every table given to `subtree`.
    unsafe fn finish(self) -> Freed {
        // SAFETY: no page walker can reach these tables, as this function's `# Safety` asks of its caller.
        unsafe { self.frames.free(self.platform, &self.batch[..self.len]) };
        self.freed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::format::tests::assert_refuses;

    #[test]
    fn a_table_of_any_frame_and_level_can_be_detached() {
        for frame in [0, 1, (1 << 44) - 1, (1 << 56) - 1].map(Pfn) {
            for level in (1..=5).map(Level) {
                let word = Detached::pack(frame, level);
                assert_ne!(word, Detached::END);
                assert_eq!(Detached::unpack(word), (frame, level));
            }
        }
        assert_refuses(|| Detached::pack(Pfn(1 << 56), Level::PAGE));
    }
}
