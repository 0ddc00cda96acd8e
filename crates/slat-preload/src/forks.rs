//! Forks of the program: by the C library's `fork` and `_Fork`, and by system calls through `syscall`.
//!
//! The heap's lock is held over a fork, so that no child inherits a heap that is half changed. It has to be the last
//! lock that the forking thread takes: the program's `malloc` holds its own locks over a fork, too, and another thread
//! may enter slat's heap from inside that `malloc`, by `mmap` or `madvise`. The C library calls first what was
//! registered last; so slat registers its handlers before all others, however early those are.
//!
//! # Locks of the process
//! A child finds each lock as it was at the moment of the fork, which may be one of a system call that nobody
//! announces. It must not wait for a thread that it does not have. What belongs to a process is in a
//! [`PerProcess`](slat_process::forks::PerProcess), of which the child makes its own value, with the locks in it;
//! what lasts is a [`Computed`](slat_process::once::Computed) or a [`Prepared`](slat_process::once::Prepared),
//! whose first use does not wait for threads of another process. These are the others (`tests/locks.rs` compares
//! the table with the code):
//!
//! | lock | file | a child |
//! |---|---|---|
//! | `STATE` | `slat-preload/src/heap.rs` | finds it free: held over the fork. After a fork that is not announced it may be held |
//! | `BREAK` | `slat-preload/src/load/memory.rs` | as `STATE`; a loaded program's forks are all dispatched, and so announced |
//! | `APART` | `slat-process/src/once.rs` | as `STATE`; held while the decoder's tables are built, once in a process |
//! | `TEXT` | `slat-preload/src/dispatch/mod.rs` | finds it set: before the program's first instruction, when there is one thread |
//! | `KEY` | `slat-preload/src/dispatch/library_threads.rs` | as `TEXT` |
//! | `OWN` | `slat-preload/src/load/mod.rs` | as `TEXT` |
//! | `LOOKS` | `slat-preload/src/environment.rs` | as `TEXT` |
//! | `LIBRARY` | `slat-preload/src/children/mod.rs` | as `TEXT` |
//!
//! The compiler that slat uses has a `OnceLock` of its own, which its first translation sets within a microsecond, on a
//! thread of slat's own: should a child find that half done, its guests are interpreted.

use crate::files::interpose;
use crate::real::{Next, set_errno};
use crate::{dispatch, heap};
use slat_host::process;
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
    dispatch::arm_thread();
}

/// Runs in a child that the C library has made, which has noted the child's number.
extern "C" fn after_in_noted_child() {
    after_in_child();
    process::note_owner();
}

/// Forks by a call of which the C library knows nothing. Returns what `fork` does: 0 is the child.
pub fn around<T: Copy + PartialEq + From<i8>>(fork: impl FnOnce() -> T) -> T {
    around_then(fork, || {
        after_in_child();
        if crate::is_prepared() {
            // Else a child of the child's `vfork` could ask first, and be taken for the owner.
            process::owner();
        }
    })
}

/// Forks by a call for which the C library runs no handlers, and runs `child` in the child.
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

/// Calls the C library's registration.
unsafe fn next(prepare: Handler, parent: Handler, child: Handler, library: *mut c_void) -> c_int {
    let Some(function) = NEXT_REGISTER.get() else {
        return libc::ENOMEM;
    };
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    // SAFETY: the C library's function of that name has this signature; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, Register>(function)(prepare, parent, child, library) }
}

/// Registers slat's handlers if they are not yet.
pub fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of this library, which is never unloaded. The call only fails for lack of memory.
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
    /// pthread_atfork(3), for libraries that were not linked with their own.
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int {
        // SAFETY: the caller's.
        unsafe { __register_atfork(prepare, parent, child, std::ptr::null_mut()) }
    }

    /// `__register_atfork`, which a library's own pthread_atfork(3) calls.
    fn __register_atfork(prepare: Handler, parent: Handler, child: Handler, library: *mut c_void) -> c_int {
        watch();
        // SAFETY: the caller's.
        unsafe { next(prepare, parent, child, library) }
    }

    /// _Fork(3): fork(2) without the handlers.
    #[allow(non_snake_case, reason = "the C library's name")]
    fn _Fork() -> libc::pid_t {
        let Some(function) = NEXT_FORK.get() else {
            set_errno(libc::ENOSYS);
            return -1;
        };
        // SAFETY: the C library's function of that name has this signature.
        let fork = || unsafe { std::mem::transmute::<usize, extern "C" fn() -> libc::pid_t>(function)() };
        around_then(fork, || after_in_noted_child())
    }
}
