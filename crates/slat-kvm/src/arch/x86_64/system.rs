//! The calls of `/dev/kvm` that only x86 has.

use crate::arch::x86_64::limits::MAX_VCPUS;
use crate::arch::x86_64::{cpuid, hyperv, msr};
use crate::errno::Result;
use crate::system::System;
use kvm_bindings::{kvm_cpuid_entry2, kvm_msr_entry};

impl System {
    /// Carries out `KVM_GET_SUPPORTED_CPUID`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn supported_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        cpuid::supported()
    }

    /// Carries out `KVM_GET_SUPPORTED_HV_CPUID`: returns the leaves of Hyper-V's interface that a client may give vCPUs
    /// with local APICs.
    pub fn supported_hv_cpuid(&self) -> [kvm_cpuid_entry2; 10] {
        hyperv::cpuid::supported(true, MAX_VCPUS)
    }

    /// Carries out `KVM_GET_EMULATED_CPUID`: returns the leaves with the features that KVM emulates.
    pub fn emulated_cpuid(&self) -> [kvm_cpuid_entry2; 3] {
        cpuid::emulated()
    }

    /// Carries out `KVM_GET_MSR_INDEX_LIST`.
    pub fn msr_index_list(&self) -> &'static [u32] {
        msr::SAVED
    }

    /// Carries out `KVM_GET_MSR_FEATURE_INDEX_LIST`.
    pub fn msr_feature_index_list(&self) -> &'static [u32] {
        msr::FEATURES
    }

    /// Carries out `KVM_X86_GET_MCE_CAP_SUPPORTED`.
    pub fn mce_capabilities(&self) -> u64 {
        msr::mce::SUPPORTED
    }

    /// Carries out `KVM_GET_MSRS` of the system: reads feature MSRs in order, up to the first MSR that is no feature
    /// MSR. Returns the number of MSRs that were read.
    pub fn feature_msrs(&self, entries: &mut [kvm_msr_entry]) -> usize {
        let known = entries.iter_mut().map_while(|entry| {
            entry.data = msr::feature(entry.index)?;
            Some(())
        });
        known.count()
    }
}
