//! Sleeping and waking by the futex operations that the standard library's locks also use.

use crate::enter::raw;
use crate::list::{Call, is_allowed};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `value`, for at most `longest` if given. Returns whether a signal handler ran during the
/// sleep. Async-signal-safe.
///
/// If there is a time limit and the thread is stopped (SIGSTOP, a debugger, the freezer), the kernel may continue the
/// sleep by the system call `restart_syscall`.
pub fn sleep(word: &AtomicU32, value: u32, longest: Option<Duration>) -> bool {
    let limit = longest.map(|longest| libc::timespec {
        tv_sec: longest.as_secs() as _,
        tv_nsec: longest.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let arguments = [
        word.as_ptr() as usize,
        operation as usize,
        value as usize,
        limit as usize,
        0,
        0,
    ];
    // SAFETY: the word is live and aligned; the time limit is null, or is on the stack.
    let slept = unsafe { raw(libc::SYS_futex, arguments) };
    slept == -(libc::EINTR as isize)
}

/// Wakes every thread that sleeps on `word`. Async-signal-safe.
pub fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    let everybody = i32::MAX as usize;
    let arguments = [
        word.as_ptr() as usize,
        operation as usize,
        everybody,
        0,
        0,
        0,
    ];
    // SAFETY: the word is live and aligned. It is no error if no thread sleeps.
    unsafe { raw(libc::SYS_futex, arguments) };
}

/// Sleeps for about `duration`. If a filter forbids a system call that a sleep with a time limit needs, only yields.
pub fn pause(duration: Duration) {
    match is_allowed(Call::RestartSyscall) {
        true => drop(sleep(&AtomicU32::new(0), 0, Some(duration))),
        false => yield_now(),
    }
}

/// Lets other threads run, but makes no system call that a filter forbids.
pub fn yield_now() {
    const SPINS: u32 = 200;
    match is_allowed(Call::Yield) {
        true => std::thread::yield_now(),
        false => (0..SPINS).for_each(|_| std::hint::spin_loop()),
    }
}
