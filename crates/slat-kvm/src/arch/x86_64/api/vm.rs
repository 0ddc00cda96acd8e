//! Calls of a [`VmFd`] that only x86 has.

use crate::api::VmFd;
use crate::errno::Result;
use kvm_bindings::kvm_clock_data;

impl VmFd {
    /// Carries out `KVM_SET_TSS_ADDR`.
    ///
    /// # Errors
    /// `EINVAL` when the pages would not end below 4 GiB.
    pub fn set_tss_address(&self, offset: usize) -> Result<()> {
        self.vm.set_tss_addr(offset as u64)
    }

    /// Carries out `KVM_SET_IDENTITY_MAP_ADDR`.
    ///
    /// # Errors
    /// `EINVAL` once there are vCPUs.
    pub fn set_identity_map_address(&self, address: u64) -> Result<()> {
        self.vm.set_identity_map_addr(address)
    }

    /// Carries out `KVM_GET_CLOCK`.
    ///
    /// # Errors
    /// `EIO` in a forked child. Every call of a VM returns this error.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        self.vm.get_clock()
    }

    /// Carries out `KVM_SET_CLOCK`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags.
    pub fn set_clock(&self, clock: &kvm_clock_data) -> Result<()> {
        self.vm.set_clock(clock)
    }

    /// Carries out `KVM_GET_TSC_KHZ` of the VM.
    ///
    /// # Errors
    /// No error can happen.
    pub fn get_tsc_khz(&self) -> Result<u32> {
        Ok(self.vm.tsc_khz())
    }
}
