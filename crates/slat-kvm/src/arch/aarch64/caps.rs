//! The values of the capabilities that not every architecture has.

use crate::arch::aarch64::limits::MAX_VCPU_ID;
use crate::arch::aarch64::state::ipa_limit;
use crate::arch::aarch64::{eager_split, guest_debug};
use crate::routing::MAX_ROUTES;
use kvm_bindings::*;
use slat::MmuKind;
use slat_a64::{BREAKPOINTS, WATCHPOINTS};

/// Returns the value of a capability; 0 if slat does not have the capability.
pub(crate) fn capability(cap: u32, _: MmuKind) -> u32 {
    match cap {
        KVM_CAP_ONE_REG
        | KVM_CAP_MP_STATE
        | KVM_CAP_VCPU_EVENTS
        | KVM_CAP_ARM_PSCI
        | KVM_CAP_ARM_PSCI_0_2
        | KVM_CAP_ARM_NISV_TO_USER
        | KVM_CAP_ARM_INJECT_SERROR_ESR
        | KVM_CAP_ARM_INJECT_EXT_DABT
        | KVM_CAP_ARM_SYSTEM_SUSPEND
        | KVM_CAP_SET_GUEST_DEBUG
        | KVM_CAP_ARM_WRITABLE_IMP_ID_REGS
        | KVM_CAP_COUNTER_OFFSET
        | KVM_CAP_ENABLE_CAP => 1,
        KVM_CAP_ARM_USER_IRQ
        | KVM_CAP_IRQCHIP
        | KVM_CAP_IRQFD
        | KVM_CAP_IRQFD_RESAMPLE
        | KVM_CAP_SIGNAL_MSI
        | KVM_CAP_MSI_DEVID
        | KVM_CAP_ARM_SET_DEVICE_ADDR
        | KVM_CAP_ARM_IRQ_LINE_LAYOUT_2
        | KVM_CAP_VCPU_ATTRIBUTES => 1,
        KVM_CAP_IRQ_ROUTING => MAX_ROUTES,
        KVM_CAP_ARM_VM_IPA_SIZE => ipa_limit(),
        KVM_CAP_STEAL_TIME => crate::steal_time::is_available().into(),
        // The capability's value has one bit for each range of registers that `KVM_ARM_GET_REG_WRITABLE_MASKS`
        // supports, which is only this range.
        KVM_CAP_ARM_SUPPORTED_REG_MASK_RANGES => 1 << KVM_ARM_FEATURE_ID_RANGE,
        KVM_CAP_SET_GUEST_DEBUG2 => guest_debug::CONTROLS,
        KVM_CAP_GUEST_DEBUG_HW_BPS => BREAKPOINTS as u32,
        KVM_CAP_GUEST_DEBUG_HW_WPS => WATCHPOINTS as u32,
        KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES => eager_split::block_sizes() as u32,
        KVM_CAP_MAX_VCPU_ID => MAX_VCPU_ID,
        _ => 0,
    }
}
