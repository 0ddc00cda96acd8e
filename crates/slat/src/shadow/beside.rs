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
use core::ops::Range;

use super::page::{Agreement, Pages};
use super::{Physical, ShadowMmu};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format, Leaf};
use crate::platform::Platform;
use crate::shadow::trail::Target;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use crate::table::{At, Path, Retry, Tree};

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
    pub(crate) fn tree_for(&self, target: &Target<'_, P, F>) -> Option<&Tree<P, F>> {
        self.tree().filter(|_| target.trail().is_none())
    }

    /// Returns `leaf`, of `level`, without the right to write if it maps a tracked table, and how often tracking has
    /// begun. The tree may have the leaf at `gfn` if [`Self::tracking_begun`] is the same under the lock of the table
    /// that receives it.
    ///
    /// # Errors
    /// [`Retry::Stale`]: a huge leaf would cover a table.
    pub(crate) fn leaf_beside(
        &self,
        gfn: Gfn,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
    ) -> Result<(Leaf, u64), Retry> {
        let begun = self.tracking_begun();
        if !self.tracking.any() {
            return Ok((leaf, begun));
        }
        let pages = self.lock();
        match self.largest(&pages, gfn, level) < level {
            true => Err(Retry::Stale),
            false => Ok((self.guarded(&pages, gfn, leaf, path), begun)),
        }
    }

    /// Like [`Self::leaf_beside`], for leaves of level 1 that map `gfns`: if one would map a table, none gets the right
    /// to write. A fault finds out which of the pages may be written to.
    pub(crate) fn run_beside(&self, gfns: &Range<Gfn>, leaf: Leaf) -> (Leaf, u64) {
        let begun = self.tracking_begun();
        let has_table = self.tracking.any() && self.has_table(gfns);
        let leaf = Leaf {
            write: leaf.write && !has_table,
            may_write: leaf.may_write && !has_table,
            ..leaf
        };
        (leaf, begun)
    }
}
