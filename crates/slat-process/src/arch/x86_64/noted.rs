//! The word in which the C library stores a thread's id: in glibc, `tid` of `struct pthread`.

use std::sync::atomic::AtomicU32;

/// Returns whether [`noted_id`] may be called. Call before the first [`noted_id`].
pub fn locate() -> bool {
    true
}

/// Returns the address of the word in which the C library stores this thread's id.
pub fn noted_id() -> *mut AtomicU32 {
    const OFFSET: usize = 0x2d0;
    let block: *mut u8;
    // SAFETY: the FS base of every thread is the address of its thread control block. The first word of the block is
    // the block's own address.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    block.wrapping_add(OFFSET).cast()
}
