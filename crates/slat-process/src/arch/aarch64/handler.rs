//! Signal handlers: the first instructions of slat's handlers, and the call of the program's handlers.

use super::pointers::{PROGRAMS, SEPARATE, find};
use std::arch::naked_asm;
use std::ffi::c_int;

/// Bytes below a stack pointer in which a function may have data: none (AAPCS64, "The stack").
pub const RED_ZONE: usize = 0;

/// Defines `$name`, which the kernel calls as a signal handler, and which calls `$inner` on slat's thread pointer. If
/// there is only one pointer, `$name` behaves like `$inner`, and unwinding can pass through `$name`. The flags need no
/// care.
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

/// Calls `function` with the remaining arguments, on the program's thread pointer.
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
        /// The entry of a signal handler that returns its stack pointer.
        entry calls inner
    }

    fn pointer() -> usize {
        let pointer: usize;
        // SAFETY: the instruction reads a register.
        unsafe { asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack)) };
        pointer
    }

    /// Stands for slat's handler. Writes the thread pointer with which it runs to the second argument's address. Then
    /// runs [`program`], which writes the thread pointer of the program to the third argument's address.
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

    /// A handler of the program: stores the signal's number at the second argument, and the thread pointer at the
    /// third.
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
        // SAFETY: this thread runs on slat's pointer. Only the two handlers run on another.
        unsafe { pointers::separate(0) };
        for before in [PROGRAMS, slats] {
            let (mut own, mut programs) = ([0usize; 2], 0usize);
            let after: usize;
            // SAFETY: a call by the C ABI. The two functions that run on the program's pointer do not need it.
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
