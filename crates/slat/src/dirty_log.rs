//! The data of a slot's dirty log. The VM's operations on it, and their order, are in `vm/dirty.rs`.

use crate::sync::atomic::{AtomicU64, Ordering::*};
use alloc::vec::Vec;
use core::ops::Range;

use crate::addr::{Gfn, Level};
use crate::heap::OutOfMemory;
use crate::sync::FairLock;

/// How a slot's log learns of writes, and where it notes them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogKind {
    /// Write protection; a bitmap.
    Bitmap,
    /// The leaves' own dirty bits; a bitmap, at a harvest.
    DirtyBits,
    /// Write protection; the rings of the vCPUs.
    Rings,
}

impl LogKind {
    /// Whether a leaf must not be writable before a write to it was noted.
    pub(crate) fn protects(self) -> bool {
        self != LogKind::DirtyBits
    }
}

/// The log of a slot.
pub(crate) struct DirtyLog {
    kind: LogKind,
    /// Held to begin, harvest or clear it.
    pub(crate) turn: FairLock<()>,
    /// One bit per page, if the log has a bitmap.
    pub(crate) bits: Vec<AtomicU64>,
    /// Whether every page was marked when it was made.
    pub(crate) initially_set: bool,
}

impl DirtyLog {
    /// Makes a log of `pages` pages with a bitmap, in which every page is marked if `initially_set`.
    pub(crate) fn bitmap(
        kind: LogKind,
        pages: u64,
        initially_set: bool,
    ) -> Result<Self, OutOfMemory> {
        let words = pages.div_ceil(64) as usize;
        let mut bits = Vec::new();
        bits.try_reserve_exact(words).map_err(|_| OutOfMemory)?;
        let word = if initially_set { u64::MAX } else { 0 };
        bits.resize_with(words, || AtomicU64::new(word));
        Ok(DirtyLog {
            kind,
            turn: FairLock::new(()),
            bits,
            initially_set,
        })
    }

    /// Makes a log without a bitmap: writes are noted in the vCPUs' rings.
    pub(crate) fn rings() -> Self {
        DirtyLog {
            kind: LogKind::Rings,
            turn: FairLock::new(()),
            bits: Vec::new(),
            initially_set: false,
        }
    }

    pub(crate) fn kind(&self) -> LogKind {
        self.kind
    }

    /// Marks the page `page` of the slot.
    pub(crate) fn mark(&self, page: u64) {
        let word = &self.bits[page as usize / 64];
        let bit = 1 << (page % 64);
        // Re-dirtying is common, and a load is cheaper than a locked instruction.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Release);
        }
    }

    /// Marks the pages of the leaf at `gfn`, as far as they lie in the frames `slot` of the log's slot: all pages of a huge
    /// leaf that could not be split.
    pub(crate) fn mark_leaf(&self, slot: &Range<Gfn>, gfn: Gfn, level: Level) {
        self.mark_gfns(slot, &gfn.block(level), |_| true);
    }

    /// Marks those of `gfns` that lie in the frames `slot` of the log's slot and for which `wanted` returns `true`.
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

    /// Whether the page `page` of the slot is marked.
    pub(crate) fn is_marked(&self, page: u64) -> bool {
        self.bits[page as usize / 64].load(Acquire) >> (page % 64) & 1 != 0
    }
}
