//! Shadow pages beside a tree: nested paging. The guest is a hypervisor, L1, whose tables for its own guests, L2,
//! are in its memory. What L1 accesses is translated by the tree, by guest frame. What L2 accesses is translated by
//! shadow pages of L1's tables, by L2's physical addresses. No table belongs to both, and no walk that begins in
//! one comes to the other.
//!
//! # Who holds what
//! * A leaf of either maps a frame of L1's. So work by gfn reaches both ([`super::by_gfn`]): first the tree,
//!   table by table, then the shadow pages. Each has locks of its own, so there is a moment at which one has been
//!   done and the other has not, as there is between two tables of a tree; the operation has one ticket, and
//!   flushes once, after both.
//! * L1 stores to its tables by leaves of the tree, L2 by those of shadow pages, if L1 lets it. Both are noticed
//!   ([`super::track`]): a frame with a tracked table is not writable in either, and no huge leaf of either covers it.
//!
//! # The order of locks
//! The holder of the MMU's lock may take that of a table of the tree, one at a time, to write-protect a leaf
//! ([`Tree::protect_frame`]), and never the reverse: under a table's lock nothing asks the shadow pages. A thread that
//! waits for a table's lock with the MMU's held waits for a few instructions, or for one table.
//!
//! # Before the first shadow page
//! Most guests are no hypervisors. Until a CPU first asks for an address of L2's, work by gfn is done in the tree
//! alone, and neither takes the MMU's lock nor looks for pages ([`Beginning`]). That CPU says that there will be some,
//! and waits until all reader sections have ended that may not know it. So what was done without looking was over
//! before there was a page; and a fault that makes one finds what an operation has changed before that.
//!
//! # A fault in the tree, while tracking begins
//! The fault asks under the MMU's lock whether the frame is tracked, and releases it. Under the lock of the table that
//! receives the leaf it checks that no tracking has begun since ([`Tracking::begun`]). Tracking begins in the other
//! order: it raises that number, and then protects the leaf, taking the locks of all tables on its path. So either the
//! fault has the lock first, and its leaf is protected; or the number has changed, and the fault asks again. A huge
//! leaf is the same, for all frames that it covers.

use alloc::string::String;

use super::page::{Agreement, Pages};
use super::{Physical, ShadowMmu};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::shadow::trail::Target;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use crate::table::{At, Installed, Path, Retry, Tree};

/// Whether there may be shadow pages.
#[derive(Default)]
pub(super) struct Beginning {
    /// Work by gfn looks for them.
    announced: AtomicBool,
    /// All of it does.
    over: AtomicBool,
}

impl Beginning {
    /// Returns the state for an MMU that has shadow pages from the start.
    pub(super) fn none() -> Self {
        Beginning {
            announced: AtomicBool::new(true),
            over: AtomicBool::new(true),
        }
    }
}

/// The list of the guest's tables that are tracked, for a fault in the tree, which does not hold the MMU's lock.
/// Changed under that lock.
#[derive(Default)]
pub(super) struct Tracking {
    /// How often tracking of a table has begun.
    begun: AtomicU64,
    /// The number of shadow pages of tables.
    pages: AtomicU64,
}

impl Tracking {
    /// Call when a page of a table was made.
    pub(super) fn made(&self) {
        self.pages.store(self.pages.load(Relaxed) + 1, Relaxed);
    }

    /// Call when a page of a table was zapped.
    pub(super) fn forget(&self) {
        self.pages.store(self.pages.load(Relaxed) - 1, Relaxed);
    }

    /// Call before leaves are protected that allow stores to a table.
    fn begin(&self) {
        self.begun.store(self.begun.load(Relaxed) + 1, Release);
    }

