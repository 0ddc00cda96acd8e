//! The radix tree over any format.
//!
//! # Who may change what under whom
//! * Every table has one lock, in its [`TableMeta`]. **Every change that software makes to an entry
//!   is made under the lock of the table that holds the entry**, as one atomic store (or
//!   read-modify-write, where hardware may be setting accessed/dirty bits in that entry this moment).
//!   A range operation takes the lock once for up to 512 entries, a fault once for its install.
//! * Nobody holds two table locks, allocates, or waits for anything under one.
//! * Walkers, software and hardware, take no lock. They see each entry as it was before or after a
//!   change. A table is published by a `Release` store after it was filled; a walker loads entries
//!   with `Acquire`, so it sees the table's entries, too.
//! * A table that is taken out ([`Detached`]) is still walked by those who have reached it. It goes
//!   back to the platform only after [`crate::sync::quiesce`] says that everybody has passed, and
//!   after the flush. A leaf that a late fault puts into it can be reached by nobody new, and the
//!   one who put it there acknowledges the same flush before the table is freed. Only range operations take
//!   anything away: a fault that meets something else in its place has that zapped by one.
//! * A fault decides *under the lock of the table it installs into* whether what it knows (slot, host
//!   page) still holds (`valid` in [`Tree::map`]). An invalidation first makes it not hold, then
//!   walks the range, taking the lock of every table on the way, also of those that look empty. So
//!   either the fault's section comes first, and the walk sees the leaf, or it comes later, and the
//!   fault sees that it is stale. The same holds for a table that is filled with leaves before it is
//!   put in place, with the lock of the table that receives it ([`Tree::map_absent`]).
//!
//! # Break-before-make
//! On formats that ask for it ([`Format::BREAK_BEFORE_MAKE`]), no valid entry may be installed while a TLB
//! may hold a *conflicting* one for the same addresses: another frame, another size, another memory type.
//! The same leaf again, or wider rights, conflict with nothing. So every entry that is taken away, for
//! whatever reason, becomes an invalid entry that *names its flush* ([`Format::cleared`]): the number of the
//! first one that begins after the change ([`flushes`]). Whoever installs something (a leaf, a table, a run of
//! leaves, an MMIO entry) looks, under the lock of the table, at what is there: an entry whose flush is not due
//! any more is as good as an empty one, another is not touched. Such an entry is [`Entry::Empty`] to
//! everybody else: walkers fault, range operations pass over it, nobody cleans it up.
//!
//! * *When it is not due any more.* The operation that took the entry away is a debtor from before its first
//!   change until its flush has been done. So under the lock of the table it is found among the debtors, with the
//!   frames it is about, or the flush has been done. One that became a debtor later cannot have taken the entry
//!   away; one that is about other frames has not.
//! * *What may be cached below.* Whatever a walker has read in a table that was taken out, it has reached
//!   through the entry that names the flush. Nothing else can be put in the place of that entry, and so
//!   nothing conflicting above, at, or below it, before the flush. A late fault that installs into the table
//!   that was taken out is in a reader section, which the flush waits for before it tells the hardware.
//! * *Why the number is read after the change.* A flush voids what was taken away before it began. If the
//!   number came first, a flush could begin between, and pass for one that covers the change. A walk clears many
//!   entries under one lock; they get their number together, before the lock is released
//!   ([`clear::Section`]). Until then they name flush 0, which nobody sees who has the lock.
//! * *Who waits for whom.* Nobody for anybody. A fault that finds an entry whose flush is due
//!   ([`Mapped::Unflushed`]) leaves its reader section, with no lock held, flushes what that entry covers itself,
//!   and remembers that ([`Flushed`]). The flush waits for readers to pass, as every flush
//!   does, and they do not wait for this one. Then the fault returns [`crate::Stop::Retry`] and is not counted
//!   as one that fixed something. What it found then is not due for it any more, whatever is
//!   taken away elsewhere meanwhile: a fault is held up again only by
//!   another clear of the same entry. What only adds what is not there (prefetch, MMIO entries) gives up.
//! * *Failure, and the end.* Nothing is allocated between a clear and its flush, so no flush is forgotten for
//!   want of memory. A tree that is dropped is walked by nobody. Numbers belong to a VM; a frame that another
//!   VM had is emptied before it is a table.
//! * *Splits.* A leaf that is to be split is not taken away: it becomes [`Entry::Broken`], which keeps the
//!   leaf for invalidations to find, and is mended by the one who broke it, after a flush ([`Tree::mend`]). That
//!   one may find, instead of its own, a leaf that was zapped, mapped and broken again meanwhile. So the
//!   table's metadata have the number for the last leaf that was broken in it, and nothing in it is mended
//!   but after a flush of one's own with such a number: until then the flush is repeated, at most once for each
//!   other leaf that is broken in the same table. Only here others wait: a fault that meets a broken leaf waits
//!   outside until it is mended; the mender flushes and never waits for a fault.
//!
//! Where a format asks for nothing of this, `cleared` is 0 and names nothing, and all checks are compiled away.

