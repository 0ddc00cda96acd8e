//! The firmware, through the RISC-V Supervisor Binary Interface: console, other harts, remote fences, end.

use core::arch::asm;
use core::ops::Range;

use slat::{Gfn, PAGE_SHIFT};

/// Extension and function numbers, by the names of the specification.
mod number {
    pub(super) const CONSOLE_PUTCHAR: (u64, u64) = (0x01, 0);
    pub(super) const HART_START: (u64, u64) = (0x48_53_4d, 0);
    pub(super) const SEND_IPI: (u64, u64) = (0x73_50_49, 0);
    pub(super) const REMOTE_HFENCE_GVMA_VMID: (u64, u64) = (0x52_46_4e_43, 3);
    pub(super) const SYSTEM_RESET: (u64, u64) = (0x53_52_53_54, 0);
    pub(super) const FWFT_SET: (u64, u64) = (0x46_57_46_54, 0);
}

/// # Safety
/// - if the function starts or stops something, the caller is ready for that.
unsafe fn call((extension, function): (u64, u64), arguments: [u64; 5]) -> i64 {
    let error: i64;
    // SAFETY: by the SBI's calling convention all registers but a0 and a1 keep their values.
    unsafe {
        asm!(
            "ecall",
            inout("a0") arguments[0] => error,
            inout("a1") arguments[1] => _,
            in("a2") arguments[2],
            in("a3") arguments[3],
            in("a4") arguments[4],
            in("a6") function,
            in("a7") extension,
            options(nostack)
        );
    }
    error
}

/// Prints by the legacy extension, which every firmware has.
pub(crate) fn print(text: &str) {
    for byte in text.bytes() {
        // SAFETY: the call only prints.
        unsafe { call(number::CONSOLE_PUTCHAR, [byte.into(), 0, 0, 0, 0]) };
    }
}

/// Starts another hart at `secondary_start`, as CPU `cpu`.
pub(crate) fn start(hart: u64, cpu: usize) {
    unsafe extern "C" {
        fn secondary_start();
    }
    let entry = secondary_start as *const () as u64;
    // SAFETY: the hart selects its own stack by the number of its CPU.
    let error = unsafe { call(number::HART_START, [hart, entry, cpu as u64, 0, 0]) };
    assert_eq!(error, 0, "SBI hart_start of hart {hart}");
}

/// Sends a software interrupt to `hart`.
pub(crate) fn interrupt(hart: u64) {
    // SAFETY: harts expect the interrupt only in the guest, and leave it pending elsewhere.
    let error = unsafe { call(number::SEND_IPI, [1, hart, 0, 0, 0]) };
    assert_eq!(error, 0, "SBI send_ipi to hart {hart}");
}

/// Executes HFENCE.GVMA on every hart, for `gfns` of the guest `vmid`. Every walk after the call sees the stores
/// before the call.
pub(crate) fn fence_guest(vmid: u16, gfns: &Range<Gfn>) {
    const ALL_HARTS: u64 = u64::MAX;
    let start = gfns.start.gpa().0;
    let size = (gfns.end.0 - gfns.start.0) << PAGE_SHIFT;
    // SAFETY: a TLB may be fenced at any time.
    let error = unsafe {
        call(
            number::REMOTE_HFENCE_GVMA_VMID,
            [0, ALL_HARTS, start, size, vmid.into()],
        )
    };
    assert_eq!(error, 0, "SBI remote_hfence_gvma_vmid");
}

/// Asks the firmware for walkers that set the accessed and dirty bits. If the firmware does not support the request,
/// the machine decides, and `marks` finds out.
pub(crate) fn ask_for_hardware_marks() {
    const PTE_AD_HW_UPDATING: u64 = 4;
    // SAFETY: no address is translated yet.
    unsafe { call(number::FWFT_SET, [PTE_AD_HW_UPDATING, 1, 0, 0, 0]) };
}

pub(crate) fn power_off() -> ! {
    loop {
        // SAFETY: the call ends the machine, and this program has nothing more to do.
        unsafe { call(number::SYSTEM_RESET, [0; 5]) };
    }
}
