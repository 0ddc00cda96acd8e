//! The translations that several threads may still use.
//!
//! A vCPU may use a translation until the vCPU quiesces. A call that unmaps a page (a slot change, an invalidation)
//! returns only after all vCPUs that may use the page have quiesced. So *each use* can be checked exactly. A page that
//! a slot change is about to map is recorded before the call. A page that the change has unmapped is removed after the
//! call has returned. A host page gets its new version during the invalidation.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

use slat::{Hpa, Translation};

use crate::host::HostMemory;

const NONE: u64 = u64::MAX;

/// For each guest frame from 0 on, the host page that may back it now. While a slot moves, there may be two such pages.
pub struct Witness {
    now: Box<[AtomicU64]>,
    soon: Box<[AtomicU64]>,
}

impl Witness {
    /// Makes a witness for `frames` guest frames. At first, no frame may have a page.
    pub fn new(frames: u64) -> Self {
        let nothing = || (0..frames).map(|_| AtomicU64::new(NONE)).collect();
        Witness {
            now: nothing(),
            soon: nothing(),
        }
    }

    /// Allows the host pages from `host_page` on at `gfns`. Call before a slot change that maps these pages.
    pub fn allow(&self, gfns: Range<u64>, host_page: u64) {
        for (i, gfn) in gfns.enumerate() {
            self.soon[gfn as usize].store(host_page + i as u64, SeqCst);
        }
    }

    /// Forbids the old pages of `gone`, and all pages of `gfns` except the new pages. Call after the slot change that
    /// has unmapped `gone` and mapped `gfns`.
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

    /// Checks whether a vCPU that has not quiesced may use `translation` of `gfn` at this moment. `write` tells whether
    /// the access is a write. The error describes the violation.
    pub fn check(
        &self,
        host: &HostMemory,
        gfn: u64,
        translation: &Translation,
        write: bool,
    ) -> Result<(), String> {
        let Hpa(address) = translation.host;
        let (page, _) = HostMemory::identify(host.granule().pfn(Hpa(address)));
        // The order of these reads matters: a page is stored in `now` before it is removed from `soon`.
        let soon = self.soon[gfn as usize].load(SeqCst);
        let now = self.now[gfn as usize].load(SeqCst);
        if page != soon && page != now {
            return Err(format!(
                "frame {gfn:#x} leads to host page {page:#x}, its slot to {now:#x} (or {soon:#x})"
            ));
        }
        let today = host.get(page);
        if today.map(|p| host.granule().hpa(p.pfn)) != Some(translation.host) {
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

/// Checks that every write is in a dirty log that is collected after the write.
pub struct Harvests {
    taken: AtomicU64,
    /// For each page, the number of dirty logs that were collected before the page's last write, plus one.
    written: Box<[AtomicU64]>,
    /// For each page, the number of the last dirty log that contained the page.
    named: Box<[AtomicU64]>,
}

impl Harvests {
    /// Makes the state for a slot with `pages` pages.
    pub fn new(pages: u64) -> Self {
        let zeros = || (0..pages).map(|_| AtomicU64::new(0)).collect();
        Harvests {
            taken: AtomicU64::new(0),
            written: zeros(),
            named: zeros(),
        }
    }

    /// Records a write by a vCPU that has the right to write to `page`. Call when the vCPU writes.
    pub fn write(&self, page: u64) {
        let next = self.taken.load(SeqCst) + 1;
        self.written[page as usize].fetch_max(next, SeqCst);
    }

    /// Collects a dirty log by calling `take`. Only one thread at a time calls this.
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

    /// Forgets all writes. Call when the log was deleted with its slot.
    pub fn forget(&self) {
        for written in &self.written {
            written.store(0, SeqCst);
        }
    }

    /// Returns a page that was written, but is in no log that was collected later. `None` if there is no such page.
    /// Call after the last log, when no thread writes.
    pub fn lost(&self) -> Option<u64> {
        let pages = self.written.iter().zip(&self.named);
        let mut lost = pages.map(|(w, n)| n.load(SeqCst) < w.load(SeqCst));
        lost.position(|lost| lost).map(|page| page as u64)
    }
}
