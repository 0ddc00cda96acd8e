//! Tracking: how the MMU notices stores to guest tables, and how it updates shadow pages after such stores.
//!
//! # Which stores are noticed
//! The frame of a guest table that has a shadow page is *tracked*: no leaf that maps the frame is writable, so the
//! guest's stores to it fault. The client or the software CPU does the store for the guest, and then reports it to the
//! MMU ([`ShadowMmu::stored`]). Then all shadow entries that were made from the old contents are zapped. So while a
//! page is [`Agreement::Synced`], its entries match the guest's table.
//!
//! The guest stores to tables of level 1 so often that a fault for each store would be too slow. So the first store to
//! such a table makes its shadow pages [`Agreement::Unsynced`], and the leaf that maps the table writable: further
//! stores are not noticed. This is correct because a processor, too, may use cached entries of a table until its TLB is
//! flushed. When the guest executes an instruction that flushes, the table is write-protected, so that stores are
//! noticed again ([`Agreement::ToCompare`]), and the page is compared with the table, entry by entry.
//!
//! # When tracking begins
//! When a guest table gets its first shadow page, the leaves that map its frame are write-protected, but TLBs may still
//! have them as writable. So the shadow page stores the number of the first flush that begins after this, like an entry
//! that was cleared on a format with break-before-make ([`crate::table`]). A fault that needs the page does this flush,
//! unless it was already done, and reads the guest's tables again. Only then may an entry refer to the page. So all
//! unnoticed stores were before the fault read the tables. That no noticed store was made after the read and before the
//! install is checked by [`Changes`](super::trail::Changes).
//!
//! # Several address spaces
//! Each address space has its own MMU, whose leaves are not write-protected for tables that another MMU tracks. A store
//! that is noticed in one address space is reported to the MMUs of all. But a store may be unnoticed: for example, a
//! store of a vCPU in SMM to tables that are shadowed in the other address space. Such stores are found by comparison:
//! while vCPUs use different address spaces, and once after that, all shadow pages are compared when the guest flushes
//! ([`ShadowMmu::distrust_all`], [`Vm::vcpu_moves`](crate::vm::Vm)).

use core::ops::Range;

use super::ShadowMmu;
use super::page::{Agreement, Cleared, EntryId, Guest, Pages};
use super::trail::{Meaning, PageOf, Role, Target, Trail};
use crate::addr::{Gfn, Gpa, Level, PAGE_SIZE, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::frame::ENTRIES;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;
use crate::table::{Detached, Flushed, Key, LeafCounts, Path, Retry};

/// A walk through shadow pages, and its position.
#[derive(Clone, Copy)]
pub(super) struct Descent {
    /// The number of the page at which the walk begins.
    pub(super) root: u32,
    /// The number of the page that the walk has reached.
    pub(super) number: u32,
}

/// Counts of the changes that were made because of a store or a flush of the guest.
#[derive(Default)]
pub(crate) struct Followed {
    /// Zapped leaves, by level.
    pub(crate) zapped: LeafCounts,
    /// Leaves that have lost the right to write, by level.
    pub(crate) protected: LeafCounts,
    /// Cleared entries that referred to a table.
    pub(crate) tables: u64,
    /// Shadow pages zapped because of write flooding (KVM's word): their memory is apparently not a table any more.
    pub(crate) flooded: u64,
    /// Shadow pages that are synced with the guest's table again.
    pub(crate) synced: u64,
}

/// The result of comparing a shadow page with its guest table.
pub(crate) struct Compared {
    /// The counter of changes of the guest's table ([`ShadowMmu::changes_of`]) before and after the comparison.
    pub(crate) changes: (u64, u64),
    /// Whether the page is synced with the guest's table again.
    pub(crate) synced: bool,
}

/// Entries read from a guest table, to compare a shadow page with them.
pub(crate) struct ReadEntries<'e> {
    pub(crate) page: PageOf,
    /// The indexes of the shadow page's entries to which `entries` correspond.
    pub(crate) indexes: Range<usize>,
    pub(crate) entries: &'e [u64],
    /// The value of [`ShadowMmu::changes_of`] for the table before the entries were read.
    pub(crate) changes: u64,
    /// The last flush that the vCPU had itself done before it read the entries.
    pub(crate) flushed: Flushed,
}

