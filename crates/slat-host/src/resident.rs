//! Which pages are in memory now: mincore(2). If a seccomp filter forbids mincore, this is unknown: faults ask for it,
//! and they are too many for the helper.

use slat_process::calls::{self, Call};
use std::ops::Range;

const PAGE: usize = 4096;
/// Pages per call of mincore.
const CHUNK: usize = 512;

/// Whether the page of `address` is known to be in memory.
pub fn is_resident(address: usize) -> bool {
    let page = address & !(PAGE - 1);
    let mut is_resident = false;
    stretches(page..page + PAGE, &mut |_| is_resident = true);
    is_resident
}

/// Calls `found` for every stretch of resident pages of `range` (whole pages), in ascending order.
pub(crate) fn stretches(range: Range<usize>, found: &mut dyn FnMut(Range<usize>)) {
    if !calls::is_allowed(Call::Resident) {
        return;
    }
    let mut resident = [0u8; CHUNK];
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + CHUNK * PAGE);
        let pages = (end - at) / PAGE;
        // SAFETY: `resident` has a byte for each page of the range; the call writes nothing else, and fails with ENOMEM
        // if the range is not mapped.
        let answer = unsafe { libc::mincore(at as *mut _, end - at, resident.as_mut_ptr()) };
        if answer != 0 {
            return;
        }
        let mut page = 0;
        while page < pages {
            let run = resident[page..pages]
                .iter()
                .take_while(|r| **r & 1 != 0)
                .count();
            if run > 0 {
                found(at + page * PAGE..at + (page + run) * PAGE);
            }
            // Skips one page more, because the page that ended the run is not resident.
            page += run + 1;
        }
        at = end;
    }
}
