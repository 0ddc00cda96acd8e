//! Request numbers of the ioctls that only arm64 has.

use crate::requests::{io, ior, iow, requests};
use kvm_bindings::*;

requests! { name_of_request:
    // vCPU
    KVM_ARM_VCPU_INIT = iow::<kvm_vcpu_init>(0xae);
    KVM_ARM_VCPU_FINALIZE = iow::<i32>(0xc2);
    // VM
    KVM_CREATE_IRQCHIP = io(0x60);
    KVM_ARM_SET_DEVICE_ADDR = iow::<kvm_arm_device_addr>(0xab);
    KVM_ARM_PREFERRED_TARGET = ior::<kvm_vcpu_init>(0xaf);
    KVM_ARM_SET_COUNTER_OFFSET = iow::<kvm_arm_counter_offset>(0xb5);
    KVM_ARM_GET_REG_WRITABLE_MASKS = ior::<reg_mask_range>(0xb6);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{KVM_SET_GUEST_DEBUG, name};

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        // The expected values are those of the public header, which programs that use KVM contain.
        assert_eq!(KVM_ARM_PREFERRED_TARGET, 0x8020_aeaf);
        assert_eq!(KVM_ARM_SET_DEVICE_ADDR, 0x4010_aeab);
        assert_eq!(KVM_ARM_GET_REG_WRITABLE_MASKS, 0x8040_aeb6);
        assert_eq!(KVM_ARM_SET_COUNTER_OFFSET, 0x4010_aeb5);
        assert_eq!(KVM_SET_GUEST_DEBUG, 0x4208_ae9b);
        let expected = Some("KVM_ARM_PREFERRED_TARGET");
        assert_eq!(name(KVM_ARM_PREFERRED_TARGET), expected);
    }
}
