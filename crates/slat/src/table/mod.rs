//! The radix tree of page tables, in any format.
//!
//! # Who may change what
//! * Every table has one lock, in its [`TableMeta`]. **Software changes an entry only under the lock of the table that
//!   contains it**, by one atomic store (or read-modify-write, if hardware may set the accessed or dirty bit at the
//!   same time). A range operation takes the lock once for all entries of the table, and a fault takes it once for its
//!   install. There are three exceptions: a page walker sets accessed and dirty bits without the lock, [`age`] clears
//!   accessed bits without it, and [`protect`] gives an entry that refers to a table the right to write under the lock
//!   of *the table to which the entry refers*.
//! * A thread that holds a table's lock takes no other table's lock, does not allocate, and does not wait. A thread
//!   that takes a table's lock may hold the lock of shadow pages ([`crate::shadow`]), but no thread takes that lock
//!   while it holds a table's lock.
//! * Walkers, software and hardware, take no lock. They see each entry either as it was before a change or as it is
//!   after it. A new table is filled first, and then published by a `Release` store of the entry that refers to it; a
//!   walker loads entries with `Acquire`, so it also sees the new table's entries.
//! * Walkers that have reached a table may still read it after it was removed from the tree ([`Detached`]). It is freed
//!   only after every reader has passed a quiescent point ([`crate::sync::quiesce`]) and after the flush. A fault in
//!   progress may still install a leaf into it: no new walker can reach that leaf, and the vCPU of the fault passes a
//!   quiescent point before the table is freed. Only range operations remove leaves and tables: a fault that finds a
//!   conflicting entry starts a range operation to zap it.
//! * A fault checks *under the lock of the table that receives the leaf* whether its look-ups (slot, host page) are
//!   still current (`valid` in [`Tree::map`]). An invalidation first makes this check fail, and then walks over its
//!   range and takes the lock of every table on the way, even of a table that looks empty. If the fault takes the lock
//!   first, the walk finds the leaf. If the walk takes it first, the fault finds that its look-ups are stale. The same
//!   argument applies to a new table that is filled with leaves before it is installed ([`Tree::map_absent`]); there
//!   the lock is that of the table that refers to the new table.
//!
//! # Break-before-make
//! On formats that require it ([`Format::BREAK_BEFORE_MAKE`]), no valid entry may be installed while a TLB may cache a
//! *conflicting* entry for the same addresses: with another frame, another size, or another memory type. The same leaf,
//! or the same leaf with more rights, does not conflict. So every entry that is cleared, for whatever reason, becomes
//! an invalid entry that *names its flush* ([`Format::cleared`]): the number of the first flush that begins after the
//! change ([`flushes`]). A thread that installs something (a leaf, a table, a run of leaves, an MMIO entry) first reads
//! the entry under the lock of the table. If the flush that the entry names is not due any more, the entry counts as
//! empty; otherwise the thread must not change it. For all other purposes a cleared entry is [`Entry::Empty`]: walkers
//! fault on it, and range operations skip it. It keeps the number until it is replaced.
//!
//! * *When a flush is not due any more.* The operation that clears an entry has a ticket from before its first change
//!   until its flush is done. So if a thread that holds the lock of the table finds no ticket that covers the entry's
//!   frames, the flush has been done. Tickets that cover other frames do not matter, and neither do tickets that were
//!   taken after the flush that the entry names began: their operations cannot have cleared the entry.
//! * *What may be cached below a cleared entry.* A walker that has read a removed table has reached it through the
//!   entry that now names the flush. Nothing can be installed in this entry before the flush, so no conflicting entry
//!   can be installed above, at, or below it. A fault in progress that installs a leaf into the removed table is in a
//!   reader section, and the flush waits for the end of that section before it flushes the hardware.
//! * *Why the number is read after the change.* A flush voids the translations of entries that were cleared before the
//!   flush began. If the number were read before the entry is cleared, a flush could begin in between and seem to cover
//!   the entry. A walk clears many entries under one lock, and stores the same number in all of them before it releases
//!   the lock ([`clear::LockedTable`]). Until then they contain the number 0, which no other holder of the lock can
//!   see.
//! * *No thread waits for another thread's flush.* A fault that finds an entry whose flush is due
//!   ([`Retry::Unflushed`]) leaves its reader section, holds no lock, flushes the frames of this entry itself, and
//!   remembers its flush ([`Flushed`]). (Like every flush, this one waits until readers have passed a quiescent point,
//!   but these readers do not wait for the flush.) Then the fault returns [`crate::Stop::Retry`] and does not count as
//!   fixed. For its vCPU the flush of this entry is not due any more. Only if the same entry is cleared again does the
//!   fault need another flush. Installs that only add absent entries (prefetch, MMIO entries) give up instead of
//!   flushing.
//! * *No flush is forgotten.* No memory is allocated between a clear and its flush, so the flush cannot fail for lack
//!   of memory. A tree is dropped only when no walker uses it. Flush numbers belong to one VM: a frame that another VM
//!   has used is overwritten before it becomes a table, so no entry contains another VM's number.
//! * *Splits.* A leaf that is split is not cleared. It becomes [`Entry::Broken`], which keeps the leaf, so that
//!   invalidations find it. The thread that *broke* the leaf flushes, and then *mends* it: it installs the pieces
//!   ([`ByGfn::mend`]). But meanwhile the leaf may have been zapped, and another leaf may have been mapped and broken
//!   in the same entry. So the metadata of each table contain the number of the flush that the last leaf broken in it
//!   needs, and a thread mends a leaf in the table only after its own flush with at least this number. It repeats its
//!   flush at most once for each other leaf that is broken in the same table. This is the only case in which a thread
//!   waits: a fault that finds a broken leaf waits, outside its reader section, until the leaf is mended. The thread
//!   that mends it flushes, and never waits for a fault.
//!
//! * *Collapses.* When a huge leaf replaces a table, the entry becomes a broken leaf in the same way. The thread that
//!   stored the leaf detaches the table, flushes, and then makes the leaf valid ([`ByGfn::restore`]). A fault that
//!   finds the broken leaf waits. An invalidation that finds the broken leaf zaps it.
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
    /// Makes an empty tree whose tables' frames come from `frames`.
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

    /// Returns the root at which all walks of this tree start.
    pub(crate) fn context(&self) -> Root {
        Root::new(self.root, F::TOP)
    }

    /// Returns the key of a walk to `gfn`: the root, and the index.
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
        // SAFETY: `&mut self` shows that no software walker has a reference to the tree, and the owner of a VM stops
        // its CPUs before it drops the VM.
        let _ = unsafe { all.free::<P, F>(&*self.platform, &self.frames) };
    }
}

/// A page table in an allocated frame, which has the size of the granule of `F`.
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

    /// Returns the table in frame `frame`, for the MMUs outside this module.
    ///
    /// # Safety
    /// - `platform` has allocated `frame` for a table, and does not free it as long as the result, or a reference
    ///   obtained from it, is used.
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
        // SAFETY: an allocated frame has this number of entries, as `Platform`'s `# Safety` says. The frames of roots,
        // and those to which entries refer, are allocated; the frame of a detached table stays allocated until no
        // reader can use it any more.
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
