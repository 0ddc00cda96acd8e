//! The interrupt controllers of a PC as pure state machines.
//!
//! Nothing here knows a descriptor, an ioctl, a thread or a clock: time is an argument (nanoseconds of whatever clock
//! the caller has), and what a register access brings about outside comes back as a value or goes to a closure. So a
//! VMM can use each controller alone, and a test can drive it register by register. Each controller is one plain
//! struct; whoever shares it between threads puts it behind a lock.
//!
//! | file | idea |
//! |---|---|
//! | [`message`] | an interrupt on its way to local APICs: from an ICR, an MSI, an I/O APIC |
//! | [`lapic`] | the local APIC of one CPU |
//! | [`apic_map`] | which local APICs a message is for, without asking each |
//! | [`mod@line`] | input lines with several sources, and what became of a change |
//! | [`pic`] | the pair of 8259A |
//! | [`ioapic`] | the I/O APIC |
//! | [`pit`] | the 8254 timer |

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod apic_map;
pub mod ioapic;
pub mod lapic;
pub mod line;
pub mod message;
pub mod pic;
pub mod pit;
#[cfg(test)]
mod random;
