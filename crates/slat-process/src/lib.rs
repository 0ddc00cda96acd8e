//! The process in which slat runs. The process belongs to the program, which may fork, and may forbid its own threads
//! to make system calls.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | [`forks`] | state of one process, which its forked children do not share |
//! | [`calls`] | the system calls that slat makes on the program's threads, and who makes those that a filter forbids |
//! | `list`, `enter` | the list of those calls; entering the kernel |
//! | `ids`, `noted` | the kernel's ids of a thread and its process; where the C library stores the thread's id |
//! | [`file_size`] | files that exceed the program's limit |
//! | [`filter`] | what a seccomp filter decides about a call |
//! | `helper` | a thread without a filter that makes system calls for others |
//! | `arch` | what depends on the processor's architecture: x86-64 and arm64 |
//! | [`caller`] | flags and floating point as the program has set them, and as slat needs them |
//! | [`context`] | the registers of the code that a signal has interrupted |
//! | [`gate`] | the instruction at which slat enters the kernel |
//! | [`once`] | work that is done once, and does not hang forked children |
//! | [`pointers`] | two thread pointers on one thread: the program's and slat's |
//! | [`handler`](mod@handler) | signal handlers of slat and of the program |
//! | [`stack`] | the stack on which dispatched system calls are served |
//! | [`wait`] | sleeping and waking by futex, which every filter has to allow |
//! | `sync` | the atomics and sleeps of the helper's protocol; in its loom model, loom's atomics |
#![cfg(target_os = "linux")]

mod arch;
pub mod calls;
mod enter;
pub mod file_size;
pub mod filter;
pub mod forks;
pub mod gate;
pub mod handler;
pub mod helper;
mod ids;
mod list;
mod noted;
pub mod once;
pub mod stack;
mod sync;
pub mod wait;

pub use arch::memory::page_size;
pub use arch::{caller, context, pointers};
pub use ids::{find_noted_id, myself, thread_id};
pub use noted::first_noted_id;

/// Reads this thread's `errno`. Async-signal-safe.
pub fn errno() -> i32 {
    // SAFETY: `errno` is a variable of this thread.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's `errno`. Async-signal-safe if the signal handler restores the earlier value before it returns.
pub fn set_errno(errno: i32) {
    // SAFETY: `errno` is a variable of this thread.
    unsafe { *libc::__errno_location() = errno };
}
