//! Requests to a VM that only arm64 has.

use super::{Answer, DONE, UNKNOWN};
use crate::abi::*;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::kvm_device_attr;

// This function is not inlined, because otherwise other requests would have this function's frame, too.
#[inline(never)]
pub(crate) fn ioctl(vm: &VmObject, request: u32, argument: u64) -> Answer {
    match request {
        KVM_ARM_PREFERRED_TARGET => user::write(argument, &vm.preferred_target()?)?,
        KVM_CREATE_IRQCHIP => vm.create_irqchip()?,
        KVM_ARM_SET_DEVICE_ADDR => vm.set_device_address(&user::read(argument)?)?,
        KVM_HAS_DEVICE_ATTR | KVM_SET_DEVICE_ATTR => {
            user::read::<kvm_device_attr>(argument)?;
            vm.device_attribute()?;
        }
        _ => return UNKNOWN,
    }
    DONE
}
