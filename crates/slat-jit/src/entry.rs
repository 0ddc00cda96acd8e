//! How a thread enters compiled code, and how it leaves.
//!
//! Compiled code is a function without arguments. It finds a [`Frame`] by the host's pinned register (R15, X21), and
//! preserves that register and the stack pointer alone. It returns the address of the code that the thread executes
//! next, or a number below [`LEAST_CODE`](crate::LEAST_CODE), with which [`enter`] returns.
//!
//! A guarded access that fails ends compiled code at once: [`enter`] returns [`FAILED`](crate::FAILED). So compiled
//! code needs no frame pointer, and no code for such an access.

use crate::arch;
use crate::frame::Frame;

/// Executes compiled code, and the code that follows it, until one returns a number below
/// [`LEAST_CODE`](crate::LEAST_CODE). Returns that number.
///
/// # Safety
/// - `code` is the address of compiled code, as the module's documentation describes it, and so is each address that
///   compiled code returns.
/// - Compiled code may use `frame`, and the client's fields after it.
pub unsafe fn enter(frame: *mut Frame, code: *const u8) -> u64 {
    // SAFETY: this function's `# Safety` is that of the host's code.
    unsafe { arch::enter(frame, code) }
}

/// Returns the exit for [`Arena::announce`](crate::Arena::announce) of code that [`enter`] executes.
pub fn failed_access() -> usize {
    arch::failed_access as *const () as usize
}
