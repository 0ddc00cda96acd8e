//! Calls of [`Kvm`] that only x86 has.

use crate::api::{Kvm, VmFd};
use crate::errno::{Result, fail, no_memory};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MAX_MSR_ENTRIES, MsrList, Msrs};

impl Kvm {
    /// Carries out `KVM_CREATE_VM`.
    ///
    /// # Errors
    /// `ENOMEM`, or the host's error for opening a descriptor.
    pub fn create_vm(&self) -> Result<VmFd> {
        self.create_vm_with_type(0)
    }

    /// Carries out `KVM_GET_EMULATED_CPUID`.
    ///
    /// # Errors
    /// `ENOMEM` for `num_entries` above `KVM_MAX_CPUID_ENTRIES`, `E2BIG` when the table has more than
    /// `num_entries` entries.
    pub fn get_emulated_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        cpuid(&self.system.emulated_cpuid(), num_entries)
    }

    /// Carries out `KVM_GET_SUPPORTED_CPUID`.
    ///
    /// # Errors
    /// `ENOMEM` for `num_entries` above `KVM_MAX_CPUID_ENTRIES`, `E2BIG` when the table has more than
    /// `num_entries` entries.
    pub fn get_supported_cpuid(&self, num_entries: usize) -> Result<CpuId> {
        cpuid(&self.system.supported_cpuid()?, num_entries)
    }

    /// Carries out `KVM_GET_MSR_INDEX_LIST`.
    ///
    /// # Errors
    /// No error can happen.
    pub fn get_msr_index_list(&self) -> Result<MsrList> {
        debug_assert!(self.system.msr_index_list().len() <= KVM_MAX_MSR_ENTRIES);
        MsrList::from_entries(self.system.msr_index_list()).map_err(no_memory)
    }

    /// Carries out `KVM_GET_MSR_FEATURE_INDEX_LIST`.
    ///
    /// # Errors
    /// No error can happen.
    pub fn get_msr_feature_index_list(&self) -> Result<MsrList> {
        MsrList::from_entries(self.system.msr_feature_index_list()).map_err(no_memory)
    }

    /// Carries out `KVM_GET_MSRS` of the system: reads feature MSRs. Returns how many MSRs were read.
    ///
    /// # Errors
    /// No error can happen.
    pub fn get_msrs(&self, msrs: &mut Msrs) -> Result<usize> {
        Ok(self.system.feature_msrs(msrs.as_mut_slice()))
    }
}

pub(super) fn cpuid(table: &[kvm_bindings::kvm_cpuid_entry2], room: usize) -> Result<CpuId> {
    if room > KVM_MAX_CPUID_ENTRIES {
        return fail(libc::ENOMEM);
    }
    if room < table.len() {
        return fail(libc::E2BIG);
    }
    CpuId::from_entries(table).map_err(no_memory)
}
