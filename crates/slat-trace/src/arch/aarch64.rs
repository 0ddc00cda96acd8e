//! 64-bit Arm.

use std::arch::asm;

/// Returns the virtual counter of the generic timer. One count is longer than a processor cycle: usually 1 to 40 ns.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    let cycles: u64;
    // SAFETY: the instruction reads a register. Linux lets programs read it, as its vDSO does.
    unsafe {
        asm!("mrs {}, cntvct_el0", out(reg) cycles, options(nostack, nomem, preserves_flags))
    };
    cycles
}