fn page_of(pages: &Pages, number: u32) -> PageOf {
    let page = pages.pool.get(number);
    PageOf {
        number,
        gfn: page.gfn.get(),
        role: page.role.get(),
    }
}

impl Pages {
    /// Returns whether `gfn` contains a guest table to which stores must be noticed.
    pub(super) fn is_tracked(&self, gfn: Gfn) -> bool {
        let mut pages = self
            .pages_of_table(gfn)
            .filter_map(|n| self.pool.get(n).guest());
        pages.any(|guest| guest.agreement.get() != Agreement::Unsynced)
    }

    /// Write-protects all leaves in shadow pages that map `gfn`. Returns whether one of them was writable.
    pub(super) fn protect<P: Platform, F: Format>(&self, platform: &P, gfn: Gfn) -> bool {
        let mut changed = false;
        for level in (1..=F::MAX_LEAF.0).map(Level) {
            let Some(listed) = self.rmap.find(gfn, level) else {
                continue;
            };
            for id in self.leaves_of(listed) {
                let entry = self.table(platform, id.page()).entry(id.index());
                let bits = entry.load(Relaxed);
                if !F::is_absent(bits) && bits & (F::WRITE | F::MAY_WRITE) != 0 {
                    entry.fetch_and(!(F::WRITE | F::MAY_WRITE), Relaxed);
                    changed |= F::is_writable(bits);
                }
            }
        }
        changed
    }