mod clear;
mod flushes;
mod map;
mod ops;
mod walk;

use crate::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::*, const_fn};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;

use crate::addr::{Access, Gfn, Level, Pfn};
use crate::format::{Entry, Format, Leaf};
use crate::heap::Shared;
use crate::platform::{Platform, WaitFor};
use crate::sync::spin::RawSpinLock;

pub(crate) use flushes::{Debt, Flushed, Flushes, overlap};
pub(crate) use map::Mapped;
pub(crate) use ops::{SplitWalk, Zapped, room_for_broken};
pub(crate) use walk::{At, Next, Show, Walk};

/// Entries in one table.
pub const ENTRIES: usize = 1 << Level::INDEX_BITS;

/// The entries of one table, in the 4 KiB frame that page walkers read.
#[repr(C, align(4096))]
pub struct Entries([AtomicU64; ENTRIES]);

impl Default for Entries {
    fn default() -> Self {
        Entries(core::array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// What the engine keeps beside each table frame, as Linux does in `struct page`.
///
/// The platform stores it (see [`Platform::meta`]); only the engine looks inside.
pub struct TableMeta {
    lock: RawSpinLock,
    /// The table stands where a huge leaf could, were it not for the policy `nx_huge_pages`.
    /// Written under the lock of the table above, or before publication.
    nx_split: AtomicBool,
    /// Leaves in the table, so that it can be freed, or passed over, without a look at its entries.
    /// Written under the table's lock, or before publication.
    leaves: AtomicU16,
    /// The number that the flush must have after which leaves that were broken in the table may be mended; 0:
    /// none was. As `leaves`.
    broken: AtomicU64,
    /// While detached: the next frame of the list, or [`Detached::END`].
    next: AtomicU64,
}

impl TableMeta {
    const_fn! {
        /// For a frame that has just been allocated.
        pub fn new() -> Self {
            TableMeta {
                lock: RawSpinLock::new(),
                nx_split: AtomicBool::new(false),
                leaves: AtomicU16::new(0),
                broken: AtomicU64::new(0),
                next: AtomicU64::new(Detached::END),
            }
        }
    }
}

impl TableMeta {
    /// For a table that is not published yet.
    fn begin(&self, leaves: u16) {
        self.leaves.store(leaves, Relaxed);
        self.nx_split.store(false, Relaxed);
        self.broken.store(0, Relaxed);
    }

    /// Under the table's lock.
    #[inline]
    fn count_leaves(&self, change: i16) {
        let count = self.leaves.load(Relaxed).wrapping_add_signed(change);
        self.leaves.store(count, Relaxed);
    }
}

impl Default for TableMeta {
    fn default() -> Self {
        Self::new()
    }
}

/// Frames allocated ahead of a fault, so that nothing can fail, or wait, once it is installing.
#[derive(Default)]
pub(crate) struct FrameCache(Vec<Pfn>);

impl FrameCache {
    /// As many as one fault can need: a path to the leaf, or the splits on the way to it.
    pub(crate) const FAULT: usize = 4;
    /// What a range operation takes at a time.
    pub(crate) const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

    pub(crate) fn fill(
        &mut self,
        platform: &impl Platform,
        frames: usize,
    ) -> Result<(), OutOfMemory> {
        let Some(missing) = frames.checked_sub(self.0.len()).filter(|n| *n > 0) else {
            return Ok(());
        };
        self.0.try_reserve_exact(missing).map_err(|_| OutOfMemory)?;
        let before = self.0.len();
        platform.alloc_tables(missing, &mut |frame| self.0.push(frame));
        // They are taken from the end: in the order they came, which often is that of memory.
        self.0[before..].reverse();
        if self.0.len() < frames {
            return Err(OutOfMemory);
        }
        Ok(())
    }

    fn take(&mut self) -> Pfn {
        self.0.pop().expect("the cache is filled before a fault")
    }

    pub(crate) fn release(&mut self, platform: &impl Platform) {
        self.keep(platform, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn serves_a_fault(&self) -> bool {
        self.0.len() >= Self::FAULT
    }

    /// Gives all but `frames` of them back.
    pub(crate) fn keep(&mut self, platform: &impl Platform, frames: usize) {
        let kept = frames.min(self.0.len());
        // SAFETY: the frames were allocated by `fill` and never used.
        unsafe { platform.free_tables(&self.0[kept..]) };
        self.0.truncate(kept);
    }
}

/// A table, or something else the engine needs, could not be allocated; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl core::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("no memory for another page table or memslot; nothing was changed")
    }
}

impl core::error::Error for OutOfMemory {}

/// What the way to a leaf may use, and what was done on it.
pub(crate) struct Path<'a> {
    /// Full when the way begins.
    pub(crate) frames: &'a mut FrameCache,
    /// The last flush that whoever goes this way has done himself.
    pub(crate) flushed: Flushed,
    /// The leaf is small because of the policy `nx_huge_pages`: a level 1 table made for it is one
    /// that recovery may take away again.
    pub(crate) nx_split: bool,
    /// Huge leaves split, by level.
    pub(crate) splits: LeafCounts,
    /// Level 1 tables made with `nx_split`.
    pub(crate) nx_splits: u64,
}

impl<'a> Path<'a> {
    pub(crate) fn new(frames: &'a mut FrameCache) -> Self {
        Path {
            frames,
            flushed: Flushed::default(),
            nx_split: false,
            splits: LeafCounts::default(),
            nx_splits: 0,
        }
    }
}

/// What was in tables that were freed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Freed {
    pub(crate) leaves: LeafCounts,
    pub(crate) nx_splits: u64,
}

/// Leaves by level: index 0 counts 4 KiB, 1 counts 2 MiB, 2 counts 1 GiB.
pub(crate) type LeafCounts = [u64; 3];

/// Subtrees that were taken out of a tree but may still be walked. Give them to [`Tree::free`] once
/// everybody has passed a quiescent point and flushed.
#[must_use = "detached tables are lost unless they are freed after the flush"]
pub(crate) struct Detached {
    head: u64,
}

impl Detached {
    const END: u64 = u64::MAX;
    const LEVEL_SHIFT: u32 = 56;

