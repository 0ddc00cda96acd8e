//! Installing leaves, as a fault does.

use crate::sync::atomic::{AtomicU64, Ordering::*};
use core::marker::PhantomData;
use core::ops::Range;

use super::{ENTRIES, FrameCache, Path, Table, Tree};
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
    /// Something else stands there: a leaf for another page, or a table of smaller leaves. Once it is zapped,
    /// by an operation that notes what its leaves know, the fault begins again.
    InTheWay,
    /// A huge leaf of this level was in the way on a walker that asks for break-before-make. It is broken; after
    /// a flush [`Tree::mend`] puts its pieces in its place, and the fault begins again.
    MustMend(Level),
    /// Somebody else has broken a leaf in the way and not mended it yet.
    Broken,
    /// What was there before, in an entry of this level, was taken away and not flushed yet, on a walker
    /// that asks for break-before-make. After a flush of that entry the fault begins again.
    Unflushed(Level),
    /// What the caller knew does not hold any more, or others have zapped the tables that it added so often that the
    /// frames allocated ahead are used up. No leaf was installed.
    Stale,
}

/// Why there is no way to a table.
enum NoPath {
    MustMend(Level),
    Broken,
    Unflushed(Level),
    /// A larger leaf is in the way and was left alone.
    Leaf,
    /// The frames allocated ahead are used up: others have zapped tables that were added meanwhile.
    NoFrames,
}

