//! Arm's Generic Interrupt Controllers as pure state machines.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! A [`Gic`] is a GICv2 (IHI 0048) or a GICv3 (IHI 0069) as KVM shows them to guests: one security state,
//! both groups, 32 priorities, and with GICv3 affinity routing, system registers and LPIs. An [`Its`](its::Its) turns
//! messages of devices into LPIs. The guest's memory, which has the tables of LPIs and the commands of an ITS, comes
//! through a trait ([`Memory`](memory::Memory)). Nothing here uses a descriptor, a thread or a clock; whoever shares a
//! GIC between threads holds one lock for it and its ITSs.
//!
//! # For a VMM
//!
//! | who | calls |
//! |---|---|
//! | the guest's memory accesses | [`Gic::read`], [`Gic::write`], [`Its::read`], [`Its::write`] |
//! | the guest's system registers | [`Gic::read_icc`], [`Gic::write_icc`] |
//! | devices and timers | [`Gic::set_spi`], [`Gic::set_ppi`], [`Its::signal`] |
//! | the run loop, before it enters the guest | [`Gic::signals`] |
//! | the owner, after each call | [`Gic::take_changed`], which names the vCPUs to kick; [`Gic::take_ended`] |
//! | the VMM | [`Device`](device::Device), [`ItsDevice`](device::ItsDevice): KVM's device attributes, KVM's errors |
//!
//! [`Gic`]: gic::Gic
//! [`Gic::read`]: gic::Gic::read
//! [`Gic::write`]: gic::Gic::write
//! [`Gic::read_icc`]: gic::Gic::read_icc
//! [`Gic::write_icc`]: gic::Gic::write_icc
//! [`Gic::set_spi`]: gic::Gic::set_spi
//! [`Gic::set_ppi`]: gic::Gic::set_ppi
//! [`Gic::signals`]: gic::Gic::signals
//! [`Gic::take_changed`]: gic::Gic::take_changed
//! [`Gic::take_ended`]: gic::Gic::take_ended
//! [`Its::read`]: its::Its::read
//! [`Its::write`]: its::Its::write
//! [`Its::signal`]: its::Its::signal
//!
//! # Layers
//!
//! | layer | file | idea |
//! |---|---|---|
//! | outside | `memory`, `error` | the guest's memory; errnos as a type |
//! | | `identity` | product, revision, widths |
//! | state | `interrupt` | one interrupt; INTIDs |
//! | | `pending` | the interrupts a vCPU could acknowledge, ordered |
//! | | `interface` | the CPU interface: priorities and preemption |
//! | | `gic/` | all of them: lines, signals, acknowledgement and end, SGIs, LPIs |
//! | guest | `registers/` | the registers in memory, with what differs for the VMM |
//! | | `icc` | system registers |
//! | | `its/` | the ITS: registers, commands, tables |
//! | VMM | `addresses` | where the frames are in the guest's physical memory |
//! | | `device` | KVM's device attributes |
//!
//! # As KVM, not as the architecture
//!
//! Where the architecture leaves a choice, and where KVM simplifies, guests get what KVM has: one enable bit for both
//! groups in GICD_CTLR; an SPI for several CPUs goes to the first one (GICv2) or to the one of its affinity (GICv3), so
//! that there is no 1-of-N; PPIs are level-triggered; SPIs begin as edge-triggered; GICR_WAKER is zero; accesses of
//! other widths than a register has read as zero; commands of an ITS that are errors are ignored.
//!
//! If a vCPU does not end interrupts in the reverse order of their acknowledgement, the architecture calls the result
//! UNPREDICTABLE. `gic/cpu.rs` says what slat does.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod addresses;
pub mod device;
pub mod error;
pub mod gic;
pub mod icc;
mod identity;
mod interface;
pub mod interrupt;
pub mod its;
pub mod memory;
mod pending;
pub mod registers;
