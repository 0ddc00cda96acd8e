//! The operations on the dirty log of a memslot.
//!
//! # Write protection (the default)
//! A logged slot is mapped by 4 KiB leaves that are write-protected at first (but see *Reads*). The first write to a
//! page faults. Under the lock of the page's table, the fault makes the leaf writable and *then* records the page in
//! the slot's bitmap or in the vCPU's dirty ring. A harvest removes the marked pages from the bitmap, *then*
//! write-protects each of them under the same table lock, and then flushes TLBs. If the fault takes the lock after the
//! harvest, it sets its mark after the harvest has read the bitmap, and the mark stays for the next harvest. If the
//! fault takes the lock before the harvest, this harvest may remove the mark, and then it also protects the page. So no
//! write is lost.
//!
//! # Reads (policy `dirty_log_reads`)
//! A read or fetch that finds no leaf installs one. If the policy is on (the default on x86, as in KVM), the leaf is
//! writable if the host's page is, and the page is recorded as if it had been written. The write that often follows
//! then needs no fault, but the log also contains pages that were only read. If the policy is off (the default on
//! AArch64 and RISC-V, as in KVM), the leaf is write-protected, and the log contains only pages that were written. The
//! policy also applies to dirty rings; with logs by dirty bits, it decides whether the leaf starts dirty.
//!
//! With the policy `hierarchical_protect`, on formats that allow it, whole ranges are write-protected through the
//! entries that refer to their tables (`table::protect`): when logging starts, and when a harvest finds every page
//! below such an entry in the log.
//!
//! # Dirty bits (policy `dirty_log=dirty-bit`, where the walker sets them)
//! Leaves stay writable. A leaf that a read installs starts clean (but see *Reads*). A harvest first moves the dirty
//! bits from the leaves to the bitmap: it clears a leaf's bit and marks the page. It flushes TLBs before it returns, so
//! that the next write through any CPU's TLB sets the dirty bit again.
//!
//! # Buffers (policy `dirty_log=buffer`)
//! Like dirty bits, but the walker also writes the pages whose dirty bits it has set to a buffer: [`super::drain`].
//!
//! # A slot that is replaced during a harvest
//! The harvest works in steps, and holds the slot writers' lock during each step ([`super::slot_op`]). Between two
//! steps, a change may replace the slot by another slot with another log. Then the change copies the marks that the
//! harvest has not removed, and the harvest protects no more pages. Instead the change protects all pages that are not
//! marked in the new log, including pages whose marks the harvest has removed but which it has not protected. Until the
//! change has protected such a page, a write to the page is in no log. So the harvest does not return before that
//! ([`Vm::wait_for_successors`]), and its caller, who then copies the page, copies what was written.
//!
//! # When another vCPU's fault has not recorded its write yet
//! A fault first stores the leaf, and then records the page, both under one lock. In between, a second vCPU may write
//! through the leaf, and a harvest that begins after that write may end before the page is recorded. Then the write is
//! in the next log, as with KVM's `fast_page_fault`, which also marks the page after it has made the SPTE writable. The
//! write is not lost: what must be complete is the log that a client gets after all vCPUs have left the guest, and then
//! no fault is in progress.
//!
//! # Manual protection (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)
//! Getting the log protects no page; [`Vm::clear_dirty_log`] clears the marks of the pages that the client names, and
//! protects these pages. With KVM_DIRTY_LOG_INITIALLY_SET, every page of a new log is marked, and the start of logging
//! changes no leaf.

use crate::sync::atomic::Ordering::*;
use core::fmt;
use core::mem::replace;
use core::ops::Range;

use super::departure::LogChange;
use super::slot_op::SlotOp;
use super::{DirtyLog, LogKind, Space, Vm};
use crate::addr::Gfn;
use crate::dirty_log::ReaderId;
use crate::format::{Format, all_gfns};
use crate::heap::OutOfMemory;
use crate::heap::Shared;
use crate::platform::Platform;
use crate::policy::DirtyLogMethod;
use crate::slots::{OwnedSlot, SlotFlags, SlotsChange};

