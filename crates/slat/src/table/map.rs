//! Installs leaves in a tree, for faults.
//!
//! The caller of every function is in a reader section.

use crate::sync::atomic::{AtomicU64, Ordering::*};
use core::marker::PhantomData;
use core::ops::Range;

use super::{Cursor, Found, FrameCache, Installed, NewTable, Path, Reached, Retry, Table, Tree};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::trace::Event;

/// What an install does if there is a larger leaf on the path: split it, or give up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnLeaf {
    Split,
    GiveUp,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Installs `leaf`, of `level`, at the address of `cursor`. Adds missing tables. Splits a larger leaf on the path
    /// in place, so that its other pages stay mapped throughout. If `leaf` is writable, pushes write protection down on
    /// the path to it ([`super::protect`]). Calls `valid` under the lock of the table that receives the leaf,
    /// immediately before the install, and `done` under that lock, immediately after it.
    ///
    /// # Errors
    /// [`Retry`]; no leaf was installed, and `done` was not called.
    #[inline(always)]
    pub(crate) fn map(
        &self,
        cursor: &mut Cursor<'_, P, F>,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Result<Installed, Retry> {
        let gfn = cursor.key().gfn();
        let table = loop {
            let table = self.table_for(cursor, level, OnLeaf::Split, path)?;
            if !(leaf.write && cursor.is_protected()) {
                break table;
            }
            self.push_down(cursor, level);
        };
        let entry = table.entry(F::GRANULE.index(gfn, level));
        let guard = table.lock();
        if !valid() {
            return Err(Retry::Stale);
        }
        let bits = entry.load(Relaxed);
        let installed = match F::decode(bits, level) {
            Entry::Empty | Entry::Mmio { .. } => {
                if !self.may_install(bits, gfn, level, &path.flushed) {
                    return Err(Retry::Unflushed(level));
                }
                entry.store(F::leaf(leaf, level), Release);
                guard.count_leaves(1);
                Installed::New
            }
            Entry::Leaf(old) if old.pfn == leaf.pfn && old.memory == leaf.memory => {
                match widen::<F>(entry, bits, leaf, level) {
                    true => Installed::Widened,
                    false => Installed::Spurious,
                }
            }
            Entry::Leaf(_) | Entry::Table(_) => return Err(Retry::Conflict(level)),
            Entry::Broken(_) => return Err(Retry::Broken),
        };
        done();
        drop(guard);
        Ok(installed)
    }

    /// Installs a run of leaves of `level`: `leaf` at the address of `cursor`, and leaves for the following frames in
    /// the entries after it. Considers `leaves` entries, all of one table, and fills only those that are absent. Calls
    /// `valid` like [`Self::map`]. Returns the number of leaves installed.
    ///
    /// # Errors
    /// [`Retry`]; [`Retry::Unprepared`] if there is no memory for tables.
    pub(crate) fn map_absent(
        &self,
        cursor: &mut Cursor<'_, P, F>,
        level: Level,
        leaves: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Result<u64, Retry> {
        let gfn = cursor.key().gfn();
        let first = F::GRANULE.index(gfn, level);
        let indexes = first..first + leaves as usize;
        debug_assert!(indexes.end <= F::GRANULE.entries());
        let run = Run::<F>::new(leaf, level);
        if !run.holds(leaf, level, leaves) {
            return Err(Retry::Stale);
        }
        let filled = path.frames.fill(&*self.platform, FrameCache::FAULT);
        filled.map_err(|_| Retry::Unprepared)?;
        let found = cursor.find(level);
        if found.level > level && matches!(found.entry::<F>(), Entry::Leaf(_) | Entry::Broken(_)) {
            return Err(Retry::Conflict(found.level));
        }
        if found.level > level
            && let Some(put) = self.put_run(cursor, level, indexes.clone(), &run, path, &valid)
        {
            return put.map(|()| leaves);
        }
        let table = self.table_for(cursor, level, OnLeaf::GiveUp, path)?;
        let entries = &table.entries()[indexes];
        let guard = table.lock();
        if !valid() {
            return Err(Retry::Stale);
        }
        let own = &path.flushed;
        let free = |bits, gfn| self.may_install(bits, gfn, level, own);
        let mut installed = 0;
        for (i, entry) in entries.iter().enumerate() {
            let bits = entry.load(Relaxed);
            if F::is_absent(bits) && free(bits, gfn.add(i as u64 * F::GRANULE.pages(level))) {
                // Relaxed: the leaf refers to a page, not to a table whose entries a walker must also see.
                entry.store(run.bits(i), Relaxed);
                installed += 1;
            }
        }
        guard.count_leaves(installed as i16);
        Ok(installed)
    }

    /// Installs an MMIO entry of `generation` at the address of `cursor`, if the present entry is empty or an MMIO
    /// entry of any generation. Returns whether it was installed.
    pub(crate) fn map_mmio(
        &self,
        cursor: &mut Cursor<'_, P, F>,
        generation: u64,
        path: &mut Path<'_>,
    ) -> bool {
        let gfn = cursor.key().gfn();
        // If there is a larger leaf on the path, a memslot was created meanwhile: then give up.
        let table = self.table_for(cursor, Level::PAGE, OnLeaf::GiveUp, path);
        let Ok(table) = table else {
            return false;
        };
        let entry = table.entry(F::GRANULE.index(gfn, Level::PAGE));
        let _guard = table.lock();
        let bits = entry.load(Relaxed);
        // An MMIO entry does not contain the number of a flush, so it must not replace a cleared entry whose flush is
        // still due.
        let free = F::is_absent(bits) && self.may_install(bits, gfn, Level::PAGE, &path.flushed);
        if free {
            entry.store(F::mmio(generation, 0), Release);
        }
        free
    }

    /// Returns a cursor for a walk to `gfn`.
    #[inline(always)]
    pub(crate) fn cursor(&self, gfn: Gfn) -> Cursor<'_, P, F> {
        // SAFETY: the root exists as long as the tree. Every holder of a reference to the tree is in a reader section
        // (`Guarded`).
        unsafe { Cursor::new(&self.platform, Reached::nothing::<F>(self.key(gfn))) }
    }

    /// Finds the entry of `level` on the path to `gfn`, or the entry of a higher level at which the path ends.
    #[inline]
    pub(crate) fn find_at(&self, gfn: Gfn, level: Level) -> Found<'_> {
        self.cursor(gfn).find(level)
    }

    /// Installs a new table of `level`, at the address of `cursor`, that contains the leaves of `run` at `indexes`.
    /// Returns [`Retry::Stale`] if `valid` returned `false`. `None`: the table was not installed, because the entry
    /// that would refer to it is not empty any more, or could not be reached, or because there is no frame.
    ///
    /// Calls `valid` under the lock of the table that will refer to the new table. As with the install of a single
    /// leaf, this suffices: an invalidation that takes this lock later finds the new table and enters it.
    fn put_run(
        &self,
        cursor: &mut Cursor<'_, P, F>,
        level: Level,
        indexes: Range<usize>,
        run: &Run<F>,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Option<Result<(), Retry>> {
        let above = self.table_for(cursor, level.above(), OnLeaf::GiveUp, path);
        let above = above.ok().filter(|_| !path.frames.is_empty())?;
        let mut table = NewTable::<P, F>::new(&self.platform, path.frames.take());
        if indexes.len() < F::GRANULE.entries() {
            table.clear();
        }
        table.meta().begin(indexes.len() as u16);
        run.fill(&mut table.entries()[indexes]);
        let gfn = cursor.key().gfn();
        let entry = above.entry(F::GRANULE.index(gfn, level.above()));
        let guard = above.lock();
        let bits = entry.load(Relaxed);
        let free = F::is_absent(bits) && self.may_install(bits, gfn, level.above(), &path.flushed);
        let put = table.publish(|frame| match (valid(), free) {
            (false, _) => Err(Some(Err(Retry::Stale))),
            (true, false) => Err(None),
            (true, true) => {
                entry.store(F::table(frame), Release);
                Ok(())
            }
        });
        drop(guard);
        match put {
            Ok(()) => Some(Ok(())),
            Err((why, unused)) => {
                path.frames.give_back(unused.unused());
                why
            }
        }
    }

    /// Returns the table of `level` on the path of `cursor`. Adds this table and tables above it if they are missing.
    /// With [`OnLeaf::GiveUp`], does not split a leaf on the path but returns an error.
    fn table_for(
        &self,
        cursor: &mut Cursor<'_, P, F>,
        level: Level,
        on_leaf: OnLeaf,
        path: &mut Path<'_>,
    ) -> Result<Table<'_, P, F>, Retry> {
        let gfn = cursor.key().gfn();
        loop {
            let found = cursor.find(level);
            let (table, at) = (self.table(found.table), found.level);
            if at == level {
                return Ok(table);
            }
            match F::decode(found.bits, at) {
                Entry::Broken(_) => return Err(Retry::Broken),
                Entry::Leaf(_) if on_leaf == OnLeaf::GiveUp => return Err(Retry::Conflict(at)),
                Entry::Leaf(_) if F::BREAK_BEFORE_MAKE => self.break_leaf(&table, at, gfn)?,
                _ if !self.may_install(found.bits, gfn, at, &path.flushed) => {
                    return Err(Retry::Unflushed(at));
                }
                _ if path.frames.is_empty() => return Err(Retry::Unprepared),
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

    /// Breaks the huge leaf for `gfn` in `table`, which is of `level`: the first half of break-before-make. If it has
    /// broken the leaf, returns [`Retry::MustMend`]. `Ok`: the entry is not a leaf any more, so the caller must read it
    /// again.
    fn break_leaf(&self, table: &Table<'_, P, F>, level: Level, gfn: Gfn) -> Result<(), Retry> {
        let entry = table.entry(F::GRANULE.index(gfn, level));
        let guard = table.lock();
        let broken = entry.fetch_update(Release, Relaxed, |bits| match F::decode(bits, level) {
            Entry::Leaf(_) => Some(F::broken(bits)),
            _ => None,
        });
        match broken {
            Ok(_) => {
                self.broke(guard.meta);
                Err(Retry::MustMend(level))
            }
            Err(_) => Ok(()),
        }
    }

    /// Replaces the entry for `gfn` in `table`, which is of `level`, by an entry that refers to a new table that maps
    /// the same as the old entry. Does nothing if the entry already refers to a table, if `wanted` returns `false` for
    /// it, or if its flush is due. Returns the entry's bits after the call.
    #[cold]
    pub(super) fn put_table(
        &self,
        table: &Table<'_, P, F>,
        level: Level,
        gfn: Gfn,
        path: &mut Path<'_>,
        wanted: impl Fn(Entry) -> bool,
    ) -> u64 {
        let entry = table.entry(F::GRANULE.index(gfn, level));
        // Fill the new table before taking the lock, because conflicts are rare. The exchange fails if the entry has
        // changed since it was read for this, also if hardware has set a bit in a huge leaf.
        let mut new = NewTable::<P, F>::new(&self.platform, path.frames.take());
        let mut bits = entry.load(Acquire);
        loop {
            let now = F::decode(bits, level);
            let may_install = self.may_install(bits, gfn, level, &path.flushed);
            if matches!(now, Entry::Table(_)) || !wanted(now) || !may_install {
                path.frames.give_back(new.unused());
                return bits;
            }
            new.fill_below(level, bits);
            let nx_split = path.nx_split && level == Level::MEGA;
            new.meta().nx_split.store(nx_split, Relaxed);
            let guard = table.lock();
            let is_broken = matches!(now, Entry::Broken(_));
            if is_broken && !Self::may_mend(guard.meta, gfn, level, &path.flushed) {
                bits = entry.load(Relaxed);
                drop(guard);
                path.frames.give_back(new.unused());
                return bits;
            }
            let put = new.publish(|frame| {
                let new = F::table(frame);
                (entry.compare_exchange(bits, new, Release, Acquire)).map(|_| new)
            });
            let split = matches!(now, Entry::Leaf(_) | Entry::Broken(_));
            if put.is_ok() && split {
                guard.count_leaves(-1);
            }
            drop(guard);
            match put {
                Ok(new) => {
                    if split {
                        path.split(level, F::GRANULE.entries());
                        let spte = bits;
                        (self.platform).trace(Event::SplitHugePage { gfn, spte, level });
                    }
                    path.nx_splits += nx_split as u64;
                    return new;
                }
                Err((changed, again)) => (bits, new) = (changed, again),
            }
        }
    }
}

/// Look-ups by frame, for tests.
#[cfg(test)]
impl<P: Platform, F: Format> Tree<P, F> {
    /// Finds the entry at which a page walker would end.
    pub(crate) fn lookup(&self, gfn: Gfn) -> Found<'_> {
        self.find_at(gfn, Level::PAGE)
    }
}

/// The entries of a run of leaves that differ only in their frames, which are consecutive. As numbers, the entries are
/// an arithmetic sequence (see [`Self::holds`]).
pub(crate) struct Run<F> {
    first: u64,
    step: u64,
    format: PhantomData<F>,
}

impl<F: Format> Run<F> {
    /// Makes a run of leaves of `level` that begins with `first`.
    pub(crate) fn new(first: Leaf, level: Level) -> Self {
        let second = Leaf {
            pfn: first.pfn.add(F::GRANULE.pages(level)),
            ..first
        };
        let bits = F::leaf(first, level);
        Run {
            first: bits,
            step: F::leaf(second, level).wrapping_sub(bits),
            format: PhantomData,
        }
    }

    /// Whether the first `leaves` entries of the run, of `level` and beginning with `first`, are an arithmetic
    /// sequence. They are not if entries store an address in two parts ([`Format::put_frame`]) and the run crosses a
    /// boundary, at a multiple of 256 TiB or more, at which the upper part changes.
    fn holds(&self, first: Leaf, level: Level, leaves: u64) -> bool {
        let lowest = F::FRAME.trailing_zeros();
        let bits = F::FRAME >> lowest;
        // The bits of `FRAME` may be contiguous and still be two parts, with the upper part of the address in the lower
        // bits.
        let in_one_part = bits & (bits + 1) == 0 && F::put_frame(Pfn(1)) == 1 << lowest;
        let last = Leaf {
            pfn: first.pfn.add((leaves - 1) * F::GRANULE.pages(level)),
            ..first
        };
        in_one_part || self.bits(leaves as usize - 1) == F::leaf(last, level)
    }

    /// Returns the bits of leaf number `i` of the run.
    #[inline]
    pub(crate) fn bits(&self, i: usize) -> u64 {
        self.first.wrapping_add(self.step.wrapping_mul(i as u64))
    }

    /// Writes the leaves to `entries`, from number 0 on.
    pub(super) fn fill(&self, entries: &mut [AtomicU64]) {
        // Add `step` for each entry instead of calling `bits`: the compiler vectorizes additions, but not
        // multiplications.
        let mut bits = self.first;
        for entry in entries {
            *entry.get_mut() = bits;
            bits = bits.wrapping_add(self.step);
        }
    }
}

/// Adds the rights, accessed and dirty bits of `leaf` to the leaf of `level` in `entry`, which maps the same page.
/// `bits` is the entry's value, read under the table's lock, which the caller holds. Returns whether the entry has
/// changed.
pub(crate) fn widen<F: Format>(entry: &AtomicU64, bits: u64, leaf: Leaf, level: Level) -> bool {
    let wider = |bits| match F::decode(bits, level) {
        Entry::Leaf(now) => Some(F::leaf(union(now, leaf), level)),
        _ => None,
    };
    // Walkers may set the accessed and dirty bits at the same time; the lock excludes all other changes.
    wider(bits) != Some(bits) && entry.fetch_update(Release, Relaxed, wider).is_ok()
}

/// Returns the leaf `a` with the rights, accessed and dirty bits of both `a` and `b`.
fn union(a: Leaf, b: Leaf) -> Leaf {
    Leaf {
        write: a.write | b.write,
        execute: a.execute | b.execute,
        may_write: (a.may_write | b.may_write) & !(a.write | b.write),
        may_execute: (a.may_execute | b.may_execute) & !(a.execute | b.execute),
        accessed: a.accessed | b.accessed,
        dirty: a.dirty | b.dirty,
        ..a
    }
}
