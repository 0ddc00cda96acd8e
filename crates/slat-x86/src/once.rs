//! Code that is decoded from memory, executed, and forgotten: it runs for the first time, or is single-stepped.
//!
//! Much code runs only once. A block that is kept costs a copy of its code, and a mark of its page; the mark is
//! reported to all CPUs, and makes stores to the page slow (`code_pages`). A block that is not kept needs neither the
//! copy nor the mark. Instead, the rest of the block is compared with memory after each of its instructions. So the CPU
//! sees a store to a later instruction, whatever address and TLB entry the store has used.

/// The page from which code was read last, without a copy of it.
pub(crate) struct Once {
    /// The page's key, as in [`Snapshot::key_of`](crate::snapshot::Snapshot::key_of).
    pub(crate) key: u64,
    /// The generation when `host` was looked up; 0 if it never was.
    pub(crate) generation: u64,
    /// The host address of the page.
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

    /// Forces the page to be looked up again.
    pub(crate) fn outdate(&mut self) {
        self.generation = 0;
    }
}
