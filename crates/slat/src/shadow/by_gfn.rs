//! Operations by gfn on shadow pages: a walk over the reverse map.
//!
//! The walk shows leaves in the order of the frames that they map. If several leaves map a frame, it shows the leaves
//! of higher levels first. With [`Show::tables`] it also shows, for each direct page, the entry that refers to the
//! page, at the region that the page maps. If no entry refers to the page, it shows a temporary entry that is in no
//! table. The walk holds the lock of the MMU during a step.
//!
//! If there is a tree beside the shadow pages ([`super::beside`]), each step first walks the tree, without the lock of
//! the MMU, and then walks the same frames in the shadow pages. [`At::is_in_tree`] tells whether an entry is in the
//! tree.

use alloc::string::String;
use core::cell::RefCell;
use core::ops::Range;

use super::ShadowMmu;
use super::list::END;
use super::page::{EntryId, Pages, ShadowTable};
use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf, all_gfns};
use crate::frame::{ENTRIES, TableMeta};
use crate::platform::Platform;
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::table::{
    Aged, At, ByGfn, Collapse, Detached, Kept, Listed, Next, Path, Show, Split, Visit, Walk,
    tell_zapped,
};

impl<P: Platform, F: Format> ByGfn for ShadowMmu<P, F> {
    type Format = F;

    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        match self.tree() {
            None => self.walk_pages(walk, show, visit),
            Some(tree) if !self.may_have_pages() => tree.walk(walk, show, visit),
            Some(tree) => {
                let visit = RefCell::new(visit);
                walk.both(
                    |walk| tree.walk(walk, show, *visit.borrow_mut()),
                    |walk| self.walk_pages(walk, show, *visit.borrow_mut()),
                );
            }
        }
    }

    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged)) {
        match self.tree() {
            None => self.age_pages(walk, clear, seen),
            Some(tree) if !self.may_have_pages() => tree.age(walk, clear, seen),
            Some(tree) => {
                let seen = RefCell::new(seen);
                walk.both(
                    |walk| tree.age(walk, clear, *seen.borrow_mut()),
                    |walk| self.age_pages(walk, clear, *seen.borrow_mut()),
                );
            }
        }
    }

    fn zap(&self, at: &At<'_>) {
        match self.tree_of(at) {
            Some(tree) => tree.zap(at),
            None if P::WANTS_ZAPPED => _ = self.take(at),
            None => at.clear::<F>(),
        }
    }

    fn take(&self, at: &At<'_>) -> u64 {
        if let Some(tree) = self.tree_of(at) {
            return tree.take(at);
        }
        let bits = at.take::<F>();
        tell_zapped::<P, F>(&*self.platform, bits, at.level);
        bits
    }

    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached) {
        match self.tree_of(at) {
            Some(tree) => tree.detach(at, lower, detached),
            None => listed(at).detach(lower, detached),
        }
    }

    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split {
        match self.tree_of(at) {
            Some(tree) => tree.split(at, path),
            None => listed(at).split(at, path),
        }
    }

    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse {
        if let Some(tree) = self.tree_of(at) {
            return tree.collapse(at, lower, leaf, detached);
        }
        self.detach(at, lower, detached);
        Collapse::Zapped
    }

    fn mend(&self, _gfn: Gfn, _level: Level, _path: &mut Path<'_>) -> bool {
        // There are no broken leaves, because the formats of this MMU do not require break-before-make.
        true
    }

    fn protects_tables(&self) -> bool {
        self.tree().is_some_and(ByGfn::protects_tables)
    }

    fn lift(&self, walk: &mut Walk) {
        // An entry of a shadow page that refers to a table is never write-protected.
        match self.tree() {
            Some(tree) => tree.lift(walk),
            None => walk.stop_at(walk.range().end),
        }
    }

    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        let pages = self.lock();
        let Some(oldest) = pages.oldest() else {
            return false;
        };
        self.zap_page(&pages, oldest, detached, zapped);
        true
    }

    fn is_nx_table(&self, frame: Pfn) -> bool {
        // SAFETY: the walk has just shown the entry that refers to the table, and still holds the lock of the MMU.
        let table = unsafe { ShadowTable::at(&*self.platform, frame) };
        table.meta().nx_split.load(Relaxed)
    }

    fn check(&self) -> Result<(), String> {
        let pages = self.lock();
        pages.check::<P, F>(&self.platform, self.root())?;
        match self.tree() {
            Some(tree) => self.check_beside(tree, &pages).and_then(|()| tree.check()),
            None => Ok(()),
        }
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Visits entries like [`ByGfn::walk`], but only those in shadow pages.
    fn walk_pages(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        let end = walk.range().end.min(all_gfns::<F>().end);
        let begin = walk.at();
        if begin < end {
            // Entries of regions that begin before the first frame of a step are visited only in the first step of the
            // walk.
            let is_first = begin == walk.range().start;
            let new_from = if is_first { Gfn(0) } else { begin };
            let pages = self.lock();
            let mut walker = Walker {
                mmu: self,
                pages: &pages,
                show,
                walk,
                visit,
                new_from,
                visited: begin,
                table: None,
            };
            let (root, level) = pages.rmap.root();
            if let Err(Stopped { at }) = walker.node(root, level, begin..end) {
                walk.stop_at(at);
                return;
            }
        }
        walk.stop_at(walk.range().end);
    }

    /// Ages leaves like [`ByGfn::age`], but only those in shadow pages.
    fn age_pages(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged)) {
        self.walk_pages(walk, Show::default(), &mut |at: &At<'_>| {
            let young = F::clear_accessed(at.bits) != at.bits;
            if young && clear {
                at.update::<F>(F::clear_accessed);
            }
            seen(Aged {
                gfn: at.gfn,
                level: at.level,
                mapped: 1,
                young: u64::from(young),
            });
            Next::Pass
        });
    }
}

