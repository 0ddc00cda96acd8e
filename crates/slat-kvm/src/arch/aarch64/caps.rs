//! The values of the capabilities that not every architecture has.

use crate::engine::TableFormat;
use crate::policy;
use kvm_bindings::*;
use slat::MmuKind;

/// Returns the value of a capability; 0 if slat does not have the capability.
pub(crate) fn capability(cap: u32, _: MmuKind) -> u32 {
    match cap {
        // VMs of every type have all registers of the API for 64-bit Arm.
        KVM_CAP_ONE_REG => 1,
        KVM_CAP_ARM_VM_IPA_SIZE => ipa_limit(),
        _ => 0,
    }
}

/// Returns the most bits that an IPA can have: as many as the tables of this process translate.
pub(crate) fn ipa_limit() -> u32 {
    let format = policy::current().map_or_else(|_| TableFormat::default(), |now| now.format);
    match format {
        TableFormat::Aarch64Lpa2 => 52,
        TableFormat::Aarch64 | TableFormat::Aarch64Kib16 | TableFormat::Aarch64Kib64 => 48,
    }
}
