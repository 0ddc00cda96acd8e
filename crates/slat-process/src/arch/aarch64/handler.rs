//! Signal handlers: the first instructions of slat's handlers, and the call of the program's handlers.

use super::pointers::{PROGRAMS, SEPARATE, find};
use std::arch::naked_asm;
use std::ffi::c_int;

/// The number of bytes below the stack pointer in which a function may have data (red zone): none (AAPCS64, "The
/// stack").
pub const RED_ZONE: usize = 0;

/// Defines `$name`, which the kernel calls as a signal handler. `$name` sets slat's thread pointer and calls `$inner`.
/// If slat and the program share one thread pointer, `$name` only calls `$inner`, and unwinding can pass through
/// `$name`. On this architecture, there are no flags to clear.
#[macro_export]
macro_rules! handler {
    ($(#[$meta:meta])* $name:ident calls $inner:path) => {
        $(#[$meta])*
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            ::std::arch::naked_asm!(
                "adrp x9, {separate}",
                "ldrb w9, [x9, :lo12:{separate}]",
                "cbnz w9, 2f",
                "b {inner}",
                "2:",
                "stp x29, x30, [sp, #-48]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "str x2, [sp, #32]",
                "bl {enter}",
                "str x0, [sp, #40]",
                "ldp x0, x1, [sp, #16]",
                "ldr x2, [sp, #32]",
                "bl {inner}",
                "ldr x9, [sp, #40]",
                "msr tpidr_el0, x9",
                "ldp x29, x30, [sp], #48",
                "ret",
                separate = sym $crate::pointers::SEPARATE,
                enter = sym $crate::pointers::enter,
                inner = sym $inner,
            )
        }
    };
}

/// Sets the program's thread pointer, and calls `function` with the remaining arguments. Afterwards sets slat's thread
/// pointer again.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn call(
    function: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    naked_asm!(
        "mov x16, x0",
        "mov w0, w1",
        "mov x1, x2",
        "mov x2, x3",
        "adrp x9, {separate}",
        "ldrb w9, [x9, :lo12:{separate}]",
        "cbnz w9, 2f",
        "br x16",
        "2:",
        "stp x29, x30, [sp, #-64]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x16, [sp, #32]",
        "bl {find}",
        "mrs x9, tpidr_el0",
        "str x9, [sp, #48]",
        "cbz x0, 3f",
        "ldr x9, [x0, {programs}]",
        "3:",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x16, [sp, #32]",
        "msr tpidr_el0, x9",
        "blr x16",
        "ldr x9, [sp, #48]",
        "msr tpidr_el0, x9",
        "ldp x29, x30, [sp], #64",
        "ret",
        separate = sym SEPARATE,
        find = sym find,
        programs = const PROGRAMS,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::pointers;
    use std::arch::asm;

    handler! {
        /// A signal handler for the test, which calls `inner`.
        entry calls inner
    }

    fn pointer() -> usize {
        let pointer: usize;
        // SAFETY: the instruction reads a register.
        unsafe { asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack)) };
        pointer
    }

    /// Takes the part of slat's handler. Stores the thread pointer with which it runs at the address in the second
    /// argument. Then runs [`program`], which stores the program's thread pointer at the address in the third argument.
    unsafe extern "C-unwind" fn inner(
        signal: c_int,
        own: *mut libc::siginfo_t,
        programs: *mut libc::c_void,
    ) {
        // SAFETY: the addresses are those of the test's words.
        unsafe {
            own.cast::<usize>().write(pointer());
            call(
                program as *const () as usize,
                signal + 1,
                own.cast::<usize>().add(1).cast(),
                programs,
            );
        }
    }

    /// A handler of the program: stores the signal's number at the address in the second argument, and the thread
    /// pointer at the address in the third argument.
    unsafe extern "C" fn program(signal: c_int, number: *mut usize, to: *mut usize) {
        // SAFETY: the addresses are those of the test's words.
        unsafe {
            number.write(signal as usize);
            to.write(pointer());
        }
    }

    #[test]
    fn a_handler_runs_on_slats_pointer_and_the_programs_handler_on_its_own() {
        const PROGRAMS: usize = 0x7000;
        let slats = pointer();
        // SAFETY: this thread runs on slat's thread pointer. Only the two handlers run on the program's thread pointer.
        unsafe { pointers::separate(0) };
        for before in [PROGRAMS, slats] {
            let (mut own, mut programs) = ([0usize; 2], 0usize);
            let after: usize;
            // SAFETY: a call by the C ABI. The two functions that run on the program's thread pointer do not use it.
            unsafe {
                asm!(
                    "mrs x22, tpidr_el0",
                    "msr tpidr_el0, {before}",
                    "bl {entry}",
                    "mrs x21, tpidr_el0",
                    "msr tpidr_el0, x22",
                    before = in(reg) before,
                    entry = sym entry,
                    in("x0") 4,
                    in("x1") own.as_mut_ptr(),
                    in("x2") &raw mut programs,
                    out("x21") after,
                    out("x22") _,
                    clobber_abi("C"),
                );
            }
            assert_eq!((own, programs, after), ([slats, 5], PROGRAMS, before));
        }
        pointers::forget();
    }
}
