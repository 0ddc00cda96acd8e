//! The layout of the guest's memory.

pub use crate::bare::{DATA, PAGE};

/// The address of the system slot: page tables, code and stacks.
pub const SYSTEM: u64 = 0;
/// The size of the system slot in bytes. The slot has space for page tables that map 492 GiB. The addresses between
/// this slot and [`DATA`] are free for small slots.
pub const SYSTEM_SIZE: usize = 4 << 20;
/// The maximum number of vCPUs, for each of which there is a stack.
pub const MAX_VCPUS: usize = 512;
/// The address of a device's register. No memslot may contain this address.
pub const DEVICE: u64 = 0xd000_0000;
/// The port to which a program writes at its end if its VM has interrupt controllers. Such a program cannot end with
/// HLT, because KVM itself then waits for an interrupt.
pub const END: u16 = 0xf4;

/// The address of 2 KiB of strings that programs in protected or real mode use ([`super::modes`]).
pub(super) const STRINGS: u64 = 0;
/// The address of words that programs in protected or real mode use ([`super::modes`]).
pub(super) const SCRATCH: u64 = 0x800;
pub(crate) const PML4: u64 = 0x1000;
pub(super) const PDPT: u64 = 0x2000;
/// The addresses of the GDT and of the IDT ([`super::interrupts`]).
pub(super) const GDT: u64 = 0x3000;
pub(super) const PROGRAM: u64 = 0x4000;
pub(super) const MODES: u64 = 0xe000;
pub(super) const IDT: u64 = 0xf000;
pub(super) const STACKS: u64 = 0x1_0000; // a page for each vCPU; each stack grows down
pub(crate) const PAGE_DIRECTORIES: u64 = STACKS + (MAX_VCPUS as u64 + 1) * PAGE;
