//! Handles forks of the program, by the C library's `fork` and `_Fork`, and by system calls through `syscall`.
//!
//! A thread that forks holds the lock of slat's heap over the fork, so that no child inherits a half-changed heap. The
//! forking thread must lock the heap after all other locks, for this reason: the program's `malloc` holds its own locks
//! over a fork, too, and another thread that holds these locks may call `mmap` or `madvise`, and so allocate from
//! slat's heap. Before a fork, the C library calls the registered handlers in reverse order of registration. So slat
//! registers its handlers before all others, however early those are registered.
//!
//! # Locks of the process
//! A child inherits the state that each lock had at the moment of the fork. The fork may be a system call that slat
//! does not see. A child must not wait for a thread that does not exist in the child. Data of one process is in a
//! [`PerProcess`](slat_process::forks::PerProcess): the child makes its own value, with new locks. Data that stays
//! valid in a child is in a [`Computed`](slat_process::once::Computed) or a [`Prepared`](slat_process::once::Prepared),
//! whose first use does not wait for threads of another process. The remaining locks are these (`tests/locks.rs`
//! compares the table with the code):
//!
//! | lock | file | a child |
//! |---|---|---|
//! | `STATE` | `slat-preload/src/heap.rs` | finds it free: held over announced forks; after others it may be held |
//! | `BREAK` | `slat-preload/src/program_break.rs` | as `STATE`; a loaded program's forks are all announced |
//! | `APART` | `slat-process/src/once.rs` | as `STATE`; held while the decoder's tables are built, once in a process |
//! | `PASSING` | `slat-preload/src/user_dispatch.rs` | finds it set: before the program begins, by its only thread |
//! | `KEY` | `slat-preload/src/dispatch/library_threads.rs` | as `PASSING` |
//! | `OWN` | `slat-preload/src/loaded.rs` | as `PASSING` |
//! | `LOOKS` | `slat-preload/src/environment.rs` | as `PASSING` |
//! | `LIBRARY` | `slat-preload/src/children/mod.rs` | as `PASSING` |
//!
//! An announced fork is a fork that slat sees. slat's compiler library has a `OnceLock` of its own. The library's first
//! translation sets this lock within a microsecond, on one of slat's threads. If a child finds the lock half set, the
//! child's guests are interpreted.

use crate::files::interpose;
use crate::real::{Next, set_errno};
use crate::{heap, user_dispatch};
use slat_host::process;
use slat_process::pointers;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

type Handler = Option<unsafe extern "C" fn()>;

static NEXT_REGISTER: Next = Next::new(c"__register_atfork");
static NEXT_FORK: Next = Next::new(c"_Fork");

extern "C" fn before() {
    heap::before_fork();
}

extern "C" fn after_in_parent() {
    heap::after_fork();
}

extern "C" fn after_in_child() {
    heap::after_fork();
    slat_guard::after_fork_in_child();
    pointers::after_fork();
    user_dispatch::arm_thread();
}

/// Runs in the child after the C library's `fork`. The C library has already recorded the child's id.
extern "C" fn after_in_noted_child() {
    after_in_child();
    process::note_owner();
}

/// Forks by a call for which the C library runs no handlers. Returns the result of `fork`: 0 in the child.
pub fn around<T: Copy + PartialEq + From<i8>>(fork: impl FnOnce() -> T) -> T {
    around_then(fork, || {
        after_in_child();
        if crate::is_prepared() {
            // Records this child as the owner of its memory now. Otherwise a `vfork` child of this child could call
            // `owner` first, and would then be recorded as the owner.
            process::owner();
        }
    })
}

/// Forks by a call for which the C library runs no handlers. In the child, calls `child`.
fn around_then<T: Copy + PartialEq + From<i8>>(
    fork: impl FnOnce() -> T,
    child: impl FnOnce(),
) -> T {
    before();
    let result = fork();
    match result == T::from(0) {
        true => child(),
        false => after_in_parent(),
    }
    result
}

/// Calls the C library's `__register_atfork`.
unsafe fn next(prepare: Handler, parent: Handler, child: Handler, library: *mut c_void) -> c_int {
    let Some(function) = NEXT_REGISTER.get() else {
        return libc::ENOMEM;
    };
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid for
    // it.
    unsafe { std::mem::transmute::<usize, Register>(function)(prepare, parent, child, library) }
}

/// Registers slat's fork handlers if they are not registered yet.
pub fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, which is never unloaded. The call only fails for lack of
        // memory.
        unsafe {
            next(
                Some(before),
                Some(after_in_parent),
                Some(after_in_noted_child),
                std::ptr::null_mut(),
            );
        }
    }
}

interpose! {
    /// Replaces pthread_atfork(3), for libraries that are not linked with a copy of it.
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int {
        // SAFETY: the arguments are valid for pthread_atfork(3), as this function's contract requires.
        unsafe { __register_atfork(prepare, parent, child, std::ptr::null_mut()) }
    }

    /// Replaces `__register_atfork`, which the pthread_atfork(3) within a library calls.
    fn __register_atfork(prepare: Handler, parent: Handler, child: Handler, library: *mut c_void) -> c_int {
        watch();
        // SAFETY: the handlers are valid for pthread_atfork(3), as this function's contract requires.
        unsafe { next(prepare, parent, child, library) }
    }

    /// Replaces _Fork(3), which forks without calling the registered handlers.
    #[allow(non_snake_case, reason = "the C library's name")]
    fn _Fork() -> libc::pid_t {
        let Some(function) = NEXT_FORK.get() else {
            set_errno(libc::ENOSYS);
            return -1;
        };
        // SAFETY: `function` is the C library's function, which has this signature.
        let fork = || unsafe { std::mem::transmute::<usize, extern "C" fn() -> libc::pid_t>(function)() };
        around_then(fork, || after_in_noted_child())
    }
}
