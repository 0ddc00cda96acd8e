//! The range operations: each is what it does at an entry.

use core::ops::Range;
use core::sync::atomic::Ordering::*;

use super::{Detached, FrameCache, LeafCounts, Next, OutOfMemory, Show, Table, Tree};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format};
use crate::platform::Platform;

/// What a [`Tree::zap`] took away.
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

    /// Whether a flush is owed.
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

impl<P: Platform, F: Format> Tree<P, F> {
    /// Takes every translation of `range` away, adding to `zapped`. A huge leaf that reaches out of
    /// the range goes as a whole: its other pages fault back in.
    pub(crate) fn zap(&self, range: Range<Gfn>, zapped: &mut Zapped) {
        let show = Show {
            tables: true,
            ..Show::default()
        };
        self.walk(range.clone(), show, &mut |at| match at.decode::<F>() {
            Entry::Table(lower) if at.is_inside(&range) => {
                at.set(0);
                zapped.detached.push(&self.table(lower), at.level.below());
                Next::Pass
            }
            Entry::Leaf(_) => {
                at.set(0);
                zapped.leaves[at.level.0 as usize - 1] += 1;
                Next::Pass
            }
            _ => Next::Descend,
        });
    }

    /// Takes away tables of `range` in whose place `huge(gfn, level)` says that a huge leaf could
    /// stand: the next fault puts it there.
    pub(crate) fn zap_collapsible(
        &self,
        range: Range<Gfn>,
        zapped: &mut Zapped,
        mut huge: impl FnMut(Gfn, Level) -> bool,
    ) {
        let show = Show {
            tables: true,
            skip_last_level: true,
        };
        self.walk(range.clone(), show, &mut |at| match at.decode::<F>() {
            Entry::Table(lower)
                if at.level <= F::MAX_LEAF && at.is_inside(&range) && huge(at.gfn, at.level) =>
            {
                at.set(0);
                zapped.detached.push(&self.table(lower), at.level.below());
                Next::Pass
            }
            _ => Next::Descend,
        });
    }

    /// Takes the right to write from every leaf of `range` for which `wanted` says so, remembering
    /// it in `may_write`; returns how many were changed. A flush is owed if any was.
    ///
    /// A huge leaf is protected as a whole if a page of it is in the range: splitting is the
    /// business of the write fault, or of an eager split.
    pub(crate) fn write_protect(
        &self,
        range: Range<Gfn>,
        mut wanted: impl FnMut(Gfn, Level) -> bool,
    ) -> u64 {
        let mut changed = 0;
        self.walk(range, Show::default(), &mut |at| {
            if F::is_writable(at.bits) && wanted(at.gfn, at.level) {
                at.update::<F>(F::write_protect);
                changed += 1;
            }
            Next::Pass
        });
        changed
    }

    /// Splits every huge leaf of `range` down to 4 KiB, in place: each page stays mapped throughout,
    /// to the same frame with the same rights, so no walker faults and nothing needs a flush.
    ///
    /// On failure what was split stays split, and the call can be repeated.
    pub(crate) fn split(
        &self,
        range: Range<Gfn>,
        frames: &mut FrameCache,
        splits: &mut LeafCounts,
    ) -> Result<(), OutOfMemory> {
        let show = Show {
            skip_last_level: true,
            ..Show::default()
        };
        let mut rest = range;
        loop {
            // Nothing is allocated under a lock: the walk stops where the cache runs empty.
            // With less than a batch it goes as far as it can.
            let filled = frames.fill(&*self.platform, FrameCache::BATCH);
            if frames.0.is_empty() {
                return filled;
            }
            let mut starved_at = None;
            self.walk(rest.clone(), show, &mut |at| {
                let Entry::Leaf(_) = at.decode::<F>() else {
                    return Next::Descend;
                };
                let Some(frame) = frames.0.pop() else {
                    starved_at = Some(at.gfn);
                    return Next::Stop;
                };
                let mut bits = at.bits;
                loop {
                    self.fill_below(frame, at.level, bits);
                    match at.exchange(bits, F::table(frame)) {
                        Ok(()) => break,
                        Err(now) => bits = now,
                    }
                }
                splits[at.level.0 as usize - 1] += 1;
                Next::Descend
            });
            match starved_at {
                Some(gfn) => rest.start = rest.start.max(gfn),
                None => return Ok(()),
            }
        }
    }
}
