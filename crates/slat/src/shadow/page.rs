//! Shadow pages (KVM: `kvm_mmu_page`): the tables of this MMU, the facts that the MMU stores about each table, and the
//! lists that contain the tables' entries.
//!
//! Every present entry is on one list. A leaf or an MMIO entry is on the list of the guest frame that it maps
//! ([`super::rmap`]). An entry that refers to a table is on the list of parents of that table's page.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use core::cell::Cell;

use super::list::{Link, List};
use super::pool::Pool;
use super::rmap::{Node, Rmap, RmapEntry};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, X86};
use crate::frame::ENTRIES;
use crate::heap::{Large, OutOfMemory};
use crate::platform::Platform;
use crate::shadow::trail::{Note, Role};
use crate::sync::atomic::Ordering::*;
use crate::table::{Detached, Table, tell_zapped};
use crate::trace::Event;

/// The table of a shadow page: it has 4 KiB, like x86's tables, even if its entries have another format.
pub(super) type ShadowTable<'p, P> = Table<'p, P, X86<5>>;

/// The id of an entry of a shadow page: the page's number, and the entry's index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryId(pub(super) u32);

impl EntryId {
    pub(super) fn new(page: u32, index: usize) -> Self {
        debug_assert!(page as usize <= Pool::<ShadowPage>::MOST && index < ENTRIES);
        EntryId(page * ENTRIES as u32 + index as u32)
    }

    pub(super) fn page(self) -> u32 {
        self.0 / ENTRIES as u32
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize % ENTRIES
    }
}

const _: () = assert!((Pool::<ShadowPage>::MOST + 1) * ENTRIES <= u32::MAX as usize);

/// Whether the entries of a shadow page match the guest table that it shadows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Agreement {
    /// Stores to the guest's table are noticed, and the page matches the table.
    Synced,
    /// Stores to the guest's table are noticed again, but the page was not compared with the table since it was
    /// [`Self::Unsynced`].
    ToCompare,
    /// Stores to the guest's table are not noticed.
    Unsynced,
}

/// What the MMU stores about the guest table that a page shadows: general facts, and a [`Note`] for each entry of the
/// page that is a leaf or an MMIO entry.
pub(super) type Guest = Large<GuestTable, Cell<Note>, ENTRIES>;

/// Facts about a guest table and its shadow page.
pub(super) struct GuestTable {
    pub(super) agreement: Cell<Agreement>,
    /// The link in the list of pages that are not [`Agreement::Synced`].
    unsynced: Link,
    /// If the leaves of the table's frame were write-protected, and this is not known to be flushed yet: the number of
    /// the flush after which all stores to the table are noticed. Otherwise 0.
    pub(super) flush: Cell<u64>,
    /// The number of stores since a walk last used the page.
    pub(super) stores: Cell<u8>,
    /// Whether the page was used as a root, at which walks begin.
    pub(super) is_root: Cell<bool>,
}

impl GuestTable {
    fn new() -> Self {
        GuestTable {
            agreement: Cell::new(Agreement::Synced),
            unsynced: Link::new(),
            flush: Cell::new(0),
            stores: Cell::new(0),
            is_root: Cell::new(false),
        }
    }
}

/// A shadow page's record, with a list link for each entry of its table.
pub(super) type ShadowPage = Large<Page, Link, ENTRIES>;

/// A shadow page's record, without the links of its entries.
pub(super) struct Page {
    /// The host frame of the page's table.
    pub(super) frame: Cell<Pfn>,
    /// The guest frame that contains the shadowed guest table. For a direct page, the first guest frame that the page
    /// maps.
    pub(super) gfn: Cell<Gfn>,
    pub(super) role: Cell<Role>,
    /// The entries that refer to this page's table.
    pub(super) parents: List,
    /// The link in the list of pages of the same [`RmapEntry`].
    siblings: Link,
    /// The link in [`Pages::active`].
    by_age: Link,
    /// What the MMU stores about the guest table. `Some` in an MMU that shadows guest tables, but not used for direct
    /// pages.
    guest: Option<Box<Guest>>,
}

