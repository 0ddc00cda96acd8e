//! Request numbers of the ioctls that only x86 has.

use crate::requests::{io, ior, iow, iowr, requests};
use kvm_bindings::*;

requests! { name_of_request:
    // /dev/kvm
    KVM_GET_MSR_INDEX_LIST = iowr::<kvm_msr_list>(0x02);
    KVM_GET_SUPPORTED_CPUID = iowr::<kvm_cpuid2>(0x05);
    KVM_GET_EMULATED_CPUID = iowr::<kvm_cpuid2>(0x09);
    KVM_GET_MSR_FEATURE_INDEX_LIST = iowr::<kvm_msr_list>(0x0a);
    KVM_GET_SUPPORTED_HV_CPUID = iowr::<kvm_cpuid2>(0xc1);
    KVM_X86_GET_MCE_CAP_SUPPORTED = ior::<u64>(0x9d);
    // VM
    KVM_SET_NR_MMU_PAGES = io(0x44);
    KVM_GET_NR_MMU_PAGES = io(0x45);
    KVM_SET_TSS_ADDR = io(0x47);
    KVM_SET_IDENTITY_MAP_ADDR = iow::<u64>(0x48);
    KVM_CREATE_IRQCHIP = io(0x60);
    KVM_GET_IRQCHIP = iowr::<kvm_irqchip>(0x62);
    KVM_SET_IRQCHIP = ior::<kvm_irqchip>(0x63);
    KVM_CREATE_PIT = io(0x64);
    KVM_GET_PIT = iowr::<kvm_pit_state>(0x65);
    KVM_SET_PIT = ior::<kvm_pit_state>(0x66);
    KVM_REINJECT_CONTROL = io(0x71);
    KVM_CREATE_PIT2 = iow::<kvm_pit_config>(0x77);
    KVM_GET_PIT2 = ior::<kvm_pit_state2>(0x9f);
    KVM_SET_PIT2 = iow::<kvm_pit_state2>(0xa0);
    KVM_SET_BOOT_CPU_ID = io(0x78);
    KVM_SET_CLOCK = iow::<kvm_clock_data>(0x7b);
    KVM_GET_CLOCK = ior::<kvm_clock_data>(0x7c);
    KVM_SET_TSC_KHZ = io(0xa2);
    KVM_GET_TSC_KHZ = io(0xa3);
    KVM_X86_SET_MSR_FILTER = iow::<kvm_msr_filter>(0xc6);
    KVM_HYPERV_EVENTFD = iow::<kvm_hyperv_eventfd>(0xbd);
    // vCPU
    KVM_GET_REGS = ior::<kvm_regs>(0x81);
    KVM_SET_REGS = iow::<kvm_regs>(0x82);
    KVM_GET_SREGS = ior::<kvm_sregs>(0x83);
    KVM_SET_SREGS = iow::<kvm_sregs>(0x84);
    KVM_TRANSLATE = iowr::<kvm_translation>(0x85);
    KVM_INTERRUPT = iow::<kvm_interrupt>(0x86);
    KVM_GET_MSRS = iowr::<kvm_msrs>(0x88);
    KVM_SET_MSRS = iow::<kvm_msrs>(0x89);
    KVM_SET_CPUID = iow::<kvm_cpuid>(0x8a);
    KVM_GET_FPU = ior::<kvm_fpu>(0x8c);
    KVM_SET_FPU = iow::<kvm_fpu>(0x8d);
    KVM_GET_LAPIC = ior::<kvm_lapic_state>(0x8e);
    KVM_SET_LAPIC = iow::<kvm_lapic_state>(0x8f);
    KVM_SET_CPUID2 = iow::<kvm_cpuid2>(0x90);
    KVM_GET_CPUID2 = iowr::<kvm_cpuid2>(0x91);
    KVM_TPR_ACCESS_REPORTING = iowr::<kvm_tpr_access_ctl>(0x92);
    KVM_SET_VAPIC_ADDR = iow::<kvm_vapic_addr>(0x93);
    KVM_NMI = io(0x9a);
    KVM_X86_SETUP_MCE = iow::<u64>(0x9c);
    KVM_X86_SET_MCE = iow::<kvm_x86_mce>(0x9e);
    KVM_GET_DEBUGREGS = ior::<kvm_debugregs>(0xa1);
    KVM_SET_DEBUGREGS = iow::<kvm_debugregs>(0xa2);
    KVM_GET_XSAVE = ior::<kvm_xsave>(0xa4);
    KVM_SET_XSAVE = iow::<kvm_xsave>(0xa5);
    KVM_GET_XCRS = ior::<kvm_xcrs>(0xa6);
    KVM_SET_XCRS = iow::<kvm_xcrs>(0xa7);
    KVM_KVMCLOCK_CTRL = io(0xad);
    KVM_SMI = io(0xb7);
    KVM_GET_NESTED_STATE = iowr::<kvm_nested_state>(0xbe);
    KVM_SET_NESTED_STATE = iow::<kvm_nested_state>(0xbf);
    KVM_GET_SREGS2 = ior::<kvm_sregs2>(0xcc);
    KVM_SET_SREGS2 = iow::<kvm_sregs2>(0xcd);
    KVM_GET_XSAVE2 = ior::<kvm_xsave>(0xcf);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{KVM_SET_GUEST_DEBUG, name};

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        // The expected values are those of the public header, which programs that use KVM contain.
        assert_eq!(KVM_GET_SREGS, 0x8138_ae83);
        assert_eq!(KVM_SET_GUEST_DEBUG, 0x4048_ae9b);
        assert_eq!(KVM_GET_SUPPORTED_CPUID, 0xc008_ae05);
        assert_eq!(KVM_GET_MSRS, 0xc008_ae88);
        assert_eq!(name(KVM_GET_MSRS), Some("KVM_GET_MSRS"));
    }
}
