//! What several threads may still use.
//!
//! A vCPU may use a translation from the moment it gets it until it quiesces, and whoever takes the
//! page away (a slot change, an invalidation) returns only after that. So one can check *each use*,
//! with no tolerance: what a slot change is about to allow is written down before the call, what it
//! has forbidden is struck out after the call has returned, and host pages change their version inside
//! the invalidation.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::{Hpa, Translation};

use crate::host::HostMemory;

const NONE: u64 = u64::MAX;

/// For each guest frame of a window from 0 on, which host page may stand behind it now. There are two
/// answers while a slot is moved.
pub struct Witness {
    now: Box<[AtomicU64]>,
    soon: Box<[AtomicU64]>,
}

impl Witness {
    /// Nothing is allowed in any of the `frames` guest frames.
    pub fn new(frames: u64) -> Self {
        let nothing = || (0..frames).map(|_| AtomicU64::new(NONE)).collect();
        Witness {
            now: nothing(),
            soon: nothing(),
        }
    }

    /// Before the call that puts the host pages from `host_page` on behind `gfns`.
    pub fn allow(&self, gfns: Range<u64>, host_page: u64) {
        for (i, gfn) in gfns.enumerate() {
            self.soon[gfn as usize].store(host_page + i as u64, SeqCst);
        }
    }

    /// After the call that took away `gone` and put something behind `gfns`, has returned.
    pub fn settle(&self, gone: Range<u64>, gfns: Range<u64>) {
        for gfn in gone {
            self.now[gfn as usize].store(NONE, SeqCst);
        }
        for gfn in gfns {
            let soon = &self.soon[gfn as usize];
            self.now[gfn as usize].store(soon.load(SeqCst), SeqCst);
            soon.store(NONE, SeqCst);
        }
    }

    /// Whether a vCPU that has not quiesced may use `translation` of `gfn` this moment; otherwise what
    /// is wrong. `write`: it writes.
    pub fn check(
        &self,
        host: &HostMemory,
        gfn: u64,
        translation: &Translation,
        write: bool,
    ) -> Result<(), String> {
        let Hpa(address) = translation.host;
        let (page, _) = HostMemory::identify(slat::Pfn(address >> 12));
        // In this order: an answer stands in `now` before it leaves `soon`.
        let soon = self.soon[gfn as usize].load(SeqCst);
        let now = self.now[gfn as usize].load(SeqCst);
        if page != soon && page != now {
            return Err(format!(
                "frame {gfn:#x} leads to host page {page:#x}, its slot to {now:#x} (or {soon:#x})"
            ));
        }
        let today = host.get(page);
        if today.map(|p| p.pfn.hpa()) != Some(translation.host) {
            return Err(format!(
                "frame {gfn:#x} still leads to {:?}, host page {page:#x} is {today:?}",
                translation.host
            ));
        }
        if write && !today.is_some_and(|p| p.writable) {
            return Err(format!("frame {gfn:#x} is written through {translation:?}"));
        }
        Ok(())
    }
}

/// Whether every write turns up in a dirty log taken after it.
pub struct Harvests {
    taken: AtomicU64,
    /// By page: one more than the number of logs that were complete when it was last written.
    written: Box<[AtomicU64]>,
    /// By page: the number of the last log that named it.
    named: Box<[AtomicU64]>,
}

impl Harvests {
    /// For a slot of `pages` pages.
    pub fn new(pages: u64) -> Self {
        let zeros = || (0..pages).map(|_| AtomicU64::new(0)).collect();
        Harvests {
            taken: AtomicU64::new(0),
            written: zeros(),
            named: zeros(),
        }
    }

    /// A vCPU that holds the right to write to `page` writes.
    pub fn write(&self, page: u64) {
        let next = self.taken.load(SeqCst) + 1;
        self.written[page as usize].fetch_max(next, SeqCst);
    }

    /// Takes a log with `take`, one thread at a time.
    pub fn harvest(&self, bitmap: &mut [u64], take: impl FnOnce(&mut [u64])) {
        take(bitmap);
        let number = self.taken.load(SeqCst) + 1;
        for (page, named) in self.named.iter().enumerate() {
            if bitmap[page / 64] >> (page % 64) & 1 != 0 {
                named.store(number, SeqCst);
            }
        }
        self.taken.store(number, SeqCst);
    }

    /// The log has gone with its slot, and what was written with it.
    pub fn forget(&self) {
        for written in &self.written {
            written.store(0, SeqCst);
        }
    }

    /// After the last log, with no writer left: a page that was written and in no log since.
    pub fn lost(&self) -> Option<u64> {
        let pages = self.written.iter().zip(&self.named);
        let mut lost = pages.map(|(w, n)| n.load(SeqCst) < w.load(SeqCst));
        lost.position(|lost| lost).map(|page| page as u64)
    }
}
