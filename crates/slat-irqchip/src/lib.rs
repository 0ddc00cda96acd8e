//! The interrupt controllers of a PC as pure state machines.
//!
//! The controllers use no descriptor, ioctl, thread or clock. Time is an argument, in nanoseconds of any clock that the
//! caller chooses. If a register access has effects outside the controller, the controller returns these effects as a
//! value or passes them to a closure. So a VMM can use each controller alone, and a test can drive it register by
//! register. Each controller is one plain struct; a caller that shares it between threads protects it by a lock.
//!
//! | file | idea |
//! |---|---|
//! | [`message`] | an interrupt on its way to local APICs: from an ICR, an MSI, an I/O APIC |
//! | [`lapic`] | the local APIC of one CPU |
//! | [`apic_map`] | finds the local APICs to which a message is addressed, without asking each |
//! | [`mod@line`] | input lines with several sources, and the outcome of a change |
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
