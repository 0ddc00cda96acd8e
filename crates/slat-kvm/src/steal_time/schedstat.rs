//! The `schedstat` files of threads, opened in a descriptor table that no other thread uses.
//!
//! This module makes system calls directly, not through the C library. The preload library would treat calls of the C
//! library's functions as the program's. But the descriptors here belong to another table, and may have the same
//! numbers as the program's.

use std::ffi::CStr;
use std::io::Write as _;

/// Makes a system call. Returns the kernel's result; errors are negative.
///
/// # Safety
/// The caller meets the system call's conditions.
unsafe fn system_call(number: i64, [a, b, c, d]: [usize; 4]) -> isize {
    // SAFETY: the caller keeps this function's contract.
    unsafe { slat_process::calls::raw(number, [a, b, c, d, 0, 0]) }
}

/// Whether the host counts how long a thread waits for a CPU. Needs no descriptor.
pub(super) fn exists() -> bool {
    let (at, path) = (
        libc::AT_FDCWD as usize,
        c"/proc/thread-self/schedstat".as_ptr() as usize,
    );
    // SAFETY: the path ends with NUL.
    unsafe { system_call(libc::SYS_faccessat, [at, path, libc::R_OK as usize, 0]) == 0 }
}

/// The open file `schedstat` of a thread, which shows how long the thread has waited for a processor. Only the thread
/// that called [`leave_descriptors`](crate::background::leave_descriptors) uses it.
#[derive(Debug)]
pub(super) struct Schedstat(usize);

impl Schedstat {
    /// Opens the `schedstat` of a thread of this process. `None`: the thread has ended.
    pub(super) fn open(thread: usize) -> Option<Self> {
        // The path is formatted without the heap. The buffer has space for both numbers.
        let mut path = [0u8; 64];
        let mut rest = &mut path[..];
        let process = std::process::id();
        write!(rest, "/proc/{process}/task/{thread}/schedstat\0").expect("it fits");
        let path = CStr::from_bytes_until_nul(&path).expect("it ends with NUL");
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0];
        // SAFETY: the path ends with NUL.
        let fd = unsafe { system_call(libc::SYS_openat, arguments) };
        Some(Schedstat(usize::try_from(fd).ok()?))
    }

    /// Reads the time, in nanoseconds, in which the thread was ready to run and did not run. `None`: the thread has
    /// ended.
    pub(super) fn waited(&self) -> Option<u64> {
        let mut text = [0u8; 64];
        let arguments = [self.0, text.as_mut_ptr() as usize, text.len(), 0];
        // SAFETY: the call gets a live buffer and the buffer's length.
        let len = unsafe { system_call(libc::SYS_pread64, arguments) };
        let text = std::str::from_utf8(text.get(..usize::try_from(len).ok()?)?).ok()?;
        // The first number, which is skipped, is the time that the thread ran.
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    }
}

impl Drop for Schedstat {
    fn drop(&mut self) {
        // SAFETY: the descriptor is in this thread's own table, and only this value uses it.
        unsafe { system_call(libc::SYS_close, [self.0, 0, 0, 0]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::background::leave_descriptors;

    #[test]
    fn the_table_is_a_threads_own() {
        // SAFETY: the call takes no pointer.
        let is_open = || unsafe { libc::fcntl(2, libc::F_GETFD) >= 0 };
        let left = std::thread::spawn(move || {
            assert!(leave_descriptors());
            let file = Schedstat::open(crate::entered::thread_id()).unwrap();
            assert!(exists() && file.waited().is_some());
            !is_open()
        });
        assert!(left.join().unwrap());
        assert!(is_open());
    }
}
