//! x86-64.

use std::arch::x86_64::_rdtsc;

/// Returns the processor's time-stamp counter, in cycles.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    // SAFETY: the instruction works unless the process has disabled it (PR_SET_TSC); then even the process's vDSO
    // cannot tell the time.
    unsafe { _rdtsc() }
}
