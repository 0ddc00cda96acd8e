//! The structs that only arm64's ioctls copy.

use crate::user::plain;
use kvm_bindings::*;

plain!(
    kvm_arm_counter_offset,
    kvm_arm_device_addr,
    kvm_smccc_filter,
    kvm_vcpu_init,
    reg_mask_range,
);
