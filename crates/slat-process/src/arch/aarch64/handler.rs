//! Signal handlers: the first instruction of slat's handlers, and the call of the program's handlers.

use std::arch::naked_asm;
use std::ffi::c_int;

/// The number of bytes below a stack pointer in which a function may have data: none (AAPCS64, "The stack").
pub const RED_ZONE: usize = 0;

/// Defines `$name`, which the kernel calls as a signal handler, and which behaves like `$inner`: on AArch64, there is
/// only one thread pointer ([`pointers`](crate::pointers)), and no flag on which compiled code depends.
#[macro_export]
macro_rules! handler {
    ($(#[$meta:meta])* $name:ident calls $inner:path) => {
        $(#[$meta])*
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            ::std::arch::naked_asm!("b {inner}", inner = sym $inner)
        }
    };
}

/// Calls `function` with the remaining arguments.
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
        "br x16"
    )
}
