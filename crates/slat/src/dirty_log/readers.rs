//! For each reader of a dirty log: the marks that the reader has not seen yet.
//!
//! A write is marked once, in the log's own bitmap, whatever the number of readers. A reader that harvests the log
//! removes the marks from that bitmap, and adds each of them to the *pending* marks of every other reader. So a write
//! costs the same as with one reader. A harvest costs a few more instructions per other reader for each bitmap word (64
//! pages) that has a mark. A reader's *epoch* contains the pages that the reader has harvested and is working on. They
//! are not pending, but become pending again if the epoch is aborted.
//!
//! KVM's bitmap, which the client reads by KVM_GET_DIRTY_LOG, is one of these readers ([`ReaderId::CLIENT`]). The
//! client has no epochs, because its reads cannot be aborted. A log that has no other reader has no [`ReaderMarks`] at
//! all: then all marks of the log's bitmap are the client's.
//!
//! # Who changes what
//! The log's list of [`ReaderMarks`] only grows. Each element has an owner, or is free for the next reader. The slot
//! writers' lock of the log's address space protects owners and bitmaps. A harvest holds this lock from when it takes a
//! word of the log's bitmap until it has added the word's marks to all other readers' pending marks. So a change that
//! copies the marks of a log to another ([`DirtyLog::copy_marks`]) finds each mark either in the log's own bitmap or
//! with each reader. A harvest makes a mark pending for the other readers *before* it clears the mark in the log's
//! bitmap. So [`DirtyLog::is_marked_for_client`], which holds no lock, finds the mark in the log's bitmap or in the
//! client's pending marks.

use alloc::vec::Vec;

use super::{DirtyLog, bitmap, copy_bits};
use crate::heap::{self, OutOfMemory};
use crate::sync::OnceBox;
use crate::sync::atomic::{AtomicU64, Ordering::*};

/// Identifies a reader of the dirty logs of a VM. No two readers of a VM have the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReaderId(u64);

impl ReaderId {
    /// No reader: a [`ReaderMarks`] with this owner is free for the next reader.
    const NONE: ReaderId = ReaderId(0);
    /// The VMM, which reads KVM's bitmap.
    pub(crate) const CLIENT: ReaderId = ReaderId(1);

    /// Returns the id for the next reader that is made.
    pub(crate) fn next(self) -> Self {
        ReaderId(self.0 + 1)
    }
}

/// Two bitmaps for one reader of a log: the marked pages that the reader has not seen, and those that it is working on.
pub(crate) struct ReaderMarks {
    owner: AtomicU64,
    /// The pages that other readers have harvested since this reader harvested last.
    pending: Vec<AtomicU64>,
    /// The pages of the reader's epoch. Empty for the VMM, which has no epochs.
    epoch: Vec<AtomicU64>,
    next: OnceBox<ReaderMarks>,
}

impl ReaderMarks {
    /// Makes marks for the reader `owner` of a log whose bitmap has `words` words.
    fn new(owner: ReaderId, words: usize) -> Result<Self, OutOfMemory> {
        let epoch_words = if owner == ReaderId::CLIENT { 0 } else { words };
        Ok(ReaderMarks {
            owner: AtomicU64::new(owner.0),
            pending: bitmap(words, false)?,
            epoch: bitmap(epoch_words, false)?,
            next: OnceBox::new(),
        })
    }

    pub(crate) fn owner(&self) -> ReaderId {
        ReaderId(self.owner.load(Relaxed))
    }

    /// Makes all pages of the log pending (not seen yet by the reader) if `all`, otherwise none.
    pub(crate) fn fill_pending(&self, all: bool) {
        let word = if all { u64::MAX } else { 0 };
        self.pending.iter().for_each(|it| it.store(word, Relaxed));
    }

    /// Makes the pages `marks` of word `index` pending.
    #[inline]
    fn add(&self, index: usize, marks: u64) {
        let pending = &self.pending[index];
        pending.store(pending.load(Relaxed) | marks, Relaxed);
    }

    /// Returns the pending pages of word `index`.
    pub(crate) fn pending(&self, index: usize) -> u64 {
        self.pending[index].load(Relaxed)
    }

    /// Returns the bitmap of the pending pages.
    pub(super) fn all_pending(&self) -> &[AtomicU64] {
        &self.pending
    }

    /// Whether page `page` is pending: written, and not seen yet by the reader.
    pub(crate) fn is_pending(&self, page: u64) -> bool {
        self.pending(page as usize / 64) >> (page % 64) & 1 != 0
    }

    /// Removes the pages `mask` of word `index` from the pending pages.
    pub(crate) fn forget(&self, index: usize, mask: u64) {
        let pending = &self.pending[index];
        pending.store(pending.load(Relaxed) & !mask, Relaxed);
    }

    /// Adds to the reader's epoch the pending pages of word `index`, and the pages `taken`, which the reader has just
    /// harvested from the log's own bitmap.
    #[inline]
    pub(crate) fn begin(&self, index: usize, taken: u64) {
        let pending = self.pending[index].load(Relaxed);
        if pending | taken != 0 {
            let epoch = &self.epoch[index];
            epoch.store(epoch.load(Relaxed) | pending | taken, Relaxed);
            self.pending[index].store(0, Relaxed);
        }
    }

