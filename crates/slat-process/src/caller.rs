//! Processor state of a caller that the kernel does not mind and that slat's code does: flags, and how floating point is computed.
//!
//! Compiled code expects that alignment is not checked (AC), that strings go upwards (DF), that nothing traps after each instruction
//! (TF), that floating point is rounded to nearest, and that its exceptions are masked (System V ABI, AMD64 supplement, "Registers"). A
//! program may have set all of it when it calls the C library's functions, which do little but enter the kernel.
//! So each function that replaces one of them begins with [`with_own_flags!`](crate::with_own_flags), before any compiled code, and goes
//! on in [`with_own_floats`]. The registers of the x87 unit are empty there, as at each call of a function.
//!
//! Other entries into slat need a part of this. The kernel calls signal handlers with DF and TF clear and with fresh floating point,
//! but with the program's AC: [`own_flags!`](crate::own_flags). A call site that was rewritten saves all state itself.

use std::arch::asm;

/// RFLAGS.NT.
pub const NESTED_TASK: u64 = 1 << 14;
/// RFLAGS.ID.
pub const IDENTIFICATION: u64 = 1 << 21;

/// The flags that a system call keeps and compiled code does not, or that it expects clear: TF, DF, NT, AC and ID.
pub const FLAGS: u64 = 1 << 8 | 1 << 10 | NESTED_TASK | 1 << 18 | IDENTIFICATION;

/// MXCSR of a new process: rounds to nearest, all exceptions are masked.
pub static MXCSR: u32 = 0x1f80;
/// The exceptions that have occurred, in MXCSR and in the x87 status word.
const OCCURRED: u32 = 0x3f;
/// The x87 control word of a new process.
const X87_CONTROL: u16 = 0x37f;

/// Assembly of a function whose operand `inner` does its work: calls that with all of [`FLAGS`] (the operand `flags`) clear, and restores them.
/// Usually they are, and `inner` is jumped to. It may have six arguments in registers, and a seventh on the stack. Unwinding passes
/// through.
#[macro_export]
macro_rules! with_own_flags {
    () => {
        ".cfi_startproc
        pushfq
        .cfi_adjust_cfa_offset 8
        test dword ptr [rsp], {flags}
        jnz 2f
        add rsp, 8
        .cfi_adjust_cfa_offset -8
        jmp {inner}
        2:
        .cfi_adjust_cfa_offset 8
        pushfq
        and qword ptr [rsp], ~{flags}
        popfq
        sub rsp, 8
        push qword ptr [rsp + 24]
        .cfi_adjust_cfa_offset 16
        call {inner}
        add rsp, 16
        .cfi_adjust_cfa_offset -16
        popfq
        .cfi_adjust_cfa_offset -8
        ret
        .cfi_endproc"
    };
}

/// Assembly at the start of a signal handler: clears AC, which the kernel leaves as the program has set it. The arithmetic flags are lost.
#[macro_export]
macro_rules! own_flags {
    () => {
        "pushfq\nand qword ptr [rsp], -0x40001\npopfq"
    };
}

/// A caller's floating point.
struct Kept {
    mxcsr: u32,
    /// The environment of the x87 unit (FNSTENV), if it is not that of a new process.
    x87: Option<[u32; 7]>,
}

/// Runs `work` with floating point as slat's code expects it, and restores the caller's.
///
/// Nothing has to be dropped: `work` may unwind by `pthread_exit`, or be left by siglongjmp, of a handler of the program, which the
/// kernel has called with fresh floating point.
#[inline(always)]
pub fn with_own_floats<R>(work: impl FnOnce() -> R) -> R {
    let kept = Kept::replace();
    let result = work();
    kept.restore();
    result
}

impl Kept {
    /// Stores the caller's floating point, and sets slat's. They are usually the same, and what would be slow is left out.
    #[inline(always)]
    fn replace() -> Self {
        let status: u16;
        let (mut mxcsr, mut control) = (0u32, 0u16);
        // SAFETY: stores to locals.
        unsafe {
            asm!(
                "stmxcsr [{mxcsr}]",
                "fnstcw [{control}]",
                "fnstsw ax",
                mxcsr = in(reg) &raw mut mxcsr,
                control = in(reg) &raw mut control,
                out("ax") status,
                options(nostack),
            );
        }
        if mxcsr & !OCCURRED != MXCSR {
            // SAFETY: as compiled code expects it.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const MXCSR, options(nostack)) };
        }
        let is_new = control == X87_CONTROL && u32::from(status) & OCCURRED == 0;
        Kept {
            mxcsr,
            x87: (!is_new).then(replace_x87),
        }
    }

