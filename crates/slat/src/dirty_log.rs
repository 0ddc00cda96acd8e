//! The data of a slot's dirty log. The VM's operations on dirty logs, and the order of their steps, are in
//! `vm/dirty.rs`.

mod readers;
mod runs;

use crate::sync::atomic::{AtomicU64, Ordering::*};
use alloc::vec::Vec;
use core::ops::Range;

use crate::addr::{Gfn, Level};
use crate::format::{Format, Leaf};
use crate::heap::OutOfMemory;
use crate::sync::{FairLock, OnceBox};

pub(crate) use readers::{ReaderId, ReaderMarks};
pub(crate) use runs::next_run;

/// The method by which a slot's log detects writes, and where it records them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogKind {
    /// Write faults detect the writes, and a bitmap records the pages.
    Bitmap,
    /// The leaves' dirty bits record the written pages; a harvest copies these pages to a bitmap.
    DirtyBits,
    /// The leaves' dirty bits record the written pages. The page walker writes to a buffer which of these bits it has
    /// set (like Intel's PML). When the buffer is drained (`vm/drain.rs`), the pages are recorded in a bitmap.
    Buffers,
    /// Write faults detect the writes, and the dirty rings of the vCPUs record the pages. If the VM has log readers, a
    /// bitmap records the pages, too.
    Rings,
}

impl LogKind {
    /// Whether the log write-protects leaves: a leaf may become writable only when a write to it has been recorded.
    pub(crate) fn protects(self) -> bool {
        !matches!(self, LogKind::DirtyBits | LogKind::Buffers)
    }

    /// Whether the log learns of a write from the fault that installs `leaf`, because the log write-protects leaves, or
    /// because `leaf` is already dirty, so that a walker will not report the write to its buffer.
    pub(crate) fn learns_from_fault(self, leaf: &Leaf) -> bool {
        leaf.write && (self.protects() || self == LogKind::Buffers && leaf.dirty)
    }
}

/// The dirty log of a slot.
pub(crate) struct DirtyLog {
    kind: LogKind,
    /// The lock that is held by each operation that begins, harvests or clears the log.
    pub(crate) turn: FairLock<()>,
    /// The bitmap, with one bit for each page; empty for a log without a bitmap.
    pub(crate) bits: Vec<AtomicU64>,
    /// Whether every page was marked when the log was made.
    pub(crate) initially_set: bool,
    /// The marks that each reader of the log has not seen yet, if the log has had several readers ([`readers`]).
    readers: OnceBox<ReaderMarks>,
}

impl DirtyLog {
    /// Makes a log of `pages` pages with a bitmap, in which every page is marked if `initially_set`.
    pub(crate) fn bitmap(
        kind: LogKind,
        pages: u64,
        initially_set: bool,
    ) -> Result<Self, OutOfMemory> {
        let words = pages.div_ceil(64) as usize;
        Ok(DirtyLog {
            kind,
            turn: FairLock::new(()),
            bits: bitmap(words, initially_set)?,
            initially_set,
            readers: OnceBox::new(),
        })
    }

    /// Makes a log without a bitmap: writes are recorded in the vCPUs' rings.
    pub(crate) fn rings() -> Self {
        DirtyLog {
            kind: LogKind::Rings,
            turn: FairLock::new(()),
            bits: Vec::new(),
            initially_set: false,
            readers: OnceBox::new(),
        }
    }

    /// Whether the log has a bitmap.
    pub(crate) fn has_bitmap(&self) -> bool {
        !self.bits.is_empty()
    }

    pub(crate) fn kind(&self) -> LogKind {
        self.kind
    }