    /// If all shadow pages of the guest table in frame `gfn` are of level 1, makes them unsynced. Returns the number of
    /// pages that were synced before. `None`: there is a page of a higher level, so stores to the table must be
    /// noticed.
    fn unsync(&self, platform: &impl Platform, gfn: Gfn) -> Option<u64> {
        let tracks = |number: u32| self.pool.get(number).level() > Level::PAGE;
        if self.pages_of_table(gfn).any(tracks) {
            return None;
        }
        let mut unsynced = 0;
        for number in self.pages_of_table(gfn) {
            unsynced += u64::from(self.unsync_page(platform, number));
        }
        Some(unsynced)
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Returns whether the MMU has noticed no change of the guest tables on the trail of `target` since they were read.
    pub(super) fn is_current(&self, target: &Target<'_, P, F>) -> bool {
        target
            .trail()
            .is_none_or(|trail| self.changes.are_none_since(&trail.seen))
    }

    /// Makes sure that stores to the guest tables on the trail of `target` are noticed, and that none was made since
    /// the tables were read. Makes missing shadow pages of these tables. Returns a walk that has gone as far as the
    /// shadow pages are linked.
    ///
    /// # Errors
    /// [`Retry`]: stores may have been missed, or memory is missing.
    pub(super) fn track_tables(
        &self,
        pages: &Pages,
        target: &Target<'_, P, F>,
        path: &mut Path<'_>,
    ) -> Result<Descent, Retry> {
        let Some(trail) = target.trail() else {
            return self.descent(pages, target);
        };
        let (mut made, mut unflushed) = (false, false);
        // Usually all pages are already linked: then only the root must be looked up.
        let linked = self.linked(pages, target.key(), trail);
        let levels = match linked {
            Some(_) => 0..0,
            None => trail.leaf_level().0..trail.top().0 + 1,
        };
        for level in levels.map(Level) {
            let (gfn, role) = trail.page(level);
            let number = match pages.find_page(gfn, role) {
                Some(number) => number,
                None => {
                    made = true;
                    let begun = self.begin_tracking(pages, gfn, role, path);
                    begun.ok_or(Retry::Unprepared)?
                }
            };
            let Some(guest) = pages.pool.get(number).guest() else {
                continue;
            };
            let frame = gfn..gfn.add(1);
            match guest.flush.get() {
                0 => {}
                // No flush is needed: an unsynced page is compared with the guest's table anyway, before an entry
                // refers to the page and when the guest flushes.
                _ if guest.agreement.get() != Agreement::Synced => {}
                due if path.flushed.covers(&frame, due) => guest.flush.set(0),
                _ => unflushed = true,
            }
        }
        match linked {
            _ if unflushed => Err(Retry::Unprotected),
            _ if made || !self.is_current(target) => Err(Retry::Tracked),
            Some(linked) => Ok(linked),
            None => self.descent(pages, target),
        }
    }

    /// Begins a walk to `target` at its root.
    ///
    /// # Errors
    /// [`Retry::Unprepared`]: the root does not exist.
    pub(super) fn descent(
        &self,
        pages: &Pages,
        target: &Target<'_, P, F>,
    ) -> Result<Descent, Retry> {
        let root = match target.trail().map(|trail| trail.root()) {
            None => self.root().expect("an MMU beside a tree has trails"),
            Some((gfn, role)) => pages.find_page(gfn, role).ok_or(Retry::Unprepared)?,
        };
        let number = root;
        Ok(Descent { root, number })
    }

    /// Walks to `key` through the shadow pages of all guest tables on the trail. `None`: one of the pages is missing or
    /// not linked, or its table's write protection is not flushed yet.
    fn linked(&self, pages: &Pages, key: Key, trail: &Trail) -> Option<Descent> {
        let (gfn, role) = trail.root();
        let root = pages.find_page(gfn, role)?;
        let mut number = root;
        loop {
            let page = pages.pool.get(number);
            let (at, guest) = (page.level(), page.guest()?);
            let is_on_trail = (page.gfn.get(), page.role.get()) == trail.page(at);
            if !is_on_trail || guest.flush.get() != 0 {
                return None;
            }
            if at == trail.leaf_level() {
                return Some(Descent { root, number });
            }
            guest.stores.set(0);
            number = self.page_below(pages, EntryId::new(number, key.index.at(at)))?;
        }
    }

    /// Returns the number of the page to whose table entry `id` refers. `None`: the entry does not refer to a table.
    fn page_below(&self, pages: &Pages, id: EntryId) -> Option<u32> {
        let level = pages.pool.get(id.page()).level();
        let table = pages.table(&*self.platform, id.page());
        match F::decode(table.entry(id.index()).load(Relaxed), level) {
            Entry::Table(lower) => Some(pages.number_of(&*self.platform, lower)),
            _ => None,
        }
    }

    /// Makes the shadow page with the role `role` of the guest table in frame `gfn`, and begins to track the table.
    /// Returns the page's number. `None`: there is no frame or no record for the page.
    fn begin_tracking(
        &self,
        pages: &Pages,
        gfn: Gfn,
        role: Role,
        path: &mut Path<'_>,
    ) -> Option<u32> {
        let number = self.page(pages, gfn, role, path)?;
        self.changes.raise(gfn);
        let mut others = pages.pages_of_table(gfn).filter(|other| *other != number);
        let unsynced = |other: u32| {
            let guest = pages.pool.get(other).guest();
            guest.is_some_and(|guest| guest.agreement.get() == Agreement::Unsynced)
        };
        if role.level == Level::PAGE && others.any(unsynced) {
            // Other shadow pages of the table are unsynced, so stores to it are not noticed. Make the new page
            // unsynced, too: it is compared with the table when the guest flushes.
            path.unsynced += u64::from(pages.unsync_page(&*self.platform, number));
            return Some(number);
        }
        // From now on stores to the table are noticed. So unsynced pages with other roles become
        // [`Agreement::ToCompare`].
        let changed = self.protect(pages, gfn);
        self.notice_stores(pages, gfn);
        let largest = gfn.block(F::MAX_LEAF);
        if changed || self.flushes.is_due(&largest, u64::MAX, &Flushed::default()) {
            let guest = pages.pool.get(number).guest();
            guest.inspect(|guest| guest.flush.set(self.flushes.next()));
        }
        Some(number)
    }

    /// Marks the unsynced shadow pages of the guest table in frame `gfn` for comparison after a flush. Call after
    /// write-protecting the leaves that map the frame.
    fn notice_stores(&self, pages: &Pages, gfn: Gfn) {
        for number in pages.pages_of_table(gfn) {
            if let Some(guest) = pages.pool.get(number).guest()
                && guest.agreement.get() == Agreement::Unsynced
            {
                pages.set_agreement(number, Agreement::ToCompare);
                guest.flush.set(self.flushes.next());
            }
        }
    }

    /// Returns `leaf`, which maps `gfn`. If `gfn` contains a tracked table, removes the right to write. But if the
    /// access is a store to a table of level 1, keeps the right, and makes the table's shadow pages unsynced.
    pub(super) fn guarded(&self, pages: &Pages, gfn: Gfn, leaf: Leaf, path: &mut Path<'_>) -> Leaf {
        if !self.shadows() || !pages.is_tracked(gfn) {
            return leaf;
        }
        if leaf.write
            && path.stores
            && let Some(unsynced) = pages.unsync(&*self.platform, gfn)
        {
            path.unsynced += unsynced;
            return leaf;
        }
        path.tracked = true;
        Leaf {
            write: false,
            may_write: false,
            ..leaf
        }
    }

    /// Returns the counter of changes of the guest table in frame `gfn` ([`Changes`](super::trail::Changes)). Read it
    /// before reading an entry of the table.
    pub(crate) fn changes_of(&self, gfn: Gfn) -> u64 {
        self.changes.get(gfn)
    }

    /// Call after a store to `range`, which is in one page, with a tracked table, is complete. Returns whether shadow
    /// entries exist that were made from the old contents, or the page must be zapped: then call [`Self::follow`].
    pub(crate) fn stored(&self, range: Range<Gpa>) -> bool {
        let gfn = range.start.gfn();
        let pages = self.lock();
        self.changes.raise(gfn);
        let platform = &*self.platform;
        let present = |number: u32| {
            let (page, table) = (pages.pool.get(number), pages.table(platform, number));
            let mut entries = entries_in(page.role.get(), &range);
            (page.guest()).inspect(|guest| guest.stores.set(guest.stores.get().saturating_add(1)));
            is_no_table(
                page.level(),
                page.guest().map_or(0, |guest| guest.stores.get()),
                &range,
            ) || entries.any(|index| table.entry(index).load(Relaxed) != 0)
        };
        // Use `fold`, not `any`: each shadow page of the table must count the store, to detect write flooding.
        pages
            .pages_of_table(gfn)
            .fold(false, |any, number| present(number) | any)
    }

    /// Zaps the shadow entries that were made from the guest's entries in `range`, which is in one page. If the guest
    /// stores to a table again and again, or stores parts of entries, the memory is apparently not a table any more
    /// (KVM: write flooding): then zaps the table's whole shadow page.
    pub(crate) fn follow(
        &self,
        range: &Range<Gpa>,
        detached: &mut Detached,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) -> Followed {
        let mut followed = Followed::default();
        let gfn = range.start.gfn();
        let pages = self.lock();
        self.changes.raise(gfn);
        for number in pages.pages_of_table(gfn) {
            let page = pages.pool.get(number);
            let stores = page.guest().map_or(0, |guest| guest.stores.get());
            if is_no_table(page.level(), stores, range) {
                self.zap_page(&pages, number, detached, zapped);
                followed.flooded += 1;
                continue;
            }
            for index in entries_in(page.role.get(), range) {
                followed.clear::<P, F>(&pages, &self.platform, EntryId::new(number, index), zapped);
            }
        }
        followed
    }

    /// Zaps all shadow pages of the first guest table in `range`, because the memory of these frames was replaced.
    pub(crate) fn forget_table(
        &self,
        range: &Range<Gfn>,
        detached: &mut Detached,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) {
        let pages = self.lock();
        let Some(gfn) = pages.rmap.first_table(range) else {
            return;
        };
        self.changes.raise(gfn);
        for number in pages.pages_of_table(gfn) {
            self.zap_page(&pages, number, detached, zapped);
        }
    }

    /// Returns whether a frame of `range` contains a guest table that has a shadow page.
    pub(crate) fn has_table(&self, range: &Range<Gfn>) -> bool {
        self.may_have_pages() && self.lock().rmap.first_table(range).is_some()
    }

    /// Zaps the entry of `level` on the path to `key` from the page `root`, or the entry of a higher level at which the
    /// path ends.
    pub(crate) fn zap_entry(
        &self,
        key: Key,
        root: (Gfn, Role),
        level: Level,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) -> Followed {
        let mut followed = Followed::default();
        let pages = self.lock();
        if let Some(id) = self.entry_of(&pages, key, root, level) {
            followed.clear::<P, F>(&pages, &self.platform, id, zapped);
        }
        followed
    }

    /// Returns the entry of `level` on the path to `key` from the page `root` (its frame and role), or the entry of a
    /// higher level at which the path ends.
    fn entry_of(
        &self,
        pages: &Pages,
        key: Key,
        root: (Gfn, Role),
        level: Level,
    ) -> Option<EntryId> {
        let mut number = pages.find_page(root.0, root.1)?;
        let mut at = root.1.level;
        loop {
            let id = EntryId::new(number, key.index.at(at));
            match self.page_below(pages, id) {
                Some(lower) if at > level => (number, at) = (lower, at.below()),
                _ => return Some(id),
            }
        }
    }

    /// Begins to sync the address of `key`, for INVLPG: finds the entry at which a walk to `key` from the page `root`
    /// ends. If the entry must be compared with the guest's table, returns its page and index. After this call, a fault
    /// of another vCPU that has read an old entry of an unsynced table for this address installs nothing.
    pub(crate) fn begin_sync_of(&self, key: Key, root: (Gfn, Role)) -> Option<(PageOf, usize)> {
        let pages = self.lock();
        pages.unsynced().next()?;
        let id = self.entry_of(&pages, key, root, Level::PAGE);
        if let Some(id) = id
            && let page = pages.pool.get(id.page())
            && page.level() == Level::PAGE
        {
            self.changes.raise(page.gfn.get());
            let bits = pages.table(&*self.platform, id.page()).entry(id.index());
            let is_stale = page.guest()?.agreement.get() != Agreement::Synced;
            let is_present = bits.load(Relaxed) != 0;
            return (is_stale && is_present).then(|| (page_of(&pages, id.page()), id.index()));
        }
        // The path ends at a higher level, so it is unknown which unsynced table belongs to the address: raise the
        // counters of all.
        for number in pages.unsynced() {
            self.changes.raise(pages.pool.get(number).gfn.get());
        }
        None
    }

    /// Returns the shadow page of `level` on the trail, if it exists.
    pub(crate) fn page_on(&self, trail: &Trail, level: Level) -> Option<PageOf> {
        let (gfn, role) = trail.page(level);
        let number = self.lock().find_page(gfn, role)?;
        Some(PageOf { number, gfn, role })
    }

    /// Returns whether `page` must still be compared with the guest's table.
    pub(crate) fn is_unsynced(&self, page: &PageOf) -> bool {
        let pages = self.lock();
        let guest = pages.pool.get(page.number).guest();
        self.is_in_use(&pages, page)
            && guest.is_some_and(|guest| guest.agreement.get() != Agreement::Synced)
    }

    /// Returns whether any page must be compared with the guest's table.
    pub(crate) fn has_unsynced(&self) -> bool {
        self.lock().unsynced().next().is_some()
    }

    /// Write-protects the guest tables of unsynced pages, so that stores to them are noticed again. Passes these pages
    /// to `take`, until `take` returns `false`. After a flush, the caller must compare each of them
    /// ([`Self::compare`]).
    pub(crate) fn begin_sync(&self, mut take: impl FnMut(PageOf) -> bool) -> Followed {
        let pages = self.lock();
        let mut changed = false;
        for number in pages.unsynced() {
            let page = page_of(&pages, number);
            if !take(page) {
                break;
            }
            changed |= self.protect(&pages, page.gfn);
            self.notice_stores(&pages, page.gfn);
            let guest = pages.pool.get(number).guest();
            changed |= guest.is_some_and(|guest| guest.flush.get() != 0);
        }
        Followed {
            protected: [changed.into(), 0, 0],
            ..Followed::default()
        }
    }

    /// Compares entries of a shadow page with the entries `read` from the guest's table. `Some`: the guest's table
    /// grants all of them, and if `read` contains all entries, the page may now be synced. `None`: it does not grant
    /// some, so call [`Self::zap_ungranted`] next.
    pub(crate) fn compare(&self, read: &ReadEntries<'_>) -> Option<Compared> {
        let pages = self.lock();
        let mut indexes = read.indexes.clone();
        let is_granted = !self.is_in_use(&pages, &read.page)
            || indexes.all(|index| !self.is_ungranted(&pages, read, index));
        is_granted.then(|| self.compared(&pages, read))
    }

    /// Zaps the entries of a shadow page that the guest's entries `read` do not grant any more.
    pub(crate) fn zap_ungranted(
        &self,
        read: &ReadEntries<'_>,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) -> Followed {
        let mut followed = Followed::default();
        let pages = self.lock();
        if self.is_in_use(&pages, &read.page) {
            for index in read.indexes.clone() {
                if self.is_ungranted(&pages, read, index) {
                    let id = EntryId::new(read.page.number, index);
                    followed.clear::<P, F>(&pages, &self.platform, id, zapped);
                }
            }
            followed.synced += u64::from(self.compared(&pages, read).synced);
        }
        followed
    }

    fn is_in_use(&self, pages: &Pages, page: &PageOf) -> bool {
        pages.find_page(page.gfn, page.role) == Some(page.number)
    }

    /// Returns whether entry `index` of the shadow page is present, but the guest's entry does not grant it.
    fn is_ungranted(&self, pages: &Pages, read: &ReadEntries<'_>, index: usize) -> bool {
        let PageOf { number, role, .. } = read.page;
        let platform = &*self.platform;
        let bits = pages.table(platform, number).entry(index).load(Relaxed);
        if bits == 0 {
            return false;
        }
        let meaning = role.meaning(index, read.entries[index - read.indexes.start]);
        let refers_to = |lower: Pfn, page| {
            let lower = pages.pool.get(pages.number_of(platform, lower));
            (lower.gfn.get(), lower.role.get()) == page
        };
        let granted = match (meaning, F::decode(bits, role.level)) {
            (Some(Meaning::Table(gfn, role)), Entry::Table(lower)) => refers_to(lower, (gfn, role)),
            // The entry refers to a direct page, which maps parts of a larger page of the guest.
            (Some(Meaning::Memory(gfn, rights)), Entry::Table(lower)) => {
                refers_to(lower, (gfn, role.pieces(rights)))
            }
            (Some(Meaning::Memory(gfn, rights)), _) => {
                let note = pages.pool.get(number).note(index);
                note.is_granted(gfn, rights)
            }
            _ => false,
        };
        !granted
    }

    /// Records that the entries in `read` were compared. Call after entries that the guest does not grant were zapped.
    /// Makes the page synced if all its entries were compared and no store was missed or made meanwhile.
    fn compared(&self, pages: &Pages, read: &ReadEntries<'_>) -> Compared {
        let PageOf { number, gfn, .. } = read.page;
        let before = self.changes.get(gfn);
        self.changes.raise(gfn);
        let is_whole = read.indexes.len() == ENTRIES && self.is_in_use(pages, &read.page);
        let follows = |guest: &Guest| {
            let (frame, due) = (gfn..gfn.add(1), guest.flush.get());
            guest.agreement.get() == Agreement::ToCompare
                && (due == 0 || read.flushed.covers(&frame, due))
        };
        let guest = pages.pool.get(number).guest();
        let synced = before == read.changes && is_whole && guest.is_some_and(follows);
        if synced {
            pages.set_agreement(number, Agreement::Synced);
            guest.inspect(|guest| guest.flush.set(0));
        }
        Compared {
            changes: (before, self.changes.get(gfn)),
            synced,
        }
    }

    /// Marks every synced page for comparison with the guest's table at the next flush, because stores may have been
    /// missed, for example stores of the client. Returns the number of marked pages. A comparison in progress, with
    /// entries that were read before this call, does not make a page synced.
    pub(crate) fn distrust_all(&self) -> u64 {
        let pages = self.lock();
        let mut unsynced = 0;
        self.distrusts.fetch_add(1, Release);
        for number in pages.active() {
            let page = pages.pool.get(number);
            let Some(guest) = page.guest() else {
                continue;
            };
            self.changes.raise(page.gfn.get());
            if guest.agreement.get() == Agreement::Synced {
                unsynced += u64::from(pages.set_agreement(number, Agreement::ToCompare));
            }
        }
        unsynced
    }

    /// Returns how often [`Self::distrust_all`] was called.
    pub(crate) fn distrusts(&self) -> u64 {
        self.distrusts.load(Acquire)
    }

    /// Returns whether shadow pages of any level may have to be compared, because [`Self::distrust_all`] was called
    /// since all pages were last compared.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.distrusts() != self.compared.load(Acquire)
    }

