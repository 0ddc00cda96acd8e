//! Assembly for the threads of slat's C library that run the program's threads.

use std::arch::naked_asm;

/// The body of a function with two arguments. The function saves the registers, stores the stack pointer at the address
/// in the second argument, for [`leave`], and calls `$go` with the first argument. `$go` does not return.
macro_rules! run {
    ($go:path) => {
        ::std::arch::naked_asm!(
            "stp x29, x30, [sp, #-160]!",
            "stp x19, x20, [sp, #16]",
            "stp x21, x22, [sp, #32]",
            "stp x23, x24, [sp, #48]",
            "stp x25, x26, [sp, #64]",
            "stp x27, x28, [sp, #80]",
            "stp d8, d9, [sp, #96]",
            "stp d10, d11, [sp, #112]",
            "stp d12, d13, [sp, #128]",
            "stp d14, d15, [sp, #144]",
            "mov x29, sp",
            "str x29, [x1]",
            "bl {go}",
            "brk #1",
            go = sym $go,
        )
    };
}
pub(crate) use run;

/// Returns to the caller of a function whose body is [`run!`].
///
/// # Safety
/// - This thread runs a function whose body is [`run!`], and that function has stored `begun_at`. Nothing on the
///   thread's stacks is needed any more.
#[unsafe(naked)]
pub unsafe extern "C" fn leave(begun_at: usize) -> ! {
    naked_asm!(
        "mov sp, x0",
        "ldp x19, x20, [sp, #16]",
        "ldp x21, x22, [sp, #32]",
        "ldp x23, x24, [sp, #48]",
        "ldp x25, x26, [sp, #64]",
        "ldp x27, x28, [sp, #80]",
        "ldp d8, d9, [sp, #96]",
        "ldp d10, d11, [sp, #112]",
        "ldp d12, d13, [sp, #128]",
        "ldp d14, d15, [sp, #144]",
        "ldp x29, x30, [sp], #160",
        "ret",
    )
}

/// The signature of rseq(2) areas (`tools/testing/selftests/rseq/rseq-arm64.h`). glibc uses the same signature.
pub const RSEQ_SIGNATURE: usize = 0xd428_bc00;

/// Returns the thread pointer. The C library's thread-local variables are at offsets from this address.
pub fn pointer() -> usize {
    let pointer: usize;
    // SAFETY: the instruction reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags));
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[unsafe(naked)]
    unsafe extern "C" fn begin(argument: usize, begun_at: *mut usize) {
        run!(go)
    }

    /// Changes all callee-saved registers, then calls [`leave`].
    unsafe extern "C" fn go(begun_at: *const usize) -> ! {
        // SAFETY: the registers are not used any more; `begin` has stored the stack pointer.
        unsafe {
            std::arch::asm!(
                "mov x20, 1",
                "mov x21, 1",
                "mov x22, 1",
                "mov x23, 1",
                "mov x24, 1",
                "mov x25, 1",
                "mov x26, 1",
                "mov x27, 1",
                "mov x28, 1",
                "fmov d8, x20",
                "fmov d9, x20",
                "fmov d14, x20",
                "fmov d15, x20",
                options(nostack)
            );
            leave(begun_at.read_volatile())
        }
    }

    #[test]
    fn a_thread_leaves_with_the_registers_of_its_beginning() {
        let mut begun_at = 0usize;
        let (general, vector): (u64, u64);
        // SAFETY: the assembly makes a call by the C ABI, which preserves X20 and the lower half of V8.
        unsafe {
            std::arch::asm!(
                "mov x20, 77",
                "fmov d8, x20",
                "bl {begin}",
                "fmov x21, d8",
                begin = sym begin,
                in("x0") &raw mut begun_at,
                in("x1") &raw mut begun_at,
                out("x20") general,
                out("x21") vector,
                out("d8") _,
                clobber_abi("C"),
            );
        }
        assert_eq!((general, vector), (77, 77));
        assert_ne!(begun_at, 0);
    }
}
