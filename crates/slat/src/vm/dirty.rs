//! The dirty log of a slot.
//!
//! # Write protection (the default)
//! A logged slot is mapped by 4 KiB leaves that start write-protected (but see *Reads*). The first write to a
//! page faults; under the lock of its table the leaf becomes writable and *then* the write is noted, in the
//! slot's bitmap or in the vCPU's ring. A harvest takes the bits, *then* protects the pages it found,
//! each under the same lock, then flushes. If the fault's section comes after the harvest's, its bit is
//! set after the harvest took the word, and stays for the next one; if before, the bit may be taken by
//! this harvest, and then the protection follows: no write is lost.
//!
//! # Reads (policy `dirty_log_reads`)
//! A read or fetch that finds no leaf installs one. As KVM does on x86, the leaf is writable if the host's page
//! is, and the page is noted as if it had been written: the write that often follows needs no fault of its
//! own, but the log names pages that were only read. As KVM does on AArch64 and RISC-V, or with the policy
//! off, the leaf is write-protected and the log names what was written. Both hold for bitmaps and rings, and for dirty bits,
//! where the leaf starts dirty.
//!
//! # Dirty bits (policy `dirty_log=dirty-bit`, where the walker sets them)
//! Leaves stay writable, and start clean. A harvest moves the bits from the leaves into the bitmap
//! first: it clears a leaf's bit, notes the page, and flushes before it answers, so that the next write
//! through any CPU's TLB sets the bit again.
//!
//! # Manual protection (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)
//! Getting the log changes nothing; [`Vm::clear_dirty_log`] clears and protects the pages it is told.
//! With *initially set* a new log names every page, and enabling it touches no leaf at all.

use crate::sync::atomic::Ordering::*;
use core::fmt;
use core::mem::replace;
use core::ops::Range;

use super::slot_op::SlotOp;
use super::{DirtyLog, LogKind, Space, Vm};
use crate::format::Format;
use crate::heap::Shared;
use crate::platform::Platform;
use crate::slots::SlotsChange;
use crate::table::OutOfMemory;

/// Why a dirty log cannot be had, or not be cleared. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyLogError {
    /// There is no such slot, or it was not created with
    /// [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags::LOG_DIRTY_PAGES).
    NotLogged(u32),
    /// Writes go to the vCPUs' rings: there is no bitmap.
    Rings,
    /// The bitmap has fewer than one bit per page; the number of words needed.
    BufferTooSmall(usize),
    /// `first` is no multiple of 64, or `pages` is none and does not end with the slot, or the range
    /// reaches out of it.
    BadRange,
}

impl DirtyLogError {
    /// The errno that KVM answers.
    pub fn errno(&self) -> i32 {
        const ENOENT: i32 = 2;
        const ENXIO: i32 = 6;
        const EFAULT: i32 = 14;
        const EINVAL: i32 = 22;
        match self {
            DirtyLogError::NotLogged(_) => ENOENT,
            DirtyLogError::Rings => ENXIO,
            DirtyLogError::BufferTooSmall(_) => EFAULT,
            DirtyLogError::BadRange => EINVAL,
        }
    }
}

impl fmt::Display for DirtyLogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DirtyLogError::NotLogged(slot) => write!(
                f,
                "dirty log of memslot {slot}: it does not log; set LOG_DIRTY_PAGES first"
            ),
            DirtyLogError::Rings => f.write_str(
                "dirty log: this VM logs to the rings of its vCPUs; collect and reset those",
            ),
            DirtyLogError::BufferTooSmall(words) => {
                write!(f, "dirty log: the bitmap needs {words} words of 64 pages")
            }
            DirtyLogError::BadRange => f.write_str(
                "clearing a dirty log: begin at a multiple of 64 pages, and end at one or with \
                 the slot",
            ),
        }
    }
}