    /// Call after all unsynced pages have been compared. `distrusts` is the value of [`Self::distrusts`] before this.
    pub(crate) fn were_compared(&self, distrusts: u64) {
        self.compared.fetch_max(distrusts, Release);
    }
}

impl Followed {
    /// Clears entry `id`, and adds it to these counts.
    fn clear<P: Platform, F: Format>(
        &mut self,
        pages: &Pages,
        platform: &P,
        id: EntryId,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) {
        let level = pages.pool.get(id.page()).level();
        match pages.clear::<P, F>(platform, id, zapped) {
            Cleared::Leaf => self.zapped[level.0 as usize - 1] += 1,
            Cleared::Table => self.tables += 1,
            Cleared::Nothing | Cleared::Mmio => {}
        }
    }
}

/// Returns the indexes of the entries, in a shadow page of `role`, that correspond to the guest's entries that `range`
/// overlaps. The range is in one page.
fn entries_in(role: Role, range: &Range<Gpa>) -> impl Iterator<Item = usize> + use<> {
    let size = role.entry_size();
    let first = range.start.offset() / size;
    let last = (range.end.0 - range.start.gfn().gpa().0 - 1).min(PAGE_SIZE - 1) / size;
    (first..=last).flat_map(move |index| role.indexes_of(index as usize))
}

/// Whether a store to `range` shows that the memory is not a table any more. It is store number `stores` to a table of
/// `level` since the shadow page was last used. Kernels do not store parts of entries, and do not store to a table of a
/// higher level again and again before they use it. (A table of level 1 becomes unsynced instead.)
fn is_no_table(level: Level, stores: u8, range: &Range<Gpa>) -> bool {
    const FLOOD: u8 = 3;
    let bytes = range.end.0 - range.start.0;
    bytes < 4 || level > Level::PAGE && stores >= FLOOD
}
