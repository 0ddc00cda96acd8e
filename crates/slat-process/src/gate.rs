//! The instruction by which slat enters the kernel, called the gate.
//!
//! At first the gate is an instruction of slat's own. Once the system calls of this process are dispatched to slat
//! (`docs/dispatch.md`), the kernel lets only those calls pass that come from the C library's text. From then on slat
//! uses an instruction in the C library's text.
//!
//! One word holds the gate's address, and one word says whether slat's own threads use another gate. All gates exist
//! before they are used, and are never removed, so accesses to the words need no memory order.

pub use crate::arch::gate::GATE;
use crate::arch::gate::{BYTES, call_at, exempted, own};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether slat's own threads make their system calls with the instruction in `exempted`. [`exempt`] sets this word when
/// the program installs a seccomp filter for all threads: slat then extends the filter, so that it allows all calls
/// from this instruction.
static IS_EXEMPTED_USED: AtomicBool = AtomicBool::new(false);

/// Makes slat's own threads enter the kernel at an instruction that no other thread uses. Returns the range of
/// addresses that a filter then sees for these threads' calls, and must allow. Call only in a program that loads
/// libraries. The kernel may dispatch the program's calls, but not the calls of slat's threads.
pub fn exempt() -> Range<usize> {
    IS_EXEMPTED_USED.store(true, Ordering::Relaxed);
    let next = exempted as *const () as usize + BYTES;
    next..next + 1
}

/// Whether slat's own threads must call [`call_exempted`]. Costs one load. Async-signal-safe.
#[inline]
pub fn is_exempted_used() -> bool {
    IS_EXEMPTED_USED.load(Ordering::Relaxed)
}

/// Makes a system call on a thread of slat's own, even if a filter forbids the call.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
pub unsafe fn call_exempted(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change all that the call uses and changes, as `raw` requires. The two instructions
    // are at `exempted`.
    unsafe { call_at(exempted as *const () as *mut (), number, arguments) }
}

/// Makes a system call through the gate, the instruction by which slat enters the kernel.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
#[inline]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change all that the call uses and changes, as `raw` requires. The gate always
    // refers to the two instructions, as `move_to` requires.
    unsafe { call_at(GATE.load(Ordering::Relaxed), number, arguments) }
}

/// Makes a system call by slat's own instruction, even if the gate has been moved to an instruction of the C library.
/// Inlined, and calls no function of the C library, because slat's library makes such calls before the dynamic linker
/// has linked that library.
///
/// # Safety
/// The requirements of [`raw`](crate::calls::raw).
#[inline]
pub unsafe fn call_own(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change all that the call uses and changes, as `raw` requires. The two instructions
    // are at `own`.
    unsafe { call_at(own as *const () as *mut (), number, arguments) }
}

/// Moves the gate: from now on, slat enters the kernel by the instruction at `address`.
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
