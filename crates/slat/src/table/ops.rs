//! The range operations: each is what it does at an entry.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use core::marker::PhantomData;

use alloc::vec::Vec;

use super::walk::{At, RUN, Visit};
use super::{
    Detached, FrameCache, Freed, LeafCounts, Next, OutOfMemory, Path, Show, Table, Tree, Walk,
};
use crate::addr::{Access, Gfn, Level, Pfn};
use crate::format::{Entry, Format};
use crate::platform::Platform;

/// What was taken away.
#[must_use = "what was zapped must be flushed, and its tables freed after that"]
pub(crate) struct Zapped {
    /// Leaves that were zapped one by one; those in `detached` are counted when they are freed.
    pub(crate) leaves: LeafCounts,
    /// Tables that lay in the range as a whole.
    pub(crate) detached: Detached,
}

impl Zapped {
    pub(crate) const fn nothing() -> Self {
        Zapped {
            leaves: [0; 3],
            detached: Detached::none(),
        }
    }

    /// Whether nothing was taken away.
    pub(crate) fn is_empty(&self) -> bool {
        self.leaves == LeafCounts::default() && self.detached.is_empty()
    }
}

impl Detached {
    /// Adds a table that was just taken out of the tree.
    pub(super) fn push<P: Platform>(&mut self, table: &Table<'_, P>, level: Level) {
        table.meta().next.store(self.head, Relaxed);
        self.head = Detached::pack(table.frame, level);
    }
}

impl core::ops::AddAssign for Freed {
    fn add_assign(&mut self, other: Freed) {
        for (count, more) in self.leaves.iter_mut().zip(other.leaves) {
            *count += more;
        }
        self.nx_splits += other.nx_splits;
    }
}

/// See [`Tree::write_protect`].
struct WriteProtect<'c, F, W> {
    wanted: W,
    changed: &'c mut LeafCounts,
    format: PhantomData<F>,
}

impl<F: Format, W: FnMut(Gfn, Level) -> bool> Visit for WriteProtect<'_, F, W> {
    #[inline]
    fn visit(&mut self, at: &At<'_>) -> Next {
        if F::is_writable(at.bits) && (self.wanted)(at.gfn, at.level) {
            at.put(F::write_protect(at.bits));
            self.changed[at.level.0 as usize - 1] += 1;
        }
        Next::Pass
    }

    /// Pages that may all be written.
    #[inline]
    fn run(&mut self, entries: &[AtomicU64; RUN], first: Gfn) -> bool {
        let bits: [u64; RUN] = core::array::from_fn(|i| entries[i].load(Relaxed));
        let (set, clear) = F::ready(Access::Write);
        let set = set & !(F::ACCESSED | F::DIRTY);
        let all = bits.iter().fold(u64::MAX, |all, bits| all & bits);
        let any = bits.iter().fold(0, |any, bits| any | bits);
        let wanted = (0..RUN as u64).all(|i| (self.wanted)(first.add(i), Level::PAGE));
        if all & set != set || any & clear != 0 || !wanted {
            return false;
        }
        for (entry, bits) in entries.iter().zip(bits) {
            overwrite(entry, F::write_protect(bits));
        }
        self.changed[0] += RUN as u64;
        true
    }
}

/// How a split walks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SplitWalk {
    /// Every entry, those of tables it has just made included: what there is to improve on.
    Full,
    /// No table of level 1.
    SkipLastLevel,
    /// No table without a huge leaf either.
    SkipWithoutHuge,
}

impl SplitWalk {
    fn show(self) -> Show {
        Show {
            skip_last_level: self != SplitWalk::Full,
            skip_without_huge: self == SplitWalk::SkipWithoutHuge,
            ..Show::default()
        }
    }
}

