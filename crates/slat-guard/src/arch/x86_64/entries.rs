//! The code by which a signal handler returns to the kernel, and the system call that changes the signal mask.

use std::arch::naked_asm;

/// The size in bytes of the first instruction of [`before_restorer`].
pub const NOP: usize = 1;

/// Contains, after a first instruction, the code by which a handler returns to the kernel: rt_sigreturn. Debuggers and
/// unwinders recognise its two instructions, and look for the function that contains the byte before them. The first
/// instruction makes this function contain that byte.
#[unsafe(naked)]
pub unsafe extern "C" fn before_restorer() {
    naked_asm!("nop", "mov rax, 15", "syscall",)
}

/// Changes the thread's signal mask by rt_sigprocmask. During this system call, handlers of unblocked signals run, and
/// they may unwind the stack (`pthread_exit`). Inline assembly must not unwind, so this is a separate function with the
/// ABI `C-unwind`: it describes its stack frame, and has nothing to drop.
///
/// # Safety
/// - `set` and `before` are null, or point to signal sets of `bytes` bytes.
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
