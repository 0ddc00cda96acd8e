//! x86-64.

use std::arch::x86_64::_rdtsc;

/// Returns the processor's time-stamp counter, in cycles.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    // SAFETY: the instruction has no condition, unless the process has forbidden it to itself (PR_SET_TSC); then even
    // its vDSO cannot tell the time.
    unsafe { _rdtsc() }
}