impl ShadowPage {
    /// Makes a page record. If `shadows`, the record can be used for a page that shadows a guest table.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn make(shadows: bool) -> Result<Box<Self>, OutOfMemory> {
        let guest = match shadows {
            true => Some(Guest::new(GuestTable::new(), || Cell::new(Note::NONE))?),
            false => None,
        };
        let page = Page {
            frame: Cell::new(Pfn(0)),
            gfn: Cell::new(Gfn(0)),
            role: Cell::new(Role::direct(Level::PAGE)),
            parents: List::new(),
            siblings: Link::new(),
            by_age: Link::new(),
            guest,
        };
        Self::new(page, Link::new)
    }

    /// Returns the level of the page's table.
    pub(super) fn level(&self) -> Level {
        self.role.get().level
    }

    /// Returns the properties of the guest's table. `None`: the page is direct.
    pub(super) fn guest(&self) -> Option<&Guest> {
        (self.guest.as_deref()).filter(|_| !self.role.get().is_direct())
    }

    /// Returns the first guest frame that entry `index` maps. The entry must be a leaf or an MMIO entry, or in a direct
    /// page.
    pub(super) fn gfn_at(&self, index: usize) -> Gfn {
        match self.guest() {
            Some(guest) => guest.array[index].get().gfn(),
            None => self.gfn.get().add(index as u64 * self.level().pages()),
        }
    }

    /// Returns the note of entry `index`, which must be a leaf or an MMIO entry: the guest's frame and rights.
    pub(super) fn note(&self, index: usize) -> Note {
        match self.guest() {
            Some(guest) => guest.array[index].get(),
            None => Note::new(self.gfn_at(index), self.role.get().rights),
        }
    }

    /// Sets the note of entry `index`. Has no effect for a direct page, whose notes are made from its role.
    pub(super) fn set_note(&self, index: usize, note: Note) {
        if let Some(guest) = self.guest() {
            guest.array[index].set(note);
        }
    }
}

/// What an entry was before [`Pages::clear`] cleared it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cleared {
    Nothing,
    Table,
    Leaf,
    Mmio,
}

/// All shadow pages of an MMU, and its reverse map. Only used under the MMU's lock.
pub(super) struct Pages {
    pub(super) pool: Pool<ShadowPage>,
    pub(super) rmap: Rmap,
    /// The pages in use, the newest first, without the permanent root.
    active: List,
    /// The last page of `active`, which is the oldest.
    oldest: Cell<u32>,
    /// The pages whose agreement with the guest's table is not [`Agreement::Synced`].
    unsynced: List,
}

impl Pages {
    /// Returns the largest number of shadow pages that an install can make. If the MMU shadows guest tables: one for
    /// each level of the guest's tables, and two for the pieces of a guest page of 1 GiB.
    pub(super) const fn install(shadows: bool) -> usize {
        if shadows { 7 } else { 4 }
    }

    /// Returns the largest number of reverse-map nodes that an install can make: up to four for each shadow page, and
    /// four for the leaf.
    pub(super) const fn install_nodes(shadows: bool) -> usize {
        if shadows { 32 } else { 4 }
    }

    pub(super) const fn new(top: Level) -> Self {
        Pages {
            pool: Pool::new(),
            rmap: Rmap::new(top),
            active: List::new(),
            oldest: Cell::new(super::list::END),
            unsynced: List::new(),
        }
    }

    /// Whether there are enough spare records for an install.
    #[inline]
    pub(super) fn is_prepared(&self, shadows: bool) -> bool {
        self.pool.spare() >= Self::install(shadows)
            && self.rmap.spare() >= Self::install_nodes(shadows)
    }

    pub(super) fn link(&self, id: u32) -> &Link {
        let id = EntryId(id);
        &self.pool.get(id.page()).array[id.index()]
    }

