//! The changes that range operations make to entries. Each method continues a walk ([`ByGfn::walk`]) as far as its
//! budget allows.

use crate::sync::atomic::{AtomicU64, Ordering::*, overwrite};
use alloc::vec::Vec;
use core::marker::PhantomData;

use super::Unflushed;
use crate::addr::{Access, Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::policy::SplitWalk;
use crate::slots::{Memslot, SlotSet};
use crate::sync::{Guarded, InSection};
use crate::table::{
    Aged, At, ByGfn, Collapse, Flushed, LeafCounts, Next, Path, RUN, Show, Split, Visit, Walk,
};
use crate::vm::LogKind;

/// A step of a range operation on the MMU `M`: the part of the operation in one reader section.
pub(crate) struct Step<'s, M> {
    mmu: &'s M,
    unflushed: &'s mut Unflushed,
    section: InSection<'s>,
}

impl<'s, M: ByGfn> Step<'s, M> {
    pub(crate) fn new(
        mmu: &'s Guarded<M>,
        unflushed: &'s mut Unflushed,
        section: InSection<'s>,
    ) -> Self {
        Step {
            mmu: mmu.get(section),
            unflushed,
            section,
        }
    }

    /// Returns a token that proves that the step is in a reader section.
    pub(crate) fn section(&self) -> InSection<'s> {
        self.section
    }

    /// Calls `visit` for the entries that `show` selects. Changes nothing itself.
    pub(crate) fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        self.mmu.walk(walk, show, visit);
    }

    /// Call after removing a right from leaves. `leaves` counts them by level. The operation will then flush.
    pub(in crate::vm) fn changed(&mut self, leaves: &LeafCounts) {
        let changed = self.unflushed.changed.iter_mut();
        changed.zip(leaves).for_each(|(sum, n)| *sum += n);
    }

    /// Zaps leaves of `slot`. If dirty bits are part of the slot's log, moves the leaves' dirty bits to its bitmap.
    pub(crate) fn zap(&mut self, slot: &Memslot, walk: &mut Walk) {
        match slot.log() {
            Some(log) if !log.kind().protects() => self.zap_some(slot, walk, |_, _| true),
            _ => self.zap_unnoted(walk),
        }
    }

    /// Zaps the leaves of `slot` for which `wanted` returns `true`. If dirty bits are part of the slot's log, moves the
    /// leaves' dirty bits to its bitmap, under the lock of the leaves' table. Detaches no tables: a walker that has
    /// reached a detached table could still set a dirty bit in it.
    pub(super) fn zap_some(
        &mut self,
        slot: &Memslot,
        walk: &mut Walk,
        wanted: impl Fn(Gfn, Level) -> bool,
    ) {
        let log = slot.log().filter(|log| !log.kind().protects());
        let (mmu, unflushed) = (self.mmu, &mut *self.unflushed);
        mmu.walk(walk, Show::default(), &mut |at: &At<'_>| {
            if wanted(at.gfn, at.level) {
                let bits = mmu.take(at);
                if let Some(log) = log.filter(|_| M::Format::clear_dirty(bits) != bits) {
                    log.mark_leaf::<M::Format>(&slot.gfns(), at.gfn, at.level);
                }
                count(&mut unflushed.zapped, at.level);
            }
            Next::Pass
        });
    }

    /// Zaps all leaves of the walk's range, and detaches the tables that cover only frames of the range. A huge leaf
    /// that also maps frames outside the range is zapped as a whole: accesses to those frames fault again.
    pub(crate) fn zap_unnoted(&mut self, walk: &mut Walk) {
        let show = Show {
            tables: true,
            ..Show::default()
        };
        let (mmu, unflushed, range) = (self.mmu, &mut *self.unflushed, walk.range());
        mmu.walk(walk, show, &mut |at: &At<'_>| {
            match M::Format::next_table(at.bits, at.level) {
                Some(lower) if at.is_inside::<M::Format>(&range) => {
                    mmu.detach(at, lower, &mut unflushed.detached);
                    Next::Pass
                }
                Some(_) => Next::Descend,
                // The walk shows tables and leaves only, so this is a leaf.
                None => {
                    mmu.zap(at);
                    count(&mut unflushed.zapped, at.level);
                    Next::Pass
                }
            }
        });
    }

    /// Zaps the oldest shadow page, and records the dirty bits of its leaves like [`Self::zap`]. Returns whether there
    /// was a shadow page.
    pub(crate) fn zap_oldest(&mut self, slots: &SlotSet) -> bool {
        let mmu = self.mmu;
        self.noting(slots, |unflushed, noted| {
            mmu.zap_oldest(&mut unflushed.detached, noted)
        })
    }

    /// Runs `zap`, and passes it a function that it must call for each leaf that it zaps, with the leaf's gfn, level
    /// and bits. If the leaf was dirty, that function marks the leaf's pages in the dirty log of their slot, like
    /// [`Self::zap`].
    pub(in crate::vm) fn noting<R>(
        &mut self,
        slots: &SlotSet,
        zap: impl FnOnce(&mut Unflushed, &mut dyn FnMut(Gfn, Level, u64)) -> R,
    ) -> R {
        zap(self.unflushed, &mut |gfn, level, bits| {
            if M::Format::clear_dirty(bits) != bits
                && let Some(slot) = slots.find(gfn)
                && let Some(log) = slot.log().filter(|log| !log.kind().protects())
            {
                log.mark_leaf::<M::Format>(&slot.gfns(), gfn, level);
            }
        })
    }

    /// Clears all MMIO entries of the range. Needs no flush: no TLB caches an MMIO entry.
    pub(crate) fn zap_mmio(&mut self, walk: &mut Walk) {
        let show = Show {
            mmio: true,
            ..Show::default()
        };
        self.walk(walk, show, &mut |at: &At<'_>| {
            if let Entry::Mmio { .. } = at.decode::<M::Format>() {
                at.clear_mmio();
            }
            Next::Descend
        });
    }

    /// Calls `visit` for each entry that refers to a table and could be a huge leaf instead: its level can have leaves,
    /// and it covers only frames of the range. Also passes the frame of the table.
    pub(crate) fn visit_tables(&self, walk: &mut Walk, visit: impl FnMut(&At<'_>, Pfn) -> Next) {
        visit_tables(self.mmu, walk, visit);
    }

    /// For each table that [`Self::visit_tables`] visits, calls `wanted`, and treats the table as `wanted` returns.
    /// `wanted` gets the first guest frame of the table, the level of the entry that refers to it, and whether the
    /// table exists only because of `nx_huge_pages`. With break-before-make, the entry of a replaced table is invalid
    /// at first, and its frame and level are passed to `broken`: the caller must flush, and then restore each such leaf
    /// ([`ByGfn::restore`]).
    ///
    /// `wanted` is called under the lock of the table that contains the entry. So, as in a fault, its checks still hold
    /// when the leaf is installed.
    pub(crate) fn collapse(
        &mut self,
        walk: &mut Walk,
        mut wanted: impl FnMut(Gfn, Level, bool) -> Collapsing,
        mut broken: impl FnMut(Gfn, Level),
    ) {
        let (mmu, unflushed) = (self.mmu, &mut *self.unflushed);
        visit_tables(mmu, walk, |at, table| {
            match wanted(at.gfn, at.level, mmu.is_nx_table(table)) {
                Collapsing::Keep => return Next::Descend,
                Collapsing::Zap => mmu.detach(at, table, &mut unflushed.detached),
                Collapsing::To(leaf) => {
                    match mmu.collapse(at, table, leaf, &mut unflushed.detached) {
                        Collapse::Zapped => return Next::Pass,
                        Collapse::InPlace => {}
                        Collapse::Broken => broken(at.gfn, at.level),
                    }
                    count(&mut unflushed.collapsed, at.level);
                }
            }
            Next::Pass
        });
    }

    /// Installs a leaf whose entry [`Self::collapse`] has passed to `broken` ([`ByGfn::restore`]).
    pub(super) fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        self.mmu.restore(gfn, level, own)
    }

    /// Of the tables that [`Self::visit_tables`] visits, detaches those that exist only because of `nx_huge_pages` and
    /// for which `wanted` returns `true`. The next fault in such a region then installs a leaf of the largest possible
    /// level.
    pub(crate) fn zap_nx_tables(
        &mut self,
        walk: &mut Walk,
        mut wanted: impl FnMut(Gfn, Level) -> bool,
    ) {
        let (mmu, unflushed) = (self.mmu, &mut *self.unflushed);
        visit_tables(mmu, walk, |at, table| {
            if !mmu.is_nx_table(table) || !wanted(at.gfn, at.level) {
                return Next::Descend;
            }
            mmu.detach(at, table, &mut unflushed.detached);
            Next::Pass
        });
    }

    /// Makes the log of `slot` record the next write to the pages for which `is_named` returns `true`: write-protects
    /// the pages, or clears their dirty bits, depending on the kind of the log.
    pub(crate) fn protect(
        &mut self,
        slot: &Memslot,
        walk: &mut Walk,
        is_named: impl Fn(Gfn) -> bool,
    ) {
        let named = |gfn, level| level > Level::PAGE || is_named(gfn);
        match slot.log() {
            Some(log) if log.kind() == LogKind::Buffers => self.protect_buffered(walk, named),
            Some(log) if !log.kind().protects() => {
                // The dirty bit of a huge leaf also stands for pages that are not named, so mark these pages before it
                // is cleared.
                let range = walk.range();
                let note = |gfn: Gfn, level| {
                    let cleared = |gfn| range.contains(&gfn) && is_named(gfn);
                    log.mark_gfns(&slot.gfns(), &M::Format::GRANULE.block(gfn, level), |gfn| {
                        !cleared(gfn)
                    });
                };
                self.clear_dirty(walk, named, note);
            }
            _ => self.write_protect(walk, named),
        }
    }

    /// Like [`Self::protect`], but for all pages in the range. If the log works by write protection, and walkers check
    /// the right to write in entries that refer to tables ([`ByGfn::protects_tables`]), write-protects the highest
    /// entries that cover only frames of the range, and no entry below them.
    pub(crate) fn protect_from_above(&mut self, slot: &Memslot, walk: &mut Walk) {
        let by_dirty_bit = slot.log().is_some_and(|log| !log.kind().protects());
        if by_dirty_bit || !self.mmu.protects_tables() {
            return self.protect(slot, walk, |_| true);
        }
        let range = walk.range();
        let (changed, tables) = (&mut self.unflushed.changed, &mut self.unflushed.protected);
        let mut protect = WriteProtect::<M::Format, _, _> {
            wanted: |_, _| true,
            passes: |at: &At<'_>| match at.level <= M::Format::PROTECT_FROM
                && at.is_inside::<M::Format>(&range)
            {
                true => {
                    *tables += u64::from(at.protect_below::<M::Format>());
                    true
                }
                false => at.is_protected::<M::Format>(),
            },
            changed,
            format: PhantomData,
        };
        self.mmu.walk(walk, Show::ENTERED, &mut protect);
    }

    /// Write-protects every leaf of the range for which `wanted` returns `true`, and sets its `may_write`. Skips leaves
    /// below an entry that is already write-protected ([`Self::protect_from_above`]).
    ///
    /// A huge leaf is protected as a whole even if only some of its pages are in the range. The next write fault, or an
    /// eager split, splits the leaf.
    ///
    /// Uses plain stores, so an accessed or dirty bit that hardware sets at the same time may be lost. A lost accessed
    /// bit only makes a page look unused for longer; the same happens while a TLB caches the leaf. A lost dirty bit is
    /// harmless because a log that works by write protection does not use dirty bits.
    pub(crate) fn write_protect(
        &mut self,
        walk: &mut Walk,
        wanted: impl FnMut(Gfn, Level) -> bool,
    ) {
        let show = match self.mmu.protects_tables() {
            true => Show::ENTERED,
            false => Show::default(),
        };
        let mut protect = WriteProtect::<M::Format, _, _> {
            wanted,
            passes: |at: &At<'_>| at.is_protected::<M::Format>(),
            changed: &mut self.unflushed.changed,
            format: PhantomData,
        };
        self.mmu.walk(walk, show, &mut protect);
    }

    /// Write-protects every leaf of the range, whatever the logs are. If `from_above` and walkers [obey
    /// it](ByGfn::protects_tables), protects the highest entries instead, as [`Self::protect_from_above`] does. Loses no
    /// bit that a walker sets.
    pub(in crate::vm) fn protect_everything(&mut self, walk: &mut Walk, from_above: bool) {
        let from_above = from_above && self.mmu.protects_tables();
        let show = match from_above {
            true => Show::ENTERED,
            false => Show::default(),
        };
        let range = walk.range();
        let (changed, tables) = (&mut self.unflushed.changed, &mut self.unflushed.protected);
        self.mmu.walk(walk, show, &mut |at: &At<'_>| {
            if M::Format::next_table(at.bits, at.level).is_some() {
                let protects = at.is_in_tree()
                    && at.level <= M::Format::PROTECT_FROM
                    && at.is_inside::<M::Format>(&range);
                if !protects {
                    return Next::Descend;
                }
                *tables += u64::from(at.protect_below::<M::Format>());
            } else if M::Format::is_writable(at.bits) {
                at.update::<M::Format>(M::Format::write_protect);
                count(changed, at.level);
            }
            Next::Pass
        });
    }

    /// Reverts the protection by [`Self::protect_from_above`], at entries that cover only frames of the range.
    pub(crate) fn lift_protection(&self, walk: &mut Walk) {
        self.mmu.lift(walk);
    }

    /// Clears the dirty bit of every dirty leaf of the range for which `wanted` returns `true`, and calls `dirty` for
    /// each of these leaves, under the lock of its table.
    pub(crate) fn clear_dirty(
        &mut self,
        walk: &mut Walk,
        mut wanted: impl FnMut(Gfn, Level) -> bool,
        mut dirty: impl FnMut(Gfn, Level),
    ) {
        let (mmu, unflushed) = (self.mmu, &mut *self.unflushed);
        mmu.walk(walk, Show::default(), &mut |at: &At<'_>| {
            if M::Format::clear_dirty(at.bits) != at.bits && wanted(at.gfn, at.level) {
                at.update::<M::Format>(M::Format::clear_dirty);
                dirty(at.gfn, at.level);
                count(&mut unflushed.changed, at.level);
            }
            Next::Pass
        });
    }

    /// Clears the dirty bit of the leaves of the range for which `wanted` returns `true`, so that a walker that sets
    /// the bit again writes the page's address to its buffer. But for a huge leaf a walker would write the address of
    /// only one page, and for a leaf in a shadow page it does not know the guest frame. So leaves of these two kinds
    /// are also write-protected: the next write faults, and splits a huge leaf.
    fn protect_buffered(&mut self, walk: &mut Walk, mut wanted: impl FnMut(Gfn, Level) -> bool) {
        let (mmu, unflushed) = (self.mmu, &mut *self.unflushed);
        mmu.walk(walk, Show::default(), &mut |at: &At<'_>| {
            let is_named = at.level == Level::PAGE && !at.is_shadowed();
            let rearmed = |bits| match !is_named && M::Format::is_writable(bits) {
                true => M::Format::clear_dirty(M::Format::write_protect(bits)),
                false => M::Format::clear_dirty(bits),
            };
            if rearmed(at.bits) != at.bits && wanted(at.gfn, at.level) {
                at.update::<M::Format>(rearmed);
                count(&mut unflushed.changed, at.level);
            }
            Next::Pass
        });
    }

    /// Calls `seen`, for some leaves at a time, for all leaves of the range, and tells which of them were used since
    /// their accessed bits were last cleared. Clears these bits if `clear`. Needs no flush: a CPU whose TLB still has
    /// the leaf does not set the bit again, so the page may look unused although it is used.
    pub(crate) fn age(&self, walk: &mut Walk, clear: bool, mut seen: impl FnMut(Aged)) {
        self.mmu.age(walk, clear, &mut seen);
    }

    /// Splits the huge leaves of the range for which `wanted` returns `true`, and also their huge pieces for which it
    /// does. Each page stays mapped to the same frame with the same rights throughout, so no walker faults and no flush
    /// is needed. Stops when `path` has no frame left.
    ///
    /// On formats with break-before-make it only makes the leaves invalid, as many as `path` has frames for, and adds
    /// them to `broken`, which has enough capacity. The caller must flush, and then replace each by its pieces
    /// ([`ByGfn::mend`]).
    pub(crate) fn split(
        &mut self,
        walk: &mut Walk,
        how: SplitWalk,
        wanted: impl Fn(Gfn, Level) -> bool,
        path: &mut Path<'_>,
        broken: &mut Vec<(Gfn, Level)>,
    ) {
        let show = Show {
            skip_last_level: how != SplitWalk::Full,
            skip_without_huge: how == SplitWalk::Default,
            ..Show::default()
        };
        let mmu = self.mmu;
        mmu.walk(walk, show, &mut |at: &At<'_>| {
            let Entry::Leaf(_) = at.decode::<M::Format>() else {
                return Next::Descend;
            };
            if at.level == Level::PAGE || !wanted(at.gfn, at.level) {
                return Next::Pass;
            }
            if broken.len() == path.frames.len() {
                return Next::Stop;
            }
            match mmu.split(at, path) {
                Split::InPlace => Next::Descend,
                Split::Broken => {
                    broken.push((at.gfn, at.level));
                    Next::Pass
                }
                Split::Unprepared => Next::Stop,
            }
        });
        // The pieces of a leaf of 1 GiB must perhaps be split, too, after they are installed: go back to the first such
        // leaf.
        let enters = |(_, level): &&(Gfn, Level)| *level > Level::MEGA || how == SplitWalk::Full;
        if let Some((gfn, _)) = broken.iter().find(enters) {
            walk.go_to(*gfn);
        }
    }

    /// Installs the pieces of a leaf that [`Self::split`] has made invalid ([`ByGfn::mend`]).
    pub(super) fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool {
        self.mmu.mend(gfn, level, path)
    }
}

