//! The instructions `svc #0` and `ret`, by which slat makes a system call. The call's number is in X8, its arguments
//! are in X0 to X5; the result is in X0.

use std::arch::{asm, naked_asm};
use std::sync::atomic::AtomicPtr;

/// The number of bytes of the instruction that enters the kernel.
pub const BYTES: usize = 4;

/// The address of an instruction that enters the kernel (`svc #0`) followed by `ret`. Assembly calls this address with
/// the system call's registers.
pub static GATE: AtomicPtr<()> = AtomicPtr::new(own as *const () as *mut ());

/// Enters the kernel, and returns. The registers are those of the system call.
#[unsafe(naked)]
pub unsafe extern "C" fn own() {
    naked_asm!("svc #0", "ret")
}

/// Enters the kernel like [`own`], but at another address. By this address, seccomp filters recognise slat's own
/// threads.
#[unsafe(naked)]
pub unsafe extern "C" fn exempted() {
    naked_asm!("svc #0", "ret")
}

/// Makes a system call by the instructions `svc #0` and `ret` at `instructions`. Returns the kernel's
/// result. Async-signal-safe.
///
/// # Safety
/// - These two instructions are at `instructions`. The requirements of [`raw`](crate::calls::raw) hold.
#[inline]
pub unsafe fn call_at(instructions: *mut (), number: i64, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the two instructions are at `instructions`, and the caller may use and change all that the system call
    // uses and changes, as this function's `# Safety` requires. Of the general registers, the kernel changes only X0.
    // Of the vector registers, it keeps only the low 128 bits (`Documentation/arch/arm64/sve.rst`). So all registers
    // that a called function may change are declared as changed. These include X30, which the branch changes.
    unsafe {
        asm!(
            "blr {instructions}",
            instructions = in(reg) instructions,
            in("x8") number,
            inlateout("x0") a => answer,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            clobber_abi("C"),
        );
    }
    answer
}
