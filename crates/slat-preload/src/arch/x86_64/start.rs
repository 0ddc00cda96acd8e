//! The start of a process: the first instructions of this library as a program, and the jump to a program that slat has
//! loaded.

use std::arch::naked_asm;

/// The body of this library's entry point: calls `$become_program` with the stack pointer of the new process.
/// `$become_program` does not return.
macro_rules! begin {
    ($become_program:path) => {
        ::std::arch::naked_asm!(
            "xor ebp, ebp",
            "mov rdi, rsp",
            "and rsp, -16",
            "call {become_program}",
            "ud2",
            become_program = sym $become_program,
        )
    };
}
pub(crate) use begin;

/// Jumps to a program, with the registers that the kernel gives a new process.
///
/// # Safety
/// - The program is loaded, and begins at `start`. `sp` is the stack pointer of a new process.
#[unsafe(naked)]
pub unsafe extern "C" fn enter(sp: *mut usize, start: usize) -> ! {
    naked_asm!(
        "mov rsp, rdi",
        "mov rax, rsi",
        "xor ecx, ecx",
        "wrfsbase rcx",
        "xor ebx, ebx",
        "xor edx, edx",
        "xor esi, esi",
        "xor edi, edi",
        "xor ebp, ebp",
        "jmp rax",
    )
}