    /// Makes a shadow page for `gfn` and `role` of a spare record, and adds it to the lists. The caller must give the
    /// page a table. `None`: there is no spare record.
    pub(super) fn new_page(&self, gfn: Gfn, role: Role) -> Option<u32> {
        let number = self.pool.take()?;
        let page = self.pool.get(number);
        page.gfn.set(gfn);
        page.role.set(role);
        self.rmap.change(gfn, Self::listed_at(role), |entry| {
            entry
                .pages
                .push(number, |number| &self.pool.get(number).siblings);
        });
        if let Some(guest) = page.guest() {
            guest.agreement.set(Agreement::Synced);
            guest.flush.set(0);
            guest.stores.set(0);
            guest.is_root.set(false);
            self.rmap.count_table(gfn, 1);
        }
        if self.active.is_empty() {
            self.oldest.set(number);
        }
        self.active
            .push(number, |number| &self.pool.get(number).by_age);
        Some(number)
    }

    /// Returns the level of the reverse-map entries that list pages of `role`. A direct page with a table of level n
    /// maps the region of one entry of level n + 1. For a page of a guest table, the region is the frame (level 1) that
    /// contains the guest's table.
    fn listed_at(role: Role) -> Level {
        match role.is_direct() {
            true => Level(role.level.0 + 1),
            false => Level::PAGE,
        }
    }

    /// Returns the number of the shadow page for `gfn` and `role`, if there is one.
    pub(super) fn find_page(&self, gfn: Gfn, role: Role) -> Option<u32> {
        let entry = self.rmap.find(gfn, Self::listed_at(role))?;
        self.pages_of(entry).find(|number| {
            let page = self.pool.get(*number);
            page.gfn.get() == gfn && page.role.get() == role
        })
    }

    /// Returns the numbers of all shadow pages of the guest table in frame `gfn`: they have different roles.
    pub(super) fn pages_of_table(&self, gfn: Gfn) -> impl Iterator<Item = u32> {
        let entry = self.rmap.find(gfn, Level::PAGE);
        entry.into_iter().flat_map(|entry| self.pages_of(entry))
    }

    /// Iterates over the pages whose agreement is not [`Agreement::Synced`], beginning with the page that was last
    /// added to this list.
    pub(super) fn unsynced(&self) -> impl Iterator<Item = u32> {
        self.unsynced.iter(|number| self.unsynced_link(number))
    }

    fn unsynced_link(&self, number: u32) -> &Link {
        let guest = self.pool.get(number).guest.as_deref();
        &guest
            .expect("only pages of the guest's tables are listed")
            .unsynced
    }

    /// Makes page `number`, which shadows a guest table, [`Agreement::Unsynced`]. Returns whether the page was
    /// [`Agreement::Synced`] before.
    pub(super) fn unsync_page(&self, platform: &impl Platform, number: u32) -> bool {
        let unsynced = self.set_agreement(number, Agreement::Unsynced);
        let page = self.pool.get(number);
        if unsynced {
            platform.trace(Event::UnsyncPage {
                gfn: page.gfn.get(),
                role: page.role.get().word(),
            });
        }
        unsynced
    }

    /// Sets the agreement of page `number` with the guest's table. Returns whether this changes between
    /// [`Agreement::Synced`] and another value: then the page was added to or removed from the list `unsynced`.
    pub(super) fn set_agreement(&self, number: u32, agreement: Agreement) -> bool {
        let guest = self.pool.get(number).guest();
        let guest = guest.expect("the page is one of a guest's table");
        let was = guest.agreement.replace(agreement);
        let link = |number| self.unsynced_link(number);
        match (was == Agreement::Synced, agreement == Agreement::Synced) {
            (true, false) => self.unsynced.push(number, link),
            (false, true) => self.unsynced.remove(number, link),
            _ => return false,
        }
        true
    }