/// Each goes on with a walk ([`Tree::walk`]) as far as it may.
impl<P: Platform, F: Format> Tree<P, F> {
    /// Takes every translation of the range away, adding to `zapped`. A huge leaf that reaches out of
    /// the range goes as a whole: its other pages fault back in.
    pub(crate) fn zap(&self, walk: &mut Walk, zapped: &mut Zapped) {
        let show = Show {
            tables: true,
            ..Show::default()
        };
        let range = walk.range();
        self.walk(walk, show, &mut |at: &At<'_>| match at.decode::<F>() {
            Entry::Table(lower) if at.is_inside(&range) => {
                at.clear::<F>();
                zapped.detached.push(&self.table(lower), at.level.below());
                Next::Pass
            }
            Entry::Leaf(_) | Entry::Broken(_) => {
                at.clear::<F>();
                zapped.leaves[at.level.0 as usize - 1] += 1;
                Next::Pass
            }
            _ => Next::Descend,
        });
    }

    /// The same where leaves' dirty bits are somebody's log: calls `dirty`, under the lock of its
    /// table, for every leaf that has one. No table goes as a whole, because a walker that is in it
    /// could still set a bit there.
    pub(crate) fn zap_noting(
        &self,
        walk: &mut Walk,
        zapped: &mut Zapped,
        mut dirty: impl FnMut(Gfn, Level),
    ) {
        self.walk(walk, Show::default(), &mut |at: &At<'_>| {
            let bits = at.take::<F>();
            if F::clear_dirty(bits) != bits {
                dirty(at.gfn, at.level);
            }
            zapped.leaves[at.level.0 as usize - 1] += 1;
            Next::Pass
        });
    }

    /// Shows `visit` the entries of the range that refer to a table and could be a leaf instead, each with the
    /// table's frame. `visit` returns how the walk goes on.
    pub(crate) fn visit_tables(
        &self,
        walk: &mut Walk,
        mut visit: impl FnMut(&At<'_>, Pfn) -> Next,
    ) {
        let range = walk.range();
        self.walk(
            walk,
            Show::TABLES,
            &mut |at: &At<'_>| match at.decode::<F>() {
                Entry::Table(lower) if at.level <= F::MAX_LEAF && at.is_inside(&range) => {
                    visit(at, lower)
                }
                _ => Next::Descend,
            },
        );
    }

    /// Zaps the tables that [`Self::visit_tables`] visits and for which `wanted(gfn, level, frame of the table)`
    /// is true; the next fault installs a huge leaf, or what then fits, instead.
    pub(crate) fn zap_tables(
        &self,
        walk: &mut Walk,
        zapped: &mut Zapped,
        mut wanted: impl FnMut(Gfn, Level, Pfn) -> bool,
    ) {
        self.visit_tables(walk, |at, table| {
            if !wanted(at.gfn, at.level, table) {
                return Next::Descend;
            }
            at.clear::<F>();
            zapped.detached.push(&self.table(table), at.level.below());
            Next::Pass
        });
    }

    /// Removes all MMIO entries, which no TLB holds: nothing is owed for them.
    pub(crate) fn zap_mmio(&self, walk: &mut Walk) {
        let show = Show {
            mmio: true,
            ..Show::default()
        };
        self.walk(walk, show, &mut |at: &At<'_>| {
            if let Entry::Mmio { .. } = at.decode::<F>() {
                at.put(0);
            }
            Next::Descend
        });
    }

    /// Whether the table in `frame` is one that recovery of NX huge pages may take away.
    pub(crate) fn is_nx_table(&self, frame: Pfn) -> bool {
        self.table(frame).meta().nx_split.load(Relaxed)
    }

    /// Takes the right to write from every leaf of the range for which `wanted` says so, remembering
    /// it in `may_write`; adds those to `changed`. A flush is owed if there are any.
    ///
    /// A huge leaf is protected as a whole if a page of it is in the range: splitting is the
    /// business of the write fault, or of an eager split.
    ///
    /// Plain stores: an accessed or dirty bit that is being set this moment may be lost. A page then
    /// looks older than it is, as with a TLB that holds the bit back; and dirty bits mean nothing
    /// where the log goes by write protection.
    pub(crate) fn write_protect(
        &self,
        walk: &mut Walk,
        wanted: impl FnMut(Gfn, Level) -> bool,
        changed: &mut LeafCounts,
    ) {
        let mut protect = WriteProtect::<F, _> {
            wanted,
            changed,
            format: PhantomData,
        };
        self.walk(walk, Show::default(), &mut protect);
    }

    /// Clears the dirty bit of every leaf of the range that has it and for which `wanted` says so, calls
    /// `dirty` for each, and adds those to `changed`. A flush is owed if there are any.
    pub(crate) fn clear_dirty(
        &self,
        walk: &mut Walk,
        mut wanted: impl FnMut(Gfn, Level) -> bool,
        mut dirty: impl FnMut(Gfn, Level),
        changed: &mut LeafCounts,
    ) {
        self.walk(walk, Show::default(), &mut |at: &At<'_>| {
            if F::clear_dirty(at.bits) != at.bits && wanted(at.gfn, at.level) {
                at.update::<F>(F::clear_dirty);
                dirty(at.gfn, at.level);
                changed[at.level.0 as usize - 1] += 1;
            }
            Next::Pass
        });
    }

    /// Counts the leaves of the range that were used since their accessed bit was last cleared, and
    /// clears it if `clear`. No flush is owed: an accessed bit that a TLB holds back only makes a
    /// page look older than it is.
    pub(crate) fn age(&self, walk: &mut Walk, clear: bool) -> u64 {
        let mut young = 0;
        self.walk(walk, Show::default(), &mut |at: &At<'_>| {
            if F::clear_accessed(at.bits) != at.bits {
                young += 1;
                if clear {
                    at.update::<F>(F::clear_accessed);
                }
            }
            Next::Pass
        });
        young
    }

    /// Splits the huge leaves of the range for which `wanted` says so, and the pieces it says it of, down
    /// to 4 KiB at most, in place: each page stays mapped throughout, to the same frame with the same
    /// rights, so no walker faults and nothing needs a flush. It stops where the path has no frame left.
    ///
    /// On a walker that asks for break-before-make it breaks them only, as many as the path has frames for, and
    /// adds them to `broken`, which has room for so many. Then the caller flushes, and mends each ([`Tree::mend`]).
    pub(crate) fn split(
        &self,
        walk: &mut Walk,
        how: SplitWalk,
        wanted: impl Fn(Gfn, Level) -> bool,
        path: &mut Path<'_>,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        self.walk(walk, how.show(), &mut |at: &At<'_>| {
            let mut bits = at.bits;
            let Entry::Leaf(_) = F::decode(bits, at.level) else {
                return Next::Descend;
            };
            if at.level == Level::PAGE || !wanted(at.gfn, at.level) {
                return Next::Pass;
            }
            if broken.len() == path.frames.0.len() {
                return Next::Stop;
            }
            if F::BREAK_BEFORE_MAKE {
                at.update::<F>(F::broken);
                self.broke(at.meta);
                broken.push((at.gfn, at.level));
                return Next::Pass;
            }
            let frame = path.frames.take();
            loop {
                // SAFETY: the frame is this path's, and not published before the exchange.
                unsafe { self.fill_below(frame, at.level, bits) };
                match at.put_table::<F>(bits, F::table(frame)) {
                    Ok(()) => break,
                    Err(now) => bits = now,
                }
            }
            path.splits[at.level.0 as usize - 1] += 1;
            Next::Descend
        });
        // What comes out of a broken leaf of 1 GiB can be split further.
        let enters = |(_, level): &&(Gfn, Level)| *level > Level::MEGA || how == SplitWalk::Full;
        if let Some((gfn, _)) = broken.iter().find(enters) {
            walk.go_to(*gfn);
        }
    }
}

/// Room for leaves that a [`Tree::split`] breaks: for as many as a path has frames, where the format asks for it.
///
/// # Errors
/// [`OutOfMemory`].
pub(crate) fn room_for_broken<F: Format>() -> Result<Vec<(Gfn, Level)>, OutOfMemory> {
    let mut leaves = Vec::new();
    if F::BREAK_BEFORE_MAKE {
        let room = leaves.try_reserve_exact(FrameCache::BATCH);
        room.map_err(|_| OutOfMemory)?;
    }
    Ok(leaves)
}
