//! The pages of a snapshot: which of them the platform has been given. `vm/snapshot.rs` decides when a page is given.
//!
//! A page is known by its backing address, so a page that several guest frames map is given once. Its number counts the
//! pages of all ranges of backing addresses, in ascending order. Each page has two bits:
//!
//! * *free*: no thread has begun to give the page. The thread that clears the bit gives the page.
//! * *owed*: the page was not given completely. That thread clears this bit when [`Platform::keep`] has returned.
//!
//! A page that is owed must not be written to. So a thread that finds a page owed and not free waits for another one.
//! The bit *owed* is cleared with `Release` and read with `Acquire`: what a thread writes to a page after it has found
//! the page given, `keep` has not read.

use alloc::vec::Vec;
use core::ops::Range;

use crate::addr::{Granule, Hva};
use crate::dirty_log::{bitmap, next_run, words_of};
use crate::heap::OutOfMemory;
use crate::platform::{Platform, VmId};
use crate::sync::atomic::{AtomicU64, Ordering::*, fence};

/// The pages of a snapshot.
pub(crate) struct OldPages {
    vm: VmId,
    granule: Granule,
    /// The backing of the memory, ascending and without overlaps.
    parts: Vec<Part>,
    free: Vec<AtomicU64>,
    owed: Vec<AtomicU64>,
    /// All pages before this one are not free.
    next: AtomicU64,
}

/// A range of backing addresses.
struct Part {
    hvas: Range<Hva>,
    /// The number of the first page.
    first: u64,
}

impl OldPages {
    /// Makes the record of a snapshot of `vm` whose memory has the backing addresses `backing`, in any order, and of
    /// which no page was given.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn new(
        vm: VmId,
        granule: Granule,
        mut backing: Vec<Range<Hva>>,
    ) -> Result<Self, OutOfMemory> {
        backing.sort_unstable_by_key(|hvas| hvas.start);
        let mut parts: Vec<Part> = Vec::new();
        (parts.try_reserve_exact(backing.len())).map_err(|_| OutOfMemory)?;
        let mut pages = 0;
        for hvas in backing {
            let done = parts.last().map_or(Hva(0), |last| last.hvas.end);
            let hvas = hvas.start.max(done)..hvas.end;
            if hvas.is_empty() {
                continue;
            }
            let more = granule.pages_between(hvas.start, hvas.end);
            match parts.last_mut() {
                Some(last) if last.hvas.end == hvas.start => last.hvas.end = hvas.end,
                _ => parts.push(Part { hvas, first: pages }),
            }
            pages += more;
        }
        let words = pages.div_ceil(64) as usize;
        let (free, owed) = (bitmap(words, false)?, bitmap(words, false)?);
        for (index, mask) in words_of(0..pages) {
            free[index].store(mask, Relaxed);
            owed[index].store(mask, Relaxed);
        }
        Ok(OldPages {
            vm,
            granule,
            parts,
            free,
            owed,
            next: AtomicU64::new(0),
        })
    }

    /// Returns the parts that have pages of `hvas`, each with the numbers of these pages.
    fn within(&self, hvas: &Range<Hva>) -> impl Iterator<Item = (&Part, Range<u64>)> {
        let first = (self.parts).partition_point(|part| part.hvas.end <= hvas.start);
        let (start, end) = (hvas.start, hvas.end);
        let overlapping = self.parts[first..]
            .iter()
            .take_while(move |part| part.hvas.start < end);
        overlapping.map(move |part| {
            let number = |hva: Hva| {
                let hva = hva.max(part.hvas.start).min(part.hvas.end);
                part.first + self.granule.pages_between(part.hvas.start, hva)
            };
            // An address within a page counts for the whole page.
            let last = Hva(end.0.saturating_add(self.granule.bytes() - 1));
            (part, number(start)..number(last))
        })
    }

    /// Whether every page of `hvas` that is in the snapshot was given: they may be written to.
    pub(crate) fn has(&self, hvas: &Range<Hva>) -> bool {
        let owed = |pages: Range<u64>| next_run(&self.owed, pages, 0, 1).is_some();
        let has = !self.within(hvas).any(|(_, pages)| owed(pages));
        fence(Acquire);
        has
    }

    /// Gives the free pages of `hvas`. Other threads may still be giving the others ([`Self::has`]). The caller holds
    /// no lock of the engine but that of slot changes, and is in no reader section.
    pub(crate) fn give(&self, hvas: &Range<Hva>, platform: &impl Platform) {
        for (part, pages) in self.within(hvas) {
            while self
                .give_run(part, pages.clone(), u64::MAX, platform)
                .is_some()
            {}
        }
    }

    /// Gives the first run of free pages, at most `most`. Returns their number; 0 if there are none.
    pub(crate) fn give_next(&self, most: u64, platform: &impl Platform) -> u64 {
        let next = self.next.load(Relaxed);
        let first = self.parts.partition_point(|part| part.first <= next);
        for part in &self.parts[first.saturating_sub(1)..] {
            let end = part.first + self.granule.pages_between(part.hvas.start, part.hvas.end);
            let pages = next.max(part.first)..end;
            if let Some(given) = self.give_run(part, pages, most.max(1), platform) {
                self.next.fetch_max(given.end, Relaxed);
                return given.end - given.start;
            }
        }
        0
    }

    /// Gives the first run of free pages of `pages`, all of them in `part`, at most `most`.
    fn give_run(
        &self,
        part: &Part,
        pages: Range<u64>,
        most: u64,
        platform: &impl Platform,
    ) -> Option<Range<u64>> {
        let run = self.claim(pages, most)?;
        let hva = |page: u64| (self.granule).add_pages(part.hvas.start, page - part.first);
        platform.keep(self.vm, hva(run.start)..hva(run.end));
        for (index, mask) in words_of(run.clone()) {
            self.owed[index].fetch_and(!mask, Release);
        }
        Some(run)
    }

    /// Takes the first run of free pages of `pages`, at most `most`. They are not free any more.
    fn claim(&self, pages: Range<u64>, most: u64) -> Option<Range<u64>> {
        loop {
            let run = next_run(&self.free, pages.clone(), 0, most)?;
            let mut end = run.start;
            for (index, mask) in words_of(run.clone()) {
                let take = |free| (free & mask == mask).then_some(free & !mask);
                if self.free[index]
                    .fetch_update(Relaxed, Relaxed, take)
                    .is_err()
                {
                    break;
                }
                end = run.end.min((index as u64 + 1) * 64);
            }
            if end > run.start {
                return Some(run.start..end);
            }
        }
    }

    /// Takes all free pages without giving them. Afterwards no thread begins to give a page.
    pub(crate) fn abandon(&self) {
        for (free, owed) in self.free.iter().zip(&self.owed) {
            let free = free.swap(0, Relaxed);
            owed.fetch_and(!free, Release);
        }
    }

    /// Returns the number of pages that were not given completely.
    pub(crate) fn left(&self) -> u64 {
        let owed = |word: &AtomicU64| u64::from(word.load(Relaxed).count_ones());
        let left = self.owed.iter().map(owed).sum();
        fence(Acquire);
        left
    }
}