    pub(crate) const fn none() -> Self {
        Detached { head: Self::END }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == Self::END
    }

    /// A frame with the level of its table in one word (frame numbers have at most 40 bits).
    fn pack(frame: Pfn, level: Level) -> u64 {
        frame.0 | (level.0 as u64) << Self::LEVEL_SHIFT
    }

    fn unpack(word: u64) -> (Pfn, Level) {
        (
            Pfn(word & ((1 << Self::LEVEL_SHIFT) - 1)),
            Level((word >> Self::LEVEL_SHIFT) as u8),
        )
    }
}

/// A tree of tables in format `F`, from guest frames to host frames.
pub(crate) struct Tree<P: Platform, F: Format> {
    platform: Arc<P>,
    root: Pfn,
    /// The VM's.
    flushes: Shared<Flushes>,
    format: PhantomData<F>,
}

/// What a lock-free walk ended at.
pub(crate) struct Found<'t> {
    slot: &'t AtomicU64,
    bits: u64,
    pub(crate) level: Level,
    /// The frame of the table that holds the entry.
    pub(crate) table: Pfn,
}

impl Found<'_> {
    /// What stands there; no [`Entry::Table`].
    #[inline]
    pub(crate) fn entry<F: Format>(&self) -> Entry {
        F::decode(self.bits, self.level)
    }

    /// The leaf that stands there, if it allows `access` and has the bits set that the access sets.
    #[inline(always)]
    pub(crate) fn ready<F: Format>(&self, access: Access) -> Option<Leaf> {
        let (set, clear) = F::ready(access);
        let ready = self.bits & (set | clear) == set;
        ready.then(|| F::decode_leaf(self.bits))
    }

    /// Sets accessed, and dirty for a write, as the walker that uses the leaf does: without a lock,
    /// and only if the leaf is still there. `false`: it is not, walk again.
    #[inline]
    pub(crate) fn mark<F: Format>(&self, write: bool) -> bool {
        let marked = F::mark(self.bits, write);
        marked == self.bits
            || self
                .slot
                .compare_exchange(self.bits, marked, Relaxed, Relaxed)
                .is_ok()
    }
}

impl<P: Platform, F: Format> Tree<P, F> {
    pub(crate) fn new(platform: Arc<P>, flushes: Shared<Flushes>) -> Result<Self, OutOfMemory> {
        let root = platform.alloc_root(F::ROOT_TABLES).ok_or(OutOfMemory)?;
        let tree = Tree {
            platform,
            root,
            flushes,
            format: PhantomData,
        };
        for frame in tree.roots() {
            tree.table(frame).meta().begin(0);
            // SAFETY: nobody knows the new tree.
            unsafe { tree.table(frame).clear() };
        }
        Ok(tree)
    }

