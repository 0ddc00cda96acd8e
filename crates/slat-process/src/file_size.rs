//! Files under RLIMIT_FSIZE. The kernel refuses to extend a file beyond this limit, and sends SIGXFSZ, which ends a
//! program that does not handle the signal.
//!
//! A program that uses the kernel's KVM needs to write no files for that. So slat's writes to its own files must not
//! end the program.

use crate::calls::raw;
use std::io;

/// The size of the kernel's signal set in bytes.
const SET_BYTES: usize = 8;
/// The signal set that contains only SIGXFSZ.
const EXCEEDED: u64 = 1 << (libc::SIGXFSZ - 1);

/// Runs `work`, which extends a file. If the file would exceed the limit, `work` gets `EFBIG`, but the program gets no
/// signal. Async-signal-safe if `work` is.
///
/// # Errors
/// The errors of `work`.
pub fn limited<R>(work: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    let (set, mut before) = (EXCEEDED, 0u64);
    let mask = |how: i32, set: *const u64, before: *mut u64| {
        // SAFETY: each pointer is null, or points to a live set of the size that is passed.
        unsafe {
            raw(
                libc::SYS_rt_sigprocmask,
                [how as usize, set as usize, before as usize, SET_BYTES, 0, 0],
            )
        }
    };
    mask(libc::SIG_BLOCK, &set, &mut before);
    let result = work();
    let exceeded = matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EFBIG));
    // If the program itself blocks SIGXFSZ, the signal stays pending: one may have been pending before `work`, and a
    // second one makes no difference.
    if exceeded && before & EXCEEDED == 0 {
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let (set, now) = (&raw const set as usize, &raw const now as usize);
        // SAFETY: the arguments are a live signal set, a null pointer for the information, and a time limit. The call
        // removes the pending signal, which the kernel has sent to this thread.
        unsafe { raw(libc::SYS_rt_sigtimedwait, [set, 0, now, SET_BYTES, 0, 0]) };
    }
    mask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    result
}

/// Returns an error of writing a file as a message. If the limit was exceeded, the message names the limit.
pub fn explained(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EFBIG) => "RLIMIT_FSIZE (ulimit -f) forbids a file of this size".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::FromRawFd;

    #[test]
    fn a_file_beyond_the_limit_is_an_error_and_no_signal() {
        // SAFETY: the child, which has one thread, only makes system calls on its own descriptor, and ends by `_exit`.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let limit = libc::rlimit {
                    rlim_cur: 4096,
                    rlim_max: 4096,
                };
                libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
                let file = File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), 0));
                let refused = limited(|| file.set_len(8192));
                let fine = limited(|| file.set_len(4096));
                let is_large = refused.map_err(|error| error.raw_os_error());
                libc::_exit(i32::from(
                    is_large != Err(Some(libc::EFBIG)) || fine.is_err(),
                ));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "the child's status");
    }
}
