//! Capabilities: the values that `KVM_CHECK_EXTENSION` returns.
//!
//! slat claims only capabilities that work, because a client that finds a capability relies on it. `tests/capabilities`
//! uses each.

use crate::irq::routing::MAX_ROUTES;
use crate::irq::vcpus::{MAX_VCPU_ID, MAX_VCPUS};
use kvm_bindings::*;
use slat::MmuKind;

/// `KVM_CAP_GUEST_MEMFD_FLAGS`, of Linux 6.18.
pub const KVM_CAP_GUEST_MEMFD_FLAGS: u32 = 244;
/// `KVM_CAP_USERFAULT` of the posted series (version 3). Linux has since given the number to a capability of Arm hosts.
pub const KVM_CAP_USERFAULT: u32 = 243;

/// The number of memslots per address space that a client may use.
pub const NR_MEMSLOTS: u32 = 32764;
/// The number of address spaces of a VM: vCPUs in system management mode have an address space of their own.
pub const ADDRESS_SPACES: u32 = 2;

/// Returns the value of a capability for VMs whose tables `mmu` makes; 0 if slat does not have the capability. Includes
/// capabilities that only VMs of one type have. For a given VM, call `VmObject::check_extension` instead.
pub fn check(cap: u64, mmu: MmuKind) -> i32 {
    let Ok(cap) = u32::try_from(cap) else {
        return 0;
    };
    let value = match cap {
        // Without a second level, KVM does not map memory before the guest uses it, and has no private memory.
        KVM_CAP_PRE_FAULT_MEMORY if mmu == MmuKind::Shadow => 0,
        KVM_CAP_VM_TYPES if mmu == MmuKind::Shadow => 1 << KVM_X86_DEFAULT_VM,
        KVM_CAP_USER_MEMORY
        | KVM_CAP_USER_MEMORY2
        | KVM_CAP_HLT
        | KVM_CAP_IRQCHIP
        | KVM_CAP_IRQ_INJECT_STATUS
        | KVM_CAP_IRQFD
        | KVM_CAP_IRQFD_RESAMPLE
        | KVM_CAP_IOEVENTFD
        | KVM_CAP_IOEVENTFD_ANY_LENGTH
        | KVM_CAP_IOEVENTFD_NO_LENGTH
        | KVM_CAP_PIT
        | KVM_CAP_PIT2
        | KVM_CAP_PIT_STATE2
        | KVM_CAP_REINJECT_CONTROL
        | KVM_CAP_SPLIT_IRQCHIP
        | KVM_CAP_SET_TSS_ADDR
        | KVM_CAP_EXT_CPUID
        | KVM_CAP_EXT_EMUL_CPUID
        | KVM_CAP_MP_STATE
        | KVM_CAP_SYNC_MMU
        | KVM_CAP_DESTROY_MEMORY_REGION_WORKS
        | KVM_CAP_JOIN_MEMORY_REGIONS_WORKS
        | KVM_CAP_USER_NMI
        | KVM_CAP_SET_IDENTITY_MAP_ADDR
        | KVM_CAP_VCPU_EVENTS
        | KVM_CAP_DEBUGREGS
        | KVM_CAP_SET_GUEST_DEBUG
        | KVM_CAP_X86_ROBUST_SINGLESTEP
        | KVM_CAP_XSAVE
        | KVM_CAP_XCRS
        | KVM_CAP_GET_TSC_KHZ
        | KVM_CAP_SIGNAL_MSI
        | KVM_CAP_DEVICE_CTRL
        | KVM_CAP_READONLY_MEM
        | KVM_CAP_CHECK_EXTENSION_VM
        | KVM_CAP_ENABLE_CAP_VM
        | KVM_CAP_ENABLE_CAP
        | KVM_CAP_IMMEDIATE_EXIT
        | KVM_CAP_GET_MSR_FEATURES
        | KVM_CAP_NOP_IO_DELAY
        | KVM_CAP_SET_BOOT_CPU_ID
        | KVM_CAP_KVMCLOCK_CTRL
        | KVM_CAP_TSC_DEADLINE_TIMER
        | KVM_CAP_INTERNAL_ERROR_DATA
        | KVM_CAP_CLOCKSOURCE
        | KVM_CAP_ENFORCE_PV_FEATURE_CPUID
        | KVM_CAP_COALESCED_PIO
        | KVM_CAP_BINARY_STATS_FD
        | KVM_CAP_VM_DISABLE_NX_HUGE_PAGES
        | KVM_CAP_PRE_FAULT_MEMORY
        | KVM_CAP_SREGS2
        | KVM_CAP_GUEST_MEMFD
        | KVM_CAP_MEMORY_FAULT_INFO
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
        KVM_CAP_X86_APIC_BUS_CYCLES_NS => crate::arch::options::APIC_BUS_CYCLE_NS as u32,
        KVM_CAP_X86_BUS_LOCK_EXIT => crate::arch::options::BUS_LOCK_MODES,
        KVM_CAP_X86_DISABLE_EXITS => crate::arch::options::DISABLED_EXITS,
        KVM_CAP_NESTED_STATE => crate::arch::nested::SIZE,
        KVM_CAP_MCE => crate::arch::msr::mce::MAX_BANKS,
        KVM_CAP_IRQ_ROUTING => MAX_ROUTES,
        KVM_CAP_X2APIC_API => KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK,
        KVM_CAP_ADJUST_CLOCK => crate::arch::clock::FLAGS,
        KVM_CAP_SET_GUEST_DEBUG2 => crate::arch::guest_debug::CONTROLS,
        KVM_CAP_XSAVE2 => size_of::<kvm_xsave>() as u32,
        KVM_CAP_NR_VCPUS => num_cpus(),
        KVM_CAP_MAX_VCPUS => MAX_VCPUS,
        KVM_CAP_MAX_VCPU_ID => MAX_VCPU_ID,
        KVM_CAP_NR_MEMSLOTS => NR_MEMSLOTS,
        KVM_CAP_MULTI_ADDRESS_SPACE => ADDRESS_SPACES,
        KVM_CAP_SYNC_REGS => KVM_SYNC_X86_VALID_FIELDS,
        KVM_CAP_DISABLE_QUIRKS2 => crate::arch::quirks::SUPPORTED,
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => {
            KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
        }
        KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => crate::dirty::MAX_RING_SIZE,
        KVM_CAP_COALESCED_MMIO => KVM_COALESCED_MMIO_PAGE_OFFSET,
        KVM_CAP_VM_TYPES => 1 << KVM_X86_DEFAULT_VM | 1 << KVM_X86_SW_PROTECTED_VM,
        KVM_CAP_MEMORY_ATTRIBUTES => KVM_MEMORY_ATTRIBUTE_PRIVATE,
        KVM_CAP_USERFAULT => crate::policy::userfault().into(),
        KVM_CAP_GUEST_MEMFD_FLAGS => crate::guest_memfd::flags(false) as u32,
        KVM_CAP_EXIT_HYPERCALL => crate::arch::options::HYPERCALL_EXITS,
        _ => 0,
    };
    value as i32
}

/// Returns the number of the host's processors, which is the number of vCPUs that KVM recommends.
fn num_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_what_the_selftests_look_for() {
        assert_eq!(check(KVM_CAP_MAX_VCPUS.into(), MmuKind::Tdp), 1024);
        assert_eq!(check(KVM_CAP_MAX_VCPU_ID.into(), MmuKind::Tdp), 4096);
        assert_eq!(check(KVM_CAP_NR_MEMSLOTS.into(), MmuKind::Tdp), 32764);
        assert_eq!(check(KVM_CAP_IMMEDIATE_EXIT.into(), MmuKind::Tdp), 1);
    }

    #[test]
    fn an_unknown_capability_is_zero() {
        assert_eq!(check(100_000, MmuKind::Tdp), 0);
        assert_eq!(check(u64::MAX, MmuKind::Tdp), 0);
    }
}