    fn roots(&self) -> impl Iterator<Item = Pfn> + use<P, F> {
        let root = self.root;
        (0..F::ROOT_TABLES as u64).map(move |i| root.add(i))
    }

    /// The root table on the way to `gfn`, which is below the capacity.
    #[inline]
    fn root_for(&self, gfn: Gfn) -> Pfn {
        Self::root_table(self.root, gfn)
    }

    #[inline]
    fn root_table(root: Pfn, gfn: Gfn) -> Pfn {
        if F::ROOT_TABLES == 1 {
            root
        } else {
            root.add(gfn.0 / (F::TOP.pages() * ENTRIES as u64))
        }
    }

    /// Guest frames that the tree can hold.
    pub(crate) const fn capacity() -> u64 {
        F::TOP.pages() * (ENTRIES * F::ROOT_TABLES) as u64
    }

    pub(crate) fn root(&self) -> Pfn {
        self.root
    }

    /// Finds what a walker finds for `gfn`, without a lock. The caller is inside a reader section.
    #[inline]
    pub(crate) fn lookup(&self, gfn: Gfn) -> Found<'_> {
        self.descend(gfn, Level::PAGE)
    }

    /// Finds the entry of `level` on the way to `gfn`, or the one above it at which the way ends: every way through
    /// the tables that is not a [walk](Tree::walk) is this one.
    #[inline]
    fn descend(&self, gfn: Gfn, level: Level) -> Found<'_> {
        let mut found = self.table(self.root_for(gfn)).find(gfn, F::TOP);
        while found.level > level
            && let Some(lower) = F::next_table(found.bits, found.level)
        {
            found = self.table(lower).find(gfn, found.level.below());
        }
        found
    }

    /// [`Tree::lookup`] for a vCPU, telling the compiler what to expect: `Ok` if the walk ends at level 1. Knows
    /// the tree by its `root`, so that whoever walks often need not go by way of the tree.
    ///
    /// # Safety
    /// - `root` is the root of a tree of this format on `platform`, and the caller is in a reader section, as
    ///   long as the answer is used.
    #[inline(always)]
    pub(crate) unsafe fn lookup_page(
        platform: &P,
        root: Pfn,
        gfn: Gfn,
    ) -> Result<Found<'_>, Found<'_>> {
        let find = |frame, level| Table { platform, frame }.find(gfn, level);
        let mut frame = Self::root_table(root, gfn);
        // So many steps that the compiler knows their number, and unrolls them.
        for step in 0..F::TOP.0 - 1 {
            let level = Level(F::TOP.0 - step);
            let found = find(frame, level);
            match F::next_table(found.bits, level) {
                Some(lower) => frame = lower,
                None => return Err(found),
            }
        }
        Ok(find(frame, Level::PAGE))
    }

    /// Takes the last step of [`Tree::lookup_page`] alone, in the level 1 table where that ended.
    ///
    /// # Safety
    /// - on `platform`, `lookup_page` has found an entry of `table` for a page of the same 2 MiB, and the
    ///   caller has been in one reader section since, without a quiescent point, and stays in it as long as the
    ///   answer is used.
    #[inline(always)]
    pub(crate) unsafe fn lookup_in(platform: &P, table: Pfn, gfn: Gfn) -> Found<'_> {
        let frame = table;
        Table { platform, frame }.find(gfn, Level::PAGE)
    }

    #[inline]
    fn table(&self, frame: Pfn) -> Table<'_, P> {
        Table {
            platform: &self.platform,
            frame,
        }
    }

    /// Gives the tables of `detached` back to the platform; returns what was in them.
    ///
    /// # Safety
    /// - since they were detached, every reader has passed a quiescent point, and hardware was
    ///   flushed: nobody can reach them.
    pub(crate) unsafe fn free(&self, detached: Detached) -> Freed {
        let mut freeing = Freeing {
            platform: &*self.platform,
            batch: [Pfn(0); FREE_BATCH],
            len: 0,
            freed: Freed::default(),
        };
        let mut head = detached.head;
        while head != Detached::END {
            let (frame, level) = Detached::unpack(head);
            head = self.table(frame).meta().next.load(Relaxed);
            // SAFETY: the caller's promise.
            unsafe { freeing.subtree::<F>(frame, level) };
        }
        // SAFETY: as above.
        unsafe { freeing.finish() }
    }
}

