//! The MMU of shadow pages, which KVM calls the shadow MMU. It can shadow the guest's own tables. Or it can make the
//! tables of a second-level walker, like [`crate::table::Tree`], as KVM's *direct* MMU does (`tdp_mmu=0`). In both
//! cases it finds the entries that map a guest frame by a reverse map, not by their position in a tree.
//!
//! # Parts
//! * A *shadow page* ([`page`]) is a table, together with the guest frame and the *role* for which it was made (see
//!   [`trail`]). There is at most one shadow page for a frame and a role. If no entry refers to a page any more, the
//!   page is kept, and can be found again by frame and role.
//! * The *reverse map* ([`rmap`]) lists for each guest frame the leaves that map it. Operations by gfn ([`by_gfn`]) use
//!   it.
//! * An MMU that shadows only nested tables also has a *tree* beside the shadow pages ([`beside`]), for all other
//!   translations.
//! * The number of pages is limited ([`Budget`]). If a fault finds that the limit is reached, the VM zaps the oldest
//!   pages.
//!
//! # Who may change what
//! * Each address space has one lock ([`ShadowMmu::lock`]). Only its holder changes entries, pages and lists. It holds
//!   the lock while it installs a leaf, or during one step of a walk. It does not wait, takes no other lock (except
//!   that of a table of the tree: [`beside`]), and does not allocate. The memory for an install is allocated before
//!   ([`ShadowMmu::prepare`]).
//! * Page walkers take no lock ([`crate::table`], whose rules about publishing and freeing tables apply here, too).
//!   They set accessed and dirty bits in leaves, so the holder of the lock changes a leaf by a read-modify-write.
//! * A fault checks under the lock whether its look-ups are still current. An invalidation first makes this check fail,
//!   and then takes the lock. If the fault takes the lock first, the invalidation finds its leaf in the list of the
//!   leaf's frame. Otherwise the fault finds that its look-ups are stale.
//! * A zapped page's table is freed after the flush ([`crate::table::Detached`]), like a table of a `Tree`. The page's
//!   record may be reused at once, because records are only used under the lock.

mod beside;
mod budget;
mod by_gfn;
mod list;
mod map;
mod page;
mod pool;
mod rmap;
mod track;
pub(crate) mod trail;

pub(crate) use budget::Budget;
pub(crate) use track::{Compared, Followed, ReadEntries};

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::marker::PhantomData;

use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Format, X86, can_shadow};
use crate::heap::{OutOfMemory, Shared, boxed};
use crate::platform::{Platform, WaitFor};
use crate::shadow::trail::{Changes, Role};
use crate::sync::SpinLock;
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::spin::SpinGuard;
use crate::table::{
    ByGfn, Detached, Flushes, FrameCache, NewFrame, NewTable, Root, TableFrames, Tree,
};
use beside::{Beginning, Tracking};
use page::{Agreement, Pages, ShadowPage, ShadowTable};
use pool::More;
use rmap::Node;

/// The tables of one address space, in format `F`, made of shadow pages.
pub(crate) struct ShadowMmu<P: Platform, F: Format> {
    platform: Arc<P>,
    frames: Shared<TableFrames>,
    /// The tables for walks by guest-physical addresses.
    physical: Physical<P, F>,
    pages: SpinLock<Pages>,
    /// Whether the MMU shadows guest tables; if not, all its pages are direct.
    shadows: bool,
    context: Root,
    tracking: Tracking,
    beginning: Beginning,
    /// The number of zapped shadow pages that were roots: pages at which walks start.
    roots_zapped: AtomicU64,
    changes: Box<Changes>,
    /// How often all shadow pages were marked for comparison with the guest's tables ([`Self::distrust_all`]).
    distrusts: AtomicU64,
    /// The value that `distrusts` had before all shadow pages were last compared.
    compared: AtomicU64,
    /// The flushes of the VM.
    flushes: Shared<Flushes>,
    budget: Shared<Budget>,
    /// Whether an install has found too few spare records (of shadow pages, or of nodes of the reverse map).
    is_short: AtomicBool,
    format: PhantomData<F>,
}

