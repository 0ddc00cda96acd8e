//! The process that slat runs in, which belongs to the program: the program forks, and forbids system calls to its own threads.
//!
//! | file | idea |
//! |---|---|
//! | [`forks`] | what belongs to one process and not to its forked children |
//! | [`calls`] | the system calls that slat makes on the program's threads, and who makes those that a filter forbids |
//! | [`file_size`] | files that the program's limit forbids |
//! | [`filter`] | what a seccomp filter decides about them |
//! | `helper` | a thread without a filter that makes system calls for others |
//! | [`caller`] | flags and floating point as the program has set them, and as slat needs them |
//! | [`gate`] | the instruction at which slat enters the kernel |
//! | [`once`] | what is done once, and does not hang forked children |
//! | [`pointers`] | two thread pointers on one thread: the program's and slat's |
//! | [`stack`] | the stack on which dispatched system calls are served |
//! | [`wait`] | sleeping and waking by futex, which every filter has to allow |
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod caller;
pub mod calls;
pub mod file_size;
pub mod filter;
pub mod forks;
pub mod gate;
pub mod helper;
pub mod once;
pub mod pointers;
pub mod stack;
pub mod wait;

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};

/// Returns the kernel's numbers of the process that this thread runs in, and of the thread. In contrast to [`forks::owner`] and
/// [`thread_id`] they are right in a child of `vfork`, too, where no filter forbids to ask. Async-signal-safe.
pub fn myself() -> (libc::pid_t, libc::pid_t) {
    if !calls::is_allowed(calls::Call::ProcessId) {
        return (forks::owner(), thread_id());
    }
    // SAFETY: no arguments.
    unsafe {
        let ask = |number| calls::raw(number, [0; 6]) as libc::pid_t;
        (ask(libc::SYS_getpid), ask(libc::SYS_gettid))
    }
}

/// Reads this thread's `errno`. Async-signal-safe.
pub fn errno() -> i32 {
    // SAFETY: the thread's own cell.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's `errno`. Async-signal-safe: a handler restores the value it found.
pub fn set_errno(errno: i32) {
    // SAFETY: the thread's own cell.
    unsafe { *libc::__errno_location() = errno };
}

/// Returns the kernel's number of this thread. Async-signal-safe.
///
/// One system call per thread: a forked child's thread has another number than the thread it is a copy of, and asks again.
pub fn thread_id() -> libc::pid_t {
    thread_local! {
        // Without an initialiser or a destructor: handlers read them.
        static ID: Cell<libc::pid_t> = const { Cell::new(0) };
        /// The process in which `ID` is right; 0 is none.
        static PROCESS: Cell<u64> = const { Cell::new(0) };
    }
    let here = forks::Birth::here().number();
    if PROCESS.get() != here {
        // SAFETY: no arguments.
        ID.set(unsafe { calls::raw(libc::SYS_gettid, [0; 6]) } as libc::pid_t);
        // A handler that runs in between asks once more.
        compiler_fence(Ordering::SeqCst);
        PROCESS.set(here);
    }
    ID.get()
}
