//! The code by which a signal handler returns to the kernel, and the system call during which deferred signals arrive.

use std::arch::naked_asm;

/// The number of bytes of the first instruction of [`before_restorer`].
pub const NOP: usize = 1;

/// A handler returns to the kernel through the code after the first instruction: rt_sigreturn. Debuggers and unwinders
/// recognise the two instructions, and look for a function around the byte before them.
#[unsafe(naked)]
pub unsafe extern "C" fn before_restorer() {
    naked_asm!("nop", "mov rax, 15", "syscall",)
}

/// Changes the thread's signal mask by rt_sigprocmask, during which handlers run that may unwind (`pthread_exit`).
/// Inline assembly must not unwind, nor a call that Rust assumes not to unwind. So this is a function of its own: it
/// describes its frame, and has nothing to drop.
///
/// # Safety
/// - `set` and `before` refer to sets of `bytes` bytes, or are null.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn change_mask(
    how: i32,
    set: *const u64,
    before: *mut u64,
    bytes: usize,
) -> isize {
    naked_asm!(
        ".cfi_startproc",
        "mov r10, rcx",
        "mov eax, {number}",
        "jmp qword ptr [rip + {gate}]",
        ".cfi_endproc",
        number = const libc::SYS_rt_sigprocmask,
        gate = sym slat_process::gate::GATE,
    )
}
