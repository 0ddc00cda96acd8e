//! Capabilities: the values that `KVM_CHECK_EXTENSION` returns.
//!
//! slat claims only capabilities that work, because a client that finds a capability relies on it. The test
//! `tests/capabilities` uses each capability.

use crate::arch::{self, MAX_VCPUS, MEMORY_ATTRIBUTES};
use kvm_bindings::*;
use slat::MmuKind;

/// `KVM_CAP_GUEST_MEMFD_FLAGS`, of Linux 6.18.
pub const KVM_CAP_GUEST_MEMFD_FLAGS: u32 = 244;
/// `KVM_CAP_USERFAULT` of the patch series that was posted for Linux (version 3), which no released Linux has. Linux
/// has since given the series' number, 243, to a capability of Arm hosts. So this number is slat's own. Linux numbers
/// capabilities consecutively, for all architectures together, and will never reach this number.
pub const KVM_CAP_USERFAULT: u32 = 0x736c_0001;

/// The number of memslots per address space that a client may use.
pub const NR_MEMSLOTS: u32 = 32764;
pub use crate::arch::ADDRESS_SPACES;

/// Returns the value of a capability for VMs whose tables `mmu` makes; 0 if slat does not have the capability. This
/// function also reports capabilities that only one type of VM has. For a given VM, call `VmObject::check_extension`
/// instead.
pub fn check(cap: u64, mmu: MmuKind) -> i32 {
    let Ok(cap) = u32::try_from(cap) else {
        return 0;
    };
    let value = match cap {
        KVM_CAP_USER_MEMORY
        | KVM_CAP_USER_MEMORY2
        | KVM_CAP_IOEVENTFD
        | KVM_CAP_IOEVENTFD_ANY_LENGTH
        | KVM_CAP_IOEVENTFD_NO_LENGTH
        | KVM_CAP_SYNC_MMU
        | KVM_CAP_DESTROY_MEMORY_REGION_WORKS
        | KVM_CAP_JOIN_MEMORY_REGIONS_WORKS
        | KVM_CAP_DEVICE_CTRL
        | KVM_CAP_READONLY_MEM
        | KVM_CAP_CHECK_EXTENSION_VM
        | KVM_CAP_ENABLE_CAP_VM
        | KVM_CAP_IMMEDIATE_EXIT
        | KVM_CAP_BINARY_STATS_FD
        | KVM_CAP_GUEST_MEMFD
        | KVM_CAP_MEMORY_FAULT_INFO => 1,
        KVM_CAP_NR_VCPUS => num_cpus(),
        KVM_CAP_MAX_VCPUS => MAX_VCPUS,
        KVM_CAP_NR_MEMSLOTS => NR_MEMSLOTS,
        KVM_CAP_MULTI_ADDRESS_SPACE => ADDRESS_SPACES,
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => {
            KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
        }
        KVM_CAP_DIRTY_LOG_RING_ACQ_REL => crate::dirty::MAX_RING_SIZE,
        KVM_CAP_COALESCED_MMIO => KVM_COALESCED_MMIO_PAGE_OFFSET,
        KVM_CAP_MEMORY_ATTRIBUTES => MEMORY_ATTRIBUTES,
        KVM_CAP_USERFAULT => crate::policy::userfault().into(),
        KVM_CAP_GUEST_MEMFD_FLAGS => crate::guest_memfd::flags(false) as u32,
        cap => arch::capability(cap, mmu),
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
        assert_eq!(check(KVM_CAP_NR_MEMSLOTS.into(), MmuKind::Tdp), 32764);
        assert_eq!(check(KVM_CAP_IMMEDIATE_EXIT.into(), MmuKind::Tdp), 1);
    }

    #[test]
    fn an_unknown_capability_is_zero() {
        assert_eq!(check(100_000, MmuKind::Tdp), 0);
        assert_eq!(check(u64::MAX, MmuKind::Tdp), 0);
    }
}
