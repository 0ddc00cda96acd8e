//! The place where the C library notes a thread's id: glibc uses `tid` of its `struct pthread`.

use std::sync::atomic::AtomicU32;

/// Call before the first [`noted_id`]. Returns whether that may be called.
pub fn locate() -> bool {
    true
}

/// Returns the address at which the C library has stored this thread's id.
pub fn noted_id() -> *mut AtomicU32 {
    const OFFSET: usize = 0x2d0;
    let block: *mut u8;
    // SAFETY: the FS base of every thread is the address of its thread control block, which begins with its own
    // address.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    block.wrapping_add(OFFSET).cast()
}
