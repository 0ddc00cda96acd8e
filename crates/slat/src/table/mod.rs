//! The radix tree of page tables, in any format.
//!
//! # Who may change what
//! * Every table has one lock, in its [`TableMeta`]. **Software changes an entry only under the lock of the table that
//!   contains it**, by one atomic store (or read-modify-write, where hardware may set accessed or dirty in that
//!   entry at the same time). A range operation takes the lock once for the entries of the table, a fault once for its
//!   install. Three exceptions: a page walker sets accessed and dirty without the lock, [`age`] clears accessed, and
//!   [`protect`] gives an entry that refers to a table the right to write under the lock of *that* table.
//! * No thread holds two table locks, allocates, or waits for anything under one. A thread that takes a table's lock
//!   may hold the lock of the shadow pages beside the tree ([`crate::shadow`]). No thread takes that lock under a
//!   table's lock.
//! * Walkers, software and hardware, take no lock. They see each entry as it was before or after a change. A table is
//!   published by a `Release` store after it was filled; a walker loads entries with `Acquire`, so it sees the
//!   entries of the table, too.
//! * Walkers that have reached a table may still read it after it was removed ([`Detached`]). It is freed only after
//!   every reader has passed a quiescent point ([`crate::sync::quiesce`]) and after the flush. A fault in progress may
//!   still install a leaf into it: no new walker can reach that leaf, and the vCPU of the fault passes a quiescent
//!   point before the table is freed. Only range operations remove leaves and tables: a fault that finds a conflicting
//!   entry starts a range operation to zap it.
//! * A fault checks *under the lock of the table that receives the leaf* whether its look-ups (slot, host page) are
//!   still current (`valid` in [`Tree::map`]). An invalidation first makes that check fail, then walks the range and
//!   takes the lock of every table on the path, even if it looks empty. If the fault holds the lock first, the walk
//!   finds the leaf. If the walk does, the fault finds that its look-ups are stale. The same argument holds for a table
//!   that is filled with leaves before it is installed, with the lock of the table that refers to it
//!   ([`Tree::map_absent`]).
//!
//! # Break-before-make
//! On formats that require it ([`Format::BREAK_BEFORE_MAKE`]), no valid entry may be installed while a TLB may cache a
//! *conflicting* entry for the same addresses: with another frame, another size, or another memory type. The same leaf,
//! or the same leaf with more rights, does not conflict. So every entry that is cleared, for whatever reason, becomes
//! an invalid entry that *names its flush* ([`Format::cleared`]): the number of the first flush that begins after the
//! change ([`flushes`]). A thread that installs something (a leaf, a table, a run of leaves, an MMIO entry) first reads
//! the entry under the lock of the table. If the flush that the entry names is not due any more, the entry counts as
//! empty; otherwise the thread does not change it. Everything else treats a cleared entry as [`Entry::Empty`]: walkers
//! fault, range operations skip it, and nothing cleans it up.
//!
//! * *When a flush is not due any more.* The operation that clears an entry has a ticket from before its first change
//!   until its flush is done. So a thread with the lock of the table either finds a ticket that covers the frames of
//!   the entry, or the flush has been done. An operation that took its ticket after that flush began cannot have
//!   cleared the entry. Nor can an operation whose ticket covers other frames.
//! * *What may be cached below a cleared entry.* A walker that has read a removed table has reached it through the
//!   entry that names the flush. Nothing can be installed in that entry before the flush, so nothing that conflicts can
//!   be installed above, at, or below it. A fault in progress that installs a leaf into the removed table is in a
//!   reader section, and the flush waits for the end of that section before it flushes the hardware.
//! * *Why the number is read after the change.* A flush voids what was cleared before the flush began. If the number
//!   were read first, a flush could begin between the two, and seem to cover the change. A walk clears many
//!   entries under one lock; they all get the same number before the lock is released
//!   ([`clear::LockedTable`]). Until then they name flush 0, which no other holder of the lock can see.
//! * *No thread waits for another one.* A fault that finds an entry whose flush is due ([`Retry::Unflushed`]) leaves
//!   its reader section, with no lock held, flushes the frames of that entry itself, and remembers that flush
//!   ([`Flushed`]). Like every flush, it waits until readers have passed a quiescent point; these readers do not wait
//!   for the flush. Then the fault returns [`crate::Stop::Retry`] and does not count as fixed. For its vCPU the flush
//!   of that entry is not due any more, whatever is cleared elsewhere meanwhile. Only if the same entry is cleared
//!   again does the fault need another flush. Installs that only add absent entries (prefetch, MMIO entries) give up
//!   instead.
//! * *No flush is forgotten.* Nothing is allocated between a clear and its flush, so no flush is lost for lack of
//!   memory. A tree is dropped only when no walker uses it. Numbers belong to a VM; a frame that another VM has
//!   used is overwritten before it becomes a table.
//! * *Splits.* A leaf that is split is not cleared. It becomes [`Entry::Broken`], which keeps the leaf, so that
//!   invalidations find it. The thread that broke it flushes, and then mends it: it installs the pieces
//!   ([`ByGfn::mend`]). But the thread may find another broken leaf there, if its own was zapped meanwhile, and then
//!   another was mapped and broken. So the metadata of a table contain the flush number for the last leaf that was
//!   broken in it. A thread mends nothing in the table before a flush of its own with at least that number. It repeats
//!   its flush at most once for each other leaf that is broken in the same table. Only here does a thread wait: a fault
//!   that finds a broken leaf waits, outside its reader section, until the leaf is mended. The mending thread flushes,
//!   and never waits for a fault.
//!
//! * *Collapses.* When a huge leaf replaces a table, the entry becomes a broken leaf in the same way. The thread that
//!   stored the leaf detaches the table, flushes, and then makes the leaf valid ([`ByGfn::restore`]). A fault waits. An
//!   invalidation that comes meanwhile finds the leaf, and zaps it.
//!
//! On formats that do not require break-before-make, `cleared` is 0 and names no flush, and all checks are compiled
//! away.
//!
//! [`Entry::Empty`]: crate::format::Entry::Empty
//! [`Entry::Broken`]: crate::format::Entry::Broken

