//! Signal handlers: how the kernel calls slat's handlers ([`handler!`](crate::handler!)), and how these call the
//! program's handlers.

use crate::arch::handler::call;
use crate::context;
use crate::stack;
use std::ffi::c_int;

/// Calls a signal handler of the program, on the program's thread pointer.
///
/// # Safety
/// - `function` is a signal handler, and the arguments are those that the kernel gave slat's handler. (A handler
///   without `SA_SIGINFO` does not read the last two.)
pub unsafe fn call_program(
    function: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: `context` is the kernel's context of the interrupted code, as this function's `# Safety` requires.
    let sp = unsafe { context::sp(&*context.cast::<libc::ucontext_t>()) };
    // SAFETY: `function` is a signal handler, and the arguments are the kernel's, as this function's `# Safety`
    // requires.
    stack::around_handler(sp, || unsafe { call(function, signal, info, context) });
}