impl core::error::Error for DirtyLogError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Manual protection: [`Vm::get_dirty_log`] only looks, [`Vm::clear_dirty_log`] protects. With
    /// `initially_set`, logs that begin from now on name every page.
    pub fn set_manual_dirty_log(&self, manual: bool, initially_set: bool) {
        self.log_mode.manual.store(manual, SeqCst);
        self.log_mode
            .initially_set
            .store(manual && initially_set, SeqCst);
    }

    /// Words of 64 pages that the dirty log of `slot` has.
    ///
    /// # Errors
    /// [`DirtyLogError::NotLogged`], [`DirtyLogError::Rings`].
    pub fn dirty_log_words(&self, space: usize, slot: u32) -> Result<usize, DirtyLogError> {
        let space = self
            .spaces
            .get(space)
            .ok_or(DirtyLogError::NotLogged(slot))?;
        let change = space.slots.change(self.turn_wait());
        bitmap_of(&change, slot).map(|log| log.bits.len())
    }

    /// Runs `then` with an operation on the log of slot `id`, which has a bitmap, and the number of its pages, when it
    /// is its turn.
    fn on_bitmap<R>(
        &self,
        space: usize,
        id: u32,
        then: impl FnOnce(SlotOp<'_, P, F>, &DirtyLog, u64) -> Result<R, DirtyLogError>,
    ) -> Result<R, DirtyLogError> {
        let space = self.spaces.get(space).ok_or(DirtyLogError::NotLogged(id))?;
        loop {
            let log = bitmap_of(&space.slots.change(self.turn_wait()), id)?;
            let _turn = log.turn.lock(self.turn_wait());
            let change = space.slots.change(self.turn_wait());
            let op = SlotOp::begin(self, space, change, id, Some(log.clone()));
            // `None`: while this waited, the slot began another log, or ended logging, or was deleted.
            if let Some(pages) = op.slot().map(|slot| slot.pages()) {
                return then(op, &log, pages);
            }
        }
    }

    /// Waits until the log of a slot, if it has one, has begun.
    pub(super) fn wait_for_begin(&self, change: SlotsChange<'_>, id: u32) {
        let log = change.by_id(id).and_then(|slot| slot.share_log());
        drop(change);
        if let Some(log) = log {
            drop(log.turn.lock(self.turn_wait()));
        }
    }

    /// Takes the dirty log of `slot` into `bitmap` (bit n is page n) and, unless protection is manual,
    /// clears it and protects the pages it names again: KVM_GET_DIRTY_LOG. Every write that came
    /// before this call is in it, or in a log taken before; every write after it will be in a later one. Slots may
    /// change meanwhile: if this one goes, or logs no more, the rest of the bitmap is what its log held.
    ///
    /// # Errors
    /// [`DirtyLogError`].
    pub fn get_dirty_log(
        &self,
        space: usize,
        slot: u32,
        bitmap: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        self.on_bitmap(space, slot, |mut op, log, pages| {
            if bitmap.len() < log.bits.len() {
                return Err(DirtyLogError::BufferTooSmall(log.bits.len()));
            }
            if log.kind() == LogKind::DirtyBits {
                op.harvest_dirty_bits(log, pages);
            }
            let manual = self.log_mode.manual.load(SeqCst);
            let protects = !manual && log.kind().protects();
            let mut taken = 0;
            let mut full = 0..0;
            for (i, (out, word)) in bitmap.iter_mut().zip(&log.bits).enumerate() {
                *out = match word.load(Acquire) {
                    0 => 0,
                    dirty if manual => dirty,
                    _ => word.swap(0, AcqRel),
                } & valid_bits(pages, i);
                op.look();
                if !manual {
                    taken |= *out;
                }
                if protects {
                    op.protect_word(&mut full, i as u64, *out);
                }
            }
            op.protect_words(full);
            // A page in the log whose leaf is gone may still be written through a translation that
            // somebody else took away and has not flushed yet.
            if taken != 0 {
                op.finish();
            }
            Ok(())
        })
    }

    /// Clears the pages that `bitmap` names, bit n for page `first + n`, and makes their next write be
    /// noted: KVM_CLEAR_DIRTY_LOG. Huge leaves in the range are split first (`eager_page_split`).
    ///
    /// # Errors
    /// [`DirtyLogError`].
    pub fn clear_dirty_log(
        &self,
        space: usize,
        slot: u32,
        first: u64,
        pages: u64,
        bitmap: &[u64],
    ) -> Result<(), DirtyLogError> {
        self.on_bitmap(space, slot, |mut op, log, all| {
            let end = first.checked_add(pages).filter(|end| *end <= all);
            let end = end.ok_or(DirtyLogError::BadRange)?;
            if !first.is_multiple_of(64) || !(end == all || pages.is_multiple_of(64)) {
                return Err(DirtyLogError::BadRange);
            }
            let words = pages.div_ceil(64) as usize;
            if bitmap.len() < words {
                return Err(DirtyLogError::BufferTooSmall(words));
            }
            op.split_eagerly(first..end);
            let mut taken = 0;
            let mut full = 0..0;
            let named = bitmap[..words].iter().zip(first as usize / 64..);
            for (clear, i) in named.filter(|(clear, _)| **clear != 0) {
                let clear = clear & valid_bits(all, i);
                let was = log.bits[i].fetch_and(!clear, AcqRel) & clear;
                op.look();
                op.protect_word(&mut full, i as u64, was);
                taken |= was;
            }
            op.protect_words(full);
            if taken != 0 {
                op.finish();
            }
            Ok(())
        })
    }

    /// The log of a slot that begins to log.
    pub(super) fn new_log(&self, pages: u64) -> Result<DirtyLog, OutOfMemory> {
        if self.log_mode.rings.load(SeqCst) {
            return Ok(DirtyLog::rings());
        }
        let kind = match F::SETS_DIRTY && self.policy.logs_by_dirty_bit() {
            true => LogKind::DirtyBits,
            false => LogKind::Bitmap,
        };
        DirtyLog::bitmap(kind, pages, self.log_mode.initially_set.load(SeqCst))
    }

    /// Begins logging in slot `id`, which was mapped before.
    pub(super) fn begin_logging(&self, space: &Space<P, F>, change: SlotsChange<'_>, id: u32) {
        let Some(log) = change.by_id(id).and_then(|slot| slot.share_log()) else {
            return;
        };
        // Nobody has found the log before the lock of `change` is released.
        let _turn = log.turn.lock(self.turn_wait());
        let mut op = SlotOp::begin(self, space, change, id, Some(log.clone()));
        let Some(pages) = op.slot().map(|slot| slot.pages()) else {
            return;
        };
        // It names all pages already: `clear_dirty_log` will split and protect, chunk by chunk. The log
        // itself tells: how later ones are to begin may have changed since it was made.
        if log.initially_set {
            return;
        }
        // In this order: a huge leaf is protected once, and the leaves it is split into are as it was.
        op.protect(0..pages, |_| true);
        op.split_eagerly(0..pages);
        op.finish();
    }

    /// Ends logging in slot `id`: tables in whose place a huge leaf could stand go, and the next fault brings it
    /// back. The small leaves that stay become writable by their next write fault.
    pub(super) fn end_logging(&self, space: &Space<P, F>, change: SlotsChange<'_>, id: u32) {
        let mut op = SlotOp::begin(self, space, change, id, None);
        op.collapse();
        op.finish();
    }
}

