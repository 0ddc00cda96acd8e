//! The page size, and variables in pages of their own. The kernel is built for pages of 4, 16 or 64 KiB.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the page size in bytes. Only the first call asks the kernel. Async-signal-safe.
#[inline]
pub fn page_size() -> usize {
    static SIZE: AtomicUsize = AtomicUsize::new(0);
    match SIZE.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: the call reads the process's auxiliary vector.
            let size = unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize;
            SIZE.store(size, Ordering::Relaxed);
            size
        }
        size => size,
    }
}

/// A variable whose pages contain no other data, however large the pages are.
#[repr(C, align(65536))]
#[derive(Debug)]
pub struct OwnPages<T>(pub T);
