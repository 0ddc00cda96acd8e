//! Requests to a vCPU that only arm64 has.

use super::{Answer, DONE, UNKNOWN};
use crate::abi::*;
use crate::errno::fail;
use crate::user;
use crate::vcpu::VcpuObject;
use kvm_bindings::kvm_one_reg;

// Not inlined, so that the other requests do not get this function's large stack frame.
#[inline(never)]
pub(crate) fn ioctl(vcpu: &VcpuObject, request: u32, argument: u64) -> Answer {
    match request {
        KVM_ARM_VCPU_INIT => vcpu.init(&user::read(argument)?)?,
        // Only vCPUs with SVE and those in realms are finalized, and slat has neither.
        KVM_ARM_VCPU_FINALIZE => {
            user::read::<u32>(argument)?;
            return fail(libc::EINVAL);
        }
        KVM_GET_ONE_REG => {
            let register: kvm_one_reg = user::read(argument)?;
            let mut value = [0; 16];
            let len = vcpu.get_one_reg(register.id, &mut value)?;
            user::write_slice(register.addr, &value[..len])?;
        }
        KVM_SET_ONE_REG => {
            let register: kvm_one_reg = user::read(argument)?;
            vcpu.set_one_reg(register.id, |value| user::read_bytes(register.addr, value))?;
        }
        KVM_GET_REG_LIST => {
            let room: u64 = user::read(argument)?;
            let registers = vcpu.registers()?;
            // The number of registers is written even if the client's list is too short for them.
            user::write(argument, &(registers.len() as u64))?;
            if room < registers.len() as u64 {
                return fail(libc::E2BIG);
            }
            user::write_slice(argument + 8, &registers)?;
        }
        KVM_HAS_DEVICE_ATTR => vcpu.has_attribute(&user::read(argument)?)?,
        KVM_GET_DEVICE_ATTR => vcpu.get_attribute(&user::read(argument)?)?,
        KVM_SET_DEVICE_ATTR => vcpu.set_attribute(&user::read(argument)?)?,
        _ => return UNKNOWN,
    }
    DONE
}
