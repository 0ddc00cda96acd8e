//! Requests to `/dev/kvm`.

use super::{Answer, ENTRIES, Object, give, give_cpuid, give_msr_list, take_msrs, unknown, value};
use crate::abi::*;
use crate::errno::{Result, fail};
use crate::system::System;
use crate::user;
use kvm_bindings::kvm_device_attr;

// Not inlined: otherwise requests to other objects would have this function's frame, too.
#[inline(never)]
pub(super) fn ioctl(system: &System, request: u32, argument: u64) -> Result<Answer> {
    match request {
        KVM_GET_API_VERSION if argument == 0 => value(system.api_version()),
        KVM_GET_VCPU_MMAP_SIZE if argument == 0 => value(system.vcpu_mmap_size() as i32),
        KVM_GET_API_VERSION | KVM_GET_VCPU_MMAP_SIZE => fail(libc::EINVAL),
        KVM_CHECK_EXTENSION => value(system.check_extension(argument)),
        KVM_CREATE_VM => {
            let (vm, fd) = system.create_vm(argument, None, None)?;
            Ok(Answer::Created(Object::Vm(vm), fd))
        }
        KVM_GET_SUPPORTED_CPUID => give_cpuid(argument, &system.supported_cpuid()?),
        KVM_GET_SUPPORTED_HV_CPUID => give_cpuid(argument, &system.supported_hv_cpuid()),
        KVM_GET_EMULATED_CPUID => give_cpuid(argument, &system.emulated_cpuid()),
        KVM_GET_MSR_INDEX_LIST => give_msr_list(argument, system.msr_index_list()),
        KVM_GET_MSR_FEATURE_INDEX_LIST => give_msr_list(argument, system.msr_feature_index_list()),
        KVM_HAS_DEVICE_ATTR => {
            system.device_attribute(&user::read(argument)?)?;
            value(0)
        }
        KVM_GET_DEVICE_ATTR => {
            let attribute: kvm_device_attr = user::read(argument)?;
            give(attribute.addr, &system.device_attribute(&attribute)?)
        }
        KVM_X86_GET_MCE_CAP_SUPPORTED => give(argument, &system.mce_capabilities()),
        KVM_GET_MSRS => {
            let mut entries = take_msrs(argument)?;
            let done = system.feature_msrs(&mut entries);
            user::write_slice(argument + ENTRIES, &entries)?;
            value(done as i32)
        }
        // KVM returns this errno on x86; for a VM's unknown requests it returns ENOTTY.
        _ => unknown(request, libc::EINVAL),
    }
}
