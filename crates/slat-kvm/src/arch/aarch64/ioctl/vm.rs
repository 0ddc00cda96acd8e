//! Requests to a VM that only arm64 has.

use super::{Answer, DONE, UNKNOWN};
use crate::abi::*;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::reg_mask_range;

// Not inlined, so that the other requests do not get this function's large stack frame.
#[inline(never)]
pub(crate) fn ioctl(vm: &VmObject, request: u32, argument: u64) -> Answer {
    match request {
        KVM_ARM_PREFERRED_TARGET => user::write(argument, &vm.preferred_target()?)?,
        KVM_CREATE_IRQCHIP => vm.create_irqchip()?,
        KVM_ARM_SET_DEVICE_ADDR => vm.set_device_address(&user::read(argument)?)?,
        KVM_HAS_DEVICE_ATTR => vm.has_attribute(&user::read(argument)?)?,
        KVM_SET_DEVICE_ATTR => vm.set_attribute(&user::read(argument)?)?,
        KVM_ARM_SET_COUNTER_OFFSET => vm.set_counter_offset(&user::read(argument)?)?,
        KVM_ARM_GET_REG_WRITABLE_MASKS => {
            let range: reg_mask_range = user::read(argument)?;
            user::write_slice(range.addr, &vm.writable_masks(&range)?)?;
        }
        _ => return UNKNOWN,
    }
    DONE
}
