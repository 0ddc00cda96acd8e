//! x86-64.

use crate::frame::{FAILED, Frame, LEAST_CODE};
use std::arch::naked_asm;
use std::mem::offset_of;

pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns the features that the host's processor has.
pub(crate) fn features() -> impl Iterator<Item = &'static str> {
    let all = [
        ("has_sse3", is_x86_feature_detected!("sse3")),
        ("has_ssse3", is_x86_feature_detected!("ssse3")),
        ("has_sse41", is_x86_feature_detected!("sse4.1")),
        ("has_sse42", is_x86_feature_detected!("sse4.2")),
        ("has_avx", is_x86_feature_detected!("avx")),
        ("has_popcnt", is_x86_feature_detected!("popcnt")),
        ("has_lzcnt", is_x86_feature_detected!("lzcnt")),
        ("has_bmi1", is_x86_feature_detected!("bmi1")),
        ("has_bmi2", is_x86_feature_detected!("bmi2")),
    ];
    let present = all.into_iter().filter(|(_, is_there)| *is_there);
    present.map(|(name, _)| name)
}

/// Makes later calls of [`publish`] possible. The host's instruction cache needs nothing.
pub(crate) fn prepare() -> bool {
    true
}

/// Makes all threads see new code. The host's instruction cache sees all stores.
pub(crate) fn publish(_start: *const u8, _bytes: usize) -> bool {
    true
}

/// The end of [`enter`], with the stack pointer of its beginning: restores the registers that `enter` has saved, and
/// returns.
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

/// See [`crate::entry::enter`].
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

/// A guarded access of compiled code continues here if it has failed: returns from `enter`. The address of the access
/// is in RAX.
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
    // mov eax,N; ret
    [0xb8, n, 0, 0, 0, 0xc3].to_vec()
}
