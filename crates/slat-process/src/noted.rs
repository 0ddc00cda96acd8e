//! The word in which the C library stores a thread's id, called its note. By the note slat knows the id without a
//! system call. The kernel writes the note when a thread is created or a process is forked, and clears it when the
//! thread ends. [`find_noted_id`](crate::find_noted_id) checks that the note is at the expected address.

pub(crate) use crate::arch::noted::{locate, noted_id};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// The address of the note of the process's first thread. Null if the note is not at the address that [`noted_id`]
/// returns.
static FIRST: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Records that this thread is the first one of the process.
pub(crate) fn note_first() {
    FIRST.store(noted_id(), Ordering::Relaxed);
}

/// Returns the note of the process's first thread. When that thread ends, the kernel clears the note and wakes the
/// threads that sleep on it. Afterwards, the note's memory may be freed, so only `futex` may access it.
pub fn first_noted_id() -> Option<NonNull<AtomicU32>> {
    NonNull::new(FIRST.load(Ordering::Relaxed))
}

/// Returns this thread's id from the C library's note, without a system call. `None`: slat does not know where the note
/// is. The result is wrong on a thread or in a process that the C library has not created.
pub(crate) fn noted_thread_id() -> Option<libc::pid_t> {
    // SAFETY: the note belongs to this thread, and its address is known.
    first_noted_id().map(|_| unsafe { (*noted_id()).load(Ordering::Relaxed) } as libc::pid_t)
}
