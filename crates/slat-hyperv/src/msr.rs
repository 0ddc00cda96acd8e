//! The numbers of the synthetic MSRs, under the TLFS's names without their prefix `HV_X64_MSR`.

#![allow(missing_docs)]

pub const GUEST_OS_ID: u32 = 0x4000_0000;
pub const HYPERCALL: u32 = 0x4000_0001;
pub const VP_INDEX: u32 = 0x4000_0002;
pub const RESET: u32 = 0x4000_0003;
pub const VP_RUNTIME: u32 = 0x4000_0010;
pub const TIME_REF_COUNT: u32 = 0x4000_0020;
pub const REFERENCE_TSC: u32 = 0x4000_0021;
pub const TSC_FREQUENCY: u32 = 0x4000_0022;
pub const APIC_FREQUENCY: u32 = 0x4000_0023;
pub const EOI: u32 = 0x4000_0070;
pub const ICR: u32 = 0x4000_0071;
pub const TPR: u32 = 0x4000_0072;
pub const VP_ASSIST_PAGE: u32 = 0x4000_0073;
pub const SCONTROL: u32 = 0x4000_0080;
pub const SVERSION: u32 = 0x4000_0081;
pub const SIEFP: u32 = 0x4000_0082;
pub const SIMP: u32 = 0x4000_0083;
pub const EOM: u32 = 0x4000_0084;
pub const SINT0: u32 = 0x4000_0090;
pub const SINT15: u32 = 0x4000_009f;
pub const STIMER0_CONFIG: u32 = 0x4000_00b0;
pub const STIMER3_COUNT: u32 = 0x4000_00b7;
pub const SYNDBG_CONTROL: u32 = 0x4000_00f1;
pub const SYNDBG_STATUS: u32 = 0x4000_00f2;
pub const SYNDBG_SEND_BUFFER: u32 = 0x4000_00f3;
pub const SYNDBG_RECV_BUFFER: u32 = 0x4000_00f4;
pub const SYNDBG_PENDING_BUFFER: u32 = 0x4000_00f5;
pub const SYNDBG_OPTIONS: u32 = 0x4000_00ff;
pub const CRASH_P0: u32 = 0x4000_0100;
pub const CRASH_P1: u32 = 0x4000_0101;
pub const CRASH_P2: u32 = 0x4000_0102;
pub const CRASH_P3: u32 = 0x4000_0103;
pub const CRASH_P4: u32 = 0x4000_0104;
pub const CRASH_CTL: u32 = 0x4000_0105;
pub const REENLIGHTENMENT_CONTROL: u32 = 0x4000_0106;
pub const TSC_EMULATION_CONTROL: u32 = 0x4000_0107;
pub const TSC_EMULATION_STATUS: u32 = 0x4000_0108;
pub const TSC_INVARIANT_CONTROL: u32 = 0x4000_0118;

/// Whether `index` is in the ranges of synthetic MSRs that KVM handles. Not all numbers in these ranges exist.
pub fn is_synthetic(index: u32) -> bool {
    matches!(index, GUEST_OS_ID..=SINT15
        | STIMER0_CONFIG..=STIMER3_COUNT
        | SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER
        | SYNDBG_OPTIONS
        | CRASH_P0..=TSC_EMULATION_STATUS
        | TSC_INVARIANT_CONTROL)
}

/// Whether the MSR belongs to the partition (the VM), so that all virtual processors share the MSR.
pub fn is_of_partition(index: u32) -> bool {
    matches!(index, GUEST_OS_ID | HYPERCALL | RESET | TIME_REF_COUNT | REFERENCE_TSC
        | SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER
        | SYNDBG_OPTIONS
        | CRASH_P0..=TSC_EMULATION_STATUS
        | TSC_INVARIANT_CONTROL)
}
