//! The local APIC, as far as one CPU needs it to start and interrupt another. APIC ids are 0 and 1.

use core::hint::spin_loop;
use core::ptr;

use crate::boot::SECOND_PAGE;

/// The vector that makes a CPU leave the guest.
pub const KICK: u8 = 0x40;

const BASE: u32 = 0xfee0_0000;
/// The address of the register that ends an interrupt.
pub(crate) const END_OF_INTERRUPT: u32 = BASE + 0xb0;
const SPURIOUS: u32 = BASE + 0xf0;
const COMMAND: u32 = BASE + 0x300;
const COMMAND_TARGET: u32 = BASE + 0x310;

// Intel SDM 3A, "Interrupt Command Register": delivery modes, and level assert.
const ASSERT: u32 = 1 << 14;
const INIT: u32 = 5 << 8;
const START_UP: u32 = 6 << 8;
const PENDING: u32 = 1 << 12;

fn read(register: u32) -> u32 {
    // SAFETY: the registers belong to this CPU's own APIC, which is mapped uncached. Reading changes nothing.
    unsafe { ptr::read_volatile(register as usize as *const u32) }
}

fn write(register: u32, value: u32) {
    // SAFETY: the registers belong to this CPU's own APIC, which is mapped uncached. The written registers concern
    // interrupts only.
    unsafe { ptr::write_volatile(register as usize as *mut u32, value) };
}

/// Enables interrupts of this CPU.
pub(crate) fn enable() {
    const ENABLED: u32 = 1 << 8;
    write(SPURIOUS, ENABLED | 0xff);
}

/// Ends the interrupt that this CPU has accepted.
pub fn end_of_interrupt() {
    write(END_OF_INTERRUPT, 0);
}

fn send(cpu: usize, command: u32) {
    write(COMMAND_TARGET, (cpu as u32) << 24);
    write(COMMAND, command | ASSERT);
    while read(COMMAND) & PENDING != 0 {
        spin_loop();
    }
}

/// Interrupts `cpu`.
pub fn kick(cpu: usize) {
    send(cpu, KICK.into());
}

/// Starts `cpu` at the page where `boot` has put its first instructions.
pub(crate) fn start(cpu: usize) {
    send(cpu, INIT);
    // An emulator counts this time in emulated time. On a real CPU, the loop takes 10 ms.
    (0..1_000_000).for_each(|_| spin_loop());
    send(cpu, START_UP | u32::from(SECOND_PAGE));
}