/// Returns the operations of this MMU on the entry `at`, which a walk in shadow pages shows.
fn listed<'t>(at: &At<'t>) -> &'t dyn Listed {
    match at.kept {
        Kept::Listed(listed) => listed,
        Kept::Cleared(_) => unreachable!("a walk over this MMU shows only entries that it lists"),
    }
}

/// An entry that a walk shows.
struct Shown<'w, P: Platform, F: Format> {
    mmu: &'w ShadowMmu<P, F>,
    pages: &'w Pages,
    id: EntryId,
    /// The [`Region::listed_by`] of the region at which the entry is shown.
    listed_by: (u32, usize),
}

impl<P: Platform, F: Format> Listed for Shown<'_, P, F> {
    fn is_shadowed(&self) -> bool {
        self.mmu.shadows()
    }

    fn unlist(&self) {
        let (node, index) = self.listed_by;
        let link = |id| self.pages.link(id);
        let rmap = &self.pages.rmap;
        rmap.change_in(node, index, |entry| entry.leaves.remove(self.id.0, link));
    }

    fn detach(&self, lower: Pfn, detached: &mut Detached) {
        let number = self.pages.number_of(&*self.mmu.platform, lower);
        (self.mmu).zap_page(self.pages, number, detached, &mut |_, _, _| ());
    }

    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split {
        let split = self.mmu.is_prepared(self.pages)
            && (self.mmu.split_leaf(self.pages, self.id, at.gfn, path)).is_some();
        match split {
            true => Split::InPlace,
            false => Split::Unprepared,
        }
    }
}

/// The position at which a step has ended before the end of the walk.
struct Stopped {
    /// The first frame whose entries were not visited.
    at: Gfn,
}

/// One step of a walk.
struct Walker<'w, P: Platform, F: Format, V> {
    mmu: &'w ShadowMmu<P, F>,
    pages: &'w Pages,
    show: Show,
    walk: &'w mut Walk,
    visit: &'w mut V,
    /// Regions that begin before this frame were visited in an earlier step.
    new_from: Gfn,
    /// The first frame of the region that was visited last.
    visited: Gfn,
    /// The table of the entry that was visited last (its page's number, its entries, and its metadata), because the
    /// next entry is often in the same table.
    table: Option<(u32, &'w [AtomicU64], &'w TableMeta)>,
}

