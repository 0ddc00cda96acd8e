//! The kernel's ids of this thread and of its process.

use crate::enter::raw;
use crate::forks;
use crate::list::{Call, is_allowed};
use crate::noted::{locate, note_first, noted_id, noted_thread_id};
use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};

/// Returns the kernel's ids of the calling process and of the calling thread. In contrast to [`forks::owner`] and
/// [`thread_id`], these ids are right even in a child of `vfork`, except if a filter forbids the system calls that
/// return them. Async-signal-safe.
pub fn myself() -> (libc::pid_t, libc::pid_t) {
    if !is_allowed(Call::ProcessId) || !is_allowed(Call::ThreadId) {
        return (forks::owner(), thread_id());
    }
    // SAFETY: the calls have no arguments.
    unsafe {
        let ask = |number| raw(number, [0; 6]) as libc::pid_t;
        (ask(libc::SYS_getpid), ask(libc::SYS_gettid))
    }
}

/// Checks whether the word at `noted_id` contains this thread's id, so that slat may use it. Call on the first thread
/// of the process.
pub fn find_noted_id() {
    // SAFETY: the word is within the thread's control block.
    let note = || unsafe { (*noted_id()).load(Ordering::Relaxed) };
    if locate() && note() == forks::owner() as u32 {
        note_first();
    }
}

/// Returns the kernel's id of this thread. Async-signal-safe.
///
/// Makes one system call per thread, and one more in a forked child, where the thread has another id. If a filter
/// forbids the call, and slat knows where the C library stores the id, makes no call.
pub fn thread_id() -> libc::pid_t {
    thread_local! {
        // `ID` and `PROCESS` have neither an initialiser nor a destructor, because signal handlers read them.
        static ID: Cell<libc::pid_t> = const { Cell::new(0) };
        /// The process (generation) for which `ID` is the thread's id. 0 if `ID` was not set yet.
        static PROCESS: Cell<u64> = const { Cell::new(0) };
    }
    let here = forks::Birth::here().number();
    if PROCESS.get() != here {
        let noted = match is_allowed(Call::ThreadId) {
            true => None,
            false => noted_thread_id(),
        };
        // SAFETY: the call has no arguments.
        let ask = || unsafe { raw(libc::SYS_gettid, [0; 6]) } as libc::pid_t;
        ID.set(noted.unwrap_or_else(ask));
        // If a signal handler runs between the two stores, the handler asks the kernel for the id again.
        compiler_fence(Ordering::SeqCst);
        PROCESS.set(here);
    }
    ID.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_threads_id_is_noted_where_slat_looks_for_it() {
        if !locate() {
            // With musl, `locate` finds no id, because the word that the kernel clears is a lock.
            if cfg!(not(target_env = "musl")) {
                eprintln!("skipped: this kernel does not tell where the note is");
            }
            return;
        }
        let check = || {
            // SAFETY: the word belongs to this thread, and its address is known.
            let noted = unsafe { (*noted_id()).load(Ordering::Relaxed) };
            assert_eq!(noted as libc::pid_t, thread_id());
        };
        check();
        std::thread::scope(|scope| scope.spawn(check).join().unwrap());
    }
}