/// The log of slot `id`, which is a bitmap.
fn bitmap_of(change: &SlotsChange<'_>, id: u32) -> Result<Shared<DirtyLog>, DirtyLogError> {
    match change.by_id(id).and_then(|slot| slot.share_log()) {
        None => Err(DirtyLogError::NotLogged(id)),
        Some(log) if log.kind() == LogKind::Rings => Err(DirtyLogError::Rings),
        Some(log) => Ok(log),
    }
}

impl<P: Platform, F: Format> SlotOp<'_, P, F> {
    /// Makes the next write to the pages that `mask` names in a word of the bitmap be noted. Words that name all
    /// their pages are gathered in `full` as long as they stand side by side: one walk serves them. To be ended
    /// by [`Self::protect_words`].
    fn protect_word(&mut self, full: &mut Range<u64>, word: u64, mask: u64) {
        if mask == 0 {
            return;
        }
        if mask == u64::MAX && full.end == word {
            full.end += 1;
        } else if mask == u64::MAX {
            self.protect_words(replace(full, word..word + 1));
        } else {
            let first = word * 64;
            let last = first + 64 - u64::from(mask.leading_zeros());
            let pages = first + u64::from(mask.trailing_zeros())..last;
            self.protect(pages, |page| mask >> (page - first) & 1 != 0);
        }
    }

    /// The same for all pages of these words.
    fn protect_words(&mut self, words: Range<u64>) {
        self.protect(words.start * 64..words.end * 64, |_| true);
    }

    /// Moves the dirty bits of the leaves of all `pages` into the bitmap of `log`.
    fn harvest_dirty_bits(&mut self, log: &DirtyLog, pages: u64) {
        let mut found = 0;
        self.walk(0..pages, |tree, slot, walk, taken| {
            let note = |gfn, level| {
                log.mark_leaf(&slot.gfns(), gfn, level);
                found += 1;
            };
            tree.clear_dirty(walk, |_, _| true, note, &mut taken.changed);
        });
        self.counters().dirty_pages.add(found);
        self.flush();
    }
}

/// The bits of word `index` of the bitmap of a slot of `pages` that stand for pages.
fn valid_bits(pages: u64, index: usize) -> u64 {
    match pages - index as u64 * 64 {
        left @ ..64 => (1 << left) - 1,
        _ => u64::MAX,
    }
}
