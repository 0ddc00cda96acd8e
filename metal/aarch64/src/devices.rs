//! The devices of QEMU's virt machine that the monitor uses: PL011, GICv2, PSCI.

use core::arch::asm;

/// Returns a device register at an address.
fn register(address: usize) -> *mut u32 {
    core::ptr::with_exposed_provenance_mut(address)
}

/// The console: a PL011. QEMU's PL011 needs no set-up.
pub(crate) mod console {
    use super::register;

    const DATA: usize = 0x0900_0000;
    const FLAGS: usize = DATA + 0x18;
    const TRANSMIT_FULL: u32 = 1 << 5;

    pub(crate) fn print(text: &str) {
        for byte in text.bytes() {
            // SAFETY: the UART's registers are at this address, mapped as a device.
            unsafe {
                while register(FLAGS).read_volatile() & TRANSMIT_FULL != 0 {}
                register(DATA).write_volatile(byte.into());
            }
        }
    }
}

/// Interrupts from CPU to CPU, by a GICv2: "Arm Generic Interrupt Controller, architecture version 2".
pub(crate) mod gic {
    use super::{asm, register};

    const GICD_CTLR: usize = 0x0800_0000;
    const GICD_SGIR: usize = GICD_CTLR + 0xf00;
    const GICC_CTLR: usize = 0x0801_0000;
    const GICC_PMR: usize = GICC_CTLR + 0x04;
    const GICC_IAR: usize = GICC_CTLR + 0x0c;
    const GICC_EOIR: usize = GICC_CTLR + 0x10;
    /// The software-generated interrupt that makes a CPU leave the guest.
    const KICK: u32 = 0;
    const INTERRUPT: u32 = 0x3ff;

    /// Enables the calling CPU's interrupts. Call on each CPU, on CPU 0 first.
    pub(crate) fn enable() {
        // SAFETY: the GIC's registers are at these addresses, mapped as a device; interrupts are masked.
        unsafe {
            register(GICD_CTLR).write_volatile(1);
            register(GICC_PMR).write_volatile(0xf0);
            register(GICC_CTLR).write_volatile(1);
        }
    }

    pub(crate) fn kick(cpu: usize) {
        // SAFETY: the GIC's registers are at these addresses, mapped as a device; the barrier makes all earlier writes
        // visible to the CPU that is interrupted.
        unsafe {
            asm!("dsb ishst", options(nostack, preserves_flags));
            register(GICD_SGIR).write_volatile(1 << (16 + cpu) | KICK);
        }
    }

    /// Acknowledges the interrupt that made this CPU leave the guest. Returns `false` if no interrupt is pending any
    /// more.
    pub(crate) fn take_kick() -> bool {
        // SAFETY: the GIC's registers are at these addresses, mapped as a device.
        unsafe {
            let interrupt = register(GICC_IAR).read_volatile();
            let kicked = interrupt & INTERRUPT == KICK;
            if kicked {
                register(GICC_EOIR).write_volatile(interrupt);
            }
            kicked
        }
    }
}

/// The "Arm Power State Coordination Interface". EL2 calls it by SMC.
pub(crate) mod psci {
    use super::asm;

    const SYSTEM_OFF: u64 = 0x8400_0008;
    const CPU_ON: u64 = 0xc400_0003;

    /// # Safety
    /// - if `function` starts or stops a CPU or the machine, the caller is ready for that.
    unsafe fn call(function: u64, arguments: [u64; 3]) -> i64 {
        let answer: i64;
        // SAFETY: by the SMC calling convention, the call does not change x18 and the registers above.
        unsafe {
            asm!(
                "smc #0",
                inout("x0") function => answer,
                inout("x1") arguments[0] => _,
                inout("x2") arguments[1] => _,
                inout("x3") arguments[2] => _,
                out("x4") _, out("x5") _, out("x6") _, out("x7") _, out("x8") _, out("x9") _,
                out("x10") _, out("x11") _, out("x12") _, out("x13") _, out("x14") _,
                out("x15") _, out("x16") _, out("x17") _,
                options(nostack)
            );
        }
        answer
    }

    /// Starts another CPU at `secondary_start`.
    pub(crate) fn start(cpu: usize) {
        unsafe extern "C" {
            fn secondary_start();
        }
        let entry = secondary_start as *const () as u64;
        // SAFETY: the CPU selects its own stack by its number.
        let answer = unsafe { call(CPU_ON, [cpu as u64, entry, cpu as u64]) };
        assert_eq!(answer, 0, "PSCI CPU_ON of CPU {cpu}");
    }

    pub(crate) fn power_off() -> ! {
        loop {
            // SAFETY: the call turns the machine off, and this program has nothing more to do.
            unsafe { call(SYSTEM_OFF, [0; 3]) };
        }
    }
}
