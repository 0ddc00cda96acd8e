//! The process in which slat runs. It belongs to the program, which may fork, and may forbid system
//! calls to its own threads.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | [`forks`] | what belongs to one process and not to its forked children |
//! | [`calls`] | the system calls that slat makes on the program's threads, and who makes those that a filter forbids |
//! | `list`, `enter` | the list of those calls; entering the kernel |
//! | [`file_size`] | files that exceed the program's limit |
//! | [`filter`] | what a seccomp filter decides about a call |
//! | `helper` | a thread without a filter that makes system calls for others |
//! | [`caller`] | flags and floating point as the program has set them, and as slat needs them |
//! | [`gate`] | the instruction at which slat enters the kernel |
//! | [`once`] | work that is done once, and does not hang forked children |
//! | [`pointers`] | two thread pointers on one thread: the program's and slat's |
//! | [`handler`] | signal handlers of slat and of the program |
//! | [`stack`] | the stack on which dispatched system calls are served |
//! | [`wait`] | sleeping and waking by futex, which every filter has to allow |
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod caller;
pub mod calls;
mod enter;
pub mod file_size;
pub mod filter;
pub mod forks;
pub mod gate;
pub mod handler;
pub mod helper;
mod list;
pub mod once;
pub mod pointers;
pub mod stack;
pub mod wait;

use calls::Call;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering, compiler_fence};

/// Returns the kernel's ids of the process and of the thread in which this runs. In contrast to [`forks::owner`]
/// and [`thread_id`], they are right even in a child of `vfork`, unless a filter forbids the calls that ask for
/// them. Async-signal-safe.
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

/// Sets this thread's `errno`. Async-signal-safe, provided that a handler restores the value it found.
pub fn set_errno(errno: i32) {
    // SAFETY: the thread's own cell.
    unsafe { *libc::__errno_location() = errno };
}

/// The C library's note of the id of the process's first thread. Null if the note is not where
/// [`noted_id`] looks for it.
static FIRST: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the address of glibc's note of this thread's id: `tid` in its `struct pthread`. The kernel fills it in
/// when a thread is made or a process is forked, and clears it when the thread ends. [`find_noted_id`] checks
/// that the note is there.
fn noted_id() -> *mut AtomicU32 {
    const OFFSET: usize = 0x2d0;
    let block: *mut u8;
    // SAFETY: every thread's FS refers to its thread control block, which begins with its own address.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    block.wrapping_add(OFFSET).cast()
}

/// Checks whether the C library's note of a thread's id is where `noted_id` looks for it. Call on the first
/// thread of the process.
pub fn find_noted_id() {
    // SAFETY: the control block is longer.
    if unsafe { (*noted_id()).load(Ordering::Relaxed) } == forks::owner() as u32 {
        note_first();
    }
}

/// Records that this thread is the first one of the process.
pub(crate) fn note_first() {
    FIRST.store(noted_id(), Ordering::Relaxed);
}

/// Returns the C library's note of the id of the process's first thread. When that thread ends, the kernel
/// clears the note and wakes the threads that sleep on it. The note's memory may be freed afterwards, so only
/// `futex` may access it.
pub fn first_noted_id() -> Option<NonNull<AtomicU32>> {
    NonNull::new(FIRST.load(Ordering::Relaxed))
}

/// Returns this thread's id from the C library's note, without a system call. `None` if the place of the note is
/// unknown. The result is wrong on a thread or in a process that the C library has not made.
pub(crate) fn noted_thread_id() -> Option<libc::pid_t> {
    // SAFETY: this thread's own note, whose address is known.
    first_noted_id().map(|_| unsafe { (*noted_id()).load(Ordering::Relaxed) } as libc::pid_t)
}

/// Returns the kernel's id of this thread. Async-signal-safe.
///
/// Makes one system call per thread. In a forked child, the thread's id differs from that of the thread it is a copy
/// of, so the child asks again. Makes no call if a filter forbids it and the C library has noted the id.
pub fn thread_id() -> libc::pid_t {
    thread_local! {
        // `ID` and `PROCESS` have neither an initialiser nor a destructor, because handlers read them.
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
        // If a handler runs between the two stores, the handler asks for the id again.
        compiler_fence(Ordering::SeqCst);
        PROCESS.set(here);
    }
    ID.get()
}
