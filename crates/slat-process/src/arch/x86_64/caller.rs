//! The processor state that slat's code needs and that a program's code, which calls slat, may have changed: flags, and
//! the settings of floating-point computation. The kernel does not depend on this state.
//!
//! Compiled code expects that alignment is not checked (AC), that string instructions go upwards (DF), that nothing
//! traps after each instruction (TF), that floating point is rounded to nearest, and that floating-point exceptions are
//! masked (System V ABI, AMD64 supplement, "Registers"). A program may call the C library's wrappers of system calls
//! with other values of all of these. So each function of slat that replaces such a wrapper begins with
//! [`enter_function!`](crate::enter_function), before any compiled code, and does its work in [`with_own_floats`]. At
//! that time the registers of the x87 unit are empty, as at each function call.
//!
//! Other entries into slat have less to do. The kernel calls signal handlers with DF and TF clear and with the
//! floating-point state of a new process, but with the program's AC. So handlers only clear AC
//! ([`own_flags!`](crate::own_flags)). The entry from a rewritten call site saves all state itself.

use std::arch::asm;

/// The flag NT (nested task) in RFLAGS.
pub const NESTED_TASK: u64 = 1 << 14;
/// The flag ID (identification) in RFLAGS.
pub const IDENTIFICATION: u64 = 1 << 21;

/// The flags that a system call preserves, but that compiled code changes or expects to be clear: TF, DF, NT, AC and
/// ID.
pub const FLAGS: u64 = 1 << 8 | 1 << 10 | NESTED_TASK | 1 << 18 | IDENTIFICATION;

/// The value of MXCSR in a new process: results are rounded to nearest, and all exceptions are masked.
pub static MXCSR: u32 = 0x1f80;
/// The bits of the floating-point exceptions that have occurred, in MXCSR and in the x87 status word.
const OCCURRED: u32 = 0x3f;
/// The x87 control word of a new process.
pub const X87_CONTROL: u16 = 0x37f;

/// The assembly of a function that calls the operand `inner` to do its work. Clears all of [`FLAGS`] (the operand
/// `flags`), calls `inner`, and restores the flags. If the flags are already clear, which is usual, the assembly jumps
/// to `inner` instead. `inner` may have six arguments in registers, and a seventh on the stack. Unwinding can pass
/// through this frame.
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

/// The body of a function that runs `$inner` with slat's own flags ([`with_own_flags!`](crate::with_own_flags)).
#[macro_export]
macro_rules! enter_function {
    ($inner:path) => {
        ::std::arch::naked_asm!(
            $crate::with_own_flags!(),
            inner = sym $inner,
            flags = const $crate::caller::FLAGS,
        )
    };
}

/// The assembly at the start of a signal handler. Clears AC, because the kernel does not clear the program's AC for a
/// handler. Destroys the arithmetic flags.
#[macro_export]
macro_rules! own_flags {
    () => {
        "pushfq\nand qword ptr [rsp], -0x40001\npopfq"
    };
}

/// A caller's floating-point state.
struct Kept {
    mxcsr: u32,
    /// The environment of the x87 unit (FNSTENV), if it differs from that of a new process.
    x87: Option<[u32; 7]>,
}

/// Runs `work` with floating point as slat's code expects it, and then restores the caller's settings.
///
/// This function has no value with a destructor. So `work` may unwind through it by `pthread_exit`, and a signal
/// handler of the program may leave it by siglongjmp. The kernel has called that handler with the floating-point state
/// of a new process.
#[inline(always)]
pub fn with_own_floats<R>(work: impl FnOnce() -> R) -> R {
    let kept = Kept::replace();
    let result = work();
    kept.restore();
    result
}

