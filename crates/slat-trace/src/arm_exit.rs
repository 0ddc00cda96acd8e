//! The reason why a vCPU of arm64 has left the guest: the values of `kvm_exit`, with the names that Linux's trace has
//! for them.

/// A value of `ret`: an interrupt of the host, by which the vCPU was asked to leave the guest.
pub const IRQ: i32 = 0;
/// A value of `ret`: an exception, whose class is in `esr_ec`.
pub const TRAP: i32 = 2;

/// `esr_ec`: WFI, WFE or YIELD.
pub const WFX: u32 = 0x01;
/// `esr_ec`: HVC.
pub const HVC: u32 = 0x16;
/// `esr_ec`: SMC.
pub const SMC: u32 = 0x17;
/// `esr_ec`: a system instruction that invalidates translations of all vCPUs.
pub const SYSTEM: u32 = 0x18;
/// `esr_ec`: a fetch from an address that could not be mapped.
pub const FETCH_ABORT: u32 = 0x20;
/// `esr_ec`: an access to an address that could not be mapped.
pub const DATA_ABORT: u32 = 0x24;
/// `esr_ec`: a breakpoint of a debugger.
pub const BREAKPOINT: u32 = 0x30;
/// `esr_ec`: a step of a debugger.
pub const STEP: u32 = 0x32;
/// `esr_ec`: a watchpoint of a debugger.
pub const WATCHPOINT: u32 = 0x34;
/// `esr_ec`: BRK.
pub const BRK: u32 = 0x3c;

/// Returns Linux's name of an exit: the name of the exception class `esr_ec`, or `IRQ` if `ret` is [`IRQ`]. `None`:
/// slat has no such exit.
pub fn name(ret: u64, esr_ec: u64) -> Option<&'static str> {
    if ret as i32 == IRQ {
        return Some("IRQ");
    }
    Some(match u32::try_from(esr_ec).ok()? {
        WFX => "WFx",
        HVC => "HVC64",
        SMC => "SMC64",
        SYSTEM => "SYS64",
        FETCH_ABORT => "IABT_LOW",
        DATA_ABORT => "DABT_LOW",
        BREAKPOINT => "BREAKPT_LOW",
        STEP => "SOFTSTP_LOW",
        WATCHPOINT => "WATCHPT_LOW",
        BRK => "BRK64",
        _ => return None,
    })
}
