//! The processor state that slat's code needs and that a program's code, which calls slat, may have changed: the
//! settings of floating-point computation. The kernel does not depend on these settings.
//!
//! Compiled code expects that floating point is rounded to nearest, that denormal numbers are not flushed to zero, and
//! that no exception traps: FPCR is 0 (AAPCS64, "SIMD and Floating-Point registers"). A program may call the C
//! library's wrappers of system calls with another FPCR. So each function of slat that replaces such a wrapper does its
//! work in [`with_own_floats`].
//!
//! The flags in PSTATE need no such care. The condition flags may have any value at a call, the kernel alone decides
//! whether alignment is checked, and nothing else that a program can write in PSTATE changes the result of an
//! instruction.
//!
//! In contrast to x86, the kernel calls signal handlers with the FPCR of the code that they interrupt, and restores
//! FPCR when they return. A handler that computes with floating point uses [`with_own_floats`], too.

use std::arch::asm;

/// The value of FPCR in a new process: results are rounded to nearest, and no exception traps.
pub const FPCR: u64 = 0;

/// Returns FPCR.
#[inline(always)]
fn fpcr() -> u64 {
    let value: u64;
    // SAFETY: the instruction reads a register.
    unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, nomem, preserves_flags)) };
    value
}

/// Sets FPCR. On some processors, writing FPCR is slow.
#[inline(always)]
fn set_fpcr(value: u64) {
    // SAFETY: the callers set the value that compiled code expects, or the value that their own caller had set.
    unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
}

/// Returns FPSR: the floating-point exceptions that have occurred.
#[inline(always)]
fn fpsr() -> u64 {
    let value: u64;
    // SAFETY: the instruction reads a register. It is not `nomem`, so that its order relative to other floating-point
    // instructions stays.
    unsafe { asm!("mrs {}, fpsr", out(reg) value, options(nostack, preserves_flags)) };
    value
}

/// Sets FPSR.
#[inline(always)]
fn set_fpsr(value: u64) {
    // SAFETY: compiled code does not depend on FPSR.
    unsafe { asm!("msr fpsr, {}", in(reg) value, options(nostack, preserves_flags)) };
}

/// The body of a function that runs `$inner`. On x86-64, this macro saves flags; on this architecture, there is nothing
/// to save.
#[macro_export]
macro_rules! enter_function {
    ($inner:path) => {
        ::std::arch::naked_asm!("b {inner}", inner = sym $inner)
    };
}

/// Runs `work` with floating point as slat's code expects it, and then restores the caller's settings.
///
/// This function has no value with a destructor. So `work` may unwind through it by `pthread_exit`, and a signal
/// handler of the program may leave it by siglongjmp.
#[inline(always)]
pub fn with_own_floats<R>(work: impl FnOnce() -> R) -> R {
    let (control, status) = (fpcr(), fpsr());
    if control != FPCR {
        set_fpcr(FPCR);
    }
    let result = work();
    if fpcr() != control {
        set_fpcr(control);
    }
    if fpsr() != status {
        set_fpsr(status);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a quotient that is computed at run time, not by the compiler.
    fn quotient(a: f64, b: f64) -> f64 {
        let result: f64;
        // SAFETY: the instruction only computes a quotient.
        unsafe {
            asm!("fdiv {0:d}, {1:d}, {2:d}", out(vreg) result, in(vreg) a, in(vreg) b, options(nostack))
        };
        result
    }

    #[test]
    fn work_is_done_in_slats_state_and_the_callers_comes_back() {
        const UPWARDS: u64 = 1 << 22;
        const FLUSH_TO_ZERO: u64 = 1 << 24;
        const DIVISION_BY_ZERO: u64 = 1 << 1;
        let third = quotient(1.0, 3.0);
        for control in [FPCR, UPWARDS, UPWARDS | FLUSH_TO_ZERO] {
            for status in [0, DIVISION_BY_ZERO] {
                set_fpcr(control);
                set_fpsr(status);
                let outside = quotient(1.0, 3.0);
                set_fpsr(status);
                let inside = with_own_floats(|| (fpcr(), quotient(1.0, 3.0), quotient(1.0, 0.0)));
                let after = (fpcr(), fpsr());
                set_fpcr(FPCR);
                assert_eq!(inside, (FPCR, third, f64::INFINITY));
                assert_eq!(outside == third, control == FPCR);
                assert_eq!(after, (control, status));
            }
        }
    }
}
