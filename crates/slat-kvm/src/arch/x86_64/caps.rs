//! The values of the capabilities that not every architecture has.

use crate::arch::x86_64::limits::MAX_VCPU_ID;
use crate::arch::x86_64::{clock, guest_debug, msr, nested, options, quirks};
use crate::dirty::MAX_RING_SIZE;
use crate::routing::MAX_ROUTES;
use kvm_bindings::*;
use slat::MmuKind;

/// Returns the value of a capability for VMs whose tables `mmu` makes; 0 if slat does not have the capability.
pub(crate) fn capability(cap: u32, mmu: MmuKind) -> u32 {
    match cap {
        // As in KVM, memory can be mapped before the guest uses it only if there are second-level tables.
        KVM_CAP_PRE_FAULT_MEMORY if mmu == MmuKind::Shadow => 0,
        // As in KVM, memory can be private only if there are second-level tables.
        KVM_CAP_VM_TYPES if mmu == MmuKind::Shadow => 1 << KVM_X86_DEFAULT_VM,
        KVM_CAP_HLT
        | KVM_CAP_ENABLE_CAP
        | KVM_CAP_IRQFD
        | KVM_CAP_PRE_FAULT_MEMORY
        | KVM_CAP_SIGNAL_MSI
        | KVM_CAP_IRQCHIP
        | KVM_CAP_IRQ_INJECT_STATUS
        | KVM_CAP_IRQFD_RESAMPLE
        | KVM_CAP_PIT
        | KVM_CAP_PIT2
        | KVM_CAP_PIT_STATE2
        | KVM_CAP_REINJECT_CONTROL
        | KVM_CAP_SPLIT_IRQCHIP
        | KVM_CAP_SET_TSS_ADDR
        | KVM_CAP_EXT_CPUID
        | KVM_CAP_EXT_EMUL_CPUID
        | KVM_CAP_MP_STATE
        | KVM_CAP_USER_NMI
        | KVM_CAP_SET_IDENTITY_MAP_ADDR
        | KVM_CAP_VCPU_EVENTS
        | KVM_CAP_DEBUGREGS
        | KVM_CAP_SET_GUEST_DEBUG
        | KVM_CAP_X86_ROBUST_SINGLESTEP
        | KVM_CAP_XSAVE
        | KVM_CAP_XCRS
        | KVM_CAP_GET_TSC_KHZ
        | KVM_CAP_GET_MSR_FEATURES
        | KVM_CAP_NOP_IO_DELAY
        | KVM_CAP_SET_BOOT_CPU_ID
        | KVM_CAP_KVMCLOCK_CTRL
        | KVM_CAP_TSC_DEADLINE_TIMER
        | KVM_CAP_INTERNAL_ERROR_DATA
        | KVM_CAP_CLOCKSOURCE
        | KVM_CAP_ENFORCE_PV_FEATURE_CPUID
        | KVM_CAP_COALESCED_PIO
        | KVM_CAP_VM_DISABLE_NX_HUGE_PAGES
        | KVM_CAP_SREGS2
        | KVM_CAP_MMU_SHADOW_CACHE_CONTROL
        | KVM_CAP_EXCEPTION_PAYLOAD
        | KVM_CAP_X86_TRIPLE_FAULT_EVENT
        | KVM_CAP_EXIT_ON_EMULATION_FAILURE
        | KVM_CAP_MSR_PLATFORM_INFO
        | KVM_CAP_X86_USER_SPACE_MSR
        | KVM_CAP_X86_MSR_FILTER
        | KVM_CAP_DISABLE_QUIRKS
        | KVM_CAP_TSC_CONTROL
        | KVM_CAP_VM_TSC_CONTROL
        | KVM_CAP_VAPIC
        | KVM_CAP_X86_SMM
        | KVM_CAP_HYPERV
        | KVM_CAP_HYPERV_VAPIC
        | KVM_CAP_HYPERV_SPIN
        | KVM_CAP_HYPERV_TIME
        | KVM_CAP_HYPERV_SYNIC
        | KVM_CAP_HYPERV_SYNIC2
        | KVM_CAP_HYPERV_VP_INDEX
        | KVM_CAP_HYPERV_EVENTFD
        | KVM_CAP_HYPERV_TLBFLUSH
        | KVM_CAP_HYPERV_SEND_IPI
        | KVM_CAP_HYPERV_CPUID
        | KVM_CAP_SYS_HYPERV_CPUID
        | KVM_CAP_HYPERV_ENFORCE_CPUID
        | KVM_CAP_SYS_ATTRIBUTES
        | KVM_CAP_ONE_REG
        | KVM_CAP_X86_GUEST_MODE
        | KVM_CAP_X86_NOTIFY_VMEXIT
        | KVM_CAP_SMALLER_MAXPHYADDR
        | KVM_CAP_ASYNC_PF
        | KVM_CAP_ASYNC_PF_INT
        | KVM_CAP_VCPU_ATTRIBUTES => 1,
        KVM_CAP_STEAL_TIME => crate::steal_time::is_available().into(),
        KVM_CAP_IRQ_ROUTING => MAX_ROUTES,
        KVM_CAP_DIRTY_LOG_RING => MAX_RING_SIZE,
        KVM_CAP_X86_APIC_BUS_CYCLES_NS => options::APIC_BUS_CYCLE_NS as u32,
        KVM_CAP_X86_BUS_LOCK_EXIT => options::BUS_LOCK_MODES,
        KVM_CAP_X86_DISABLE_EXITS => options::DISABLED_EXITS,
        KVM_CAP_NESTED_STATE => nested::SIZE,
        KVM_CAP_MCE => msr::mce::MAX_BANKS,
        KVM_CAP_X2APIC_API => KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK,
        KVM_CAP_ADJUST_CLOCK => clock::FLAGS,
        KVM_CAP_SET_GUEST_DEBUG2 => guest_debug::CONTROLS,
        KVM_CAP_XSAVE2 => size_of::<kvm_xsave>() as u32,
        KVM_CAP_MAX_VCPU_ID => MAX_VCPU_ID,
        KVM_CAP_SYNC_REGS => KVM_SYNC_X86_VALID_FIELDS,
        KVM_CAP_DISABLE_QUIRKS2 => quirks::SUPPORTED,
        KVM_CAP_VM_TYPES => 1 << KVM_X86_DEFAULT_VM | 1 << KVM_X86_SW_PROTECTED_VM,
        KVM_CAP_EXIT_HYPERCALL => options::HYPERCALL_EXITS,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::check;

    #[test]
    fn claims_what_the_selftests_look_for() {
        assert_eq!(check(KVM_CAP_MAX_VCPUS.into(), MmuKind::Tdp), 1024);
        assert_eq!(check(KVM_CAP_MAX_VCPU_ID.into(), MmuKind::Tdp), 4096);
    }
}
