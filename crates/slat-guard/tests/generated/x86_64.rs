//! x86-64.

use std::arch::naked_asm;

/// The offset of the access.
pub const ACCESS: usize = 1;
/// The bytes of the code.
pub const BYTES: usize = 7;

/// Reads a word. Returns 0.
#[unsafe(naked)]
pub unsafe extern "C" fn access(word: *const u64) -> usize {
    naked_asm!("nop", "mov rcx, [rdi]", "xor eax, eax", "ret")
}

/// Returns the address of the access.
#[unsafe(naked)]
pub unsafe extern "C" fn exit() {
    naked_asm!("ret")
}
