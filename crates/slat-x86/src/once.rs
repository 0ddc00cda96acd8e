//! Execution of code whose block is not kept, because the code runs for the first time or is single-stepped.
//!
//! Much code runs only once. A kept block needs a copy of its code and a mark on its page. The mark is reported to all
//! CPUs, and makes stores to the page slow (`code_pages`). A block that is not kept needs neither. Instead, after each
//! of its instructions, the CPU compares the rest of the block with memory. So the CPU sees every store to a later
//! instruction, even one at another linear address.

/// The page from which code was last read without a snapshot of the page.
pub(crate) struct Once {
    /// The page's key, as in [`Snapshot::key_of`](crate::snapshot::Snapshot::key_of).
    pub(crate) key: u64,
    /// The clock's generation when `host` was translated; 0 if it must be translated again.
    pub(crate) generation: u64,
    /// The host address of the page that contains the code.
    pub(crate) host: *mut u8,
}

impl Once {
    pub(crate) fn new() -> Self {
        Self {
            key: 0,
            generation: 0,
            host: std::ptr::null_mut(),
        }
    }

    /// Makes the CPU translate the page's address again before it reads code from the page.
    pub(crate) fn outdate(&mut self) {
        self.generation = 0;
    }
}
