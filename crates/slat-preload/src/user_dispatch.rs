//! Switches Syscall User Dispatch (`Documentation/admin-guide/syscall-user-dispatch.rst`) on and off. While it is on,
//! the kernel sends a thread's system calls to the handler of SIGSYS, except calls that come from one range of
//! addresses. [`dispatch`](crate::dispatch) has the handler.
//!
//! The kernel keeps the setting for each thread. New threads and processes begin without dispatch, and [`arm_thread`]
//! switches dispatch on before they run the program.

use crate::real::kernel;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// `PR_SET_SYSCALL_USER_DISPATCH` of `include/uapi/linux/prctl.h`.
pub const SET_DISPATCH: usize = 59;
/// `PR_SYS_DISPATCH_OFF`: the kernel dispatches no calls of the thread.
pub const OFF: usize = 0;
/// `PR_SYS_DISPATCH_ON`: the kernel dispatches the thread's calls.
pub const ON: usize = 1;

/// The addresses from which calls pass to the kernel: the C library's text.
static PASSING: OnceLock<Range<usize>> = OnceLock::new();

/// Whether the kernel dispatches calls in this process.
static IS_ARMED: AtomicBool = AtomicBool::new(false);

/// Stores the addresses from which calls pass to the kernel. Call while the process has one thread.
pub fn let_pass(addresses: Range<usize>) {
    PASSING.get_or_init(|| addresses);
}

/// Returns the addresses from which calls pass to the kernel. `None`: slat receives only the program's calls of C
/// library functions.
pub fn passing() -> Option<&'static Range<usize>> {
    PASSING.get()
}

/// Whether the program's own calls arrive at slat: the kernel dispatches them, or call sites were rewritten.
pub fn is_armed() -> bool {
    passing().is_some()
}

/// Makes the kernel dispatch the calls of this thread, except calls from the addresses that [`let_pass`] has stored.
/// slat then does the same in each thread and process that this thread creates ([`arm_thread`]). Call while the process
/// has one thread. Returns `false` if this kernel cannot do that.
pub fn arm() -> bool {
    IS_ARMED.store(true, Ordering::Relaxed);
    let is_armed = arm_thread();
    IS_ARMED.store(is_armed, Ordering::Relaxed);
    is_armed
}

/// Makes the kernel dispatch this thread's calls, if the kernel dispatches calls in this process. Returns whether the
/// kernel now dispatches them. Async-signal-safe.
pub fn arm_thread() -> bool {
    match passing() {
        Some(passing) if IS_ARMED.load(Ordering::Relaxed) => {
            let (start, len) = (passing.start, passing.len());
            // A call that succeeds on the first thread succeeds on all threads. SAFETY: the call takes no pointer,
            // because there is no selector.
            unsafe { kernel!(libc::SYS_prctl, SET_DISPATCH, ON, start, len, 0) }.is_ok()
        }
        _ => false,
    }
}

/// Stops the dispatch of this thread's calls: all of its calls pass to the kernel.
pub fn disarm_thread() {
    if IS_ARMED.load(Ordering::Relaxed) {
        // SAFETY: the call takes no pointer.
        let _ = unsafe { kernel!(libc::SYS_prctl, SET_DISPATCH, OFF, 0, 0, 0) };
    }
}
