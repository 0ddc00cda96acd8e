//! Memory for compiled code. It consists of whole pages in one reserved range of address space. A page is writable
//! while code is copied to it, and executable afterwards, but never both.
//!
//! After the code is a table with one bit per byte of code: 1 where a guarded access begins. The table tells a signal
//! handler whether an instruction may fail (`slat_guard::set_generated`).
//!
//! Only the compiling threads allocate, fill and recycle pages, because a seccomp filter may forbid the system calls on
//! other threads. (In tests, CPUs may compile on their own threads.) Pages that other threads free are listed in
//! `returned`, until a compiling thread reuses them.

use crate::arch;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// Locks a mutex, even if another thread has panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the size of the host's pages in bytes.
fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions. It cannot fail for the page size.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// The reserved range of addresses: first the code, then the table of guarded accesses.
#[derive(Debug)]
struct Reservation {
    start: *mut u8,
    /// The number of bytes for code.
    bytes: usize,
}

impl Reservation {
    /// Returns the size of the table of guarded accesses in bytes.
    fn table_bytes(&self) -> usize {
        self.bytes / 8
    }
}

// SAFETY: the pointer is the address of a mapping. Each part of the mapping has only one user.
unsafe impl Send for Reservation {}
// SAFETY: a shared reference allows only reads of the address and the size, which never change.
unsafe impl Sync for Reservation {}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to `self`, and its last user was dropped.
        unsafe { libc::munmap(self.start.cast(), self.bytes + self.table_bytes()) };
    }
}

/// Why code is not compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// All pages for code are used.
    Full,
    /// The host has no memory, forbids executable memory, or cannot make all threads see new code.
    Forbidden,
    /// The compiler does not support this code.
    Unable,
}

/// The memory for all compiled code of a process.
#[derive(Debug)]
pub struct Arena {
    memory: Reservation,
    /// The size of the host's pages in bytes: 4, 16 or 64 KiB. Access rights apply to whole pages.
    page: usize,
    state: Mutex<State>,
    /// Whether the signal handlers know the addresses of the code.
    announced: Once,
}

#[derive(Debug, Default)]
struct State {
    /// The free runs of pages below `fresh`, in ascending order. No two of them are adjacent.
    free: Vec<Range<usize>>,
    /// Runs of pages that other threads have freed. They are still executable.
    returned: Vec<Range<usize>>,
    /// The first page that was never used. No page after it was used, either.
    fresh: usize,
}

