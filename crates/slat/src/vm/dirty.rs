//! The dirty log of a slot: one bit per page, set by the fault that makes the page writable.
//!
//! A logged slot is mapped by 4 KiB leaves that start write-protected. The first write to a page
//! faults; under the lock of its table the leaf becomes writable and *then* the bit is set. A harvest
//! takes the bits, *then* protects the pages it found, each under the same lock, then flushes. If the
//! fault's section comes after the harvest's, its bit is set after the harvest took the word, and
//! stays for the next one; if before, the bit may be taken by this harvest, and then the protection
//! follows: no write is lost.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::Vm;
use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::platform::Platform;
use crate::slots::Memslot;
use crate::table::{FrameCache, LeafCounts, OutOfMemory, Zapped};

/// Bits of the pages of one slot.
pub(crate) struct DirtyLog(Vec<AtomicU64>);

impl DirtyLog {
    pub(crate) fn new(pages: u64) -> Result<Self, OutOfMemory> {
        let words = pages.div_ceil(64) as usize;
        let mut log = Vec::new();
        log.try_reserve_exact(words).map_err(|_| OutOfMemory)?;
        log.resize_with(words, || AtomicU64::new(0));
        Ok(DirtyLog(log))
    }

    pub(crate) fn mark(&self, page: u64) {
        let word = &self.0[page as usize / 64];
        let bit = 1 << (page % 64);
        // Re-dirtying is common, and a load is cheaper than a locked instruction.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Release);
        }
    }

    pub(crate) fn is_marked(&self, page: u64) -> bool {
        self.0[page as usize / 64].load(Acquire) >> (page % 64) & 1 != 0
    }
}

/// Why a dirty log cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyLogError {
    /// There is no such slot, or it was not created with
    /// [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags::LOG_DIRTY_PAGES).
    NotLogged(u32),
    /// The buffer has fewer than one bit per page of the slot; the number of words needed.
    BufferTooSmall(usize),
}

impl DirtyLogError {
    /// The errno that KVM answers.
    pub fn errno(&self) -> i32 {
        const ENOENT: i32 = 2;
        const EFAULT: i32 = 14;
        match self {
            DirtyLogError::NotLogged(_) => ENOENT,
            DirtyLogError::BufferTooSmall(_) => EFAULT,
        }
    }
}

impl fmt::Display for DirtyLogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DirtyLogError::NotLogged(slot) => write!(
                f,
                "getting the dirty log of memslot {slot}: it does not log; set LOG_DIRTY_PAGES first"
            ),
            DirtyLogError::BufferTooSmall(words) => write!(
                f,
                "getting a dirty log: the bitmap needs {words} words of 64 pages"
            ),
        }
    }
}

impl core::error::Error for DirtyLogError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Words of 64 pages that the dirty log of `slot` has.
    ///
    /// # Errors
    /// [`DirtyLogError::NotLogged`].
    pub fn dirty_log_words(&self, space: usize, slot: u32) -> Result<usize, DirtyLogError> {
        let not_logged = DirtyLogError::NotLogged(slot);
        let space = self.spaces.get(space).ok_or(not_logged)?;
        let change = space.slots.change(self.lock_wait());
        let log = change.by_id(slot).and_then(|s| s.dirty.as_ref());
        log.map(|log| log.0.len()).ok_or(not_logged)
    }

    /// Takes the dirty log of `slot` into `bitmap` (bit n is page n) and protects the pages it names
    /// again: KVM_GET_DIRTY_LOG. Every write that came before this call is in it, or in a log taken
    /// before; every write after it will be in a later one.
    ///
    /// # Errors
    /// [`DirtyLogError`]; the log is as it was.
    pub fn get_dirty_log(
        &self,
        space: usize,
        slot: u32,
        bitmap: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        let not_logged = DirtyLogError::NotLogged(slot);
        let space = self.spaces.get(space).ok_or(not_logged)?;
        let change = space.slots.change(self.lock_wait());
        let slot = change.by_id(slot).ok_or(not_logged)?;
        let log = slot.dirty.as_ref().ok_or(not_logged)?;
        if bitmap.len() < log.0.len() {
            return Err(DirtyLogError::BufferTooSmall(log.0.len()));
        }
        let section = self.section();
        self.begin_zap();
        let mut protected = 0;
        let mut taken = 0;
        for (i, (out, word)) in bitmap.iter_mut().zip(&log.0).enumerate() {
            *out = if word.load(Relaxed) == 0 {
                0
            } else {
                word.swap(0, AcqRel)
            };
            taken |= *out;
            protected += self.protect_pages(&space.tree, slot.base.add(i as u64 * 64), *out);
        }
        if protected > 0 {
            self.owe_flush();
        }
        // A page in the log whose leaf is gone may still be written through a translation that
        // somebody else took away and has not flushed yet.
        let range = (taken != 0).then(|| slot.gfns());
        self.finish_zap(space, range, Zapped::nothing(), &section);
        Ok(())
    }

    /// Write-protects the pages `mask` names, counted from `first`.
    fn protect_pages(&self, tree: &crate::table::Tree<P, F>, first: Gfn, mask: u64) -> u64 {
        if mask == 0 {
            return 0;
        }
        let range =
            first.add(mask.trailing_zeros() as u64)..first.add(64 - mask.leading_zeros() as u64);
        tree.write_protect(range, |gfn, level| {
            level > Level::PAGE || mask >> (gfn.0 - first.0) & 1 != 0
        })
    }

    /// Begins logging: every page of the slot faults on its next write. Huge leaves are split first
    /// (policy `eager_page_split`), as far as there is memory; the write fault splits the others.
    pub(super) fn protect_slot(&self, space: usize, range: Range<Gfn>) {
        let space = &self.spaces[space];
        let section = self.section();
        if self.policy.eager_page_split() {
            let mut frames = FrameCache::default();
            let mut splits = LeafCounts::default();
            let _ = space.tree.split(range.clone(), &mut frames, &mut splits);
            frames.release(&*self.platform);
            section.counters().leaves_split(&splits);
        }
        self.begin_zap();
        if space.tree.write_protect(range.clone(), |_, _| true) > 0 {
            self.owe_flush();
        }
        self.finish_zap(space, Some(range), Zapped::nothing(), &section);
    }

    /// Ends logging: tables that hold what a huge leaf could hold go, and the next fault brings the
    /// huge leaf back. The small leaves that stay become writable by their next write fault.
    pub(super) fn recover_huge_pages(&self, space: usize, slot: &Memslot) {
        let space = &self.spaces[space];
        let section = self.section();
        self.begin_zap();
        let mut zapped = Zapped::nothing();
        let gfns = slot.gfns();
        space
            .tree
            .zap_collapsible(gfns.clone(), &mut zapped, |gfn, level| {
                self.platform
                    .resolve_resident(slot.hva(gfn))
                    .is_some_and(|host| {
                        self.fitting_level(&gfns, gfn, host.pfn, host.level) >= level
                    })
            });
        self.finish_zap(space, Some(gfns.clone()), zapped, &section);
    }
}
