//! The range operations: each is what it does at an entry.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use core::marker::PhantomData;
use core::ops::Range;

use alloc::vec::Vec;

use super::walk::{At, RUN, Visit};
use super::{
    Detached, FrameCache, Freed, LeafCounts, Next, OutOfMemory, Path, Show, Table, Tickets, Tree,
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
    /// Drawn for some of it, or for all.
    pub(crate) tickets: Tickets,
}

impl Zapped {
    pub(crate) const fn nothing() -> Self {
        Zapped {
            leaves: [0; 3],
            detached: Detached::none(),
            tickets: Tickets::NONE,
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
struct WriteProtect<F, W> {
    wanted: W,
    changed: u64,
    format: PhantomData<F>,
}

impl<F: Format, W: FnMut(Gfn, Level) -> bool> Visit for WriteProtect<F, W> {
    #[inline]
    fn visit(&mut self, at: &At<'_>) -> Next {
        if F::is_writable(at.bits) && (self.wanted)(at.gfn, at.level) {
            at.put(F::write_protect(at.bits));
            self.changed += 1;
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
        self.changed += RUN as u64;
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

impl<P: Platform, F: Format> Tree<P, F> {
    /// Takes every translation of `range` away, adding to `zapped`. A huge leaf that reaches out of
    /// the range goes as a whole: its other pages fault back in.
    pub(crate) fn zap(&self, range: Range<Gfn>, zapped: &mut Zapped) {
        let show = Show {
            tables: true,
            ..Show::default()
        };
        let walked = self.walk(range.clone(), show, &mut |at| match at.decode::<F>() {
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
        zapped.tickets.append(walked.tickets);
    }

    /// The same where leaves' dirty bits are somebody's log: calls `dirty`, under the lock of its
    /// table, for every leaf that has one. No table goes as a whole, because a walker that is in it
    /// could still set a bit there.
    pub(crate) fn zap_noting(
        &self,
        range: Range<Gfn>,
        zapped: &mut Zapped,
        mut dirty: impl FnMut(Gfn, Level),
    ) {
        let walked = self.walk(range, Show::default(), &mut |at| {
            let bits = at.take::<F>();
            if F::clear_dirty(bits) != bits {
                dirty(at.gfn, at.level);
            }
            zapped.leaves[at.level.0 as usize - 1] += 1;
            Next::Pass
        });
        zapped.tickets.append(walked.tickets);
    }

    /// Takes away tables of `range` for which `wanted(gfn, level, frame of the table)` says so; the
    /// next fault puts a huge leaf, or what then fits, in their place.
    pub(crate) fn zap_tables(
        &self,
        range: Range<Gfn>,
        zapped: &mut Zapped,
        mut wanted: impl FnMut(Gfn, Level, Pfn) -> bool,
    ) {
        let show = Show {
            tables: true,
            skip_last_level: true,
            ..Show::default()
        };
        let walked = self.walk(range.clone(), show, &mut |at| match at.decode::<F>() {
            Entry::Table(lower)
                if at.level <= F::MAX_LEAF
                    && at.is_inside(&range)
                    && wanted(at.gfn, at.level, lower) =>
            {
                at.clear::<F>();
                zapped.detached.push(&self.table(lower), at.level.below());
                Next::Pass
            }
            _ => Next::Descend,
        });
        zapped.tickets.append(walked.tickets);
    }

    /// Removes all MMIO entries, which no TLB holds: nothing is owed for them.
    pub(crate) fn zap_mmio(&self) {
        let show = Show {
            mmio: true,
            ..Show::default()
        };
        self.walk(Gfn(0)..Gfn(Self::capacity()), show, &mut |at| {
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

    /// Takes the right to write from every leaf of `range` for which `wanted` says so, remembering
    /// it in `may_write`; returns how many were changed. A flush is owed if any was.
    ///
    /// A huge leaf is protected as a whole if a page of it is in the range: splitting is the
    /// business of the write fault, or of an eager split.
    ///
    /// Plain stores: an accessed or dirty bit that is being set this moment may be lost. A page then
    /// looks older than it is, as with a TLB that holds the bit back; and dirty bits mean nothing
    /// where the log goes by write protection.
    pub(crate) fn write_protect(
        &self,
        range: Range<Gfn>,
        wanted: impl FnMut(Gfn, Level) -> bool,
    ) -> u64 {
        let mut protect = WriteProtect::<F, _> {
            wanted,
            changed: 0,
            format: PhantomData,
        };
        self.walk_with(range, Show::default(), &mut protect);
        protect.changed
    }

    /// Clears the dirty bit of every leaf of `range` that has it and for which `wanted` says so, and
    /// calls `dirty` for each. Returns how many there were. A flush is owed if any was.
    pub(crate) fn clear_dirty(
        &self,
        range: Range<Gfn>,
        mut wanted: impl FnMut(Gfn, Level) -> bool,
        mut dirty: impl FnMut(Gfn, Level),
    ) -> u64 {
        let mut changed = 0;
        self.walk(range, Show::default(), &mut |at| {
            if F::clear_dirty(at.bits) != at.bits && wanted(at.gfn, at.level) {
                at.update::<F>(F::clear_dirty);
                dirty(at.gfn, at.level);
                changed += 1;
            }
            Next::Pass
        });
        changed
    }

    /// Counts the leaves of `range` that were used since their accessed bit was last cleared, and
    /// clears it if `clear`. No flush is owed: an accessed bit that a TLB holds back only makes a
    /// page look older than it is.
    pub(crate) fn age(&self, range: Range<Gfn>, clear: bool) -> u64 {
        let mut young = 0;
        self.walk(range, Show::default(), &mut |at| {
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

    /// Splits every huge leaf of `range` for which `wanted` says so, and the pieces it says it of, down
    /// to 4 KiB at most, in place: each page stays mapped throughout, to the same frame with the same
    /// rights, so no walker faults and nothing needs a flush. On a
    /// walker that asks for break-before-make, leaves are broken by the batch, `flush` is called
    /// once for each batch, and then they are mended.
    ///
    /// `flush` is called with no lock held; it ends the caller's reader section and begins another.
    /// It is called also from time to time on a long range, so that nobody waits long for this walk
    /// to pass a quiescent point. Returns how many entries were looked at.
    ///
    /// On failure what was split stays split, and the call can be repeated.
    pub(crate) fn split(
        &self,
        range: Range<Gfn>,
        walk: SplitWalk,
        wanted: impl Fn(Gfn, Level) -> bool,
        path: &mut Path<'_>,
        mut flush: impl FnMut(),
    ) -> Result<u64, OutOfMemory> {
        let mut broken: Vec<(Gfn, Level)> = Vec::new();
        if F::BREAK_BEFORE_MAKE {
            broken
                .try_reserve_exact(FrameCache::BATCH)
                .map_err(|_| OutOfMemory)?;
        }
        let mut entries = 0;
        let mut rest = range;
        loop {
            // Nothing is allocated under a lock: the walk stops where the frames run out. With less
            // than a batch it goes as far as it can.
            let filled = path.frames.fill(&*self.platform, FrameCache::BATCH);
            if path.frames.0.is_empty() {
                filled?;
            }
            let mut stopped_at = None;
            let walked = self.walk(rest.clone(), walk.show(), &mut |at| {
                let mut bits = at.bits;
                let Entry::Leaf(_) = F::decode(bits, at.level) else {
                    return Next::Descend;
                };
                if at.level == Level::PAGE || !wanted(at.gfn, at.level) {
                    return Next::Pass;
                }
                if broken.len() == path.frames.0.len() {
                    stopped_at = Some(at.gfn);
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
            entries += walked.entries;
            if stopped_at.is_some() || !broken.is_empty() {
                flush();
            }
            // What comes out of a broken leaf of 1 GiB is walked again.
            let first_broken = broken.first().map(|(gfn, _)| *gfn);
            for (gfn, level) in broken.drain(..) {
                while !self.mend(gfn, level, path) {
                    flush();
                }
            }
            match first_broken.or(stopped_at) {
                Some(gfn) => rest.start = rest.start.max(gfn),
                None => return Ok(entries),
            }
        }
    }
}