    /// Returns how often tracking of a table has begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Acquire)
    }

    /// Returns whether there are pages of tables. If not, none is tracked that [`Self::begun`] has counted.
    pub(super) fn any(&self) -> bool {
        self.pages.load(Relaxed) != 0
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Returns the tree beside it, if there is one.
    #[inline(always)]
    pub(crate) fn tree(&self) -> Option<&Tree<P, F>> {
        match &self.physical {
            Physical::Tree(tree) => Some(tree),
            Physical::Pages(_) => None,
        }
    }

    /// Does what [`Self::tree`] does.
    pub(crate) fn tree_mut(&mut self) -> Option<&mut Tree<P, F>> {
        match &mut self.physical {
            Physical::Tree(tree) => Some(tree),
            Physical::Pages(_) => None,
        }
    }

    /// Returns the number of the direct page that walks by guest-physical addresses begin with, if there is no tree.
    pub(super) fn root(&self) -> Option<u32> {
        match self.physical {
            Physical::Pages(root) => Some(root),
            Physical::Tree(_) => None,
        }
    }

    /// Returns whether there may be shadow pages. The caller is in a reader section.
    #[inline(always)]
    pub(super) fn may_have_pages(&self) -> bool {
        self.beginning.announced.load(Relaxed)
    }

    /// Returns whether shadow pages may be made. If not: [`Self::announce`], wait until all readers have passed, and
    /// [`Self::begin`].
    pub(crate) fn has_begun(&self) -> bool {
        self.beginning.over.load(Acquire)
    }

    /// Has work by gfn look for shadow pages, in reader sections that begin from now on.
    pub(crate) fn announce(&self) {
        self.beginning.announced.store(true, Relaxed);
    }

    /// Allows shadow pages to be made.
    pub(crate) fn begin(&self) {
        self.beginning.over.store(true, Release);
    }

    /// Returns the tree, if that has the entry `at`.
    #[inline(always)]
    pub(super) fn tree_of(&self, at: &At<'_>) -> Option<&Tree<P, F>> {
        self.tree().filter(|_| at.is_in_tree())
    }

    /// Returns whether there are shadow pages of tables, as far as the caller has been told: others
    /// may be made meanwhile.
    pub(crate) fn has_tables(&self) -> bool {
        self.tracking.any()
    }

    /// Returns how often tracking of a table has begun.
    pub(crate) fn tracking_begun(&self) -> u64 {
        self.tracking.begun()
    }

    /// Write-protects all leaves that map `gfn`, of which a table begins to be tracked. Returns
    /// whether one allowed stores.
    pub(super) fn protect(&self, pages: &Pages, gfn: Gfn) -> bool {
        self.tracking.begin();
        let in_pages = pages.protect::<P, F>(&self.platform, gfn);
        let in_tree = self.tree().is_some_and(|tree| tree.protect_frame(gfn));
        in_pages | in_tree
    }

    /// Checks that no leaf of `tree` allows stores to a tracked table, and that no huge leaf allows stores to any
    /// table. The caller is in a reader section.
    ///
    /// # Errors
    /// The first table that a leaf allows stores to.
    pub(super) fn check_beside(&self, tree: &Tree<P, F>, pages: &Pages) -> Result<(), String> {
        for page in pages.active().map(|number| pages.pool.get(number)) {
            let (gfn, Some(guest)) = (page.gfn.get(), page.guest()) else {
                continue;
            };
            let found = tree.find_at(gfn, Level::PAGE);
            let is_tracked = guest.agreement.get() != Agreement::Unsynced;
            if let Entry::Leaf(leaf) = found.entry::<F>()
                && (leaf.write || leaf.may_write)
                && (is_tracked || found.level > Level::PAGE)
            {
                let level = found.level.0;
                return Err(alloc::format!(
                    "a leaf of level {level} of the tree allows stores to the table at {gfn:?}"
                ));
            }
        }
        Ok(())
    }

    /// Returns the tree, for an install at `target`. `None`: shadow pages have the path to that.
    #[inline(always)]
    pub(crate) fn tree_for(&self, target: &Target<'_, P, F>) -> Option<TreeBeside<'_, P, F>> {
        let tree = self.tree().filter(|_| target.trail().is_none())?;
        Some(TreeBeside { mmu: self, tree })
    }
}

/// The tree beside shadow pages, as faults use it.
pub(crate) struct TreeBeside<'m, P: Platform, F: Format> {
    mmu: &'m ShadowMmu<P, F>,
    pub(crate) tree: &'m Tree<P, F>,
}

impl<P: Platform, F: Format> TreeBeside<'_, P, F> {
    /// Does what [`Tree::map`] does.
    ///
    /// # Errors
    /// [`Retry`].
    pub(crate) fn map(
        &self,
        target: &mut Target<'_, P, F>,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Result<Installed, Retry> {
        let begun = self.mmu.tracking.begun();
        let mut leaf = leaf;
        if self.mmu.tracking.any() {
            let (pages, gfn) = (self.mmu.lock(), target.key().gfn());
            if self.mmu.largest(&pages, gfn, level) < level {
                return Err(Retry::Stale);
            }
            leaf = self.mmu.guarded(&pages, gfn, leaf, path);
        }
        let valid = || valid() && self.mmu.tracking.begun() == begun;
        self.tree
            .map(&mut target.cursor, level, leaf, path, valid, done)
    }

    /// Does what [`Tree::map_absent`] does.
    ///
    /// # Errors
    /// [`Retry`].
    pub(crate) fn map_absent(
        &self,
        target: &mut Target<'_, P, F>,
        pages: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Result<u64, Retry> {
        let begun = self.mmu.tracking.begun();
        let gfn = target.key().gfn();
        let has_table = self.mmu.tracking.any() && {
            let gfns = gfn..gfn.add(pages);
            self.mmu.lock().rmap.first_table(&gfns).is_some()
        };
        // A fault finds out which of the pages may be written to.
        let leaf = Leaf {
            write: leaf.write && !has_table,
            may_write: leaf.may_write && !has_table,
            ..leaf
        };
        let valid = || valid() && self.mmu.tracking.begun() == begun;
        self.tree
            .map_absent(&mut target.cursor, Level::PAGE, pages, leaf, path, valid)
    }
}
