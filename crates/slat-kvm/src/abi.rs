//! Request numbers of the KVM ioctls, built from the sizes of kvm-bindings' structs. kvm-bindings has the structs but
//! not the request numbers.

use crate::arch;
use crate::requests::{io, ior, iow, iowr, requests};
use kvm_bindings::*;

pub use crate::arch::requests::*;
pub use crate::requests::KVMIO;

/// Returns the name of a request, for messages. `None`: the request is unknown.
pub fn name(request: u32) -> Option<&'static str> {
    name_of_neutral(request).or_else(|| arch::name_of_request(request))
}

requests! { name_of_neutral:
    // /dev/kvm
    KVM_GET_API_VERSION = io(0x00);
    KVM_CREATE_VM = io(0x01);
    KVM_CHECK_EXTENSION = io(0x03);
    KVM_GET_VCPU_MMAP_SIZE = io(0x04);
    KVM_SET_DEVICE_ATTR = iow::<kvm_device_attr>(0xe1);
    KVM_GET_DEVICE_ATTR = iow::<kvm_device_attr>(0xe2);
    KVM_HAS_DEVICE_ATTR = iow::<kvm_device_attr>(0xe3);
    // VM
    KVM_CREATE_VCPU = io(0x41);
    KVM_GET_DIRTY_LOG = iow::<kvm_dirty_log>(0x42);
    KVM_SET_USER_MEMORY_REGION = iow::<kvm_userspace_memory_region>(0x46);
    KVM_SET_USER_MEMORY_REGION2 = iow::<kvm_userspace_memory_region2>(0x49);
    KVM_IRQ_LINE = iow::<kvm_irq_level>(0x61);
    KVM_IRQ_LINE_STATUS = iowr::<kvm_irq_level>(0x67);
    KVM_SET_GSI_ROUTING = iow::<kvm_irq_routing>(0x6a);
    KVM_IRQFD = iow::<kvm_irqfd>(0x76);
    KVM_IOEVENTFD = iow::<kvm_ioeventfd>(0x79);
    KVM_ENABLE_CAP = iow::<kvm_enable_cap>(0xa3);
    KVM_REGISTER_COALESCED_MMIO = iow::<kvm_coalesced_mmio_zone>(0x67);
    KVM_UNREGISTER_COALESCED_MMIO = iow::<kvm_coalesced_mmio_zone>(0x68);
    KVM_SIGNAL_MSI = iow::<kvm_msi>(0xa5);
    KVM_CLEAR_DIRTY_LOG = iowr::<kvm_clear_dirty_log>(0xc0);
    KVM_RESET_DIRTY_RINGS = io(0xc7);
    KVM_GET_STATS_FD = io(0xce);
    KVM_CREATE_DEVICE = iowr::<kvm_create_device>(0xe0);
    KVM_SET_MEMORY_ATTRIBUTES = iow::<kvm_memory_attributes>(0xd2);
    KVM_CREATE_GUEST_MEMFD = iowr::<kvm_create_guest_memfd>(0xd4);
    // vCPU
    KVM_RUN = io(0x80);
    KVM_SET_SIGNAL_MASK = iow::<kvm_signal_mask>(0x8b);
    KVM_GET_MP_STATE = ior::<kvm_mp_state>(0x98);
    KVM_SET_MP_STATE = iow::<kvm_mp_state>(0x99);
    KVM_SET_GUEST_DEBUG = iow::<kvm_guest_debug>(0x9b);
    KVM_GET_VCPU_EVENTS = ior::<kvm_vcpu_events>(0x9f);
    KVM_SET_VCPU_EVENTS = iow::<kvm_vcpu_events>(0xa0);
    KVM_GET_ONE_REG = iow::<kvm_one_reg>(0xab);
    KVM_SET_ONE_REG = iow::<kvm_one_reg>(0xac);
    KVM_GET_REG_LIST = iowr::<kvm_reg_list>(0xb0);
    KVM_PRE_FAULT_MEMORY = iowr::<kvm_pre_fault_memory>(0xd5);
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
    }

    #[test]
    fn requests_have_names() {
        assert_eq!(name(KVM_RUN), Some("KVM_RUN"));
        assert_eq!(name(0xaeff), None);
    }
}