/// What [`Step::collapse`] does with a table.
pub(crate) enum Collapsing {
    /// Leave the table, and visit the tables below it.
    Keep,
    /// Detach the table: the next fault installs a leaf.
    Zap,
    /// Replace the table by this leaf, which maps all pages that the table maps.
    To(Leaf),
}

/// Implements [`Step::visit_tables`].
fn visit_tables<M: ByGfn>(mmu: &M, walk: &mut Walk, mut visit: impl FnMut(&At<'_>, Pfn) -> Next) {
    let range = walk.range();
    mmu.walk(
        walk,
        Show::TABLES,
        &mut |at: &At<'_>| match at.decode::<M::Format>() {
            Entry::Table(lower)
                if at.level <= M::Format::MAX_LEAF && at.is_inside::<M::Format>(&range) =>
            {
                visit(at, lower)
            }
            _ => Next::Descend,
        },
    );
}

fn count(counts: &mut LeafCounts, level: Level) {
    counts[level.0 as usize - 1] += 1;
}

/// The visitor of [`Step::write_protect`] and [`Step::protect_from_above`].
struct WriteProtect<'c, F, W, T> {
    /// Returns whether to write-protect a leaf.
    wanted: W,
    /// Returns whether to skip the entries below an entry that refers to a table. May first write-protect that entry.
    passes: T,
    changed: &'c mut LeafCounts,
    format: PhantomData<F>,
}

impl<F, W, T> Visit for WriteProtect<'_, F, W, T>
where
    F: Format,
    W: FnMut(Gfn, Level) -> bool,
    T: FnMut(&At<'_>) -> bool,
{
    #[inline]
    fn visit(&mut self, at: &At<'_>) -> Next {
        if F::TABLE_WRITE != 0 && F::next_table(at.bits, at.level).is_some() {
            // An entry outside the tree may refer to a shadow page: do not protect such an entry.
            return match at.is_in_tree() && (self.passes)(at) {
                true => Next::Pass,
                false => Next::Descend,
            };
        }
        if F::is_writable(at.bits) && (self.wanted)(at.gfn, at.level) {
            at.put(F::write_protect(at.bits));
            count(self.changed, at.level);
        }
        Next::Pass
    }

    /// Fast path: if all `entries` are writable leaves for which `wanted` returns `true`, protects them all. Otherwise
    /// returns `false` and changes nothing.
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
            overwrite(entry, F::write_protect(bits), Relaxed);
        }
        self.changed[0] += RUN as u64;
        true
    }
}