    /// Ends the reader's epoch. If `aborted`, the pages of the epoch become pending again.
    pub(crate) fn end_epoch(&self, aborted: bool) {
        for (index, word) in self.epoch.iter().enumerate() {
            let marks = word.load(Relaxed);
            if marks != 0 {
                word.store(0, Relaxed);
                if aborted {
                    self.add(index, marks);
                }
            }
        }
    }

    /// Returns the bitmap of the reader's epoch.
    pub(crate) fn epoch(&self) -> &[AtomicU64] {
        &self.epoch
    }

    /// Copies the marks of `pages` pages from the marks of the same reader in another log ([`DirtyLog::copy_marks`]).
    pub(super) fn copy_from(&self, marks: &ReaderMarks, from: u64, to: u64, pages: u64) {
        copy_bits(&marks.pending, &self.pending, from, to, pages);
        if !self.epoch.is_empty() {
            copy_bits(&marks.epoch, &self.epoch, from, to, pages);
        }
    }
}

impl DirtyLog {
    /// Returns the marks of all readers, including those that have no owner.
    fn all_readers(&self) -> impl Iterator<Item = &ReaderMarks> {
        core::iter::successors(self.readers.get(), |marks| marks.next.get())
    }

    /// Returns the marks that have an owner. Call under the slot writers' lock.
    pub(crate) fn readers(&self) -> impl Iterator<Item = &ReaderMarks> {
        self.all_readers()
            .filter(|marks| marks.owner() != ReaderId::NONE)
    }

    /// Returns the marks of the reader `id`, if the log has such a reader. Call under the slot writers' lock.
    pub(crate) fn reader(&self, id: ReaderId) -> Option<&ReaderMarks> {
        self.all_readers().find(|marks| marks.owner() == id)
    }

    /// Makes the log, which must have a bitmap, keep marks for the reader `id`, and for the client. For a reader that
    /// is added, all pages are pending if `all`, otherwise none; for the client, none. Call under the slot writers'
    /// lock.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn add_reader(&self, id: ReaderId, all: bool) -> Result<(), OutOfMemory> {
        for (id, all) in [(ReaderId::CLIENT, false), (id, all)] {
            if self.reader(id).is_none() {
                self.marks_for(id)?.fill_pending(all);
            }
        }
        Ok(())
    }

    /// Returns marks for the reader `id`: marks without owner, or new ones at the end of the list.
    fn marks_for(&self, id: ReaderId) -> Result<&ReaderMarks, OutOfMemory> {
        // The client's marks have no bitmap for an epoch, so they must not serve another reader; they always have an
        // owner.
        if let Some(free) = self.reader(ReaderId::NONE) {
            free.owner.store(id.0, Relaxed);
            return Ok(free);
        }
        let end = match self.all_readers().last() {
            Some(last) => &last.next,
            None => &self.readers,
        };
        end.get_or_make(|| heap::boxed(ReaderMarks::new(id, self.bits.len())?))
    }

    /// Ends the epoch of the reader `id`, and makes its marks free for another reader. Call under the slot writers'
    /// lock.
    pub(crate) fn remove_reader(&self, id: ReaderId) {
        if let Some(marks) = self.reader(id) {
            marks.end_epoch(false);
            marks.owner.store(ReaderId::NONE.0, Relaxed);
        }
    }

    /// Removes the marks of word `index` from the log's bitmap and returns them, for the reader `by`. Makes them
    /// pending for all other readers. Call under the slot writers' lock.
    #[inline]
    pub(crate) fn take_for(&self, index: usize, by: ReaderId) -> u64 {
        let word = &self.bits[index];
        let seen = word.load(Acquire);
        if seen == 0 {
            return 0;
        }
        self.hand_on(index, seen, by);
        let taken = word.swap(0, AcqRel);
        self.hand_on(index, taken & !seen, by);
        taken
    }

    /// Whether page `page` is marked in the log's bitmap, or pending for the client. Needs no lock.
    pub(crate) fn is_marked_for_client(&self, page: u64) -> bool {
        // Read the log's bitmap first: a harvest makes a mark pending before it clears the mark in that bitmap.
        let client = || self.reader(ReaderId::CLIENT);
        self.is_marked(page) || client().is_some_and(|client| client.is_pending(page))
    }

    /// Makes the pages `taken` of word `index` pending for all readers but `by`, which takes them from the log's
    /// bitmap. Call under the slot writers' lock, held since before `by` began to take them.
    #[inline]
    pub(crate) fn hand_on(&self, index: usize, taken: u64, by: ReaderId) {
        if taken != 0 {
            (self.readers().filter(|marks| marks.owner() != by))
                .for_each(|marks| marks.add(index, taken));
        }
    }

    /// Makes all pages pending for each reader but the VMM: the slot was moved, so its frames have other contents. Call
    /// under the slot writers' lock.
    pub(crate) fn mark_for_readers(&self) {
        (self
            .readers()
            .filter(|marks| marks.owner() != ReaderId::CLIENT))
        .for_each(|marks| marks.fill_pending(true));
    }
}