impl Arena {
    /// Reserves address space for `bytes` bytes of code, a multiple of the page size. Returns `None` if the host has no
    /// such space, or cannot make all threads see new code.
    pub fn try_new(bytes: usize) -> Option<Arc<Self>> {
        if !arch::prepare() {
            return None;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the call makes a new mapping at an address that the kernel chooses.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + bytes / 8,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return None;
        }
        let memory = Reservation {
            start: memory.cast(),
            bytes,
        };
        // SAFETY: the range is the end of the mapping that was made above.
        let table = unsafe {
            libc::mprotect(
                memory.start.add(bytes).cast(),
                memory.table_bytes(),
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if table != 0 {
            return None;
        }
        Some(Arc::new(Self {
            memory,
            page: page_size(),
            state: Mutex::default(),
            announced: Once::new(),
        }))
    }

    /// Registers the code with the signal handlers: if a guarded access fails, the thread continues at `exit`. Call
    /// before a thread executes the code.
    ///
    /// # Safety
    /// - At each guarded access the code may continue at `exit`, with the address of the access in the host's register
    ///   for results, and all other registers unchanged.
    /// - No thread executes the code of another arena that was announced before.
    pub unsafe fn announce(&self, exit: usize) {
        self.announced.call_once(|| {
            let start = self.memory.start as usize;
            let end = start + self.memory.bytes;
            // SAFETY: the table follows the code. It is readable as long as the arena exists, and each chunk keeps the
            // arena alive. The caller guarantees the other conditions.
            unsafe { slat_guard::set_generated(start..end, end, exit) };
        });
    }

    /// Copies `code` into pages that no other code uses. `guarded` yields the offsets of the guarded accesses. The
    /// code's offset in its first page varies: otherwise the first lines of all functions would compete for a few cache
    /// sets.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn put(
        self: &Arc<Self>,
        code: &[u8],
        guarded: impl Iterator<Item = u32>,
    ) -> Result<Chunk, Refused> {
        let pages = self
            .take(code.len().div_ceil(self.page))
            .ok_or(Refused::Full)?;
        let len = pages.len() * self.page;
        let start = self.memory.start.wrapping_add(pages.start * self.page);
        let lines = (len - code.len()) / LINE + 1;
        let offset = pages.start * 41 % lines * LINE;
        let chunk = Chunk {
            arena: self.clone(),
            pages,
            offset,
            len: code.len(),
        };
        // SAFETY: these pages belong to no other code, and no thread executes them yet.
        unsafe {
            if libc::mprotect(start.cast(), len, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return Err(Refused::Forbidden);
            }
            // No other code has bits in these bytes of the table, because the size of a page is a multiple of 8.
            let table = self.memory.start.add(self.memory.bytes);
            let first = chunk.pages.start * self.page;
            table.add(first / 8).write_bytes(0, len / 8);
            for access in guarded {
                let at = first + offset + access as usize;
                *table.add(at / 8) |= 1 << (at % 8);
            }
            (start.add(offset)).copy_from_nonoverlapping(code.as_ptr(), code.len());
            let is_seen = arch::publish(start.add(offset), code.len());
            let executable = libc::PROT_READ | libc::PROT_EXEC;
            if !is_seen || libc::mprotect(start.cast(), len, executable) != 0 {
                return Err(Refused::Forbidden);
            }
        }
        Ok(chunk)
    }

    /// Allocates a run of `count` pages. Returns `None` if there are not enough adjacent free pages.
    fn take(&self, count: usize) -> Option<Range<usize>> {
        let mut state = lock(&self.state);
        let State {
            free,
            returned,
            fresh,
        } = &mut *state;
        if !returned.is_empty() {
            free.append(returned);
            free.sort_unstable_by_key(|run| run.start);
            free.dedup_by(|run, before| {
                let follows = before.end == run.start;
                if follows {
                    before.end = run.end;
                }
                follows
            });
        }
        if let Some(at) = free.iter().position(|run| run.len() >= count) {
            let run = &mut free[at];
            let taken = run.start..run.start + count;
            run.start += count;
            if run.start == run.end {
                free.remove(at);
            }
            return Some(taken);
        }
        if (*fresh + count) * self.page > self.memory.bytes {
            return None;
        }
        let taken = *fresh..*fresh + count;
        *fresh += count;
        Some(taken)
    }
}

/// Pages with the code of one function.
#[derive(Debug)]
pub struct Chunk {
    arena: Arc<Arena>,
    pages: Range<usize>,
    /// The offset of the code in its pages.
    offset: usize,
    /// The number of bytes of the code.
    len: usize,
}

impl Chunk {
    /// Returns the offset of an address in the code, or `None` if the address is outside of the code.
    pub fn offset_of(&self, address: usize) -> Option<u32> {
        let offset = address.checked_sub(self.start() as usize)?;
        (offset < self.len).then_some(offset as u32)
    }

    /// Returns the code.
    pub fn code(&self) -> &[u8] {
        // SAFETY: the pages belong to this chunk, are readable, and are not written while the chunk exists.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    /// Returns the address of the first instruction.
    pub fn start(&self) -> *const u8 {
        self.arena
            .memory
            .start
            .wrapping_add(self.pages.start * self.arena.page + self.offset)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let mut state = lock(&self.arena.state);
        state.returned.push(self.pages.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_used_again() {
        const BYTES: usize = 1 << 20;
        let arena = Arena::try_new(BYTES).unwrap();
        let pages = BYTES / page_size();
        let code = arch::returning;
        for round in 0..3 * pages {
            let chunk = arena.put(&code(round as u8), [0].into_iter()).unwrap();
            // SAFETY: the address is that of a function that was written just now, and that returns a number.
            let function: extern "C" fn() -> u32 = unsafe { std::mem::transmute(chunk.start()) };
            assert_eq!(function(), round as u32 & 0xff);
        }
        let many: Vec<_> = (0..pages)
            .map_while(|_| arena.put(&[0xc3], [].into_iter()).ok())
            .collect();
        assert_eq!(many.len(), pages);
        assert!(arena.put(&[0xc3], [].into_iter()).is_err());
        drop(many);
        // The pages were freed one by one; this code needs them merged into one run.
        assert!(arena.put(&[0xc3; BYTES], [].into_iter()).is_ok());
    }
}
