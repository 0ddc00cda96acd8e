//! The start of a process: the first instructions of this library as a program, and the jump to a program that slat has
//! loaded.

use std::arch::naked_asm;

/// The body of this library's entry point: calls `$become_program` with the stack pointer of the new process.
/// `$become_program` does not return.
macro_rules! begin {
    ($become_program:path) => {
        ::std::arch::naked_asm!(
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x0, sp",
            "bl {become_program}",
            "brk #1",
            become_program = sym $become_program,
        )
    };
}
pub(crate) use begin;

/// Jumps to a program. All registers are 0, as in a new process, except X16: the jump needs a register for the address
/// of the first instruction.
///
/// # Safety
/// - The program is loaded, and begins at `start`. `sp` is the stack pointer of a new process.
#[unsafe(naked)]
pub unsafe extern "C" fn enter(sp: *mut usize, start: usize) -> ! {
    naked_asm!(
        "mov sp, x0",
        "mov x16, x1",
        "msr tpidr_el0, xzr",
        "msr fpcr, xzr",
        "msr fpsr, xzr",
        ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30",
        "mov x\\n, xzr",
        ".endr",
        "br x16",
    )
}
