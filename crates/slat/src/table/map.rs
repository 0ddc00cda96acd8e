//! Installing one leaf, as a fault does.

use core::sync::atomic::Ordering::*;

use super::{Detached, FrameCache, LeafCounts, Table, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;

/// What [`Tree::map`] did.
#[must_use]
pub(crate) enum Mapped {
    /// A leaf stands where none stood.
    New,
    /// The same page stood there with fewer rights, and has more now. Widening needs no flush.
    Widened,
    /// A leaf that allows as much stood there already: somebody was faster.
    Spurious,
    /// Something else stood there: a leaf for another page, or a table of smaller leaves. It is
    /// gone; the caller must flush, and free the table after that.
    Replaced(Detached, LeafCounts),
    /// What the caller knew does not hold any more. Nothing was installed.
    Stale,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Makes `leaf` translate the region of `level` that begins at `gfn`. Missing tables are added;
    /// a larger leaf in the way is split in place, so that its other pages stay mapped throughout.
    /// `valid` is asked under the lock of the table that receives the leaf, immediately before;
    /// `done` runs under that lock immediately after.
    ///
    /// `splits` is raised by the number of huge leaves that were split, by level.
    ///
    /// The caller is inside a reader section, and `frames` is full.
    #[expect(
        clippy::too_many_arguments,
        reason = "what a fault knows, and the two steps under the lock"
    )]
    pub(crate) fn map(
        &self,
        gfn: Gfn,
        level: Level,
        leaf: Leaf,
        frames: &mut FrameCache,
        splits: &mut LeafCounts,
        valid: impl Fn() -> bool,
        done: impl FnOnce(&Mapped),
    ) -> Mapped {
        let table = self.table_for(gfn, level, frames, splits);
        let entry = table.entry(level.index(gfn));
        let guard = table.lock();
        if !valid() {
            return Mapped::Stale;
        }
        let bits = entry.load(Relaxed);
        let mapped = match F::decode(bits, level) {
            Entry::Empty | Entry::Mmio { .. } => {
                entry.store(F::leaf(leaf, level), Release);
                Mapped::New
            }
            Entry::Leaf(old) if old.pfn == leaf.pfn && old.memory == leaf.memory => {
                if F::leaf(union(old, leaf), level) == bits {
                    Mapped::Spurious
                } else {
                    // Hardware may set accessed and dirty meanwhile; nothing else changes under
                    // the lock.
                    let _ =
                        entry.fetch_update(Release, Relaxed, |bits| match F::decode(bits, level) {
                            Entry::Leaf(now) => Some(F::leaf(union(now, leaf), level)),
                            _ => None,
                        });
                    Mapped::Widened
                }
            }
            Entry::Leaf(_) => {
                entry.store(F::leaf(leaf, level), Release);
                let mut counts = LeafCounts::default();
                counts[level.0 as usize - 1] = 1;
                Mapped::Replaced(Detached::none(), counts)
            }
            Entry::Table(lower) => {
                entry.store(F::leaf(leaf, level), Release);
                let mut detached = Detached::none();
                detached.push(&self.table(lower), level.below());
                Mapped::Replaced(detached, LeafCounts::default())
            }
        };
        done(&mapped);
        drop(guard);
        mapped
    }

    /// Puts an MMIO entry of `generation` at `gfn`, unless something else stands there by now; tells
    /// which. `splits` as in [`Tree::map`]: a huge leaf may come in between.
    pub(crate) fn map_mmio(
        &self,
        gfn: Gfn,
        generation: u64,
        frames: &mut FrameCache,
        splits: &mut LeafCounts,
    ) -> bool {
        // A huge leaf in the way means that a slot has appeared: leave it alone.
        if matches!(self.lookup(gfn).entry, Entry::Leaf(_)) {
            return false;
        }
        let table = self.table_for(gfn, Level::PAGE, frames, splits);
        let entry = table.entry(Level::PAGE.index(gfn));
        let _guard = table.lock();
        let free = F::is_absent(entry.load(Relaxed));
        if free {
            entry.store(F::mmio(generation), Release);
        }
        free
    }

    /// The table of `level` on the way to `gfn`, made if need be.
    fn table_for(
        &self,
        gfn: Gfn,
        level: Level,
        frames: &mut FrameCache,
        splits: &mut LeafCounts,
    ) -> Table<'_, P> {
        let mut frame = self.root;
        let mut at = F::TOP;
        while at > level {
            let table = self.table(frame);
            let entry = table.entry(at.index(gfn));
            let mut bits = entry.load(Acquire);
            if !matches!(F::decode(bits, at), Entry::Table(_)) {
                bits = self.add_table(&table, at, gfn, frames, splits);
            }
            match F::decode(bits, at) {
                Entry::Table(lower) => frame = lower,
                _ => unreachable!("add_table leaves a table"),
            }
            at = at.below();
        }
        self.table(frame)
    }

    /// Makes the entry of `table` on the way to `gfn` lead to a table; returns its bits.
    #[cold]
    fn add_table(
        &self,
        table: &Table<'_, P>,
        level: Level,
        gfn: Gfn,
        frames: &mut FrameCache,
        splits: &mut LeafCounts,
    ) -> u64 {
        let entry = table.entry(level.index(gfn));
        // Usually nobody races, so the new table is filled before the lock is taken. What it is
        // filled with is looked at again under the lock.
        let frame = frames.take();
        let mut filled_for = None;
        loop {
            let seen = entry.load(Acquire);
            if filled_for != Some(seen) {
                self.fill_below(frame, level, seen);
                filled_for = Some(seen);
            }
            let guard = table.lock();
            let bits = entry.load(Relaxed);
            match F::decode(bits, level) {
                Entry::Table(_) => {
                    drop(guard);
                    frames.give_back(frame);
                    return bits;
                }
                now => {
                    if bits == seen {
                        let new = F::table(frame);
                        entry.store(new, Release);
                        if matches!(now, Entry::Leaf(_)) {
                            splits[level.0 as usize - 1] += 1;
                        }
                        return new;
                    }
                }
            }
        }
    }

    /// Fills an unpublished table so that it means the same as `bits` at `level` above it.
    pub(super) fn fill_below(&self, frame: Pfn, level: Level, bits: u64) {
        let table = self.table(frame);
        match F::decode(bits, level) {
            Entry::Leaf(huge) => table.fill(|i| F::leaf(huge.piece(level, i), level.below())),
            _ => table.clear(),
        }
    }
}

impl FrameCache {
    fn give_back(&mut self, frame: Pfn) {
        self.0.push(frame);
    }
}

/// The rights and marks of both.
fn union(a: Leaf, b: Leaf) -> Leaf {
    Leaf {
        write: a.write | b.write,
        execute: a.execute | b.execute,
        may_write: (a.may_write | b.may_write) & !(a.write | b.write),
        accessed: a.accessed | b.accessed,
        dirty: a.dirty | b.dirty,
        ..a
    }
}