    /// Returns the numbers of the shadow pages that `entry` of the reverse map lists.
    pub(super) fn pages_of(&self, entry: &RmapEntry) -> impl Iterator<Item = u32> {
        entry.pages.iter(|number| &self.pool.get(number).siblings)
    }

    /// Returns the leaves and MMIO entries that `entry` of the reverse map lists.
    pub(super) fn leaves_of(&self, entry: &RmapEntry) -> impl Iterator<Item = EntryId> {
        entry.leaves.iter(|id| self.link(id)).map(EntryId)
    }

    /// Returns the entries that refer to the table of `page`.
    pub(super) fn parents_of(&self, page: &ShadowPage) -> impl Iterator<Item = EntryId> {
        page.parents.iter(|id| self.link(id)).map(EntryId)
    }

    /// Returns the number of the oldest page in [`Self::active`].
    pub(super) fn oldest(&self) -> Option<u32> {
        (!self.active.is_empty()).then(|| self.oldest.get())
    }

    /// Iterates over the pages in use, the newest first, without the permanent root.
    pub(super) fn active(&self) -> impl Iterator<Item = u32> {
        self.active.iter(|number| &self.pool.get(number).by_age)
    }

    /// Adds entry `id`, a leaf or an MMIO entry of `level` for `gfn`, to the reverse map's list for this frame and
    /// level.
    pub(super) fn list_leaf(&self, id: EntryId, gfn: Gfn, level: Level) {
        self.rmap.change(gfn, level, |entry| {
            entry.leaves.push(id.0, |id| self.link(id))
        });
    }

    /// Removes entry `id`, a leaf or an MMIO entry of `level` for `gfn`, from the reverse map's list.
    pub(super) fn unlist_leaf(&self, id: EntryId, gfn: Gfn, level: Level) {
        self.rmap.change(gfn, level, |entry| {
            entry.leaves.remove(id.0, |id| self.link(id));
        });
    }

    /// Adds entry `id` to the parents of `page`: the entries that refer to the page's table.
    pub(super) fn list_parent(&self, id: EntryId, page: u32) {
        let parents = &self.pool.get(page).parents;
        parents.push(id.0, |id| self.link(id));
    }

    /// Removes entry `id` from the parents of `page`.
    pub(super) fn unlist_parent(&self, id: EntryId, page: u32) {
        let parents = &self.pool.get(page).parents;
        parents.remove(id.0, |id| self.link(id));
    }

    /// Removes page `number`, whose entries are on no list any more, from all lists, and releases its record. Returns
    /// whether its agreement was not [`Agreement::Synced`].
    fn retire(&self, number: u32) -> bool {
        let page = self.pool.get(number);
        let mut unsynced = false;
        if page.guest().is_some() {
            unsynced = self.set_agreement(number, Agreement::Synced);
            self.rmap.count_table(page.gfn.get(), -1);
        }
        self.rmap
            .change(page.gfn.get(), Self::listed_at(page.role.get()), |entry| {
                entry
                    .pages
                    .remove(number, |number| &self.pool.get(number).siblings);
            });
        let by_age = |number| &self.pool.get(number).by_age;
        if self.oldest.get() == number {
            self.oldest.set(page.by_age.before());
        }
        self.active.remove(number, by_age);
        self.pool.give_back(number);
        unsynced
    }

    /// Zaps shadow page `number`: clears its entries and the entries that refer to it, and adds its table to
    /// `detached`. Calls `zapped` for every leaf, with the leaf's first frame, level, and bits. The shadow pages of
    /// tables below it are kept for reuse.
    pub(super) fn zap<P: Platform, F: Format>(
        &self,
        platform: &P,
        number: u32,
        detached: &mut Detached,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) {
        let page = self.pool.get(number);
        for id in self.parents_of(page) {
            let parent = self.table(platform, id.page());
            parent.entry(id.index()).store(0, Release);
            self.unlist_parent(id, number);
        }
        let (table, level) = (self.table(platform, number), page.level());
        for index in 0..ENTRIES {
            let id = EntryId::new(number, index);
            if self.clear::<P, F>(platform, id, zapped) == Cleared::Leaf {
                detached.zapped.leaves[level.0 as usize - 1] += 1;
            }
        }
        detached.push(&table, level);
        platform.trace(Event::PrepareZapPage {
            gfn: page.gfn.get(),
            role: page.role.get().word(),
        });
        detached.zapped.shadow_pages += 1;
        detached.zapped.unsynced += u64::from(self.retire(number));
    }

