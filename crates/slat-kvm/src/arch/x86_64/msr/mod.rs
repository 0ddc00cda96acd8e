//! Model-specific registers: which MSRs exist, and the effects of writes. Access to an unknown MSR is #GP for the guest
//! and ends `KVM_GET_MSRS`/`KVM_SET_MSRS` early, as with KVM's `ignore_msrs=0`.

use crate::arch::x86_64::cpu_features;
use crate::arch::x86_64::cpuid::is_amd;
use kvm_bindings::{
    KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_EXIT_REASON_INVAL, KVM_MSR_EXIT_REASON_UNKNOWN,
};
use slat_hyperv::msr as hyperv;
use slat_x86::MsrFault;

pub(crate) mod fixed;
pub(crate) mod index;
pub(crate) mod mce;
pub(crate) mod stored;

use index::*;

/// `KVM_GET_MSR_INDEX_LIST`: the MSRs that a client saves and restores.
pub const SAVED: &[u32] = &[
    TSC,
    SYSENTER_CS,
    SYSENTER_ESP,
    SYSENTER_EIP,
    STAR,
    CSTAR,
    KERNEL_GS_BASE,
    SFMASK,
    LSTAR,
    PAT,
    VM_HSAVE_PA,
    TSC_RATIO,
    TSC_AUX,
    FEATURE_CONTROL,
    SPEC_CTRL,
    AMD_VIRT_SPEC_CTRL,
    KVM_WALL_CLOCK,
    KVM_SYSTEM_TIME,
    KVM_WALL_CLOCK_NEW,
    KVM_SYSTEM_TIME_NEW,
    hyperv::GUEST_OS_ID,
    hyperv::HYPERCALL,
    hyperv::TIME_REF_COUNT,
    hyperv::REFERENCE_TSC,
    hyperv::TSC_FREQUENCY,
    hyperv::APIC_FREQUENCY,
    hyperv::CRASH_P0,
    hyperv::CRASH_P1,
    hyperv::CRASH_P2,
    hyperv::CRASH_P3,
    hyperv::CRASH_P4,
    hyperv::CRASH_CTL,
    hyperv::RESET,
    hyperv::VP_INDEX,
    hyperv::VP_RUNTIME,
    // Of the MSRs of Hyper-V's SynIC and synthetic timers, only these two are listed. A client that finds these two
    // knows that the others exist.
    hyperv::SCONTROL,
    hyperv::STIMER0_CONFIG,
    hyperv::VP_ASSIST_PAGE,
    hyperv::REENLIGHTENMENT_CONTROL,
    hyperv::TSC_EMULATION_CONTROL,
    hyperv::TSC_EMULATION_STATUS,
    hyperv::TSC_INVARIANT_CONTROL,
    hyperv::SYNDBG_OPTIONS,
    hyperv::SYNDBG_CONTROL,
    hyperv::SYNDBG_STATUS,
    hyperv::SYNDBG_SEND_BUFFER,
    hyperv::SYNDBG_RECV_BUFFER,
    hyperv::SYNDBG_PENDING_BUFFER,
    TSC_ADJUST,
    TSC_DEADLINE,
    KVM_STEAL_TIME,
    KVM_PV_EOI,
    // KVM_ASYNC_PF_INT is listed, and so restored, before the MSR that enables the use of its vector.
    KVM_ASYNC_PF_INT,
    KVM_ASYNC_PF_ACK,
    KVM_ASYNC_PF_EN,
    MISC_ENABLE,
    MCG_STATUS,
    MCG_CTL,
    MISC_FEATURES,
    PLATFORM_INFO,
    ARCH_CAPABILITIES,
    POWER_CTL,
    SMBASE,
    SMI_COUNT,
    UCODE_REV,
    DEBUGCTL,
    AMD_HWCR,
    MTRR_PHYS_FIRST,
    MTRR_PHYS_FIRST + 1,
    MTRR_PHYS_FIRST + 2,
    MTRR_PHYS_FIRST + 3,
    MTRR_PHYS_FIRST + 4,
    MTRR_PHYS_FIRST + 5,
    MTRR_PHYS_FIRST + 6,
    MTRR_PHYS_FIRST + 7,
    MTRR_PHYS_FIRST + 8,
    MTRR_PHYS_FIRST + 9,
    MTRR_PHYS_FIRST + 10,
    MTRR_PHYS_FIRST + 11,
    MTRR_PHYS_FIRST + 12,
    MTRR_PHYS_FIRST + 13,
    MTRR_PHYS_FIRST + 14,
    MTRR_PHYS_LAST,
    MTRR_FIX_64K,
    MTRR_FIX_16K,
    MTRR_FIX_16K_LAST,
    MTRR_FIX_4K,
    MTRR_FIX_4K + 1,
    MTRR_FIX_4K + 2,
    MTRR_FIX_4K + 3,
    MTRR_FIX_4K + 4,
    MTRR_FIX_4K + 5,
    MTRR_FIX_4K + 6,
    MTRR_FIX_4K_LAST,
    MTRR_DEF_TYPE,
    APIC_BASE,
    EFER,
];

/// `KVM_GET_MSR_FEATURE_INDEX_LIST`: the MSRs that `KVM_GET_MSRS` on `/dev/kvm` reads.
pub const FEATURES: &[u32] = &[
    UCODE_REV,
    PLATFORM_INFO,
    ARCH_CAPABILITIES,
    PERF_CAPABILITIES,
];

/// Returns the value of a feature MSR in a new vCPU. `None`: `index` is no feature MSR.
pub fn feature(index: u32) -> Option<u64> {
    match index {
        UCODE_REV => Some(microcode_revision()),
        PLATFORM_INFO => Some(PLATFORM_INFO_CPUID_FAULT),
        ARCH_CAPABILITIES => Some(cpu_features::ARCH_CAPABILITIES),
        // The value 0 means that the CPU has no performance monitoring.
        PERF_CAPABILITIES => Some(0),
        _ => None,
    }
}

/// Returns the microcode revision of a new vCPU, which depends on the vendor, as in KVM.
pub(crate) fn microcode_revision() -> u64 {
    match is_amd() {
        true => 0x0100_0065,
        false => 1 << 32,
    }
}

/// The bit of PLATFORM_INFO: the guest can make CPUID fault outside CPL 0.
pub(crate) const PLATFORM_INFO_CPUID_FAULT: u64 = 1 << 31;
/// The bit of a paravirtual feature's MSR that says that the feature is in use. All other bits of the MSR are an
/// address.
pub(crate) const KVM_ENABLED: u64 = 1;

/// Converts the reason of a refused MSR access to `KVM_MSR_EXIT_REASON_*`, as in `kvm_run`.
pub(crate) fn exit_reason(why: MsrFault) -> u32 {
    match why {
        MsrFault::Unknown => KVM_MSR_EXIT_REASON_UNKNOWN,
        MsrFault::Invalid => KVM_MSR_EXIT_REASON_INVAL,
        MsrFault::Forbidden => KVM_MSR_EXIT_REASON_FILTER,
        // A retry does not refuse the access.
        MsrFault::Retry => 0,
    }
}
