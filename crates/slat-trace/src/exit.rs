//! Basic exit reasons of VMX: appendix C of Intel's SDM, volume 3.

/// An exception or NMI.
pub const EXCEPTION_NMI: u32 = 0;
/// An interrupt of the host: the vCPU was asked to leave the guest.
pub const EXTERNAL_INTERRUPT: u32 = 1;
/// A triple fault.
pub const TRIPLE_FAULT: u32 = 2;
/// An SMI.
pub const OTHER_SMI: u32 = 6;
/// The guest can take an interrupt now.
pub const INTERRUPT_WINDOW: u32 = 7;
/// HLT.
pub const HLT: u32 = 12;
/// RSM.
pub const RSM: u32 = 17;
/// VMCALL.
pub const VMCALL: u32 = 18;
/// An access to ports.
pub const IO_INSTRUCTION: u32 = 30;
/// RDMSR.
pub const MSR_READ: u32 = 31;
/// WRMSR.
pub const MSR_WRITE: u32 = 32;
/// An access to memory that is not mapped and cannot be mapped.
pub const EPT_VIOLATION: u32 = 48;
/// An access that found an MMIO entry.
pub const EPT_MISCONFIG: u32 = 49;
/// A bus lock.
pub const BUS_LOCK: u32 = 74;
/// The processor has delivered events for the whole notify window without executing an instruction in between.
pub const NOTIFY: u32 = 75;

/// Returns the name of a reason in Linux's VMX_EXIT_REASONS. `None`: slat does not use this reason.
pub fn name(reason: u64) -> Option<&'static str> {
    Some(match u32::try_from(reason).ok()? {
        EXCEPTION_NMI => "EXCEPTION_NMI",
        EXTERNAL_INTERRUPT => "EXTERNAL_INTERRUPT",
        TRIPLE_FAULT => "TRIPLE_FAULT",
        OTHER_SMI => "OTHER_SMI",
        INTERRUPT_WINDOW => "INTERRUPT_WINDOW",
        HLT => "HLT",
        RSM => "RSM",
        VMCALL => "VMCALL",
        IO_INSTRUCTION => "IO_INSTRUCTION",
        MSR_READ => "MSR_READ",
        MSR_WRITE => "MSR_WRITE",
        EPT_VIOLATION => "EPT_VIOLATION",
        EPT_MISCONFIG => "EPT_MISCONFIG",
        BUS_LOCK => "BUS_LOCK",
        NOTIFY => "NOTIFY",
        _ => return None,
    })
}
