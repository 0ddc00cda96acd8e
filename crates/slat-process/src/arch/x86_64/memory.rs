//! The page size, and variables in pages of their own.

/// Returns the page size in bytes.
#[inline(always)]
pub const fn page_size() -> usize {
    4096
}

/// A variable whose pages contain no other data.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct OwnPages<T>(pub T);