/// What to do about a larger leaf in the way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnLeaf {
    Split,
    GiveUp,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Makes `leaf` translate the region of `level` that begins at `gfn`. Missing tables are added;
    /// a larger leaf in the way is split in place, so that its other pages stay mapped throughout.
    /// `valid` is asked under the lock of the table that receives the leaf, immediately before;
    /// `done` runs under that lock immediately after.
    ///
    /// The caller is inside a reader section.
    pub(crate) fn map(
        &self,
        gfn: Gfn,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Mapped {
        let table = match self.table_for(gfn, level, OnLeaf::Split, path) {
            Ok(table) => table,
            Err(NoPath::MustMend(level)) => return Mapped::MustMend(level),
            Err(NoPath::Unflushed(level)) => return Mapped::Unflushed(level),
            Err(NoPath::Broken | NoPath::Leaf) => return Mapped::Broken,
            Err(NoPath::NoFrames) => return Mapped::Stale,
        };
        let entry = table.entry(level.index(gfn));
        let guard = table.lock();
        if !valid() {
            return Mapped::Stale;
        }
        let bits = entry.load(Relaxed);
        let mapped = match F::decode(bits, level) {
            Entry::Empty | Entry::Mmio { .. } => {
                if !self.may_install(bits, gfn, level, &path.flushed) {
                    return Mapped::Unflushed(level);
                }
                entry.store(F::leaf(leaf, level), Release);
                guard.count_leaves(1);
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
            Entry::Leaf(_) | Entry::Table(_) => return Mapped::InTheWay,
            Entry::Broken(_) => return Mapped::Broken,
        };
        done();
        drop(guard);
        mapped
    }

    /// Installs `leaf`, and the pages behind it, in the absent entries of level 1 from `gfn` on;
    /// `pages` of them, not beyond the end of one table. Returns how many were installed; `None` if
    /// what the caller knew does not hold any more, a larger leaf is there, or memory is out.
    pub(crate) fn map_absent(
        &self,
        gfn: Gfn,
        pages: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Option<u64> {
        let first = Level::PAGE.index(gfn);
        let place = first..first + pages as usize;
        debug_assert!(place.end <= ENTRIES);
        let run = Run::<F>::new(leaf, Level::PAGE);
        path.frames.fill(&*self.platform, FrameCache::FAULT).ok()?;
        let found = self.lookup(gfn);
        if found.level > Level::PAGE
            && matches!(found.entry::<F>(), Entry::Leaf(_) | Entry::Broken(_))
        {
            return None;
        }
        if found.level > Level::PAGE
            && let Some(mapped) = self.put_run(gfn, place.clone(), &run, path, &valid)
        {
            return mapped.then_some(pages);
        }
        let table = self
            .table_for(gfn, Level::PAGE, OnLeaf::GiveUp, path)
            .ok()?;
        let entries = &table.entries()[place];
        let guard = table.lock();
        if !valid() {
            return None;
        }
        let own = &path.flushed;
        let free = |bits, gfn| self.may_install(bits, gfn, Level::PAGE, own);
        let mut installed = 0;
        for (i, entry) in entries.iter().enumerate() {
            let bits = entry.load(Relaxed);
            if F::is_absent(bits) && free(bits, gfn.add(i as u64)) {
                // A leaf refers to no memory of ours that a walker would have to see first.
                entry.store(run.bits(i), Relaxed);
                installed += 1;
            }
        }
        guard.count_leaves(installed as i16);
        Some(installed)
    }

    /// Where no level 1 table stands: puts one there that holds `run` at `place` already. `None`: one
    /// does by now. `Some(false)`: what the caller knew does not hold any more.
    ///
    /// `valid` is asked under the lock of the table that receives the new table, by the same argument
    /// as for a leaf: an invalidation that takes this lock later finds the table and enters it.
    fn put_run(
        &self,
        gfn: Gfn,
        place: Range<usize>,
        run: &Run<F>,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Option<bool> {
        let above = self
            .table_for(gfn, Level::MEGA, OnLeaf::GiveUp, path)
            .ok()
            .filter(|_| !path.frames.is_empty())?;
        let frame = path.frames.take();
        let mut table = self.table(frame);
        table.meta().begin(place.len() as u16);
        // SAFETY: the frame is this path's, and not published before the store below.
        unsafe {
            if place.len() < ENTRIES {
                table.clear();
            }
            run.fill(&mut table.unpublished()[place]);
        }
        let entry = above.entry(Level::MEGA.index(gfn));
        let guard = above.lock();
        let bits = entry.load(Relaxed);
        let free = F::is_absent(bits) && self.may_install(bits, gfn, Level::MEGA, &path.flushed);
        let valid = valid();
        if free && valid {
            entry.store(F::table(frame), Release);
        }
        drop(guard);
        if !free || !valid {
            path.frames.give_back(frame);
        }
        (free || !valid).then_some(valid)
    }

    /// Puts an MMIO entry of `generation` at `gfn`, unless something else stands there by now; tells
    /// which.
    pub(crate) fn map_mmio(&self, gfn: Gfn, generation: u64, path: &mut Path<'_>) -> bool {
        // A leaf in the way means that a slot has appeared: leave it alone.
        let Ok(table) = self.table_for(gfn, Level::PAGE, OnLeaf::GiveUp, path) else {
            return false;
        };
        let entry = table.entry(Level::PAGE.index(gfn));
        let _guard = table.lock();
        let bits = entry.load(Relaxed);
        // An MMIO entry does not name a flush: it must not take the place of one that still does.
        let free = F::is_absent(bits) && self.may_install(bits, gfn, Level::PAGE, &path.flushed);
        if free {
            entry.store(F::mmio(generation), Release);
        }
        free
    }

    /// Whether the level 1 table on the way to `gfn`, if there is one, is there because of NX.
    pub(crate) fn is_nx_split(&self, gfn: Gfn) -> bool {
        let found = self.lookup(gfn);
        found.level == Level::PAGE && self.table(found.table).meta().nx_split.load(Relaxed)
    }

    /// The second half of break-before-make: puts the pieces of the broken leaf of `level` at `gfn`
    /// in its place. The caller has flushed it since it was broken, as the path says. If the leaf has been zapped
    /// meanwhile, nothing happens. `false`: a leaf in the same table was broken since, and may be this one:
    /// another flush is needed before the next try.
    #[must_use]
    pub(crate) fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool {
        let found = self.descend(gfn, level);
        if found.level > level {
            return true;
        }
        let is_broken = |now| matches!(now, Entry::Broken(_));
        let bits = self.put_table(&self.table(found.table), level, gfn, path, is_broken);
        !is_broken(F::decode(bits, level))
    }

    /// The table of `level` on the way to `gfn`, made if need be. With [`OnLeaf::GiveUp`] a leaf in
    /// the way stays: who only adds what is not there does not come back to mend one.
    fn table_for(
        &self,
        gfn: Gfn,
        level: Level,
        on_leaf: OnLeaf,
        path: &mut Path<'_>,
    ) -> Result<Table<'_, P>, NoPath> {
        loop {
            let found = self.descend(gfn, level);
            let (table, at) = (self.table(found.table), found.level);
            if at == level {
                return Ok(table);
            }
            match F::decode(found.bits, at) {
                Entry::Broken(_) => return Err(NoPath::Broken),
                Entry::Leaf(_) if on_leaf == OnLeaf::GiveUp => return Err(NoPath::Leaf),
                Entry::Leaf(_) if F::BREAK_BEFORE_MAKE => self.break_leaf(&table, at, gfn)?,
                _ if !self.may_install(found.bits, gfn, at, &path.flushed) => {
                    return Err(NoPath::Unflushed(at));
                }
                _ if path.frames.is_empty() => return Err(NoPath::NoFrames),
                _ => {
                    self.put_table(&table, at, gfn, path, |now| match now {
                        Entry::Broken(_) => false,
                        Entry::Leaf(_) => on_leaf == OnLeaf::Split && !F::BREAK_BEFORE_MAKE,
                        _ => true,
                    });
                }
            }
        }
    }

    /// The first half of break-before-make. `Ok`: no leaf stands there any more, look again.
    fn break_leaf(&self, table: &Table<'_, P>, level: Level, gfn: Gfn) -> Result<(), NoPath> {
        let entry = table.entry(level.index(gfn));
        let guard = table.lock();
        let broken = entry.fetch_update(Release, Relaxed, |bits| match F::decode(bits, level) {
            Entry::Leaf(_) => Some(F::broken(bits)),
            _ => None,
        });
        match broken {
            Ok(_) => {
                self.broke(guard.meta);
                Err(NoPath::MustMend(level))
            }
            Err(_) => Ok(()),
        }
    }

    /// Makes the entry of `table` on the way to `gfn` lead to a table that means the same, if
    /// `wanted` says that what stands there may be replaced; returns the bits that stand there then.
    #[cold]
    fn put_table(
        &self,
        table: &Table<'_, P>,
        level: Level,
        gfn: Gfn,
        path: &mut Path<'_>,
        wanted: impl Fn(Entry) -> bool,
    ) -> u64 {
        let entry = table.entry(level.index(gfn));
        // Usually nobody races, so the new table is filled before the lock is taken. That it was
        // filled for what still stands there is checked by the exchange, which also loses no bit that
        // hardware sets in a huge leaf meanwhile.
        let frame = path.frames.take();
        let mut bits = entry.load(Acquire);
        loop {
            let now = F::decode(bits, level);
            let may_install = self.may_install(bits, gfn, level, &path.flushed);
            if matches!(now, Entry::Table(_)) || !wanted(now) || !may_install {
                path.frames.give_back(frame);
                return bits;
            }
            // SAFETY: the frame is this path's, and not published before the exchange.
            unsafe { self.fill_below(frame, level, bits) };
            let nx_split = path.nx_split && level == Level::MEGA;
            self.table(frame).meta().nx_split.store(nx_split, Relaxed);
            let new = F::table(frame);
            let guard = table.lock();
            let is_broken = matches!(now, Entry::Broken(_));
            if is_broken && !Self::may_mend(guard.meta, gfn, level, &path.flushed) {
                bits = entry.load(Relaxed);
                drop(guard);
                path.frames.give_back(frame);
                return bits;
            }
            let put = entry.compare_exchange(bits, new, Release, Acquire);
            let split = matches!(now, Entry::Leaf(_) | Entry::Broken(_));
            if put.is_ok() && split {
                guard.count_leaves(-1);
            }
            drop(guard);
            match put {
                Ok(_) => {
                    if split {
                        path.splits[level.0 as usize - 1] += 1;
                    }
                    path.nx_splits += nx_split as u64;
                    return new;
                }
                Err(changed) => bits = changed,
            }
        }
    }

    /// Fills an unpublished table so that it means the same as `bits` at `level` above it.
    ///
    /// # Safety
    /// - nobody else can reach the table in `frame`.
    pub(super) unsafe fn fill_below(&self, frame: Pfn, level: Level, bits: u64) {
        let mut table = self.table(frame);
        let leaves = match F::decode(bits, level) {
            Entry::Leaf(huge) | Entry::Broken(huge) => {
                let run = Run::<F>::new(huge.piece(level, 0), level.below());
                // SAFETY: the caller's promise.
                run.fill(unsafe { table.unpublished() });
                ENTRIES as u16
            }
            _ => {
                // SAFETY: the caller's promise.
                unsafe { table.clear() };
                0
            }
        };
        table.meta().begin(leaves);
    }
}

/// The bits of leaves that are alike but for their frames, each of which follows on the one before: in
/// every format such bits are an arithmetic sequence.
struct Run<F> {
    first: u64,
    step: u64,
    format: PhantomData<F>,
}

impl<F: Format> Run<F> {
    fn new(first: Leaf, level: Level) -> Self {
        let second = Leaf {
            pfn: first.pfn.add(level.pages()),
            ..first
        };
        let bits = F::leaf(first, level);
        Run {
            first: bits,
            step: F::leaf(second, level).wrapping_sub(bits),
            format: PhantomData,
        }
    }

    #[inline]
    fn bits(&self, i: usize) -> u64 {
        self.first.wrapping_add(self.step.wrapping_mul(i as u64))
    }

    /// Writes entries that nobody else can reach.
    fn fill(&self, entries: &mut [AtomicU64]) {
        // Lanes that a compiler puts into vectors, and that need no multiplication.
        const LANES: usize = 8;
        let mut lanes: [u64; LANES] = core::array::from_fn(|i| self.bits(i));
        let (chunks, rest) = entries.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (entry, lane) in chunk.iter_mut().zip(&mut lanes) {
                *entry.get_mut() = *lane;
                *lane = lane.wrapping_add(self.step.wrapping_mul(LANES as u64));
            }
        }
        for (entry, lane) in rest.iter_mut().zip(lanes) {
            *entry.get_mut() = lane;
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