impl<P: Platform, F: Format, V: Visit> Walker<'_, P, F, V> {
    /// Walks over `range` in node `number` of the reverse map, which is of `level`, and in the nodes below it.
    fn node(&mut self, number: u32, level: Level, range: Range<Gfn>) -> Result<(), Stopped> {
        let pages = self.pages;
        let node = pages.rmap.nodes.get(number);
        self.walk.spend(ENTRIES as u32 / 128);
        let mut gfn = range.start.align_down(level);
        while gfn < range.end {
            let next = gfn.add(level.pages());
            let below = range.start.max(gfn)..range.end.min(next);
            let index = level.index(gfn);
            let listed = node.entry(index);
            if !listed.is_empty() {
                // A step stops only before a region with another first frame than the last visited region. So all
                // regions with the same first frame are visited in one step, and each step makes progress.
                if self.walk.is_spent() && below.start > self.visited {
                    return Err(Stopped { at: below.start });
                }
                if gfn >= self.new_from {
                    self.visited = below.start;
                    let listed_by = (number, index);
                    self.listed(Region {
                        listed_by,
                        gfn,
                        level,
                    })
                    .map_err(|Stop| Stopped { at: below.start })?;
                }
                let enters = level > Level::MEGA || !self.show.skip_last_level;
                if listed.below() != END && enters {
                    self.node(listed.below(), level.below(), below)?;
                }
            }
            gfn = next;
        }
        Ok(())
    }

    /// Visits the leaves and, if the walk shows tables, the direct pages that the reverse map lists for `region`.
    fn listed(&mut self, region: Region) -> Result<(), Stop> {
        let (pages, platform) = (self.pages, &*self.mmu.platform);
        let (node, index) = region.listed_by;
        let listed = pages.rmap.nodes.get(node).entry(index);
        for id in pages.leaves_of(listed) {
            self.entry(id, region)?;
        }
        if !self.show.tables {
            return Ok(());
        }
        for number in pages.pages_of(listed) {
            let page = pages.pool.get(number);
            if page.guest().is_some() {
                continue;
            }
            // A visitor may detach the page, which takes time for each of its leaves.
            let meta = pages.table(platform, number).meta();
            self.walk.spend(meta.leaves.load(Relaxed).into());
            match pages.parents_of(page).next() {
                Some(parent) => self.entry(parent, region)?,
                None => {
                    let entry = AtomicU64::new(F::table(page.frame.get()));
                    self.visit(EntryId::new(number, 0), &entry, meta, region)?;
                }
            }
            // Forget the table: if its page was zapped, the page's number may belong to another page now.
            self.table = None;
        }
        Ok(())
    }

    /// Visits the page-table entry `id`, which is listed for `region`.
    fn entry(&mut self, id: EntryId, region: Region) -> Result<(), Stop> {
        let (entries, meta) = match self.table {
            Some((number, entries, meta)) if number == id.page() => (entries, meta),
            _ => {
                let table = self.pages.table(&*self.mmu.platform, id.page());
                self.table = Some((id.page(), table.entries(), table.meta()));
                (table.entries(), table.meta())
            }
        };
        self.visit(id, &entries[id.index()], meta, region)
    }

    /// Visits the page-table entry `entry` of a table with the metadata `meta`.
    fn visit(
        &mut self,
        id: EntryId,
        entry: &AtomicU64,
        meta: &TableMeta,
        region: Region,
    ) -> Result<(), Stop> {
        self.walk.visits();
        let bits = entry.load(Relaxed);
        if let Entry::Mmio { .. } = F::decode(bits, region.level)
            && !self.show.mmio
        {
            return Ok(());
        }
        let shown = Shown {
            mmu: self.mmu,
            pages: self.pages,
            id,
            listed_by: region.listed_by,
        };
        let at = At {
            entry,
            meta,
            kept: Kept::Listed(&shown),
            bits,
            gfn: region.gfn,
            level: region.level,
            below_protected: false,
        };
        match self.visit.visit(&at) {
            Next::Stop => Err(Stop),
            Next::Descend | Next::Pass => Ok(()),
        }
    }
}

/// A region of guest frames, for which an entry of the reverse map lists leaves and pages.
#[derive(Clone, Copy)]
struct Region {
    /// The number of the node that contains the entry of the reverse map, and the entry's index in the node.
    listed_by: (u32, usize),
    gfn: Gfn,
    level: Level,
}

/// Error: the visitor has ended the step.
struct Stop;
