//! Finds the word in which the C library stores a thread's id, and which the kernel clears when the thread ends. The
//! word is at a fixed distance from the thread pointer. The distance depends on the C library and its version, so slat
//! asks the kernel for the word's address (`PR_GET_TID_ADDRESS`, if the kernel is built with
//! CONFIG_CHECKPOINT_RESTORE).

use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering};

/// The distance from the thread pointer to the word in which the C library stores the thread's id.
static DISTANCE: AtomicIsize = AtomicIsize::new(0);

fn thread_pointer() -> *mut u8 {
    let pointer: *mut u8;
    // SAFETY: the instruction reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    pointer
}

/// Finds the word that contains the thread's id. Call before the first [`noted_id`], on a thread that the C library has
/// created. Returns whether [`noted_id`] may be called.
pub fn locate() -> bool {
    /// The maximum distance of the word from the thread pointer: no C library has a larger thread control block.
    const NEAR: usize = 0x4000;
    let mut note = 0usize;
    // SAFETY: the kernel writes an address to `note`, if it knows the word's address.
    let is_known = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut note) == 0 };
    let distance = (note as isize).wrapping_sub(thread_pointer() as isize);
    if !is_known || note == 0 || distance.unsigned_abs() > NEAR {
        return false;
    }
    // With musl, the word that the kernel clears is a lock, not the thread's id.
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

/// Returns the address of the word in which the C library stores this thread's id.
pub fn noted_id() -> *mut AtomicU32 {
    thread_pointer()
        .wrapping_offset(DISTANCE.load(Ordering::Relaxed))
        .cast()
}
