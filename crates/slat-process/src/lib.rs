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

use calls::Call;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

/// Returns the kernel's numbers of the process that this thread runs in, and of the thread. In contrast to [`forks::owner`] and
/// [`thread_id`] they are right in a child of `vfork`, too, where no filter forbids to ask. Async-signal-safe.
pub fn myself() -> (libc::pid_t, libc::pid_t) {
    if !calls::is_allowed(Call::ProcessId) || !calls::is_allowed(Call::ThreadId) {
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

/// Whether the C library notes the number of each thread where [`read_noted_id`] reads it.
static IS_NOTED: AtomicBool = AtomicBool::new(false);

/// Reads what is glibc's note of this thread's number: `tid` in its `struct pthread`, which the kernel fills in when a thread is made or a
/// process is forked. That it is there is checked by [`find_noted_id`].
fn read_noted_id() -> libc::pid_t {
    const OFFSET: usize = 0x2d0;
    let id;
    // SAFETY: every thread's FS refers to a thread control block, which is longer.
    unsafe {
        std::arch::asm!("mov {:e}, fs:[{}]", out(reg) id, const OFFSET, options(nostack, readonly, preserves_flags));
    }
    id
}

/// Finds out whether the C library's note of a thread's number is where it is looked for. Call on the first thread of the process.
pub fn find_noted_id() {
    IS_NOTED.store(read_noted_id() == forks::owner(), Ordering::Relaxed);
}

/// Returns the number of this thread as the C library has noted it, without a system call. `None` where it is not known to do so. Wrong on a
/// thread or in a process that was not made by the C library.
pub(crate) fn noted_thread_id() -> Option<libc::pid_t> {
    IS_NOTED.load(Ordering::Relaxed).then(read_noted_id)
}

/// Returns the kernel's number of this thread. Async-signal-safe.
///
/// One system call per thread: a forked child's thread has another number than the thread it is a copy of, and asks again. None where a
/// filter forbids it and the C library has noted the number.
pub fn thread_id() -> libc::pid_t {
    thread_local! {
        // Without an initialiser or a destructor: handlers read them.
        static ID: Cell<libc::pid_t> = const { Cell::new(0) };
        /// The process in which `ID` is right; 0 is none.
        static PROCESS: Cell<u64> = const { Cell::new(0) };
    }
    let here = forks::Birth::here().number();
    if PROCESS.get() != here {
        let noted = match calls::is_allowed(Call::ThreadId) {
            true => None,
            false => noted_thread_id(),
        };
        // SAFETY: no arguments.
        let ask = || unsafe { calls::raw(libc::SYS_gettid, [0; 6]) } as libc::pid_t;
        ID.set(noted.unwrap_or_else(ask));
        // A handler that runs in between asks once more.
        compiler_fence(Ordering::SeqCst);
        PROCESS.set(here);
    }
    ID.get()
}
