//! 64-bit Arm.

use std::arch::naked_asm;

/// The offset of the access.
pub const ACCESS: usize = 4;
/// The bytes of the code.
pub const BYTES: usize = 16;

/// Reads a word. Returns 0.
#[unsafe(naked)]
pub unsafe extern "C" fn access(word: *const u64) -> usize {
    naked_asm!("nop", "ldr x1, [x0]", "mov x0, #0", "ret")
}

/// Returns the address of the access.
#[unsafe(naked)]
pub unsafe extern "C" fn exit() {
    naked_asm!("ret")
}
