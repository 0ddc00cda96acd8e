//! The instructions `syscall` and `ret`, by which slat makes a system call. The call's number is in RAX, its arguments
//! are in RDI, RSI, RDX, R10, R8 and R9; the result is in RAX. The kernel overwrites RCX and R11.

use std::arch::{asm, naked_asm};
use std::sync::atomic::AtomicPtr;

/// The number of bytes of the instruction that enters the kernel.
pub const BYTES: usize = 2;

/// The address of an instruction that enters the kernel (`syscall`) followed by `ret`. Assembly calls this address with
/// the system call's registers.
pub static GATE: AtomicPtr<()> = AtomicPtr::new(own as *const () as *mut ());

/// Enters the kernel, and returns. The registers are those of the system call.
#[unsafe(naked)]
pub unsafe extern "C" fn own() {
    naked_asm!("syscall", "ret")
}

/// Enters the kernel like [`own`], but at another address. By this address, seccomp filters recognise slat's own
/// threads.
#[unsafe(naked)]
pub unsafe extern "C" fn exempted() {
    naked_asm!("syscall", "ret")
}

/// Makes a system call by the instructions `syscall` and `ret` at `instructions`. Returns the kernel's
/// result. Async-signal-safe.
///
/// # Safety
/// - These two instructions are at `instructions`. The requirements of [`raw`](crate::calls::raw) hold.
#[inline]
pub unsafe fn call_at(instructions: *mut (), number: i64, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the two instructions are at `instructions`, and the caller may use and change all that the system call
    // uses and changes, as this function's `# Safety` requires. The kernel overwrites only RCX and R11.
    unsafe {
        asm!(
            "call {instructions}",
            instructions = in(reg) instructions,
            inlateout("rax") number as isize => answer,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    answer
}
