//! The program's break (brk(2)): memory that grows at the end of the program's image. The process's own break belongs
//! to slat's C library.

use crate::memory;
use crate::real::map_memory;
use slat_kvm::thread::Section;
use slat_process::page_size;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first address of the break, and its current end.
pub type Break = (usize, usize);

/// The program's break. A thread that forks holds this lock during the fork.
static BREAK: Mutex<Break> = Mutex::new((0, 0));

/// Locks the program's break, which cannot change while the guard lives.
pub fn lock_break() -> MutexGuard<'static, Break> {
    BREAK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins the break at the end of the program's image.
pub fn begin_at(end: usize) {
    let end = end.next_multiple_of(page_size());
    *lock_break() = (end, end);
}

/// Moves the break to `to` if that is possible. Returns the break after the call.
pub fn set_break(to: usize) -> usize {
    let _section = Section::enter();
    let mut held = lock_break();
    let (start, now) = *held;
    if to < start {
        return now;
    }
    let Some(end) = to.checked_next_multiple_of(page_size()) else {
        return now;
    };
    let mapped = now.next_multiple_of(page_size());
    if end > mapped {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the call maps memory only at free addresses.
        let grown = unsafe { map_memory(mapped, end - mapped, access, libc::MAP_FIXED_NOREPLACE) };
        if grown.is_err() {
            return now;
        }
    }
    held.1 = to;
    drop(held);
    drop(_section);
    if end < mapped {
        // SAFETY: the program has shrunk its break, so it does not use this memory any more.
        unsafe { memory::unmap(end, mapped - end) };
    }
    to
}
