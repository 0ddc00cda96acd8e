//! Assembly for the threads of slat's C library that run the program's threads.

use std::arch::naked_asm;

/// The body of a function with two arguments. The function saves the registers, stores the stack pointer at the address
/// in the second argument, for [`leave`], and calls `$go` with the first argument. `$go` does not return.
macro_rules! run {
    ($go:path) => {
        ::std::arch::naked_asm!(
            "push rbx",
            "push rbp",
            "push r12",
            "push r13",
            "push r14",
            "push r15",
            "sub rsp, 8",
            "mov [rsi], rsp",
            "call {go}",
            "ud2",
            go = sym $go,
        )
    };
}
pub(crate) use run;

/// Returns to the caller of a function whose body is [`run!`].
///
/// # Safety
/// - This thread runs a function whose body is [`run!`], and that function has stored `begun_at`. Nothing on the
///   thread's stacks is needed any more.
#[unsafe(naked)]
pub unsafe extern "C" fn leave(begun_at: usize) -> ! {
    naked_asm!(
        "mov rsp, rdi",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// The signature of rseq(2) areas (`tools/testing/selftests/rseq/rseq-x86.h`). glibc uses the same signature.
pub const RSEQ_SIGNATURE: usize = 0x5305_3053;

/// Returns the thread pointer. The C library's thread-local variables are at offsets from this address.
pub fn pointer() -> usize {
    let pointer: usize;
    // SAFETY: the first word at the thread pointer is its own address (System V ABI, "Thread-Local Storage").
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(readonly, nostack));
    }
    pointer
}
