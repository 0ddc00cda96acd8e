//! The parts for hosts with 64-bit Arm processors.

use crate::frame::{FAILED, Frame, LEAST_CODE};
use cranelift_codegen::isa::CallConv;
use std::arch::{asm, naked_asm};
use std::mem::offset_of;

pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Commands of the system call `membarrier` that make all threads synchronize their instruction streams
/// (linux/membarrier.h).
const SYNC_CORE: libc::c_int = 1 << 5;
const REGISTER_SYNC_CORE: libc::c_int = 1 << 6;

/// Returns Cranelift's names for the features of the host's processor.
pub(crate) fn features() -> impl Iterator<Item = &'static str> {
    std::arch::is_aarch64_feature_detected!("lse")
        .then_some("has_lse")
        .into_iter()
}

/// The calling convention of helpers on this host ([`crate::HELPERS`]).
pub(crate) const HELPERS: CallConv = CallConv::SystemV;

/// Gives a function, or a type that begins with `fn`, the calling convention [`HELPERS`](crate::HELPERS).
#[macro_export]
macro_rules! helper {
    ($(#[$attribute:meta])* fn $($rest:tt)*) => {
        $(#[$attribute])* extern "C" fn $($rest)*
    };
}

/// Returns whether the host has an instruction for Cranelift's `fma` ([`crate::has_fused_multiply_add`]).
pub(crate) fn has_fused_multiply_add() -> bool {
    true
}

/// FPSR's flag of an inexact result.
const INEXACT: u64 = 1 << 4;

/// Loads FPCR from the lower half of `new`, and FPSR from the upper half. Returns their old values in the same form.
fn exchange_float_registers(new: u64) -> u64 {
    let (control, status): (u64, u64);
    // SAFETY: programs may write these registers. The callers load the registers' reset values, or earlier values of
    // theirs.
    unsafe {
        asm!("mrs {control}, fpcr", "mrs {status}, fpsr", "msr fpcr, {new_control}", "msr fpsr, {new_status}",
            control = out(reg) control, status = out(reg) status,
            new_control = in(reg) new & 0xffff_ffff, new_status = in(reg) new >> 32,
            options(nomem, nostack, preserves_flags))
    };
    control & 0xffff_ffff | status << 32
}

/// Loads the default floating-point settings, and clears the exception flags. Returns the old settings and flags, for
/// [`end_floats`].
pub(crate) fn begin_floats() -> u64 {
    exchange_float_registers(0)
}

/// Restores the settings and flags `before`, which [`begin_floats`] returned. Returns whether a result since then was
/// inexact.
pub(crate) fn end_floats(before: u64) -> bool {
    exchange_float_registers(before) >> 32 & INEXACT != 0
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: no pointer is passed, and the call's only effect is the barrier.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Registers the process for the barrier of [`publish`]. Returns `false` if the host's kernel has no such barrier.
pub(crate) fn prepare() -> bool {
    membarrier(REGISTER_SYNC_CORE)
}

/// Makes all threads see new code: cleans the data caches and invalidates the instruction caches (DDI 0487, B2.2.5).
/// Each thread must also execute a context synchronization event, because it may have fetched the old bytes already.
/// Returns `false` if the kernel refuses the `membarrier` for that: a seccomp filter may forbid it after [`prepare`].
pub(crate) fn publish(start: *const u8, bytes: usize) -> bool {
    let sizes: u64;
    // SAFETY: Linux lets programs read this register.
    unsafe { asm!("mrs {}, ctr_el0", out(reg) sizes, options(nomem, nostack)) };
    let (data, code) = (4usize << (sizes >> 16 & 15), 4usize << (sizes & 15));
    let first = start as usize;
    let lines = |size: usize| (first & !(size - 1)..first + bytes).step_by(size);
    for line in lines(data) {
        // SAFETY: the address is in a mapping of the caller's. The instruction changes caches, but no memory.
        unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack)) };
    }
    // SAFETY: the instruction is a barrier.
    unsafe { asm!("dsb ish", options(nostack)) };
    for line in lines(code) {
        // SAFETY: as for `dc cvau`.
        unsafe { asm!("ic ivau, {}", in(reg) line, options(nostack)) };
    }
    // SAFETY: both instructions are barriers.
    unsafe { asm!("dsb ish", "isb", options(nostack)) };
    membarrier(SYNC_CORE)
}

/// The end of [`enter`]: restores the registers that `enter` has saved, and returns. The stack pointer must have its
/// value from the beginning of `enter`.
macro_rules! leave {
    () => {
        concat!(
            "ldp x19, x20, [sp, #16]\n",
            "ldp x21, x22, [sp, #32]\n",
            "ldp x23, x24, [sp, #48]\n",
            "ldp x25, x26, [sp, #64]\n",
            "ldp x27, x28, [sp, #80]\n",
            "ldp d8, d9, [sp, #96]\n",
            "ldp d10, d11, [sp, #112]\n",
            "ldp d12, d13, [sp, #128]\n",
            "ldp d14, d15, [sp, #144]\n",
            "ldp x29, x30, [sp], #160\n",
            "ret"
        )
    };
}

/// Executes compiled code, from the function at `code` on, until it returns a number below `LEAST_CODE`
/// ([`crate::entry::enter`]).
///
/// # Safety
/// The requirements of [`crate::entry::enter`].
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn enter(frame: *mut Frame, code: *const u8) -> u64 {
    naked_asm!(
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
        "mov x21, x0",
        "mov x9, sp",
        "str x9, [x21, #{stack}]",
        "2:",
        "blr x1",
        "mov x1, x0",
        "cmp x0, #{least}",
        "b.hs 2b",
        leave!(),
        stack = const offset_of!(Frame, stack),
        least = const LEAST_CODE,
    )
}

/// Ends compiled code whose guarded access has failed: returns from `enter`. The signal handler continues here, with
/// the address of the access instruction in X0.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn failed_access() {
    naked_asm!(
        "str x0, [x21, #{failed}]",
        "mov x0, #{status}",
        "ldr x9, [x21, #{stack}]",
        "mov sp, x9",
        leave!(),
        stack = const offset_of!(Frame, stack),
        failed = const offset_of!(Frame, failed),
        status = const FAILED,
    )
}

/// Returns the code of a function that returns `n`.
#[cfg(test)]
pub(crate) fn returning(n: u8) -> Vec<u8> {
    // The words are MOV W0, #N and RET.
    let words = [0x5280_0000 | u32::from(n) << 5, 0xd65f_03c0];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