mod age;
mod at;
mod build;
mod by_gfn;
mod by_index;
mod change;
mod clear;
mod detached;
mod flushes;
mod frames;
mod lookup;
mod map;
mod new_table;
mod path;
mod protect;
mod track;
mod walk;

use alloc::sync::Arc;
use core::marker::PhantomData;
use core::slice;

use crate::addr::{Gfn, Pfn};
use crate::format::Format;
use crate::frame::TableMeta;
use crate::heap::{OutOfMemory, Shared};
use crate::platform::{Platform, WaitFor};
use crate::sync::atomic::AtomicU64;
use crate::sync::spin::RawSpinGuard;

pub(crate) use at::{At, Kept, Listed};
pub(crate) use build::TableBuilder;
pub(crate) use by_gfn::{Aged, ByGfn, Collapse, Next, RUN, Show, Split, Visit};
pub(crate) use by_index::{Found, Installed, Key, Retry, Root};
pub(crate) use detached::{Detached, Freed, tell_zapped};
pub(crate) use flushes::{FlushTicket, Flushed, Flushes, overlap};
pub(crate) use frames::TableFrames;
pub(crate) use lookup::{Cursor, Reached, lookup_in, lookup_page};
pub(crate) use map::{OnLeaf, Run, widen};
pub(crate) use new_table::{NewFrame, NewTable};
pub(crate) use path::{FrameCache, LeafCounts, Path};
pub(crate) use walk::Walk;

/// A tree of tables in format `F`, from guest frames to host frames.
pub(crate) struct Tree<P: Platform, F: Format> {
    platform: Arc<P>,
    frames: Shared<TableFrames>,
    root: Pfn,
    /// The flushes of the VM, shared by all its trees.
    flushes: Shared<Flushes>,
    format: PhantomData<F>,
}

impl<P: Platform, F: Format> Tree<P, F> {
    /// Makes an empty tree in frames of `frames`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the platform has no frames for the root.
    pub(crate) fn new(
        platform: Arc<P>,
        frames: Shared<TableFrames>,
        flushes: Shared<Flushes>,
    ) -> Result<Self, OutOfMemory> {
        let clear = |frame| NewTable::<P, F>::new(&*platform, frame).clear();
        let root = frames.allocate_root(&*platform, F::ROOT_TABLES, clear)?;
        Ok(Tree {
            platform,
            frames,
            root,
            flushes,
            format: PhantomData,
        })
    }

