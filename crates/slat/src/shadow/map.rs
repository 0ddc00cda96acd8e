//! The MMU by index: what a fault installs.

use super::page::{EntryId, Pages, Role, number_of};
use super::{ShadowMmu, begin};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format, Leaf};
use crate::frame::ENTRIES;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;
use crate::table::{ByIndex, FrameCache, GfnKey, Mapped, OnLeaf, Path, Run, widen};

impl<P: Platform, F: Format> ByIndex<P, F> for ShadowMmu<P, F> {
    #[inline(always)]
    fn platform(&self) -> &P {
        &self.platform
    }

    fn map(
        &self,
        key: GfnKey,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Mapped {
        let pages = self.lock();
        if !pages.is_prepared() {
            return Mapped::Unprepared;
        }
        if !valid() {
            return Mapped::Stale;
        }
        let Some(number) = self.page_for(&pages, key.index, level, OnLeaf::Split, path) else {
            return Mapped::Stale;
        };
        let table = pages.table(&*self.platform, number);
        let index = level.index(key.index);
        let (entry, id) = (table.entry(index), EntryId::new(number, index));
        let bits = entry.load(Relaxed);
        let mapped = match F::decode(bits, level) {
            now @ (Entry::Empty | Entry::Mmio { .. }) => {
                if now == Entry::Empty {
                    pages.list_leaf(id, key.index.align_down(level), level);
                }
                entry.store(F::leaf(leaf, level), Release);
                table.meta().count_leaves(1);
                Mapped::New
            }
            Entry::Leaf(old) if old.pfn == leaf.pfn && old.memory == leaf.memory => {
                match widen::<F>(entry, bits, leaf, level) {
                    true => Mapped::Widened,
                    false => Mapped::Spurious,
                }
            }
            _ => return Mapped::Conflict,
        };
        done();
        mapped
    }

    fn map_absent(
        &self,
        key: GfnKey,
        pages: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Option<u64> {
        let first = Level::PAGE.index(key.index);
        debug_assert!(first + pages as usize <= ENTRIES);
        self.prepare(path.frames, FrameCache::FAULT).ok()?;
        let run = Run::<F>::new(leaf, Level::PAGE);
        let all = self.lock();
        if !all.is_prepared() || !valid() {
            return None;
        }
        let number = self.page_for(&all, key.index, Level::PAGE, OnLeaf::GiveUp, path)?;
        let table = all.table(&*self.platform, number);
        let mut installed = 0;
        for i in 0..pages as usize {
            let entry = table.entry(first + i);
            let bits = entry.load(Relaxed);
            if !F::is_absent(bits) {
                continue;
            }
            if bits == 0 {
                let id = EntryId::new(number, first + i);
                all.list_leaf(id, key.index.add(i as u64), Level::PAGE);
            }
            entry.store(run.bits(i), Release);
            installed += 1;
        }
        table.meta().count_leaves(installed as i16);
        Some(installed)
    }

    fn map_mmio(&self, key: GfnKey, generation: u64, path: &mut Path<'_>) -> bool {
        let pages = self.lock();
        if !pages.is_prepared() {
            return false;
        }
        let gfn = key.index;
        // A larger leaf on the path means that a memslot was created meanwhile: leave the leaf alone.
        let number = self.page_for(&pages, gfn, Level::PAGE, OnLeaf::GiveUp, path);
        let Some(number) = number else {
            return false;
        };
        let index = Level::PAGE.index(gfn);
        let table = pages.table(&*self.platform, number);
        let entry = table.entry(index);
        let bits = entry.load(Relaxed);
        if bits == 0 {
            pages.list_leaf(EntryId::new(number, index), gfn, Level::PAGE);
        }
        let free = F::is_absent(bits);
        if free {
            entry.store(F::mmio(generation), Release);
        }
        free
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Returns the number of the page of `level` on the path to `gfn`; makes it, and those above it, if there is none.
    /// `None`: a larger leaf is on the path and was left alone, or `path` has no frame left.
    fn page_for(
        &self,
        pages: &Pages,
        gfn: Gfn,
        level: Level,
        on_leaf: OnLeaf,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let (mut number, mut at) = (self.root, F::TOP);
        while at > level {
            let index = at.index(gfn);
            let table = pages.table(&*self.platform, number);
            let bits = table.entry(index).load(Relaxed);
            let id = EntryId::new(number, index);
            number = match F::decode(bits, at) {
                Entry::Table(lower) => number_of(&*self.platform, lower),
                Entry::Leaf(_) if on_leaf == OnLeaf::GiveUp => return None,
                Entry::Leaf(_) => self.split_leaf(pages, id, gfn.align_down(at), path)?,
                _ => {
                    let lower = self.direct_page(pages, gfn.align_down(at), at.below(), path)?;
                    self.refer(pages, id, lower, bits).ok()?;
                    pages.list_parent(id, lower);
                    lower
                }
            };
            at = at.below();
        }
        Some(number)
    }

    /// Returns the number of the direct page of `level` for `gfn`, its first frame. Makes it if there is none: then its
    /// table is empty, and nothing refers to it. `None`: `path` has no frame for it.
    fn direct_page(
        &self,
        pages: &Pages,
        gfn: Gfn,
        level: Level,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let role = Role { level };
        if let Some(number) = pages.find_page(gfn, role) {
            return Some(number);
        }
        if path.frames.is_empty() {
            return None;
        }
        let frame = path.frames.take();
        let Some(number) = pages.new_page(gfn, role, frame) else {
            path.frames.give_back(frame);
            return None;
        };
        begin(&*self.platform, frame, number);
        let nx_split = path.nx_split && level == Level::PAGE;
        let meta = pages.table(&*self.platform, number).meta();
        meta.nx_split.store(nx_split, Relaxed);
        path.nx_splits += u64::from(nx_split);
        path.shadow_pages += 1;
        self.budget.took(1);
        Some(number)
    }

    /// Makes entry `id`, which has `old`, refer to the table of page `lower`. `Err`: a walker has set a bit in the entry.
    /// The caller lists it.
    fn refer(&self, pages: &Pages, id: EntryId, lower: u32, old: u64) -> Result<(), u64> {
        let table = pages.table(&*self.platform, id.page());
        let new = F::table(pages.pool.get(lower).frame.get());
        let entry = table.entry(id.index());
        entry.compare_exchange(old, new, Release, Relaxed).map(drop)
    }

    /// Replaces the huge leaf for `gfn`, its first frame, in entry `id` by a table of its pieces. A table that was in use
    /// there before may be found again: leaves in it get the rights and marks of their pieces. Returns the number of the
    /// table's page; `None` if `path` has no frame for it.
    pub(super) fn split_leaf(
        &self,
        pages: &Pages,
        id: EntryId,
        gfn: Gfn,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let above = pages.table(&*self.platform, id.page());
        let at = pages.pool.get(id.page()).level();
        let lower = self.direct_page(pages, gfn, at.below(), path)?;
        let mut bits = above.entry(id.index()).load(Acquire);
        let mut made = 0;
        loop {
            let Entry::Leaf(huge) = F::decode(bits, at) else {
                unreachable!("the lock is held, and walkers only set marks");
            };
            made += self.spread(pages, lower, huge, true);
            match self.refer(pages, id, lower, bits) {
                Ok(()) => break,
                Err(now) => bits = now,
            }
        }
        pages.unlist_leaf(id, gfn, at);
        pages.list_parent(id, lower);
        above.meta().count_leaves(-1);
        path.split(at, made);
        Some(lower)
    }

    /// Adds the rights and marks of `huge`, a leaf of the region that page `number` maps, to the leaves in its table, and
    /// in the tables below. With `fill`, installs the pieces of `huge` in its absent entries. Returns how many it
    /// installed.
    fn spread(&self, pages: &Pages, number: u32, huge: Leaf, fill: bool) -> usize {
        let page = pages.pool.get(number);
        let (table, level) = (pages.table(&*self.platform, number), page.level());
        let mut installed = 0;
        for (index, entry) in table.entries().iter().enumerate() {
            let piece = huge.piece(Level(level.0 + 1), index);
            let bits = entry.load(Relaxed);
            match F::decode(bits, level) {
                Entry::Table(lower) => {
                    self.spread(pages, number_of(&*self.platform, lower), piece, false);
                }
                Entry::Leaf(_) => _ = widen::<F>(entry, bits, piece, level),
                now if fill => {
                    if now == Entry::Empty {
                        let id = EntryId::new(number, index);
                        pages.list_leaf(id, page.gfn_at(index), level);
                    }
                    entry.store(F::leaf(piece, level), Relaxed);
                    installed += 1;
                }
                _ => {}
            }
        }
        table.meta().count_leaves(installed as i16);
        installed
    }
}
