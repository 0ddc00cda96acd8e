//! The host's counter, which every program may read.

use std::arch::asm;

/// Returns the value of the virtual counter.
#[inline]
pub(crate) fn ticks() -> u64 {
    let ticks;
    // SAFETY: Linux lets user space read this register, which has no side effect.
    unsafe { asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

/// Returns the frequency of the counter, in kHz; at least 1.
pub(crate) fn ticks_khz() -> u32 {
    (frequency() / 1000).max(1) as u32
}

/// Returns the frequency of the counter, in Hz; at least 1.
pub(crate) fn frequency() -> u64 {
    let hertz: u64;
    // SAFETY: Linux lets user space read this register, which has no side effect.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) hertz, options(nomem, nostack, preserves_flags)) };
    // CNTFRQ_EL0, which shows the frequency to the guest, has 32 bits.
    u64::from(hertz as u32).max(1)
}

/// Does nothing: the counter's frequency is in a register, so it need not be measured.
pub(crate) fn note_start() {}
