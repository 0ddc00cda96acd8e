//! Installs the leaves of faults in shadow pages.

use super::page::{Agreement, EntryId, Pages};
use super::track::Descent;
use super::trail::{Note, Role, Target, Trail, mmio_note};
use super::{ShadowMmu, begin};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format, Leaf};
use crate::frame::ENTRIES;
use crate::guest_walk::PageRights;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;
use crate::table::{FrameCache, Installed, OnLeaf, Path, Retry, Root, Run, widen};
use crate::trace::Event;

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Like [`Tree::map`](crate::table::Tree::map), but in shadow pages. If the target has a [`Trail`] (a recorded walk
    /// of the guest's tables), installs the leaf on that path.
    pub(crate) fn map(
        &self,
        target: &Target<'_, P, F>,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Result<Installed, Retry> {
        let pages = self.lock();
        if !self.is_prepared(&pages) {
            return Err(Retry::Unprepared);
        }
        let gfn = target.gfn();
        if !valid() || self.largest(&pages, gfn, level) < level {
            return Err(Retry::Stale);
        }
        let descent = self.track_tables(&pages, target, path)?;
        let number = self.page_for(&pages, target, descent, level, OnLeaf::Split, path)?;
        let leaf = self.guarded(&pages, gfn, leaf, path);
        let id = EntryId::new(number, target.key().index.at(level));
        let installed = self.install(&pages, id, gfn.align_down(level), leaf, target)?;
        done();
        Ok(installed)
    }

    /// Installs leaves for `pages` pages where the shadow pages have no entry, as
    /// [`Tree::map_absent`](crate::table::Tree::map_absent) does in a tree. Returns the number of installed leaves.
    pub(crate) fn map_absent(
        &self,
        target: &Target<'_, P, F>,
        pages: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Result<u64, Retry> {
        let first = target.key().index.at(Level::PAGE);
        debug_assert!(first + pages as usize <= ENTRIES);
        let filled = path.frames.fill(&*self.platform, FrameCache::FAULT);
        filled.map_err(|_| Retry::Unprepared)?;
        let run = Run::<F>::new(leaf, Level::PAGE);
        let prepared = self.lock_prepared(path.frames);
        let all = prepared.map_err(|_| Retry::Unprepared)?;
        if !valid() || !self.is_current(target) {
            return Err(Retry::Stale);
        }
        let gfn = target.gfn();
        let descent = self.descent(&all, target)?;
        let number = self.page_for(&all, target, descent, Level::PAGE, OnLeaf::GiveUp, path)?;
        let table = all.table(&*self.platform, number);
        let mut installed = 0;
        for i in 0..pages as usize {
            let (entry, gfn) = (table.entry(first + i), gfn.add(i as u64));
            let bits = entry.load(Relaxed);
            if !F::is_absent(bits) {
                continue;
            }
            if self.shadows() && all.is_tracked(gfn) {
                // Leave the page to a later fault, which decides whether it may be writable.
                continue;
            }
            let id = EntryId::new(number, first + i);
            all.fill(id, bits, gfn, Self::note(target, gfn));
            entry.store(run.bits(i), Release);
            installed += 1;
        }
        table.meta().count_leaves(installed as i16);
        Ok(installed)
    }

    /// Installs an MMIO entry at `target` in the shadow pages, as [`Tree::map_mmio`](crate::table::Tree::map_mmio) does
    /// in a tree. Returns whether the entry was installed.
    ///
    /// # Errors
    /// [`Retry`]: what the caller must do before it tries again.
    pub(crate) fn map_mmio(
        &self,
        target: &Target<'_, P, F>,
        generation: u64,
        path: &mut Path<'_>,
    ) -> Result<bool, Retry> {
        let trail = target.trail();
        let rights = trail.map_or(PageRights::ALL, |trail| trail.rights);
        let note = mmio_note::<F>(target.gfn(), rights);
        // `None`: the note does not fit. An MMIO entry for a guest-physical address needs no note: the guest's tables
        // were not used.
        let Some(note) = note.or_else(|| trail.is_none().then_some(0)) else {
            return Ok(false);
        };
        let pages = self.lock();
        if !self.is_prepared(&pages) {
            return Err(Retry::Unprepared);
        }
        let descent = self.track_tables(&pages, target, path)?;
        // If there is a larger leaf on the path, a memslot was created meanwhile: give up, and do not change the leaf.
        let reached = self.page_for(&pages, target, descent, Level::PAGE, OnLeaf::GiveUp, path);
        let number = match reached {
            Err(Retry::Conflict(_)) => return Ok(false),
            reached => reached?,
        };
        let (gfn, id) = (
            target.gfn(),
            EntryId::new(number, target.key().index.at(Level::PAGE)),
        );
        let table = pages.table(&*self.platform, number);
        let entry = table.entry(id.index());
        let bits = entry.load(Relaxed);
        if !F::is_absent(bits) {
            return Ok(false);
        }
        pages.fill(id, bits, gfn, Self::note(target, gfn));
        entry.store(F::mmio(generation, note), Release);
        Ok(true)
    }

    /// Returns the largest level, up to `level`, at which the MMU can map `gfn`.
    pub(crate) fn mappable_level(&self, gfn: Gfn, level: Level) -> Level {
        match self.tracking.any() && level > Level::PAGE {
            true => self.largest(&self.lock(), gfn, level),
            false => level,
        }
    }
}

impl Pages {
    /// Adds entry `id`, whose value is `bits`, to the list of `gfn`, with the note `note`. Call before the entry
    /// becomes a leaf or an MMIO entry of level 1 for `gfn`.
    fn fill(&self, id: EntryId, bits: u64, gfn: Gfn, note: Note) {
        self.fill_at(id, bits, gfn, Level::PAGE, note);
    }

    /// Like [`Self::fill`], but for an entry of `level`.
    fn fill_at(&self, id: EntryId, bits: u64, gfn: Gfn, level: Level, note: Note) {
        let page = self.pool.get(id.page());
        if bits != 0 {
            // The old entry is an MMIO entry. It may be for another frame, if the guest has changed its table and has
            // not flushed yet.
            self.unlist_leaf(id, page.gfn_at(id.index()), level);
        }
        page.set_note(id.index(), note);
        self.list_leaf(id, gfn, level);
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Returns the [`Note`] for a leaf that maps `gfn` at `target`.
    fn note(target: &Target<'_, P, F>, gfn: Gfn) -> Note {
        match target.trail() {
            Some(trail) => Note::new(gfn, trail.rights),
            // Without a trail, the guest's tables were not used: the leaf is in a direct page, whose role contains the
            // rights.
            None => Note::NONE,
        }
    }

    /// Returns the largest level, up to `level`, at which a leaf may map `gfn`: a huge leaf must not cover a guest
    /// table that has a shadow page.
    pub(super) fn largest(&self, pages: &Pages, gfn: Gfn, level: Level) -> Level {
        let mut level = level;
        while self.shadows() && level > Level::PAGE && pages.rmap.has_tables(gfn, level) {
            level = level.below();
        }
        level
    }

    /// Installs `leaf`, which maps guest memory from `gfn` on, in entry `id`.
    fn install(
        &self,
        pages: &Pages,
        id: EntryId,
        gfn: Gfn,
        leaf: Leaf,
        target: &Target<'_, P, F>,
    ) -> Result<Installed, Retry> {
        let (page, level) = (pages.pool.get(id.page()), pages.pool.get(id.page()).level());
        let table = pages.table(&*self.platform, id.page());
        let entry = table.entry(id.index());
        let bits = entry.load(Relaxed);
        let note = Self::note(target, gfn);
        match F::decode(bits, level) {
            Entry::Empty | Entry::Mmio { .. } => {
                pages.fill_at(id, bits, gfn, level, note);
                entry.store(F::leaf(leaf, level), Release);
                table.meta().count_leaves(1);
                Ok(Installed::New)
            }
            Entry::Leaf(old) if old.pfn == leaf.pfn && old.memory == leaf.memory => {
                if target.trail().is_some() {
                    let was = page.note(id.index());
                    if !was.is_like(note) {
                        return Err(Retry::Replaced(level));
                    }
                    page.set_note(id.index(), was.with(note));
                }
                Ok(match widen::<F>(entry, bits, leaf, level) {
                    true => Installed::Widened,
                    false => Installed::Spurious,
                })
            }
            _ if target.trail().is_some() => Err(Retry::Replaced(level)),
            _ => Err(Retry::Conflict(level)),
        }
    }

    /// Returns the number of the shadow page of `level` on the path to `target`. Continues the walk `descent`, and
    /// makes missing pages.
    fn page_for(
        &self,
        pages: &Pages,
        target: &Target<'_, P, F>,
        descent: Descent,
        level: Level,
        on_leaf: OnLeaf,
        path: &mut Path<'_>,
    ) -> Result<u32, Retry> {
        let Descent { root, mut number } = descent;
        if let Some(trail) = target.trail() {
            Self::check_linked(pages, root, trail)?;
            let page = pages.pool.get(root);
            (page.guest()).inspect(|guest| guest.is_root.set(true));
            path.root = Some(Root::new(page.frame.get(), page.level()));
        }
        let mut at = pages.pool.get(number).level();
        while at > level {
            let id = EntryId::new(number, target.key().index.at(at));
            let table = pages.table(&*self.platform, number);
            let bits = table.entry(id.index()).load(Relaxed);
            let (child, role) = match target.trail() {
                None => (target.gfn().align_down(at), Role::direct(at.below())),
                Some(trail) => trail.page(at.below()),
            };
            (pages.pool.get(number).guest()).inspect(|guest| guest.stores.set(0));
            number = match F::decode(bits, at) {
                Entry::Table(lower) => {
                    let lower = pages.number_of(&*self.platform, lower);
                    let page = pages.pool.get(lower);
                    if self.shadows() && (page.gfn.get(), page.role.get()) != (child, role) {
                        return Err(Retry::Replaced(at));
                    }
                    lower
                }
                Entry::Leaf(_) if on_leaf == OnLeaf::GiveUp => return Err(Retry::Conflict(at)),
                Entry::Leaf(_) => {
                    let note = || pages.pool.get(number).note(id.index());
                    let is_whole = || role.is_direct() && note() == Note::new(child, role.rights);
                    if self.shadows() && !is_whole() {
                        return Err(Retry::Replaced(at));
                    }
                    (self.split_leaf(pages, id, child, path)).ok_or(Retry::Unprepared)?
                }
                _ => {
                    let lower = self.page(pages, child, role, path);
                    let lower = lower.ok_or(Retry::Unprepared)?;
                    if let Some(trail) = target.trail() {
                        Self::check_linked(pages, lower, trail)?;
                    }
                    (self.refer(pages, id, lower, bits)).map_err(|_| Retry::Stale)?;
                    pages.list_parent(id, lower);
                    lower
                }
            };
            at = at.below();
        }
        Ok(number)
    }

    /// Checks that an entry on `trail` may begin to refer to page `number`. The guest may expect that a processor which
    /// uses a new path reads the table on this path anew. So an unsynced page must first be compared with the guest's
    /// table, after the guest's entry above was read.
    fn check_linked(pages: &Pages, number: u32, trail: &Trail) -> Result<(), Retry> {
        let page = pages.pool.get(number);
        let is_stale =
            (page.guest()).is_some_and(|guest| guest.agreement.get() != Agreement::Synced);
        match is_stale && !trail.compared[page.level().0 as usize - 1] {
            true => Err(Retry::Unsynced(page.level())),
            false => Ok(()),
        }
    }

    /// Returns the number of the shadow page for `gfn` and `role`. If there is none, makes one, with an empty table to
    /// which no entry refers. `None`: `path` has no frame for the table.
    pub(super) fn page(
        &self,
        pages: &Pages,
        gfn: Gfn,
        role: Role,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let trace = |created| {
            let role = role.word();
            let page = Event::GetPage { gfn, role, created };
            self.platform.trace(page);
        };
        if let Some(number) = pages.find_page(gfn, role) {
            trace(false);
            return Some(number);
        }
        if path.frames.is_empty() {
            return None;
        }
        let number = pages.new_page(gfn, role)?;
        let frame = begin(&*self.platform, path.frames.take(), number);
        pages.pool.get(number).frame.set(frame);
        let nx_split = path.nx_split && role.level == Level::PAGE && role.is_direct();
        let meta = pages.table(&*self.platform, number).meta();
        meta.nx_split.store(nx_split, Relaxed);
        meta.maps_parts
            .store(self.shadows() && role.is_direct(), Relaxed);
        if !role.is_direct() {
            self.tracking.made();
        }
        path.nx_splits += u64::from(nx_split);
        path.shadow_pages += 1;
        trace(true);
        self.budget.took(1);
        Some(number)
    }

    /// Makes entry `id`, whose value is `old`, refer to the table of page `lower`. The caller must add the entry to the
    /// list of the page's parents. `Err`: a walker has set a bit in the entry; contains the new value.
    fn refer(&self, pages: &Pages, id: EntryId, lower: u32, old: u64) -> Result<(), u64> {
        let table = pages.table(&*self.platform, id.page());
        let new = F::table(pages.pool.get(lower).frame.get());
        let entry = table.entry(id.index());
        entry.compare_exchange(old, new, Release, Relaxed).map(drop)
    }

    /// Replaces the huge leaf in entry `id`, whose first frame is `gfn`, by a table of its pieces. May reuse an
    /// existing shadow page: then leaves in its table get the rights, accessed and dirty bits of the pieces in
    /// addition. Returns the number of the shadow page. `None`: `path` has no frame for a new table.
    pub(super) fn split_leaf(
        &self,
        pages: &Pages,
        id: EntryId,
        gfn: Gfn,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let above = pages.table(&*self.platform, id.page());
        let at = pages.pool.get(id.page()).level();
        let page = pages.pool.get(id.page());
        let role = page.role.get().pieces(page.note(id.index()).rights());
        let lower = self.page(pages, gfn, role, path)?;
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
        self.platform.trace(Event::SplitHugePage {
            gfn,
            spte: bits,
            level: at,
        });
        Some(lower)
    }

    /// Adds the rights, accessed and dirty bits of `huge`, a leaf for the whole region that page `number` maps, to the
    /// leaves in the page's table and in the tables below it. If `fill`, also installs the pieces of `huge` in absent
    /// entries of the page's table. Returns the number of pieces installed.
    fn spread(&self, pages: &Pages, number: u32, huge: Leaf, fill: bool) -> usize {
        let page = pages.pool.get(number);
        let (table, level) = (pages.table(&*self.platform, number), page.level());
        let mut installed = 0;
        for (index, entry) in table.entries().iter().enumerate() {
            let piece = huge.piece(F::GRANULE, Level(level.0 + 1), index);
            let bits = entry.load(Relaxed);
            match F::decode(bits, level) {
                Entry::Table(lower) => {
                    self.spread(pages, pages.number_of(&*self.platform, lower), piece, false);
                }
                Entry::Leaf(_) => _ = widen::<F>(entry, bits, piece, level),
                _ if fill => {
                    let id = EntryId::new(number, index);
                    let gfn = page.gfn_at(index);
                    pages.fill_at(id, bits, gfn, level, page.note(index));
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
