//! The size of pages, and variables in pages of their own.

/// Returns the bytes of a page of this process's memory.
#[inline(always)]
pub const fn page_size() -> usize {
    4096
}

/// A variable in pages that contain nothing else.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct OwnPages<T>(pub T);
