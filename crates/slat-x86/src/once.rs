//! Code that is decoded from memory, executed, and forgotten: it runs for the first time, or is single-stepped.
//!
//! Much code runs only once. A block that is kept costs a copy of its code, and a mark of its page; all CPUs are told
//! of the mark, and it makes stores to the page slow (`code_pages`). A block that is not kept has neither. Instead, the
//! rest of the block is compared with memory after each of its instructions. So the CPU sees a store to a later
//! instruction, whatever address and TLB entry the store has used.

use crate::Cpu;
use crate::block::Block;
use crate::machine::Exit;
use crate::op::Break;
use crate::snapshot::Snapshot;

/// The page from which code was read last, without a copy of it.
pub(crate) struct Once {
    /// The page's key, as in [`Snapshot::key_of`].
    key: u64,
    /// The generation when `host` was looked up; 0 if it never was.
    generation: u64,
    /// The host address of the page.
    host: *mut u8,
}

impl Once {
    pub(crate) fn new() -> Self {
        Self {
            key: 0,
            generation: 0,
            host: std::ptr::null_mut(),
        }
    }

    /// Makes the page be looked up again.
    pub(crate) fn outdate(&mut self) {
        self.generation = 0;
    }
}

impl Cpu {
    /// Returns the host address of the page of the code at `lin`.
    fn once_host(&mut self, lin: u64) -> Result<*mut u8, Break> {
        let key = Snapshot::key_of(lin, self.cpl == 3);
        if self.once.key != key || self.once.generation != self.clock.generation() {
            let host = self.code_host(lin)?;
            self.once = Once {
                key,
                generation: self.clock.generation(),
                host,
            };
        }
        Ok(self.once.host)
    }

    /// Reads the code at `lin`, in one page, from memory.
    pub(crate) fn copy_code(&mut self, lin: u64, code: &mut [u8]) -> Result<(), Break> {
        let (at, _) = Snapshot::split(lin);
        loop {
            let host = self.once_host(lin)?;
            // SAFETY: `host` was translated in this generation, and the page contains the bytes; the access is guarded.
            match unsafe { slat_guard::copy_in(code, host.wrapping_add(at)) } {
                Ok(()) => return Ok(()),
                Err(_) => self.code_gone(lin, host)?,
            }
        }
    }

    /// Whether memory holds the code of a block that was not kept, so that it need not be decoded again.
    pub(crate) fn holds_once(&mut self, block: &Block) -> Result<bool, Break> {
        let (code, beyond) = block.parts();
        if code.is_empty() || !beyond.is_empty() {
            return Ok(false);
        }
        let (at, _) = Snapshot::split(block.key.lin);
        let host = self.once_host(block.key.lin)?.wrapping_add(at);
        // SAFETY: as in `copy_code`.
        Ok(unsafe { slat_guard::matches(host, code) }.unwrap_or(false))
    }

    /// Executes a block that is not kept. Memory held its code when it was entered.
    #[inline(never)]
    pub(crate) fn execute_once(&mut self, block: &Block) -> Option<Exit> {
        let (at, _) = Snapshot::split(block.key.lin);
        let (code, _) = block.parts();
        // A block in two pages is always a single instruction.
        let host = self.once.host.wrapping_add(at);
        self.execute_while(block, |op| {
            let end = usize::from(op.offset) + usize::from(op.len);
            let rest = code.get(end..).unwrap_or(&[]);
            // SAFETY: the page that the block was read from. Even if the page has another use now,
            // the access is guarded.
            unsafe { slat_guard::matches(host.wrapping_add(end), rest) }.unwrap_or(false)
        })
    }
}
