//! Model-specific and control registers.

use core::arch::asm;

/// The extended feature enable register. Bit 12 is SVME.
pub const EFER: u32 = 0xc000_0080;

/// Reads a register.
///
/// # Safety
/// - the CPU has the register.
pub unsafe fn read(msr: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the CPU has the register, as this function's `# Safety` asks of its caller. Reading changes nothing.
    unsafe {
        asm!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high, options(nomem, nostack))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// Writes a register.
///
/// # Safety
/// - the CPU has the register, accepts `value`, and continues to run this program with it.
pub unsafe fn write(msr: u32, value: u64) {
    let (low, high) = (value as u32, (value >> 32) as u32);
    // SAFETY: the CPU has the register, accepts `value` and continues to run this program with it, as this function's
    // `# Safety` asks of its caller.
    unsafe { asm!("wrmsr", in("ecx") msr, in("eax") low, in("edx") high, options(nostack)) };
}
