//! Assembly for the copy of this library that runs in another root directory. This code runs before the dynamic linker
//! has linked the copy. The module has the copy's first instructions, the function to which the dynamic linker jumps
//! after linking, and the return from a signal handler.

use std::arch::naked_asm;

/// Whether a copy of this library can run in another root (`carry`), so that slat keeps the files for such a copy. A
/// copy needs Syscall User Dispatch, which x86-64 kernels have since Linux 5.11, so the result is always true.
pub fn is_possible() -> bool {
    true
}

/// The body of the entry point of the library's copy. Adds the library's address, `$library`, to the library's pointers
/// to itself, which are the first `DT_RELACOUNT` entries of `DT_RELA`. Then calls `$begin` with the stack pointer of
/// the new process, and jumps to the address that `$begin` returns.
macro_rules! relocate {
    ($library:path, $begin:path) => {
        ::std::arch::naked_asm!(
            "xor ebp, ebp",
            "mov rbx, rsp",
            "lea r8, [rip + {library}]",
            "lea rsi, [rip + _DYNAMIC]",
            "xor r9d, r9d",
            "xor r10d, r10d",
            "2:",
            "mov rax, [rsi]",
            "cmp rax, {rela}",
            "cmove r9, [rsi + 8]",
            "cmp rax, {count}",
            "cmove r10, [rsi + 8]",
            "add rsi, 16",
            "test rax, rax",
            "jnz 2b",
            "add r9, r8",
            "test r10, r10",
            "jz 4f",
            "3:",
            "mov rax, [r9]",
            "mov rcx, [r9 + 16]",
            "add rcx, r8",
            "mov [r8 + rax], rcx",
            "add r9, 24",
            "dec r10",
            "jnz 3b",
            "4:",
            "mov rdi, rsp",
            "and rsp, -16",
            "call {begin}",
            "mov rsp, rbx",
            "xor edx, edx",
            "jmp rax",
            library = sym $library,
            rela = const 7,
            count = const 0x6fff_fff9,
            begin = sym $begin,
        )
    };
}
pub(crate) use relocate;

/// The body of the function to which the dynamic linker jumps when it has finished: calls `$end` with the stack
/// pointer, and jumps to the address that `$end` returns.
macro_rules! finish {
    ($end:path) => {
        ::std::arch::naked_asm!(
            "mov rbx, rsp",
            "mov rdi, rsp",
            "and rsp, -16",
            "call {end}",
            "mov rsp, rbx",
            "jmp rax",
            end = sym $end,
        )
    };
}
pub(crate) use finish;

/// The code to which a signal handler returns (`sa_restorer`): calls rt_sigreturn(2).
#[unsafe(naked)]
pub unsafe extern "C" fn restore() {
    naked_asm!("mov eax, {number}", "syscall", number = const libc::SYS_rt_sigreturn)
}