/// The reason why a dirty log could not be returned or cleared. The failed call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyLogError {
    /// There is no such address space, or no slot with this id, or the slot does not have the flag
    /// [`SlotFlags::LOG_DIRTY_PAGES`](crate::SlotFlags::LOG_DIRTY_PAGES).
    NotLogged(u32),
    /// The slot logs to the vCPUs' dirty rings, and the client has no bitmap.
    Rings,
    /// The buffer has fewer than one bit per page. Contains the number of 64-bit words needed.
    BufferTooSmall(usize),
    /// The range reaches beyond the slot; or `first` is not a multiple of 64; or `pages` is not a multiple of 64 and
    /// the range does not end with the slot.
    BadRange,
}

impl DirtyLogError {
    /// Returns the errno that KVM returns for this error.
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
                "dirty log of memslot {slot}: the memslot does not log; set LOG_DIRTY_PAGES first"
            ),
            DirtyLogError::Rings => f.write_str(
                "dirty log: this VM logs to the rings of its vCPUs; collect and reset those",
            ),
            DirtyLogError::BufferTooSmall(words) => {
                write!(f, "dirty log: the bitmap needs {words} words of 64 pages")
            }
            DirtyLogError::BadRange => f.write_str(
                "clearing a dirty log: the range must start at a multiple of 64 pages, be within the memslot, and end \
                 at a multiple of 64 pages or with the memslot",
            ),
        }
    }
}

