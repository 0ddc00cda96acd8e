//! Request numbers of the ioctls that only arm64 has.

use crate::requests::{io, ior, iow, requests};
use kvm_bindings::*;

requests! { name_of_request:
    // VM
    KVM_CREATE_IRQCHIP = io(0x60);
    KVM_ARM_SET_DEVICE_ADDR = iow::<kvm_arm_device_addr>(0xab);
    KVM_ARM_PREFERRED_TARGET = ior::<kvm_vcpu_init>(0xaf);
}