    /// Iterates over the frames of the root tables.
    fn roots(&self) -> impl Iterator<Item = Pfn> + use<P, F> {
        let root = self.root;
        (0..F::ROOT_TABLES as u64).map(move |i| root.add(i))
    }

    /// Returns the root from which all walks of this tree start.
    pub(crate) fn context(&self) -> Root {
        Root::new(self.root, F::TOP)
    }

    /// Returns the key of a walk for `gfn`.
    pub(crate) fn key(&self, gfn: Gfn) -> Key {
        Key {
            context: self.context(),
            index: gfn.into(),
        }
    }

    #[inline(always)]
    pub(crate) fn platform(&self) -> &P {
        &self.platform
    }

    #[inline]
    fn table(&self, frame: Pfn) -> Table<'_, P, F> {
        Table::new(&self.platform, frame)
    }
}

impl<P: Platform, F: Format> Drop for Tree<P, F> {
    fn drop(&mut self) {
        let mut all = Detached::none();
        for root in self.roots() {
            all.push(&self.table(root), F::TOP);
        }
        // SAFETY: `&mut self`: no software walker has a reference to the tree; and the owner of a VM stops
        // its CPUs before it drops the VM.
        let _ = unsafe { all.free::<P, F>(&*self.platform, &self.frames) };
    }
}

/// An allocated table frame, one page of the granule of `F`.
pub(crate) struct Table<'a, P: Platform, F: Format> {
    platform: &'a P,
    frame: Pfn,
    format: PhantomData<F>,
}

impl<'a, P: Platform, F: Format> Table<'a, P, F> {
    #[inline(always)]
    fn new(platform: &'a P, frame: Pfn) -> Self {
        Table {
            platform,
            frame,
            format: PhantomData,
        }
    }

    /// Returns the table in `frame`, for the MMUs outside this module.
    ///
    /// # Safety
    /// - `platform` has allocated `frame` for a table, and does not free it while the result, or a reference that it
    ///   has returned, is used.
    pub(crate) unsafe fn at(platform: &'a P, frame: Pfn) -> Self {
        Table::new(platform, frame)
    }

    /// Returns the table's frame.
    pub(crate) fn frame(&self) -> Pfn {
        self.frame
    }

    #[inline]
    pub(crate) fn entries(&self) -> &'a [AtomicU64] {
        let first = self.platform.entries(self.frame).cast::<AtomicU64>();
        // SAFETY: an allocated frame has this number of entries, as `Platform`'s `# Safety` says. Frames in entries,
        // and `root`, are allocated; a detached frame stays allocated until no reader can have reached it.
        unsafe { slice::from_raw_parts(first.as_ptr(), F::GRANULE.entries()) }
    }

    #[inline]
    pub(crate) fn entry(&self, index: usize) -> &'a AtomicU64 {
        &self.entries()[index]
    }

    #[inline]
    pub(crate) fn meta(&self) -> &'a TableMeta {
        // SAFETY: the metadata of an allocated frame are valid until the frame is freed, as `Platform`'s `# Safety`
        // says.
        unsafe { self.platform.meta(self.frame).as_ref() }
    }

    /// Takes the lock of the table.
    #[inline]
    fn lock(&self) -> TableGuard<'a> {
        let meta = self.meta();
        let platform = self.platform;
        TableGuard {
            _held: meta.lock.lock(|round| platform.wait(round, WaitFor::Lock)),
            meta,
        }
    }
}

/// Proof that the lock of a table is held. Dropping it releases the lock.
struct TableGuard<'a> {
    meta: &'a TableMeta,
    _held: RawSpinGuard<'a>,
}

impl TableGuard<'_> {
    /// Adds `change`, which may be negative, to the table's number of leaves.
    fn count_leaves(&self, change: i16) {
        self.meta.count_leaves(change);
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod heap_platform;
#[cfg(all(test, not(loom)))]
mod tests;
