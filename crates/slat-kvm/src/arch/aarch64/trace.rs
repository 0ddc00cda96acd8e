//! Tracepoints of entries and exits: none yet. KVM's tracepoints of arm64 have other fields than those of x86.

use crate::arch::aarch64::cpu::{Exit, State};

/// Call when the vCPU enters the guest.
#[inline]
pub(crate) fn enters(_vcpu_id: u32, _: &State) {}

/// Call when the vCPU has left the guest.
#[inline]
pub(crate) fn left(_vcpu_id: u32, _: &State, _: Option<&Exit>) {}
