//! Requests to `/dev/kvm` that only x86 has.

use super::tables::{ENTRIES, give_cpuid, give_msr_list, take_msrs};
use super::{Answer, DONE, UNKNOWN, give, value};
use crate::abi::*;
use crate::system::System;
use crate::user;
use kvm_bindings::kvm_device_attr;

// Not inlined: otherwise other requests would also need this function's stack frame.
#[inline(never)]
pub(crate) fn ioctl(system: &System, request: u32, argument: u64) -> Answer {
    match request {
        KVM_HAS_DEVICE_ATTR => {
            system.device_attribute(&user::read(argument)?)?;
            DONE
        }
        KVM_GET_DEVICE_ATTR => {
            let attribute: kvm_device_attr = user::read(argument)?;
            give(attribute.addr, &system.device_attribute(&attribute)?)
        }
        KVM_GET_SUPPORTED_CPUID => give_cpuid(argument, &system.supported_cpuid()?),
        KVM_GET_SUPPORTED_HV_CPUID => give_cpuid(argument, &system.supported_hv_cpuid()),
        KVM_GET_EMULATED_CPUID => give_cpuid(argument, &system.emulated_cpuid()),
        KVM_GET_MSR_INDEX_LIST => give_msr_list(argument, system.msr_index_list()),
        KVM_GET_MSR_FEATURE_INDEX_LIST => give_msr_list(argument, system.msr_feature_index_list()),
        KVM_X86_GET_MCE_CAP_SUPPORTED => give(argument, &system.mce_capabilities()),
        KVM_GET_MSRS => {
            let mut entries = take_msrs(argument)?;
            let done = system.feature_msrs(&mut entries);
            user::write_slice(argument + ENTRIES, &entries)?;
            value(done as i32)
        }
        _ => UNKNOWN,
    }
}
