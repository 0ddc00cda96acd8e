//! Shadow pages beside a tree: nested paging. The guest is a hypervisor, L1, whose memory contains the tables for its
//! own guests, L2. The tree translates the accesses of L1, by guest frame. Shadow pages of L1's tables translate the
//! accesses of L2, by L2's physical addresses. No table belongs to both the tree and the shadow pages, and no walk that
//! begins in one of the two reaches the other.
//!
//! # Which operations concern both
//! * Leaves of the tree and leaves of shadow pages map frames of L1. So an operation on a range of gfns works on both
//!   ([`super::by_gfn`]): first on the tree, table by table, then on the shadow pages. The two have different locks, so
//!   at some moment the operation has changed the tree and not yet the shadow pages. This is safe for the same reason
//!   as between two tables of a tree: the operation has one flush ticket, and flushes once, after both.
//! * L1 stores to its tables through leaves of the tree, and L2 through leaves of shadow pages, if L1 allows it. Both
//!   kinds of stores are noticed ([`super::track`]): no leaf in the tree or in shadow pages that maps a tracked table
//!   is writable, and no huge leaf covers it.
//!
//! # The order of locks
//! The holder of the MMU's lock may take the lock of a table of the tree, one at a time, to write-protect a leaf
//! ([`Tree::protect_frame`]). The reverse never happens: under a table's lock no thread takes the MMU's lock. So a
//! thread that holds the MMU's lock waits for a table's lock only while its holder works on one table.
//!
//! # Before the first shadow page
//! Most guests are not hypervisors. Until a vCPU first uses an address of L2, operations by gfn use only the tree: they
//! neither take the MMU's lock nor search shadow pages ([`Beginning`]). The first vCPU that uses an address of L2
//! announces that there will be shadow pages. Then it waits until all reader sections that may have missed the
//! announcement have ended. So an operation that did not search shadow pages was over before there was one, and a fault
//! that makes a shadow page sees what that operation has changed.
//!
//! # A fault in the tree, while tracking begins
//! A fault that installs a leaf in the tree reads the number of times that tracking has begun ([`Tracking::begun`]).
//! Then it checks under the MMU's lock whether the frame is tracked, and releases that lock. Under the lock of the
//! table that receives the leaf, it checks that the number is unchanged. A thread that begins tracking does this in the
//! other order: it raises the number, and then protects the tree's leaf, for which it takes the locks of all tables on
//! the path. If the fault takes the table's lock first, its leaf is found and protected. Otherwise the fault finds that
//! the number has changed, and begins again. The same is true for a huge leaf and all frames that it covers.

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
    /// Set when shadow pages are announced: operations by gfn in new reader sections then search shadow pages, too.
    announced: AtomicBool,
    /// Set when all operations by gfn search shadow pages: then shadow pages may be made.
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

/// Counts for faults in the tree, which read them without the MMU's lock. The counts change only under that lock.
#[derive(Default)]
pub(super) struct Tracking {
    /// The number of times that tracking of a guest table has begun.
    begun: AtomicU64,
    /// The number of shadow pages of guest tables.
    pages: AtomicU64,
}

impl Tracking {
    /// Call after making a shadow page of a guest table.
    pub(super) fn made(&self) {
        self.pages.store(self.pages.load(Relaxed) + 1, Relaxed);
    }

    /// Call after zapping a shadow page of a guest table.
    pub(super) fn forget(&self) {
        self.pages.store(self.pages.load(Relaxed) - 1, Relaxed);
    }

    /// Call when tracking of a guest table begins, before its leaves are write-protected.
    fn begin(&self) {
        self.begun.store(self.begun.load(Relaxed) + 1, Release);
    }

    /// Returns the number of times that tracking of a guest table has begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Acquire)
    }

    /// Returns whether there are shadow pages of guest tables. If not, no guest table that was tracked before the last
    /// call of [`Self::begun`] is tracked now.
    pub(super) fn any(&self) -> bool {
        self.pages.load(Relaxed) != 0
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Returns the tree beside the shadow pages, if there is one.
    #[inline(always)]
    pub(crate) fn tree(&self) -> Option<&Tree<P, F>> {
        match &self.physical {
            Physical::Tree(tree) => Some(tree),
            Physical::Pages(_) => None,
        }
    }

    /// Returns the tree beside the shadow pages mutably, if there is one.
    pub(crate) fn tree_mut(&mut self) -> Option<&mut Tree<P, F>> {
        match &mut self.physical {
            Physical::Tree(tree) => Some(tree),
            Physical::Pages(_) => None,
        }
    }

    /// Returns the number of the direct page with which a walk by guest-physical addresses begins. `None`: there is a
    /// tree, in which such a walk begins.
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

    /// Returns whether shadow pages may be made. If not, call [`Self::announce`], wait until all readers have passed a
    /// quiescent point, and call [`Self::begin`].
    pub(crate) fn has_begun(&self) -> bool {
        self.beginning.over.load(Acquire)
    }

    /// Makes operations by gfn search shadow pages, too, in reader sections that begin after this call.
    pub(crate) fn announce(&self) {
        self.beginning.announced.store(true, Relaxed);
    }

    /// Records that shadow pages may be made from now on.
    pub(crate) fn begin(&self) {
        self.beginning.over.store(true, Release);
    }

    /// Returns the tree, if the entry `at` is in the tree and not in a shadow page.
    #[inline(always)]
    pub(super) fn tree_of(&self, at: &At<'_>) -> Option<&Tree<P, F>> {
        self.tree().filter(|_| at.is_in_tree())
    }

    /// Returns whether there are shadow pages of guest tables. Other threads may change this at any time.
    pub(crate) fn has_tables(&self) -> bool {
        self.tracking.any()
    }

    /// Returns the number of times that tracking of a guest table has begun.
    pub(crate) fn tracking_begun(&self) -> u64 {
        self.tracking.begun()
    }

    /// Write-protects all leaves that map `gfn`, a frame with a guest table that begins to be tracked, in shadow pages
    /// and in the tree. Returns whether one of them was writable.
    pub(super) fn protect(&self, pages: &Pages, gfn: Gfn) -> bool {
        self.tracking.begin();
        let in_pages = pages.protect::<P, F>(&self.platform, gfn);
        let in_tree = self.tree().is_some_and(|tree| tree.protect_frame(gfn));
        in_pages | in_tree
    }

    /// Checks that no leaf of `tree` allows stores to a tracked guest table, and that no huge leaf allows stores to any
    /// guest table that has a shadow page. The caller is in a reader section.
    ///
    /// # Errors
    /// The first table to which a leaf allows stores.
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

    /// Returns the tree, for an install at `target`. `None`: `target` is in shadow pages.
    #[inline(always)]
    pub(crate) fn tree_for(&self, target: &Target<'_, P, F>) -> Option<&Tree<P, F>> {
        self.tree().filter(|_| target.trail().is_none())
    }

    /// Returns `leaf`, which is of `level` and maps `gfn` in the tree, without the right to write if it maps a tracked
    /// table. Also returns the number of times that tracking has begun. The leaf may be installed only if
    /// [`Self::tracking_begun`] still returns this number under the lock of the table that receives the leaf.
    ///
    /// # Errors
    /// [`Retry::Stale`]: `leaf` is huge, and would cover a guest table that has a shadow page.
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

    /// Like [`Self::leaf_beside`], for leaves of level 1 that map `gfns`. If one of the leaves would map a guest table
    /// that has a shadow page, none of them gets the right to write: a later write fault decides for its page alone.
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