const FREE_BATCH: usize = 64;

/// Frees tables by the batch.
struct Freeing<'a, P: Platform> {
    platform: &'a P,
    batch: [Pfn; FREE_BATCH],
    len: usize,
    freed: Freed,
}

impl<P: Platform> Freeing<'_, P> {
    /// # Safety
    /// - as [`Tree::free`], for the table and what is below it.
    unsafe fn subtree<F: Format>(&mut self, frame: Pfn, level: Level) {
        let table = Table {
            platform: self.platform,
            frame,
        };
        if level > Level::PAGE {
            for entry in table.entries() {
                if let Entry::Table(lower) = F::decode(entry.load(Relaxed), level) {
                    // SAFETY: a table below an unreachable table is unreachable.
                    unsafe { self.subtree::<F>(lower, level.below()) };
                }
            }
        }
        let meta = table.meta();
        if level <= F::MAX_LEAF {
            self.freed.leaves[level.0 as usize - 1] += u64::from(meta.leaves.load(Relaxed));
        }
        self.freed.nx_splits += u64::from(meta.nx_split.load(Relaxed));
        self.batch[self.len] = frame;
        self.len += 1;
        if self.len == FREE_BATCH {
            // SAFETY: nobody can reach these tables (caller's promise), and they leave the tree here.
            unsafe { self.platform.free_tables(&self.batch) };
            self.len = 0;
        }
    }

    /// # Safety
    /// - as [`Tree::free`], for every table given to `subtree`.
    unsafe fn finish(self) -> Freed {
        // SAFETY: the caller's promise.
        unsafe { self.platform.free_tables(&self.batch[..self.len]) };
        self.freed
    }
}

impl<P: Platform, F: Format> Drop for Tree<P, F> {
    fn drop(&mut self) {
        let mut all = Detached::none();
        for root in self.roots() {
            all.push(&self.table(root), F::TOP);
        }
        // SAFETY: `&mut self`: no walker has a reference to the tree, and the owner of a VM stops its
        // CPUs before it drops the VM.
        let _ = unsafe { self.free(all) };
    }
}

/// An allocated table frame.
struct Table<'a, P: Platform> {
    platform: &'a P,
    frame: Pfn,
}

impl<'a, P: Platform> Table<'a, P> {
    #[inline]
    fn entries(&self) -> &'a [AtomicU64; ENTRIES] {
        // SAFETY: the platform's promise for allocated frames. Frames in entries, and `root`, are
        // allocated; a detached one stays so until no reader can have reached it.
        unsafe { &self.platform.entries(self.frame).as_ref().0 }
    }

    #[inline]
    fn entry(&self, index: usize) -> &'a AtomicU64 {
        &self.entries()[index]
    }

    /// Loads the entry of this table, which is of `level`, on the way to `gfn`.
    #[inline(always)]
    fn find(&self, gfn: Gfn, level: Level) -> Found<'a> {
        let slot = self.entry(level.index(gfn));
        Found {
            slot,
            bits: slot.load(Acquire),
            level,
            table: self.frame,
        }
    }

    #[inline]
    fn meta(&self) -> &'a TableMeta {
        // SAFETY: as for `entries`.
        unsafe { self.platform.meta(self.frame).as_ref() }
    }

    /// Empties a table that is not published yet.
    ///
    /// # Safety
    /// - nobody else can reach the table.
    unsafe fn clear(&mut self) {
        // SAFETY: the caller's promise.
        for entry in unsafe { self.unpublished() } {
            *entry.get_mut() = 0;
        }
    }

    /// The entries of a table that is not published yet, for plain stores: its publication, a
    /// `Release` store, makes them seen.
    ///
    /// # Safety
    /// - nobody else can reach the table while the answer is used.
    unsafe fn unpublished(&mut self) -> &mut [AtomicU64; ENTRIES] {
        // SAFETY: the caller's promise; otherwise as for `entries`.
        unsafe { &mut self.platform.entries(self.frame).as_mut().0 }
    }

    #[inline]
    fn lock(&self) -> TableGuard<'a> {
        let meta = self.meta();
        let platform = self.platform;
        meta.lock.lock(|round| platform.wait(round, WaitFor::Lock));
        TableGuard { meta }
    }
}

/// Proof that the lock of a table is held.
struct TableGuard<'a> {
    meta: &'a TableMeta,
}

impl TableGuard<'_> {
    /// Counts leaves that have come, or gone, in this table.
    fn count_leaves(&self, change: i16) {
        self.meta.count_leaves(change);
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the guard was made by taking this lock.
        unsafe { self.meta.lock.unlock() };
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