/// The tables for walks by guest-physical addresses.
enum Physical<P: Platform, F: Format> {
    /// Direct pages. Contains the number of the root page.
    Pages(u32),
    /// A tree beside the shadow pages ([`beside`]).
    Tree(Tree<P, F>),
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Makes an MMU that maps nothing. If `shadows`, it shadows the guest's tables.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn new(
        platform: Arc<P>,
        frames: Shared<TableFrames>,
        flushes: Shared<Flushes>,
        budget: Shared<Budget>,
        shadows: bool,
    ) -> Result<Self, OutOfMemory> {
        let mut pages = Self::no_pages()?;
        let _ = (pages.pool).add(More::allocate(pages.pool.ask(1)?, || {
            ShadowPage::make(shadows)
        })?);
        let root = pages.pool.take().ok_or(OutOfMemory)?;
        let make = |frame| _ = begin::<P>(&platform, frame, root);
        let frame = frames.allocate_root(&*platform, 1, make)?;
        let page = pages.pool.get(root);
        page.frame.set(frame);
        page.role.set(Role::direct(F::TOP));
        Ok(ShadowMmu {
            platform,
            frames,
            physical: Physical::Pages(root),
            pages: SpinLock::new(pages),
            shadows,
            context: Root::new(frame, F::TOP),
            tracking: Tracking::default(),
            beginning: Beginning::none(),
            roots_zapped: AtomicU64::new(0),
            changes: boxed(Changes::new())?,
            distrusts: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            flushes,
            budget,
            is_short: AtomicBool::new(true),
            format: PhantomData,
        })
    }

    /// Makes an MMU that shadows nested tables of the guest, and has `tree` for all other translations.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn with_tree(
        tree: Tree<P, F>,
        platform: Arc<P>,
        frames: Shared<TableFrames>,
        flushes: Shared<Flushes>,
        budget: Shared<Budget>,
    ) -> Result<Self, OutOfMemory> {
        Ok(ShadowMmu {
            platform,
            frames,
            context: tree.context(),
            physical: Physical::Tree(tree),
            pages: SpinLock::new(Self::no_pages()?),
            shadows: true,
            tracking: Tracking::default(),
            beginning: Beginning::default(),
            roots_zapped: AtomicU64::new(0),
            changes: boxed(Changes::new())?,
            distrusts: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            flushes,
            budget,
            // `false`, so that no records are allocated before the guest uses nested tables.
            is_short: AtomicBool::new(false),
            format: PhantomData,
        })
    }

    /// Makes the records of an MMU that has no shadow pages, with an empty reverse map.
    fn no_pages() -> Result<Pages, OutOfMemory> {
        let mut pages = Pages::new(F::TOP);
        let nodes = &mut pages.rmap.nodes;
        let _ = nodes.add(More::allocate(nodes.ask(1)?, Node::make)?);
        pages.rmap.begin();
        Ok(pages)
    }

    /// Returns whether the MMU shadows tables of the guest.
    #[inline(always)]
    pub(crate) fn shadows(&self) -> bool {
        can_shadow::<F>() && self.shadows
    }

    #[inline(always)]
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    /// Returns the root at which walks by guest-physical addresses start.
    pub(crate) fn context(&self) -> Root {
        self.context
    }

    /// Whether an install may begin. If not, call [`Self::prepare`] first.
    #[inline]
    fn is_prepared(&self, pages: &Pages) -> bool {
        let is_prepared = pages.is_prepared(self.shadows());
        if !is_prepared {
            self.is_short.store(true, Relaxed);
        }
        is_prepared
    }

    /// Allocates the memory for an install, and takes the lock. The caller holds no lock.
    fn lock_prepared(&self, frames: &mut FrameCache) -> Result<SpinGuard<'_, Pages>, OutOfMemory> {
        loop {
            let pages = self.lock();
            if self.is_prepared(&pages) {
                return Ok(pages);
            }
            drop(pages);
            self.prepare(frames, FrameCache::FAULT)?;
        }
    }

    /// Takes the lock of the shadow pages.
    fn lock(&self) -> SpinGuard<'_, Pages> {
        self.pages
            .lock(|round| self.platform.wait(round, WaitFor::Lock))
    }

    /// Allocates the memory that an install of up to `tables` new tables needs: frames, in `frames`, and the MMU's
    /// records of shadow pages and of reverse-map nodes. Records are allocated only if an install has found too few of
    /// them ([`Retry::Unprepared`](crate::table::Retry)), because counting them takes the MMU's lock, which most faults
    /// take only once, for the install.
    ///
    /// # Errors
    /// [`OutOfMemory`]; memory that was already allocated is kept.
    pub(crate) fn prepare(
        &self,
        frames: &mut FrameCache,
        tables: usize,
    ) -> Result<(), OutOfMemory> {
        let shadows = self.shadows();
        let is_enough = !self.is_short.load(Relaxed);
        if self.tree().is_some() && is_enough {
            return frames.fill(&*self.platform, tables);
        }
        let tables = tables.max(Pages::install(shadows));
        let filled = frames.fill(&*self.platform, tables);
        if tables <= FrameCache::FAULT && is_enough {
            return filled;
        }
        // Allocate twice as many as needed, so that the next fault need not allocate.
        let wanted = |spare: usize, least: usize| match spare < least {
            true => 2 * least - spare,
            false => 0,
        };
        let pages = self.lock();
        let more_pages = wanted(pages.pool.spare(), tables);
        let nodes = tables.max(Pages::install_nodes(shadows));
        let more_nodes = wanted(pages.rmap.spare(), nodes);
        self.is_short.store(false, Relaxed);
        if more_pages + more_nodes == 0 {
            return filled;
        }
        let ask = (pages.pool.ask(more_pages), pages.rmap.nodes.ask(more_nodes));
        drop(pages);
        let more_pages = More::allocate(ask.0?, || ShadowPage::make(shadows))?;
        let more_nodes = More::allocate(ask.1?, Node::make)?;
        let mut pages = self.lock();
        let unused = (pages.pool.add(more_pages), pages.rmap.nodes.add(more_nodes));
        drop(pages);
        drop(unused);
        filled
    }
}

