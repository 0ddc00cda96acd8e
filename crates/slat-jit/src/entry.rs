//! How a thread enters compiled code, and how it leaves.
//!
//! Compiled code is a function without arguments. The host's pinned register (R15 or X21) has the address of a
//! [`Frame`]. Compiled code preserves only that register and the stack pointer. It returns the address of the code that
//! the thread executes next, or a number below [`LEAST_CODE`](crate::LEAST_CODE). In the second case [`enter`] returns
//! this number.
//!
//! A guarded access that fails ends compiled code at once: [`enter`] returns [`FAILED`](crate::FAILED). So compiled
//! code needs neither a frame pointer nor code that handles the failure.

use crate::arch;
use crate::frame::Frame;

/// Executes compiled code at `code`, then the code whose address it returns, and so on, until a number below
/// [`LEAST_CODE`](crate::LEAST_CODE) is returned. Returns that number.
///
/// # Safety
/// - `code` is the address of compiled code, as the module's documentation describes it, and so is each address that
///   compiled code returns.
/// - Compiled code may use `frame`, and the client's fields after it.
pub unsafe fn enter(frame: *mut Frame, code: *const u8) -> u64 {
    // SAFETY: `arch::enter` has the same requirements as this function.
    unsafe { arch::enter(frame, code) }
}

/// Returns the address at which failed guarded accesses continue, for [`Arena::announce`](crate::Arena::announce). Only
/// for code that [`enter`] executes.
pub fn failed_access() -> usize {
    arch::failed_access as *const () as usize
}
