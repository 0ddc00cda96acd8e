//! Calls for Hyper-V's interface to guests, which kvm-ioctls does not have.

use super::system::cpuid;
use crate::api::{Kvm, VcpuFd, VmFd};
use crate::errno::Result;
use kvm_bindings::{CpuId, kvm_hyperv_eventfd};

impl Kvm {
    /// Carries out `KVM_GET_SUPPORTED_HV_CPUID`: returns the leaves for vCPUs with local APICs.
    ///
    /// # Errors
    /// `ENOMEM` for `num_entries` above `KVM_MAX_CPUID_ENTRIES`, `E2BIG` when the table has more than
    /// `num_entries` entries.
    pub fn get_supported_hv_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        cpuid(&self.system.supported_hv_cpuid(), num_entries)
    }
}

impl VcpuFd {
    /// Carries out `KVM_GET_SUPPORTED_HV_CPUID` of a vCPU: returns the leaves for this vCPU.
    ///
    /// # Errors
    /// `ENOMEM` for `num_entries` above `KVM_MAX_CPUID_ENTRIES`, `E2BIG` when the table has more than `num_entries`
    /// entries, `EIO` in a forked child.
    pub fn get_supported_hv_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        cpuid(&self.vcpu.supported_hv_cpuid()?, num_entries)
    }
}

impl VmFd {
    /// Carries out `KVM_HYPERV_EVENTFD`: adds or removes a connection. When the guest signals a connection by a
    /// hypercall, the connection's eventfd is signalled.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags, an id of more than 24 bits, and a descriptor that is no eventfd; `EEXIST` for adding
    /// an id that is in use, `ENOENT` for removing an id that is not in use; `EBADF`, `EMFILE`, `ENOMEM`.
    pub fn hyperv_eventfd(&self, hyperv_eventfd: &kvm_hyperv_eventfd) -> Result<()> {
        self.vm.hyperv_eventfd(hyperv_eventfd)
    }
}
