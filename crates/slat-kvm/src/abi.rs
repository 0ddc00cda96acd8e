//! Request numbers of the KVM ioctls, built from the sizes of kvm-bindings' structs.
//!
//! kvm-bindings has the structs but not the request numbers. A request number encodes direction, size of the argument,
//! type (`KVMIO`) and number, as usual in Linux.

use kvm_bindings::*;

/// The type byte of every KVM ioctl.
pub const KVMIO: u32 = 0xae;

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

const fn ioc(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | KVMIO << 8 | number
}

const fn io(number: u32) -> u32 {
    ioc(NONE, number, 0)
}

/// Encodes a request to which the client passes a `T`.
const fn iow<T>(number: u32) -> u32 {
    ioc(WRITE, number, size_of::<T>())
}

/// Encodes a request that returns a `T` to the client.
const fn ior<T>(number: u32) -> u32 {
    ioc(READ, number, size_of::<T>())
}

const fn iowr<T>(number: u32) -> u32 {
    ioc(READ | WRITE, number, size_of::<T>())
}

macro_rules! requests {
    ($($name:ident = $value:expr;)*) => {
        $(#[allow(missing_docs)] pub const $name: u32 = $value;)*

        /// Returns the name of a request, for messages. `None`: the request is unknown.
        pub fn name(request: u32) -> Option<&'static str> {
            match request {
                $(_ if request == $name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

requests! {
    // /dev/kvm
    KVM_GET_API_VERSION = io(0x00);
    KVM_CREATE_VM = io(0x01);
    KVM_GET_MSR_INDEX_LIST = iowr::<kvm_msr_list>(0x02);
    KVM_CHECK_EXTENSION = io(0x03);
    KVM_GET_VCPU_MMAP_SIZE = io(0x04);
    KVM_GET_SUPPORTED_CPUID = iowr::<kvm_cpuid2>(0x05);
    KVM_GET_EMULATED_CPUID = iowr::<kvm_cpuid2>(0x09);
    KVM_GET_MSR_FEATURE_INDEX_LIST = iowr::<kvm_msr_list>(0x0a);
    KVM_GET_SUPPORTED_HV_CPUID = iowr::<kvm_cpuid2>(0xc1);
    KVM_X86_GET_MCE_CAP_SUPPORTED = ior::<u64>(0x9d);
    KVM_SET_DEVICE_ATTR = iow::<kvm_device_attr>(0xe1);
    KVM_GET_DEVICE_ATTR = iow::<kvm_device_attr>(0xe2);
    KVM_HAS_DEVICE_ATTR = iow::<kvm_device_attr>(0xe3);
    // VM
    KVM_CREATE_VCPU = io(0x41);
    KVM_GET_DIRTY_LOG = iow::<kvm_dirty_log>(0x42);
    KVM_SET_NR_MMU_PAGES = io(0x44);
    KVM_GET_NR_MMU_PAGES = io(0x45);
    KVM_SET_USER_MEMORY_REGION = iow::<kvm_userspace_memory_region>(0x46);
    KVM_SET_TSS_ADDR = io(0x47);
    KVM_SET_IDENTITY_MAP_ADDR = iow::<u64>(0x48);
    KVM_SET_USER_MEMORY_REGION2 = iow::<kvm_userspace_memory_region2>(0x49);
    KVM_CREATE_IRQCHIP = io(0x60);
    KVM_IRQ_LINE = iow::<kvm_irq_level>(0x61);
    KVM_GET_IRQCHIP = iowr::<kvm_irqchip>(0x62);
    KVM_SET_IRQCHIP = ior::<kvm_irqchip>(0x63);
    KVM_CREATE_PIT = io(0x64);
    KVM_GET_PIT = iowr::<kvm_pit_state>(0x65);
    KVM_SET_PIT = ior::<kvm_pit_state>(0x66);
    KVM_IRQ_LINE_STATUS = iowr::<kvm_irq_level>(0x67);
    KVM_SET_GSI_ROUTING = iow::<kvm_irq_routing>(0x6a);
    KVM_REINJECT_CONTROL = io(0x71);
    KVM_IRQFD = iow::<kvm_irqfd>(0x76);
    KVM_CREATE_PIT2 = iow::<kvm_pit_config>(0x77);
    KVM_IOEVENTFD = iow::<kvm_ioeventfd>(0x79);
    KVM_GET_PIT2 = ior::<kvm_pit_state2>(0x9f);
    KVM_SET_PIT2 = iow::<kvm_pit_state2>(0xa0);
    KVM_SET_BOOT_CPU_ID = io(0x78);
    KVM_SET_CLOCK = iow::<kvm_clock_data>(0x7b);
    KVM_GET_CLOCK = ior::<kvm_clock_data>(0x7c);
    KVM_SET_TSC_KHZ = io(0xa2);
    KVM_GET_TSC_KHZ = io(0xa3);
    KVM_ENABLE_CAP = iow::<kvm_enable_cap>(0xa3);
    KVM_REGISTER_COALESCED_MMIO = iow::<kvm_coalesced_mmio_zone>(0x67);
    KVM_UNREGISTER_COALESCED_MMIO = iow::<kvm_coalesced_mmio_zone>(0x68);
    KVM_SIGNAL_MSI = iow::<kvm_msi>(0xa5);
    KVM_X86_SET_MSR_FILTER = iow::<kvm_msr_filter>(0xc6);
    KVM_HYPERV_EVENTFD = iow::<kvm_hyperv_eventfd>(0xbd);
    KVM_CLEAR_DIRTY_LOG = iowr::<kvm_clear_dirty_log>(0xc0);
    KVM_RESET_DIRTY_RINGS = io(0xc7);
    KVM_GET_STATS_FD = io(0xce);
    KVM_CREATE_DEVICE = iowr::<kvm_create_device>(0xe0);
    KVM_SET_MEMORY_ATTRIBUTES = iow::<kvm_memory_attributes>(0xd2);
    KVM_CREATE_GUEST_MEMFD = iowr::<kvm_create_guest_memfd>(0xd4);
    // vCPU
    KVM_RUN = io(0x80);
    KVM_GET_REGS = ior::<kvm_regs>(0x81);
    KVM_SET_REGS = iow::<kvm_regs>(0x82);
    KVM_GET_SREGS = ior::<kvm_sregs>(0x83);
    KVM_SET_SREGS = iow::<kvm_sregs>(0x84);
    KVM_TRANSLATE = iowr::<kvm_translation>(0x85);
    KVM_INTERRUPT = iow::<kvm_interrupt>(0x86);
    KVM_GET_MSRS = iowr::<kvm_msrs>(0x88);
    KVM_SET_MSRS = iow::<kvm_msrs>(0x89);
    KVM_SET_CPUID = iow::<kvm_cpuid>(0x8a);
    KVM_SET_SIGNAL_MASK = iow::<kvm_signal_mask>(0x8b);
    KVM_GET_FPU = ior::<kvm_fpu>(0x8c);
    KVM_SET_FPU = iow::<kvm_fpu>(0x8d);
    KVM_GET_LAPIC = ior::<kvm_lapic_state>(0x8e);
    KVM_SET_LAPIC = iow::<kvm_lapic_state>(0x8f);
    KVM_SET_CPUID2 = iow::<kvm_cpuid2>(0x90);
    KVM_GET_CPUID2 = iowr::<kvm_cpuid2>(0x91);
    KVM_TPR_ACCESS_REPORTING = iowr::<kvm_tpr_access_ctl>(0x92);
    KVM_SET_VAPIC_ADDR = iow::<kvm_vapic_addr>(0x93);
    KVM_GET_MP_STATE = ior::<kvm_mp_state>(0x98);
    KVM_SET_MP_STATE = iow::<kvm_mp_state>(0x99);
    KVM_NMI = io(0x9a);
    KVM_SET_GUEST_DEBUG = iow::<kvm_guest_debug>(0x9b);
    KVM_X86_SETUP_MCE = iow::<u64>(0x9c);
    KVM_X86_SET_MCE = iow::<kvm_x86_mce>(0x9e);
    KVM_GET_VCPU_EVENTS = ior::<kvm_vcpu_events>(0x9f);
    KVM_SET_VCPU_EVENTS = iow::<kvm_vcpu_events>(0xa0);
    KVM_GET_DEBUGREGS = ior::<kvm_debugregs>(0xa1);
    KVM_SET_DEBUGREGS = iow::<kvm_debugregs>(0xa2);
    KVM_GET_XSAVE = ior::<kvm_xsave>(0xa4);
    KVM_SET_XSAVE = iow::<kvm_xsave>(0xa5);
    KVM_GET_XCRS = ior::<kvm_xcrs>(0xa6);
    KVM_SET_XCRS = iow::<kvm_xcrs>(0xa7);
    KVM_GET_ONE_REG = iow::<kvm_one_reg>(0xab);
    KVM_SET_ONE_REG = iow::<kvm_one_reg>(0xac);
    KVM_KVMCLOCK_CTRL = io(0xad);
    KVM_GET_REG_LIST = iowr::<kvm_reg_list>(0xb0);
    KVM_SMI = io(0xb7);
    KVM_GET_NESTED_STATE = iowr::<kvm_nested_state>(0xbe);
    KVM_SET_NESTED_STATE = iow::<kvm_nested_state>(0xbf);
    KVM_PRE_FAULT_MEMORY = iowr::<kvm_pre_fault_memory>(0xd5);
    KVM_GET_SREGS2 = ior::<kvm_sregs2>(0xcc);
    KVM_SET_SREGS2 = iow::<kvm_sregs2>(0xcd);
    KVM_GET_XSAVE2 = ior::<kvm_xsave>(0xcf);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        // The expected values are those of the public header, which programs that use KVM contain.
        assert_eq!(KVM_GET_API_VERSION, 0xae00);
        assert_eq!(KVM_RUN, 0xae80);
        assert_eq!(KVM_SET_USER_MEMORY_REGION, 0x4020_ae46);
        assert_eq!(KVM_SET_USER_MEMORY_REGION2, 0x40a0_ae49);
        assert_eq!(KVM_SET_MEMORY_ATTRIBUTES, 0x4020_aed2);
        assert_eq!(KVM_CREATE_GUEST_MEMFD, 0xc040_aed4);
        assert_eq!(KVM_GET_SREGS, 0x8138_ae83);
        assert_eq!(KVM_SET_GUEST_DEBUG, 0x4048_ae9b);
        assert_eq!(KVM_GET_SUPPORTED_CPUID, 0xc008_ae05);
        assert_eq!(KVM_GET_MSRS, 0xc008_ae88);
    }

    #[test]
    fn requests_have_names() {
        assert_eq!(name(KVM_RUN), Some("KVM_RUN"));
        assert_eq!(name(0xaeff), None);
    }
}
