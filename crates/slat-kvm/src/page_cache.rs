//! The second-level translations that a vCPU used last.

use std::ptr::NonNull;

const PAGE: u64 = 4096;

/// A second-level translation of one 4 KiB page.
#[derive(Clone, Copy)]
pub(crate) struct Page {
    pub(crate) gpa: u64,
    pub(crate) host: NonNull<u8>,
    pub(crate) write: bool,
    /// Of a translation for a write: the engine must be told of the store.
    pub(crate) tracked: bool,
}

// SAFETY: the pointer points into guest memory, which belongs to no thread and is accessed by guarded accesses only.
unsafe impl Send for Page {}

/// The last second-level translations of this vCPU, indexed by page number.
pub(crate) struct PageCache([Option<Page>; PageCache::SIZE]);

impl Default for PageCache {
    fn default() -> Self {
        PageCache([None; Self::SIZE])
    }
}

impl PageCache {
    const SIZE: usize = 64;

    pub(crate) fn slot(&mut self, gpa: u64) -> &mut Option<Page> {
        &mut self.0[(gpa / PAGE) as usize % Self::SIZE]
    }

    pub(crate) fn flush(&mut self) {
        self.0.fill(None);
    }
}
