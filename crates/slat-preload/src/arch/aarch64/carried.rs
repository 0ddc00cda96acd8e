//! Assembly for the copy of this library that runs in another root directory. This code runs before the dynamic linker
//! has linked the copy. The module has the copy's first instructions, the function to which the dynamic linker jumps
//! after linking, and the return from a signal handler.

use slat_process::calls::raw;
use std::arch::naked_asm;

/// Whether this kernel has Syscall User Dispatch. Without Syscall User Dispatch, the library's copy cannot receive the
/// dynamic linker's calls, so slat does not keep its files for a copy. Async-signal-safe.
pub fn is_possible() -> bool {
    /// `PR_SET_SYSCALL_USER_DISPATCH` and `PR_SYS_DISPATCH_ON` of `include/uapi/linux/prctl.h`.
    const SET_DISPATCH: usize = 59;
    const ON: usize = 1;
    let no_address = usize::MAX;
    // SAFETY: the call changes nothing, because the address of the selector is bad.
    let answer = unsafe { raw(libc::SYS_prctl, [SET_DISPATCH, ON, 0, 0, no_address, 0]) };
    answer == -(libc::EFAULT as isize)
}

/// The body of the entry point of the library's copy. Adds the library's address, `$library`, to the library's pointers
/// to itself, which are the first `DT_RELACOUNT` entries of `DT_RELA`. Then calls `$begin` with the stack pointer of
/// the new process, and jumps to the address that `$begin` returns.
macro_rules! relocate {
    ($library:path, $begin:path) => {
        ::std::arch::naked_asm!(
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x19, sp",
            "adrp x8, {library}",
            "add x8, x8, :lo12:{library}",
            "adrp x9, _DYNAMIC",
            "add x9, x9, :lo12:_DYNAMIC",
            "mov x10, xzr",
            "mov x11, xzr",
            "mov w14, {count_low}",
            "movk w14, {count_high}, lsl 16",
            "2:",
            "ldp x12, x13, [x9], 16",
            "cmp x12, {rela}",
            "csel x10, x13, x10, eq",
            "cmp x12, x14",
            "csel x11, x13, x11, eq",
            "cbnz x12, 2b",
            "cbz x11, 4f",
            "add x10, x10, x8",
            "3:",
            "ldr x12, [x10]",
            "ldr x13, [x10, 16]",
            "add x13, x13, x8",
            "str x13, [x8, x12]",
            "add x10, x10, 24",
            "subs x11, x11, 1",
            "b.ne 3b",
            "4:",
            "mov x0, sp",
            "bl {begin}",
            "mov x16, x0",
            "mov sp, x19",
            "mov x0, xzr",
            "br x16",
            library = sym $library,
            rela = const 7,
            count_low = const 0xfff9,
            count_high = const 0x6fff,
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
            "mov x19, sp",
            "mov x0, sp",
            "bl {end}",
            "mov x16, x0",
            "mov sp, x19",
            "br x16",
            end = sym $end,
        )
    };
}
pub(crate) use finish;

/// The code to which a signal handler returns (`sa_restorer`): calls rt_sigreturn(2).
#[unsafe(naked)]
pub unsafe extern "C" fn restore() {
    naked_asm!("mov x8, {number}", "svc #0", number = const libc::SYS_rt_sigreturn)
}
