//! The instruction at which slat enters the kernel.
//!
//! At first the gate is an instruction of slat's own. Once the system calls of this process are dispatched to slat
//! (`docs/dispatch.md`), the kernel lets only those calls pass that come from the C library's text. From then on slat
//! uses an instruction in the C library's text.
//!
//! The gate, and which threads use it, are one word each. All gates are there before they are used, and stay, so the
//! words need no order.

pub use crate::arch::gate::GATE;
use crate::arch::gate::{BYTES, call_at, exempted, own};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether slat's own threads enter the kernel at `exempted`: a filter that binds these threads is installed so that it
/// allows calls from there ([`exempt`]).
static IS_EXEMPTED_USED: AtomicBool = AtomicBool::new(false);

/// Makes slat's own threads enter the kernel at an instruction that no other thread uses. Returns the addresses that a
/// filter sees for their calls, and must allow. Call in a program that loads libraries: its calls may be dispatched,
/// but those of slat's threads are not.
pub fn exempt() -> Range<usize> {
    IS_EXEMPTED_USED.store(true, Ordering::Relaxed);
    let next = exempted as *const () as usize + BYTES;
    next..next + 1
}

/// Whether slat's own threads must call [`call_exempted`]. One load. Async-signal-safe.
#[inline]
pub fn is_exempted_used() -> bool {
    IS_EXEMPTED_USED.load(Ordering::Relaxed)
}

/// Makes a system call on a thread of slat's own, whatever filters forbid.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
pub unsafe fn call_exempted(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change what the call uses and changes, as `raw` asks of its caller. `exempted` has
    // the two instructions.
    unsafe { call_at(exempted as *const () as *mut (), number, arguments) }
}

/// Makes a system call through the gate.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
#[inline]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change what the call uses and changes, as `raw` asks of its caller. The gate
    // always refers to the two instructions, because `move_to` asks that of its caller.
    unsafe { call_at(GATE.load(Ordering::Relaxed), number, arguments) }
}

/// Makes a system call by slat's own instruction, wherever the gate is. Inlined, and without a call of the C library's:
/// slat's library makes such calls before it is linked.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
#[inline]
pub unsafe fn call_own(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change what the call uses and changes, as `raw` asks of its caller. `own` has the
    // two instructions.
    unsafe { call_at(own as *const () as *mut (), number, arguments) }
}

/// Moves the gate: slat enters the kernel at `address` from now on.
///
/// # Safety
/// - From now on, the instruction that enters the kernel and a `ret` are at `address`.
pub unsafe fn move_to(address: usize) {
    GATE.store(address as *mut (), Ordering::Relaxed);
}

/// Returns the address at which slat enters the kernel.
pub fn address() -> usize {
    GATE.load(Ordering::Relaxed) as usize
}
