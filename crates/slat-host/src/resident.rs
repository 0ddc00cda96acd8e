//! Finds the pages that are in memory now, by mincore(2). If a seccomp filter forbids mincore, slat treats all pages as
//! not known to be in memory. (Other forbidden calls are made by the helper thread, but faults call mincore too often
//! for that.)

use slat_process::calls::{self, Call};
use slat_process::page_size;
use std::ops::Range;

/// The number of pages for each call of mincore.
const CHUNK: usize = 512;

/// Whether the page that contains `address` is known to be in memory.
pub fn is_resident(address: usize) -> bool {
    let page = address & !(page_size() - 1);
    let mut is_resident = false;
    stretches(page..page + page_size(), &mut |_| is_resident = true);
    is_resident
}

/// Calls `found` for every resident part of `range`, in ascending order. The range consists of whole pages of the
/// guest, which may be smaller than the pages of this process.
pub(crate) fn stretches(range: Range<usize>, found: &mut dyn FnMut(Range<usize>)) {
    if !calls::is_allowed(Call::Resident) {
        return;
    }
    let size = page_size();
    let mut resident = [0u8; CHUNK];
    let mut at = range.start & !(size - 1);
    while at < range.end {
        let pages = (range.end - at).div_ceil(size).min(CHUNK);
        // SAFETY: `resident` has a byte for each page of the range; the call writes nothing else, and fails with ENOMEM
        // if the range is not mapped.
        let answer = unsafe { libc::mincore(at as *mut _, pages * size, resident.as_mut_ptr()) };
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
                let (start, end) = (at + page * size, at + (page + run) * size);
                found(start.max(range.start)..end.min(range.end));
            }
            // Also skip the page that has ended the run, because it is not resident.
            page += run + 1;
        }
        at += pages * size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_end_at_pages_of_this_process_and_at_the_range() {
        let size = page_size();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the calls make a new anonymous mapping, and write to two of its pages.
        let start = unsafe {
            let start = libc::mmap(std::ptr::null_mut(), 4 * size, rights, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            for page in [0, 2] {
                start.cast::<u8>().add(page * size).write_volatile(1);
            }
            start as usize
        };
        let found = |range: Range<usize>| {
            let mut all = Vec::new();
            stretches(start + range.start..start + range.end, &mut |stretch| {
                all.push(stretch.start - start..stretch.end - start);
            });
            all
        };
        assert_eq!(found(0..4 * size), [0..size, 2 * size..3 * size]);
        let part = size / 4;
        assert_eq!(
            found(part..2 * size + part),
            [part..size, 2 * size..2 * size + part]
        );
        assert_eq!(
            found(part..2 * part),
            [Range {
                start: part,
                end: 2 * part
            }]
        );
        assert_eq!(found(size + part..2 * size), []);
        assert!(is_resident(start + part) && !is_resident(start + size + part));
    }
}
