//! The values of the capabilities that not every architecture has.

use crate::arch::aarch64::limits::MAX_VCPU_ID;
use crate::arch::aarch64::state::ipa_limit;
use kvm_bindings::*;
use slat::MmuKind;

/// Returns the value of a capability; 0 if slat does not have the capability.
pub(crate) fn capability(cap: u32, _: MmuKind) -> u32 {
    match cap {
        // VMs of every type have all registers of the API for 64-bit Arm.
        KVM_CAP_ONE_REG => 1,
        KVM_CAP_ARM_VM_IPA_SIZE => ipa_limit(),
        KVM_CAP_MAX_VCPU_ID => MAX_VCPU_ID,
        _ => 0,
    }
}