    /// Clears entry `id`, and removes it from the list that contains it. If it is a leaf, calls `zapped` with the
    /// leaf's first frame, level, and bits.
    pub(super) fn clear<P: Platform, F: Format>(
        &self,
        platform: &P,
        id: EntryId,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) -> Cleared {
        let page = self.pool.get(id.page());
        let (table, level) = (self.table(platform, id.page()), page.level());
        let entry = table.entry(id.index());
        if entry.load(Relaxed) == 0 {
            return Cleared::Nothing;
        }
        let bits = entry.swap(0, AcqRel);
        if let Entry::Table(lower) = F::decode(bits, level) {
            self.unlist_parent(id, self.number_of(platform, lower));
            return Cleared::Table;
        }
        let gfn = page.gfn_at(id.index());
        self.unlist_leaf(id, gfn, level);
        if F::is_absent(bits) {
            return Cleared::Mmio;
        }
        table.meta().count_leaves(-1);
        tell_zapped::<P, F>(platform, bits, level);
        zapped(gfn, level, bits);
        Cleared::Leaf
    }

    /// Returns the table of page `number`.
    pub(super) fn table<'p, P: Platform>(
        &self,
        platform: &'p P,
        number: u32,
    ) -> ShadowTable<'p, P> {
        self.table_in(platform, self.pool.get(number).frame.get())
    }

    /// Returns the number of the page whose table is in `frame`, to which an entry of another page refers.
    pub(super) fn number_of<P: Platform>(&self, platform: &P, frame: Pfn) -> u32 {
        self.table_in(platform, frame).meta().next.load(Relaxed) as u32
    }

    /// Returns the table in frame `frame`, which must belong to a page in use.
    fn table_in<'p, P: Platform>(&self, platform: &'p P, frame: Pfn) -> ShadowTable<'p, P> {
        // SAFETY: the page is in use, and the lock of the MMU is held. The table is freed only after the page was
        // zapped, which requires the lock, and after a flush. Callers keep no reference when they release the lock.
        unsafe { ShadowTable::at(platform, frame) }
    }

    /// Checks that all lists are consistent, in both directions.
    ///
    /// # Errors
    /// A description of the inconsistency.
    pub(super) fn check<P: Platform, F: Format>(
        &self,
        platform: &P,
        root: Option<u32>,
    ) -> Result<(), String> {
        let mut entries = 0u64;
        for number in self.active().chain(root) {
            let page = self.pool.get(number);
            let (table, level) = (self.table(platform, number), page.level());
            let at = || {
                format!(
                    "shadow page {number}, level {}, {:?}",
                    level.0,
                    page.gfn.get()
                )
            };
            table.check_count::<F>(level)?;
            if self.number_of(platform, table.frame()) != number {
                return Err(format!("{}: its table belongs to another page", at()));
            }
            if Some(number) != root
                && self.find_page(page.gfn.get(), page.role.get()) != Some(number)
            {
                return Err(format!(
                    "{}: it is not the page of its frame and role",
                    at()
                ));
            }
            for (index, entry) in table.entries().iter().enumerate() {
                let (bits, id) = (entry.load(Acquire), EntryId::new(number, index));
                entries += u64::from(bits != 0);
                let is_listed = match F::decode(bits, level) {
                    Entry::Empty => continue,
                    Entry::Table(lower) => {
                        let lower = self.pool.get(self.number_of(platform, lower));
                        let frame = page.guest().is_some() || lower.gfn.get() == page.gfn_at(index);
                        if !frame || lower.level() != level.below() {
                            return Err(format!("{}: entry {index} refers elsewhere", at()));
                        }
                        self.parents_of(lower).any(|listed| listed == id)
                    }
                    _ => (self.rmap.find(page.gfn_at(index), level))
                        .is_some_and(|entry| self.leaves_of(entry).any(|listed| listed == id)),
                };
                if !is_listed {
                    return Err(format!("{}: entry {index}, {bits:#x}, is not listed", at()));
                }
            }
        }
        self.check_tables::<P, F>(platform)?;
        let listed = self.listed_below(self.rmap.root()) + self.parents(root);
        if listed != entries {
            return Err(format!(
                "{entries} entries are present, {listed} are listed"
            ));
        }
        match self.rmap.counts_right() {
            true => Ok(()),
            false => Err("a node of the reverse map counts wrong".into()),
        }
    }

    /// Checks that no leaf allows unnoticed stores to a tracked guest table, and that no huge leaf maps a guest table
    /// that has a shadow page.
    fn check_tables<P: Platform, F: Format>(&self, platform: &P) -> Result<(), String> {
        for number in self.active() {
            let page = self.pool.get(number);
            let (gfn, Some(guest)) = (page.gfn.get(), page.guest()) else {
                continue;
            };
            let is_listed = self.unsynced().any(|listed| listed == number);
            if is_listed == (guest.agreement.get() == Agreement::Synced) {
                return Err(format!(
                    "shadow page {number}: {:?} and listed: {is_listed}",
                    guest.agreement.get()
                ));
            }
            let levels = (1..=F::MAX_LEAF.0).map(Level);
            for (level, entry) in levels.filter_map(|at| Some((at, self.rmap.find(gfn, at)?))) {
                for id in self.leaves_of(entry) {
                    let bits = self
                        .table(platform, id.page())
                        .entry(id.index())
                        .load(Acquire);
                    let Entry::Leaf(leaf) = F::decode(bits, level) else {
                        continue;
                    };
                    let writable = leaf.write || leaf.may_write;
                    if writable && guest.agreement.get() != Agreement::Unsynced {
                        return Err(format!(
                            "a leaf of level {} allows stores to the tracked table at {gfn:?}",
                            level.0
                        ));
                    }
                    if writable && level > Level::PAGE {
                        return Err(format!("a huge leaf allows stores to the table at {gfn:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the number of entries that refer to tables.
    fn parents(&self, root: Option<u32>) -> u64 {
        let pages = self.active().chain(root);
        let parents = |number| self.parents_of(self.pool.get(number)).count();
        pages.map(parents).sum::<usize>() as u64
    }

    /// Returns the number of leaves and MMIO entries that are listed in the given node of the reverse map and in the
    /// nodes below it.
    fn listed_below(&self, (number, level): (u32, Level)) -> u64 {
        let node: &Node = self.rmap.nodes.get(number);
        let entries = (0..ENTRIES).map(|index| node.entry(index));
        let listed = |entry: &RmapEntry| {
            let below = match entry.below() {
                super::list::END => 0,
                below => self.listed_below((below, level.below())),
            };
            self.leaves_of(entry).count() as u64 + below
        };
        entries.map(listed).sum()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::format::tests::assert_refuses;

    #[test]
    fn an_entry_has_a_number_of_its_own() {
        let most = Pool::<ShadowPage>::MOST as u32;
        for (page, index) in [(1, 0), (1, ENTRIES - 1), (2, 0), (most, ENTRIES - 1)] {
            let id = EntryId::new(page, index);
            assert_eq!((id.page(), id.index()), (page, index));
        }
        assert_refuses(|| EntryId::new(1, ENTRIES));
        assert_refuses(|| EntryId::new(most + 1, 0));
    }
}
