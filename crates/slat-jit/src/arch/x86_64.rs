//! The parts for hosts with x86-64 processors.

use crate::frame::{FAILED, Frame, LEAST_CODE};
use cranelift_codegen::isa::CallConv;
use std::arch::{asm, naked_asm};
use std::mem::offset_of;

pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns Cranelift's names for the features of the host's processor.
pub(crate) fn features() -> impl Iterator<Item = &'static str> {
    let all = [
        ("has_sse3", is_x86_feature_detected!("sse3")),
        ("has_ssse3", is_x86_feature_detected!("ssse3")),
        ("has_sse41", is_x86_feature_detected!("sse4.1")),
        ("has_sse42", is_x86_feature_detected!("sse4.2")),
        ("has_avx", is_x86_feature_detected!("avx")),
        ("has_fma", has_fused_multiply_add()),
        ("has_popcnt", is_x86_feature_detected!("popcnt")),
        ("has_lzcnt", is_x86_feature_detected!("lzcnt")),
        ("has_bmi1", is_x86_feature_detected!("bmi1")),
        ("has_bmi2", is_x86_feature_detected!("bmi2")),
    ];
    let present = all.into_iter().filter(|(_, is_there)| *is_there);
    present.map(|(name, _)| name)
}

/// The calling convention of helpers on this host ([`crate::HELPERS`]).
pub(crate) const HELPERS: CallConv = CallConv::WindowsFastcall;

/// Gives a function, or a type that begins with `fn`, the calling convention [`HELPERS`](crate::HELPERS).
#[macro_export]
macro_rules! helper {
    ($(#[$attribute:meta])* fn $($rest:tt)*) => {
        $(#[$attribute])* extern "win64" fn $($rest)*
    };
}

/// Returns whether the host has an instruction for Cranelift's `fma` ([`crate::has_fused_multiply_add`]).
pub(crate) fn has_fused_multiply_add() -> bool {
    is_x86_feature_detected!("fma")
}

/// A value of MXCSR: all exceptions are masked, results are rounded to nearest, denormals are not flushed, and all
/// flags are clear.
const DEFAULT: u32 = 0x1f80;
/// MXCSR's flag of an inexact result.
const INEXACT: u32 = 1 << 5;

/// Loads MXCSR. Returns its old value.
fn exchange_mxcsr(new: u32) -> u32 {
    let mut old = 0u32;
    // SAFETY: both operands are local variables. The callers load valid values: the default, or an earlier value of
    // MXCSR.
    unsafe {
        asm!("stmxcsr [{old}]", "ldmxcsr [{new}]", old = in(reg) &raw mut old, new = in(reg) &raw const new,
            options(nostack, preserves_flags))
    };
    old
}

/// Loads the default floating-point settings, and clears the exception flags. Returns the old settings and flags, for
/// [`end_floats`].
pub(crate) fn begin_floats() -> u64 {
    exchange_mxcsr(DEFAULT).into()
}

/// Restores the settings and flags `before`, which [`begin_floats`] returned. Returns whether a result since then was
/// inexact.
pub(crate) fn end_floats(before: u64) -> bool {
    exchange_mxcsr(before as u32) & INEXACT != 0
}

/// Prepares for [`publish`]: on x86-64 there is nothing to do.
pub(crate) fn prepare() -> bool {
    true
}

/// Makes all threads see new code. On x86-64 there is nothing to do, because the instruction cache sees all stores.
pub(crate) fn publish(_start: *const u8, _bytes: usize) -> bool {
    true
}

/// The end of [`enter`]: restores the registers that `enter` has saved, and returns. The stack pointer must have its
/// value from the beginning of `enter`.
macro_rules! leave {
    () => {
        concat!(
            "add rsp, 8\n",
            "pop r15\n",
            "pop r14\n",
            "pop r13\n",
            "pop r12\n",
            "pop rbx\n",
            "pop rbp\n",
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
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov r15, rdi",
        "mov [r15 + {stack}], rsp",
        "2:",
        "call rsi",
        "mov rsi, rax",
        "cmp rax, {least}",
        "jae 2b",
        leave!(),
        stack = const offset_of!(Frame, stack),
        least = const LEAST_CODE,
    )
}

/// Ends compiled code whose guarded access has failed: returns from `enter`. The signal handler continues here, with
/// the address of the access instruction in RAX.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn failed_access() {
    naked_asm!(
        "mov [r15 + {failed}], rax",
        "mov eax, {status}",
        "mov rsp, [r15 + {stack}]",
        leave!(),
        stack = const offset_of!(Frame, stack),
        failed = const offset_of!(Frame, failed),
        status = const FAILED,
    )
}

/// Returns the code of a function that returns `n`.
#[cfg(test)]
pub(crate) fn returning(n: u8) -> Vec<u8> {
    // The instructions are `mov eax,N` and `ret`.
    [0xb8, n, 0, 0, 0, 0xc3].to_vec()
}
