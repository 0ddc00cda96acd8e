//! Finds the word in which the C library notes a thread's id. The kernel clears this word when the thread ends. The
//! word is at a fixed distance from the thread pointer, which depends on the C library and its version. The kernel
//! knows the word's address (`PR_GET_TID_ADDRESS`, if it is built with CONFIG_CHECKPOINT_RESTORE).

use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering};

/// The distance from the thread pointer to the word in which the C library notes the thread's id.
static DISTANCE: AtomicIsize = AtomicIsize::new(0);

fn thread_pointer() -> *mut u8 {
    let pointer: *mut u8;
    // SAFETY: the instruction reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    pointer
}

/// Call before the first [`noted_id`], on a thread that the C library has made. Returns whether [`noted_id`] may be
/// called.
pub fn locate() -> bool {
    /// The part of a thread's memory that can contain the note: no control block of a C library is larger.
    const NEAR: usize = 0x4000;
    let mut note = 0usize;
    // SAFETY: the kernel writes an address to `note`, if it knows the word.
    let is_known = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut note) == 0 };
    let distance = (note as isize).wrapping_sub(thread_pointer() as isize);
    if !is_known || note == 0 || distance.unsigned_abs() > NEAR {
        return false;
    }
    // musl lets the kernel clear another word, a lock.
    // SAFETY: the word exists as long as the thread. The call has no arguments.
    let is_id = unsafe {
        let noted = (*(note as *const AtomicU32)).load(Ordering::Relaxed);
        libc::c_long::from(noted as i32) == libc::syscall(libc::SYS_gettid)
    };
    if is_id {
        DISTANCE.store(distance, Ordering::Relaxed);
    }
    is_id
}

/// Returns the address of the note of this thread's id.
pub fn noted_id() -> *mut AtomicU32 {
    thread_pointer()
        .wrapping_offset(DISTANCE.load(Ordering::Relaxed))
        .cast()
}
