//! The structs that only x86's ioctls copy.

use crate::user::plain;
use kvm_bindings::*;

plain!(
    kvm_clock_data,
    kvm_cpuid_entry,
    kvm_cpuid_entry2,
    kvm_debugregs,
    kvm_fpu,
    kvm_hyperv_eventfd,
    kvm_interrupt,
    kvm_pit_config,
    kvm_pit_state,
    kvm_pit_state2,
    kvm_reinject_control,
    kvm_irqchip,
    kvm_lapic_state,
    kvm_msr_entry,
    kvm_msr_filter,
    kvm_regs,
    kvm_sregs,
    kvm_sregs2,
    kvm_tpr_access_ctl,
    kvm_translation,
    kvm_vapic_addr,
    kvm_x86_mce,
    kvm_xcrs,
);