impl Kept {
    /// Saves the caller's floating-point state, and loads slat's state. If the two states are equal, which is usual,
    /// loads nothing.
    #[inline(always)]
    fn replace() -> Self {
        let status: u16;
        let (mut mxcsr, mut control) = (0u32, 0u16);
        // SAFETY: the instructions store to local variables.
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
            // SAFETY: compiled code expects this MXCSR.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const MXCSR, options(nostack)) };
        }
        let is_new = control == X87_CONTROL && u32::from(status) & OCCURRED == 0;
        Kept {
            mxcsr,
            x87: (!is_new).then(replace_x87),
        }
    }

    /// Restores the caller's floating-point state.
    #[inline(always)]
    fn restore(&self) {
        let mut mxcsr = 0u32;
        // SAFETY: the instruction stores to a local variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack)) };
        if mxcsr != self.mxcsr {
            // SAFETY: MXCSR had this value when the caller called slat.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.mxcsr, options(nostack)) };
        }
        if let Some(environment) = &self.x87 {
            // SAFETY: the caller had this environment, and the x87 registers stay empty.
            unsafe { asm!("fldenv [{}]", in(reg) environment, options(nostack)) };
        }
    }
}

/// Sets the x87 unit to the state of a new process. Returns its old environment.
#[cold]
fn replace_x87() -> [u32; 7] {
    let mut environment = [0u32; 7];
    // SAFETY: the code stores the 28 bytes of the environment, including the control word. Afterwards the unit has the
    // state that compiled code expects.
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
        // SAFETY: the code stores state. FNSTENV masks the x87 exceptions, so the code loads the stored environment
        // again.
        unsafe {
            asm!("pushfq", "pop {}", "stmxcsr [{}]", "fnstenv [{x87}]", "fldenv [{x87}]", out(reg) flags,
                in(reg) &raw mut mxcsr, x87 = in(reg) &raw mut x87);
        }
        let words = [mxcsr, x87[0] & 0xffff, x87[1] & 0x7f].map(u64::from);
        [flags & FLAGS, words[0], words[1], words[2]]
    }

    /// The arguments with which `inner` was called, and the processor state at its entry.
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

    /// The processor state that a caller sets before a call, or finds after it. Assembly uses the offsets.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Set {
        flags: u64,
        mxcsr: u32,
        x87: u16,
    }

    /// Calls [`outer`] with the processor state `set`. Returns the result of `outer`, and the processor state
    /// afterwards.
    fn call(found: &mut Found, set: Set) -> (u64, Set) {
        let own = Set {
            flags: 2,
            mxcsr: MXCSR,
            x87: X87_CONTROL,
        };
        let mut sets = [set, own];
        let result;
        // SAFETY: a call by the C ABI, with a seventh argument on an aligned stack. Only `outer` runs while the state
        // is changed.
        unsafe {
            asm!(
                "mov r12, rsp", "and rsp, -16", "sub rsp, 8", "push 7",
                "fldcw [r13 + 12]", "ldmxcsr [r13 + 8]", "push qword ptr [r13]", "popfq",
                "call {outer}",
                "pushfq", "pop qword ptr [r13]", "push qword ptr [r13 + 16]", "popfq",
                "stmxcsr [r13 + 8]", "fnstcw [r13 + 12]", "ldmxcsr [r13 + 24]", "fldcw [r13 + 28]",
                "mov rsp, r12",
                outer = sym outer, in("r13") &raw mut sets, out("r12") _,
                in("rdi") &raw mut *found, in("rsi") 2u64, in("rdx") 3u64, in("rcx") 4u64, in("r8") 5u64, in("r9") 6u64,
                lateout("rax") result, clobber_abi("C"),
            );
        }
        sets[0].flags &= FLAGS;
        (result, sets[0])
    }

    #[test]
    fn work_is_done_in_slats_state_and_the_callers_comes_back() {
        let floats = [(0x1f80, 0x37f), (0xe040, 0x840), (0x1fbf, 0x37f)];
        for flags in [0, 1 << 18, FLAGS & !(1 << 8)] {
            for (mxcsr, x87) in floats {
                let mut found: Found = Default::default();
                let set = Set { flags, mxcsr, x87 };
                let (result, after) = call(&mut found, set);
                assert_eq!((found.0, result), ([0, 2, 3, 4, 5, 6, 7], 3));
                let [flags, mxcsr, x87, occurred] = found.1;
                let inner = (flags, mxcsr & 0xffc0, x87, occurred);
                assert_eq!(inner, (0, 0x1f80, 0x37f, 0), "{set:x?}");
                assert_eq!(after, set);
            }
        }
    }
}
