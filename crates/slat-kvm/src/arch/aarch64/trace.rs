//! Tracepoints of entries and exits.

use crate::arch::aarch64::cpu::{Exit, State};

/// Traces that the vCPU enters the guest.
pub(crate) fn enters(_vcpu_id: u32, state: &State) {
    match *state {}
}

/// Traces that the vCPU has left the guest.
pub(crate) fn left(_vcpu_id: u32, state: &State, _exit: Option<&Exit>) {
    match *state {}
}