impl core::error::Error for DirtyLogError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Sets whether dirty logs are protected manually (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2). If `manual`,
    /// [`Vm::get_dirty_log`] neither clears the log nor protects pages; only [`Vm::clear_dirty_log`] does. If also
    /// `initially_set` (KVM_DIRTY_LOG_INITIALLY_SET), logs that begin from now on have every page marked.
    pub fn set_manual_dirty_log(&self, manual: bool, initially_set: bool) {
        self.log_mode.manual.store(manual, SeqCst);
        self.log_mode
            .initially_set
            .store(manual && initially_set, SeqCst);
    }

    /// Returns the number of 64-bit words in the dirty log of `slot` in address space `space`, which has one bit per
    /// page.
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

    /// Waits for the lock `turn` of the log of slot `id`, which has a bitmap. Then runs `then` with an operation on the
    /// slot, the slot's log, and the slot's number of pages.
    fn on_bitmap<R>(
        &self,
        space: usize,
        id: u32,
        then: impl FnOnce(SlotOp<'_, P, F>, &DirtyLog, u64) -> Result<R, DirtyLogError>,
    ) -> Result<R, DirtyLogError> {
        let space = self.spaces.get(space).ok_or(DirtyLogError::NotLogged(id))?;
        loop {
            let log = bitmap_of(&space.slots.change(self.turn_wait()), id)?;
            if log.kind() == LogKind::Buffers {
                self.drain_walkers();
            }
            let turn = log.turn.lock(self.turn_wait());
            let change = space.slots.change(self.turn_wait());
            let op = SlotOp::begin(self, space, change, id, Some(log.clone()));
            // `None`: while this thread waited, the slot got another log or none, or was deleted. Then try again.
            if let Some((pages, gfns)) = op.slot().map(|slot| (slot.pages(), slot.gfns())) {
                let done = then(op, &log, pages);
                drop(turn);
                self.wait_for_successors(space, id, &log, gfns);
                return done;
            }
        }
    }

    /// Call after an operation on `log`, the log of slot `id`, which had the frames `gfns`. If a change has replaced
    /// the slot or its log during the operation, waits until that change has protected the pages that the operation did
    /// not reach.
    fn wait_for_successors(
        &self,
        space: &Space<P, F>,
        id: u32,
        log: &DirtyLog,
        mut gfns: Range<Gfn>,
    ) {
        while !gfns.is_empty() {
            let change = space.slots.change(self.turn_wait());
            if change.by_id(id).is_some_and(|slot| slot.logs_to(Some(log))) {
                return;
            }
            let mut next = None;
            change.set().in_gfns(&gfns, |slot| {
                next = Some((slot.id(), slot.gfns().end));
                false
            });
            let Some((id, end)) = next else {
                return;
            };
            self.wait_for_begin(change, id);
            gfns.start = end;
        }
    }

    /// If slot `id` logs, waits until the change that started its log has protected the slot's pages.
    pub(super) fn wait_for_begin(&self, change: SlotsChange<'_>, id: u32) {
        let log = change.by_id(id).and_then(|slot| slot.share_log());
        drop(change);
        if let Some(log) = log {
            drop(log.turn.lock(self.turn_wait()));
        }
    }

    /// Copies the dirty log of `slot` in address space `space` to `bitmap`: bit n of word m is page 64m + n of the
    /// slot. Unless protection is manual ([`Vm::set_manual_dirty_log`]), clears the log and protects its pages:
    /// KVM_GET_DIRTY_LOG.
    ///
    /// Every write before the call is in this log or in a log that was returned before. Every write after the call is
    /// in a later log. (If another vCPU is still in the fault that has made a page writable, its write is in the next
    /// log.) Slots may change during the call. If this slot is deleted or ends logging, its whole log is still
    /// returned. If other slots replace this slot, the call returns only when their dirty logging has started.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing was changed.
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
            let protects = !manual && log.kind() != LogKind::DirtyBits;
            let mut cleared = 0;
            let mut full = 0..0;
            for (i, (out, word)) in bitmap.iter_mut().zip(&log.bits).enumerate() {
                let valid = valid_bits(pages, i);
                *out = match word.load(Acquire) {
                    0 => 0,
                    dirty if manual => dirty,
                    _ => {
                        let taken = word.swap(0, AcqRel);
                        log.hand_on(i, taken, ReaderId::CLIENT);
                        taken
                    }
                } & valid;
                op.look();
                if !manual {
                    cleared |= *out;
                }
                if protects {
                    op.protect_word(&mut full, i as u64, *out, valid);
                }
            }
            op.protect_words(full);
            op.add_pending(log, bitmap, pages, manual);
            // Flush even if a page has no leaf: the guest may still write to it through a translation that another
            // thread has zapped and not flushed yet.
            if cleared != 0 {
                op.finish();
            }
            Ok(())
        })
    }

    /// Clears the marks of pages in the dirty log of `slot`, in address space `space`, and protects these pages, so
    /// that the next write to each is logged: KVM_CLEAR_DIRTY_LOG. The pages are those of the `pages` pages from page
    /// `first` on whose bit in `bitmap` is set: bit n of word m is page `first` + 64m + n. With the policy
    /// `eager_page_split`, first splits the huge leaves in the range.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing was changed.
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
            let mut cleared = 0;
            let mut full = 0..0;
            let named = bitmap[..words].iter().zip(first as usize / 64..);
            for (clear, i) in named.filter(|(clear, _)| **clear != 0) {
                let valid = valid_bits(all, i);
                let clear = clear & valid;
                let was = log.bits[i].fetch_and(!clear, AcqRel) & clear;
                log.hand_on(i, was, ReaderId::CLIENT);
                if let Some(client) = log.reader(ReaderId::CLIENT) {
                    client.forget(i, clear);
                }
                op.look();
                op.protect_word(&mut full, i as u64, was, valid);
                cleared |= was;
            }
            op.protect_words(full);
            if cleared != 0 {
                op.finish();
            }
            Ok(())
        })
    }

    /// Marks the frames `gfns` in the dirty logs, because the client, or a device that it emulates, has written to
    /// them: KVM's `mark_page_dirty`. Call after the write. Ignores frames without a memslot, or in a memslot that does
    /// not log.
    ///
    /// # Errors
    /// [`DirtyLogError::Rings`]: the VM logs to its vCPUs' dirty rings, and no vCPU has made this write. The pages were
    /// marked only for log readers ([`Vm::log_reader`]).
    pub fn mark_dirty(&self, space: usize, gfns: Range<Gfn>) -> Result<(), DirtyLogError> {
        // The number of pages that are marked in one reader section.
        const SOME: u64 = 1 << 14;
        let Some(space) = self.spaces.get(space) else {
            return Ok(());
        };
        let end = gfns.end.min(all_gfns::<F>().end);
        let mut at = gfns.start;
        let mut rings = false;
        while at < end {
            let some = at..at.add(SOME).min(end);
            let section = self.section();
            let slots = space.slots.current(section.inside());
            slots.in_gfns(&some, |slot| {
                let Some(log) = slot.log() else {
                    return true;
                };
                rings |= log.kind() == LogKind::Rings;
                if log.has_bitmap() {
                    log.mark_gfns(&slot.gfns(), &some, |_| true);
                }
                true
            });
            at = some.end;
        }
        match rings {
            true => Err(DirtyLogError::Rings),
            false => Ok(()),
        }
    }

    /// Whether `gfn` is marked in the dirty log of its memslot, so that [`Vm::get_dirty_log`] would return it. Neither
    /// clears the log nor protects pages. Also returns `false` if no slot with a bitmap for the client contains the
    /// frame. With [`DirtyLogMethod::DirtyBit`] and [`DirtyLogMethod::Buffer`], a page that a vCPU has written is
    /// marked only by the next harvest.
    pub fn is_marked_dirty(&self, space: usize, gfn: Gfn) -> bool {
        let Some(space) = self.spaces.get(space) else {
            return false;
        };
        let section = self.section();
        let Some(slot) = space.slots.current(section.inside()).find(gfn) else {
            return false;
        };
        let is_clients = slot.flags().has(SlotFlags::LOG_DIRTY_PAGES);
        let log = slot
            .log()
            .filter(|log| is_clients && log.kind() != LogKind::Rings);
        log.is_some_and(|log| log.is_marked_for_client(gfn.0 - slot.base().0))
    }

    /// Makes the dirty log for a slot of `pages` pages whose logging starts. `is_clients` tells that the client will
    /// read the log; otherwise only [`super::LogReader`]s will.
    pub(super) fn new_log(&self, pages: u64, is_clients: bool) -> Result<DirtyLog, OutOfMemory> {
        if is_clients && self.log_mode.rings.load(SeqCst) {
            return match self.log_mode.readers.load(SeqCst) {
                true => DirtyLog::bitmap(LogKind::Rings, pages, false),
                false => Ok(DirtyLog::rings()),
            };
        }
        let kind = match self.policy.dirty_log() {
            DirtyLogMethod::DirtyBit if F::SETS_DIRTY => LogKind::DirtyBits,
            DirtyLogMethod::Buffer if self.may_use_walker_buffers() => LogKind::Buffers,
            _ => LogKind::Bitmap,
        };
        let initially_set = is_clients && self.log_mode.initially_set.load(SeqCst);
        DirtyLog::bitmap(kind, pages, initially_set)
    }

    /// Makes the new log `log` of slot `id` record the next write to each page of `pages` (with
    /// [`LogChange::Continues`], only to pages that are not marked in the log). Call after publishing the slot with
    /// this log. The caller holds the lock `turn` of the log, and `change` holds the slot writers' lock. Does nothing
    /// if another change has replaced the log since: that change does this work.
    pub(super) fn begin_logging(
        &self,
        space: &Space<P, F>,
        change: SlotsChange<'_>,
        id: u32,
        log: &Shared<DirtyLog>,
        pages: Range<u64>,
        what: LogChange,
    ) {
        let mut op = SlotOp::begin(self, space, change, id, Some(log.clone()));
        if op.slot().is_none() {
            return;
        }
        match what {
            LogChange::Continues => op.protect(pages, |page| !log.is_marked(page)),
            // Split first: `protect` write-protects the leaves that are still huge then, because a walker would record
            // only one page of a huge leaf.
            LogChange::Begins if log.kind() == LogKind::Buffers => {
                op.split_eagerly(pages.clone());
                op.protect(pages, |_| true);
            }
            _ => {
                // Protect first: one entry is protected per huge leaf, and the pieces of the split inherit the
                // protection.
                op.protect_all(pages.clone());
                op.split_eagerly(pages);
            }
        }
        op.finish();
    }

    /// Call after logging of slot `id` has ended. Replaces tables by huge leaves ([`super::recover`]). First removes
    /// the protection from write-protected entries that refer to tables, so that the leaves below are writable again.
    /// Write-protected small leaves that are not replaced become writable at the next write fault.
    pub(super) fn end_logging(&self, space: &Space<P, F>, change: SlotsChange<'_>, id: u32) {
        let mut op = SlotOp::begin(self, space, change, id, None);
        if let Some(pages) = op.slot().map(|slot| slot.pages()) {
            op.lift_protection(0..pages);
        }
        op.recover_huge_pages();
        op.finish();
    }
}