    /// Sets the caller's floating point again.
    #[inline(always)]
    fn restore(&self) {
        let mut mxcsr = 0u32;
        // SAFETY: stores to a local.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack)) };
        if mxcsr != self.mxcsr {
            // SAFETY: the caller's.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.mxcsr, options(nostack)) };
        }
        if let Some(environment) = &self.x87 {
            // SAFETY: the caller's; the registers stay empty.
            unsafe { asm!("fldenv [{}]", in(reg) environment, options(nostack)) };
        }
    }
}

/// Sets the x87 unit as it is in a new process. Returns its environment.
#[cold]
fn replace_x87() -> [u32; 7] {
    let mut environment = [0u32; 7];
    // SAFETY: stores the 28 bytes of the environment, with the control word as it was; then the unit is as compiled code expects it.
    unsafe {
        asm!("fnstenv [{}]", "fninit", in(reg) &raw mut environment, out("st(0)") _, out("st(1)") _, out("st(2)") _,
            out("st(3)") _, out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _, options(nostack));
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::arch::naked_asm;

    /// Returns the flags, MXCSR and the x87 unit's control and status words.
    fn state() -> [u64; 4] {
        let flags: u64;
        let (mut mxcsr, mut x87) = (0u32, [0u32; 7]);
        // SAFETY: stores state, and loads the x87 environment that was stored.
        unsafe {
            asm!("pushfq", "pop {}", "stmxcsr [{}]", "fnstenv [{x87}]", "fldenv [{x87}]", out(reg) flags,
                in(reg) &raw mut mxcsr, x87 = in(reg) &raw mut x87);
        }
        let words = [mxcsr, x87[0] & 0xffff, x87[1] & 0x7f].map(u64::from);
        [flags & FLAGS, words[0], words[1], words[2]]
    }

    /// What `inner` has been given, and the state it has found.
    type Found = ([u64; 7], [u64; 4]);

    extern "C-unwind" fn inner(
        to: &mut Found,
        b: u64,
        c: u64,
        d: u64,
        e: u64,
        f: u64,
        g: u64,
    ) -> u64 {
        with_own_floats(|| *to = ([0, b, c, d, e, f, g], state()));
        b + 1
    }

    #[unsafe(naked)]
    unsafe extern "C-unwind" fn outer(
        to: &mut Found,
        b: u64,
        c: u64,
        d: u64,
        e: u64,
        f: u64,
        g: u64,
    ) -> u64 {
        naked_asm!(with_own_flags!(), inner = sym inner, flags = const FLAGS)
    }

    #[test]
    fn work_is_done_in_slats_state_and_the_callers_comes_back() {
        let control = 0x37fu16;
        for flags in [0, 1 << 18, FLAGS & !(1 << 8)] {
            for (mxcsr, x87) in [
                (0x1f80u32, 0x37fu16),
                (0xe07f & !OCCURRED, 0x840),
                (0x1fbf, 0x37f),
            ] {
                let mut found: Found = Default::default();
                let (result, after): (u64, u64);
                let (mut mxcsr_after, mut x87_after) = (0u32, 0u16);
                // SAFETY: a call by the C ABI, with a seventh argument on an aligned stack. Between the two changes of the state
                // nothing but `outer` runs.
                unsafe {
                    asm!(
                        "mov r12, rsp", "and rsp, -16", "sub rsp, 8", "push 7",
                        "fldcw [{x87}]", "ldmxcsr [{mxcsr}]", "push {flags}", "popfq",
                        "call {outer}",
                        "pushfq", "pop {flags}", "push 2", "popfq",
                        "stmxcsr [{mxcsr_after}]", "fnstcw [{x87_after}]", "ldmxcsr [{own}]", "fldcw [{control}]",
                        "mov rsp, r12",
                        outer = sym outer, x87 = in(reg) &raw const x87, mxcsr = in(reg) &raw const mxcsr,
                        flags = inout("r15") flags => after, mxcsr_after = in(reg) &raw mut mxcsr_after,
                        x87_after = in(reg) &raw mut x87_after, own = in(reg) &raw const MXCSR,
                        control = in(reg) &raw const control,
                        in("rdi") &raw mut found, in("rsi") 2u64, in("rdx") 3u64, in("rcx") 4u64, in("r8") 5u64,
                        in("r9") 6u64, lateout("rax") result, out("r12") _, clobber_abi("C"),
                    );
                }
                assert_eq!((found.0, result), ([0, 2, 3, 4, 5, 6, 7], 3));
                let [inner_flags, inner_mxcsr, inner_x87, occurred] = found.1;
                assert_eq!(
                    (inner_flags, inner_mxcsr & 0xffc0, inner_x87, occurred),
                    (0, 0x1f80, 0x37f, 0)
                );
                assert_eq!((after & FLAGS, mxcsr_after, x87_after), (flags, mxcsr, x87));
            }
        }
    }
}