    /// Marks page `page` of the slot as dirty in the bitmap.
    pub(crate) fn mark(&self, page: u64) {
        let word = &self.bits[page as usize / 64];
        let bit = 1 << (page % 64);
        // Most writes are to pages that are already marked, and a load is cheaper than a locked instruction.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Release);
        }
    }

    /// Marks the pages of the leaf of `level` at `gfn` that are in `slot`, the frames of the log's slot. Only a huge
    /// leaf that could not be split has several such pages.
    pub(crate) fn mark_leaf<F: Format>(&self, slot: &Range<Gfn>, gfn: Gfn, level: Level) {
        self.mark_gfns(slot, &F::GRANULE.block(gfn, level), |_| true);
    }

    /// Marks those pages of `gfns` that are in `slot` (the frames of the log's slot) and for which `wanted` returns
    /// `true`.
    pub(crate) fn mark_gfns(
        &self,
        slot: &Range<Gfn>,
        gfns: &Range<Gfn>,
        wanted: impl Fn(Gfn) -> bool,
    ) {
        let gfns = gfns.start.max(slot.start).0..gfns.end.min(slot.end).0;
        for gfn in gfns.filter(|gfn| wanted(Gfn(*gfn))) {
            self.mark(gfn - slot.start.0);
        }
    }

    /// Clears, for all readers, the marks of those pages of `gfns` that are in `slot` (the frames of the log's slot).
    /// No other thread uses the log.
    pub(crate) fn unmark(&self, slot: &Range<Gfn>, gfns: &Range<Gfn>) {
        let pages = gfns.start.max(slot.start).0..gfns.end.min(slot.end).0;
        for (index, mask) in words_of(pages.start - slot.start.0..pages.end - slot.start.0) {
            self.bits[index].fetch_and(!mask, Relaxed);
            // The log is new, so no reader has an epoch in this log. Only the pending marks must be cleared.
            self.readers().for_each(|marks| marks.forget(index, mask));
        }
    }

    /// Copies from `log` the marks of `pages` pages, and, for each reader that both logs have, the marks that the
    /// reader has not seen yet. The first of these pages is number `from` in `log` and number `to` in this log. The
    /// caller holds the slot writers' lock.
    pub(crate) fn copy_marks(&self, log: &DirtyLog, from: u64, to: u64, pages: u64) {
        copy_bits(&log.bits, &self.bits, from, to, pages);
        for marks in log.readers() {
            match self.reader(marks.owner()) {
                Some(own) => own.copy_from(marks, from, to, pages),
                // This log has no readers but the client, so all marks of its own bitmap are the client's.
                None if marks.owner() == ReaderId::CLIENT => {
                    copy_bits(marks.all_pending(), &self.bits, from, to, pages);
                }
                None => {}
            }
        }
    }

    /// Whether the page `page` of the slot is marked.
    pub(crate) fn is_marked(&self, page: u64) -> bool {
        self.bits[page as usize / 64].load(Acquire) >> (page % 64) & 1 != 0
    }
}

/// Makes a bitmap of `words` words, in which every bit is set if `set`.
///
/// # Errors
/// [`OutOfMemory`].
pub(crate) fn bitmap(words: usize, set: bool) -> Result<Vec<AtomicU64>, OutOfMemory> {
    let mut bits = Vec::new();
    bits.try_reserve_exact(words).map_err(|_| OutOfMemory)?;
    let word = if set { u64::MAX } else { 0 };
    bits.resize_with(words, || AtomicU64::new(word));
    Ok(bits)
}

/// Sets the bits in the bitmap `target` that are set in `source`, for `pages` pages. The first of these pages is number
/// `from` in `source` and number `to` in `target`.
fn copy_bits(source: &[AtomicU64], target: &[AtomicU64], from: u64, to: u64, pages: u64) {
    for (index, mask) in words_of(from..from + pages) {
        let marked = source[index].load(Acquire) & mask;
        // The bit number in `target` of this word's first bit. It is negative if the word contains bits before `from`.
        let at = (index as u64 * 64 + to).wrapping_sub(from) as i64;
        let (word, shift) = (at.div_euclid(64), at.rem_euclid(64) as u32);
        let parts = [marked << shift, marked.checked_shr(64 - shift).unwrap_or(0)];
        for (word, marks) in (word..).zip(parts).filter(|(_, marks)| *marks != 0) {
            target[word as usize].fetch_or(marks, Release);
        }
    }
}

/// Returns the words of a bitmap that have bits for `pages`, each with its index and a mask of these bits.
pub(crate) fn words_of(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    (pages.start / 64..pages.end.div_ceil(64)).map(move |word| {
        let first = pages.start.max(word * 64) - word * 64;
        let end = pages.end.min(word * 64 + 64) - word * 64;
        (word as usize, (u64::MAX >> (64 - (end - first))) << first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_copied_between_any_two_places() {
        const PAGES: u64 = 200;
        for (from, to, pages) in [
            (0, 0, 200),
            (0, 64, 130),
            (3, 0, 197),
            (70, 5, 60),
            (5, 70, 60),
            (63, 64, 1),
            (0, 199, 1),
            (128, 1, 72),
        ] {
            let [source, target] =
                [0, 1].map(|_| DirtyLog::bitmap(LogKind::Bitmap, PAGES, false).unwrap());
            (0..PAGES)
                .filter(|page| page % 3 == 0 || page % 7 == 2)
                .for_each(|page| source.mark(page));
            target.copy_marks(&source, from, to, pages);
            for page in 0..PAGES {
                let expected =
                    (to..to + pages).contains(&page) && source.is_marked(page - to + from);
                assert_eq!(
                    target.is_marked(page),
                    expected,
                    "page {page} of {from}, {to}, {pages}"
                );
            }
            source.unmark(
                &(Gfn(10)..Gfn(10 + PAGES)),
                &(Gfn(10 + from)..Gfn(10 + from + pages)),
            );
            for page in 0..PAGES {
                let cleared = (from..from + pages).contains(&page);
                let marked = page % 3 == 0 || page % 7 == 2;
                assert_eq!(source.is_marked(page), marked && !cleared, "page {page}");
            }
        }
    }
}