impl<P: Platform, F: Format> ShadowMmu<P, F> {
    /// Zaps page `number` ([`Pages::zap`]).
    fn zap_page(
        &self,
        pages: &Pages,
        number: u32,
        detached: &mut Detached,
        zapped: &mut dyn FnMut(Gfn, Level, u64),
    ) {
        let guest = pages.pool.get(number).guest();
        if guest.is_some_and(|guest| guest.is_root.get()) {
            self.roots_zapped.fetch_add(1, Release);
        }
        if guest.is_some() {
            self.tracking.forget();
        }
        pages.zap::<P, F>(&self.platform, number, detached, zapped);
        self.budget.gave_back(1);
    }

    /// Returns the number of zapped shadow pages that were roots (pages at which walks start). If the number has
    /// changed since a vCPU found a root, and the vCPU has left that reader section, it must not begin a walk with this
    /// root.
    pub(crate) fn roots_zapped(&self) -> u64 {
        self.roots_zapped.load(Acquire)
    }

    /// Returns whether the table in frame `frame` maps parts of a larger page of the guest.
    ///
    /// # Safety
    /// - A walk has reached the table in a reader section in which the caller still is.
    pub(crate) unsafe fn maps_parts(&self, frame: Pfn) -> bool {
        // SAFETY: the caller is still in the reader section in which a walk reached the table, as this function's
        // `# Safety` asks of its caller.
        let table = unsafe { ShadowTable::at(&*self.platform, frame) };
        table.meta().maps_parts.load(Relaxed)
    }

    /// Returns the root for walks that begin with the guest table in frame `gfn`. `None`: there is no shadow page of
    /// the table, or it is not known to agree with the table.
    pub(crate) fn root_of(&self, gfn: Gfn, role: Role) -> Option<Root> {
        let pages = self.lock();
        let page = pages.pool.get(pages.find_page(gfn, role)?);
        let guest = page.guest()?;
        guest.is_root.set(true);
        let is_good = guest.flush.get() == 0 && guest.agreement.get() == Agreement::Synced;
        is_good.then(|| Root::new(page.frame.get(), role.level))
    }
}

/// Makes an empty table for page `number` in `frame`. Returns the frame.
fn begin<P: Platform>(platform: &P, frame: NewFrame, number: u32) -> Pfn {
    let mut table = NewTable::<P, X86<5>>::new(platform, frame);
    table.clear();
    table.meta().next.store(number.into(), Relaxed);
    table.finish()
}

impl<P: Platform, F: Format> Drop for ShadowMmu<P, F> {
    fn drop(&mut self) {
        let mut detached = Detached::none();
        while self.zap_oldest(&mut detached, &mut |_, _, _| ()) {}
        if let Physical::Pages(root) = self.physical {
            let pages = self.lock();
            detached.push(&pages.table(&*self.platform, root), F::TOP);
        }
        // SAFETY: `&mut self` shows that no software walker has a reference to a table, and the owner of a VM stops its
        // CPUs before it drops the VM.
        let _ = unsafe { detached.free::<P, F>(&*self.platform, &self.frames) };
    }
}
