//! Switches Syscall User Dispatch (`Documentation/admin-guide/syscall-user-dispatch.rst`) on and off. The kernel then
//! sends a thread's system calls to the handler of SIGSYS, except calls that come from one range of addresses.
//! [`dispatch`](crate::dispatch) has the handler.
//!
//! The kernel keeps the setting for each thread. New threads and processes begin without dispatch, and [`arm_thread`]
//! switches it on before they run the program.

use crate::real::kernel;
use std::ops::Range;
use std::sync::OnceLock;

/// `PR_SET_SYSCALL_USER_DISPATCH`, `PR_SYS_DISPATCH_OFF` and `PR_SYS_DISPATCH_ON` of `include/uapi/linux/prctl.h`.
pub const SET_DISPATCH: usize = 59;
/// See [`SET_DISPATCH`].
pub const OFF: usize = 0;
/// See [`SET_DISPATCH`].
pub const ON: usize = 1;

/// The addresses from which calls pass to the kernel: the C library's text.
static PASSING: OnceLock<Range<usize>> = OnceLock::new();

/// Returns the addresses from which calls pass to the kernel. `None`: calls are not dispatched in this process.
pub fn passing() -> Option<&'static Range<usize>> {
    PASSING.get()
}

/// Whether calls are dispatched in this process.
pub fn is_armed() -> bool {
    passing().is_some()
}

/// Makes the kernel dispatch the calls of this thread, and of the threads and processes that it makes, unless the calls
/// come from `passing`. Call while the process has one thread. Returns `false` if this kernel cannot do that.
pub fn arm(passing: Range<usize>) -> bool {
    arm_with(PASSING.get_or_init(|| passing))
}

fn arm_with(passing: &Range<usize>) -> bool {
    // SAFETY: a plain call; without a selector.
    let armed = unsafe {
        kernel!(
            libc::SYS_prctl,
            SET_DISPATCH,
            ON,
            passing.start,
            passing.len(),
            0
        )
    };
    armed.is_ok()
}

/// Makes the kernel dispatch the calls of this thread, if the process's calls are dispatched. Async-signal-safe.
pub fn arm_thread() {
    if let Some(passing) = passing() {
        // This call cannot fail, because it has succeeded on the first thread.
        arm_with(passing);
    }
}

/// Stops the dispatch of this thread's calls: they pass to the kernel.
pub fn disarm_thread() {
    // SAFETY: a plain call.
    let _ = unsafe { kernel!(libc::SYS_prctl, SET_DISPATCH, OFF, 0, 0, 0) };
}