/// Returns the log of slot `id`, which has a bitmap that the VMM may read.
///
/// # Errors
/// [`DirtyLogError::NotLogged`], [`DirtyLogError::Rings`].
fn bitmap_of(change: &SlotsChange<'_>, id: u32) -> Result<Shared<DirtyLog>, DirtyLogError> {
    let is_clients = |slot: &&OwnedSlot| slot.flags().has(SlotFlags::LOG_DIRTY_PAGES);
    let slot = change.by_id(id).filter(is_clients);
    match slot.and_then(|slot| slot.share_log()) {
        None => Err(DirtyLogError::NotLogged(id)),
        Some(log) if log.kind() == LogKind::Rings => Err(DirtyLogError::Rings),
        Some(log) => Ok(log),
    }
}

impl<P: Platform, F: Format> SlotOp<'_, P, F> {
    /// Adds to `bitmap` the pages of `log` that are pending for the client because other readers have harvested them.
    /// (These readers have already protected the pages.) Unless `kept`, the pages are then not pending any more.
    /// `pages` is the number of pages of the slot.
    fn add_pending(&mut self, log: &DirtyLog, bitmap: &mut [u64], pages: u64, kept: bool) {
        let Some(client) = log.reader(ReaderId::CLIENT) else {
            return;
        };
        for (i, out) in bitmap.iter_mut().take(log.bits.len()).enumerate() {
            *out |= client.pending(i) & valid_bits(pages, i);
            if !kept {
                client.forget(i, u64::MAX);
            }
            self.look();
        }
    }

    /// Makes the log record the next write to the pages of bitmap word `word` whose bits are set in `mask`. `valid` has
    /// the bits of all pages of the slot in the word. If all valid bits of adjacent words are set, collects these words
    /// in `full`, so that one walk protects them. So at the end the caller must call [`Self::protect_words`] with
    /// `full`.
    pub(super) fn protect_word(&mut self, full: &mut Range<u64>, word: u64, mask: u64, valid: u64) {
        if mask == 0 {
            return;
        }
        if mask == valid && full.end == word {
            full.end += 1;
        } else if mask == valid {
            self.protect_words(replace(full, word..word + 1));
        } else {
            let first = word * 64;
            let last = first + 64 - u64::from(mask.leading_zeros());
            let pages = first + u64::from(mask.trailing_zeros())..last;
            self.protect(pages, |page| mask >> (page - first) & 1 != 0);
        }
    }

    /// Makes the log record the next write to every page of the bitmap words `words`.
    pub(super) fn protect_words(&mut self, words: Range<u64>) {
        self.protect_all(words.start * 64..words.end * 64);
    }

    /// Moves the dirty bits of the leaves of all `pages` to the bitmap of `log`, and flushes.
    pub(super) fn harvest_dirty_bits(&mut self, log: &DirtyLog, pages: u64) {
        let mut found = 0;
        self.walk(0..pages, |step, slot, walk| {
            let note = |gfn, level| {
                log.mark_leaf::<F>(&slot.gfns(), gfn, level);
                found += 1;
            };
            step.clear_dirty(walk, |_, _| true, note);
        });
        self.counters().dirty_pages.add(found);
        self.flush();
    }
}

/// Returns a mask of the bits of word `index` that represent pages, in the bitmap of a slot of `pages` pages.
pub(super) fn valid_bits(pages: u64, index: usize) -> u64 {
    match pages - index as u64 * 64 {
        left @ ..64 => (1 << left) - 1,
        _ => u64::MAX,
    }
}
