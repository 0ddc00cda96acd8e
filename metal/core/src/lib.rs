//! What the monitors share: the engine's platform on a machine without an OS, a guest that does as it
//! is told, and the scenarios with the counts expected of them. Knows no architecture: a monitor says
//! what its machine is ([`Machine`]), and how one of its CPUs runs the guest ([`Cpu`]).
//!
//! A monitor boots, starts its second CPU, which calls [`Second::serve`], and calls [`run`] on the
//! first. Monitors run with physical and virtual addresses equal and with interrupts masked, except
//! while the guest runs: an interrupt that is pending when a CPU enters the guest takes it out at once.
//!
//! The guest is one small program per architecture. It runs with paging of its own off, so that
//! every access is one second-level translation and faults can be counted exactly.
#![no_std]
#![warn(missing_docs)]

extern crate alloc;

mod bench;
mod frames;
mod guest;
mod heap;
mod host;
mod report;
mod scenarios;
mod second;
mod shootdown;

use core::ops::Range;

use slat::{Access, Format, Gfn, Gpa, Hpa, Stale, VmId};

pub use heap::Heap;
pub use host::Host;
pub use report::{Console, run};
pub use second::Second;
pub use shootdown::Shootdown;

/// A machine without an OS.
pub trait Machine: Sized + Send + Sync + 'static {
    /// Its CPUs.
    type Cpu: Cpu;
    /// What the console calls it: the name of `run --arch`.
    const NAME: &'static str;

    /// Width of its physical addresses ([`slat::Config::physical_bits`]).
    fn physical_bits() -> u32;

    /// Writes to the console, from any CPU.
    fn print(text: &str);

    /// When this returns, no CPU uses a second-level translation of `range` of `vm` that was taken out
    /// of the tables before the call, as far as `stale` says: [`slat::Platform::flush`]. By a broadcast where the machine has
    /// one, otherwise by interrupts ([`Shootdown`]). Called with no CPU in the guest waiting for the
    /// caller.
    fn flush_guests(vm: VmId, range: &Range<Gfn>, stale: Stale);

    /// Makes `cpu` leave the guest soon, if it is inside, with [`Exit::Kicked`]; called by another CPU.
    fn kick(cpu: usize);

    /// Where work for the second CPU is left.
    fn second() -> &'static Second<Self::Cpu>;

    /// Ends the emulator.
    fn power_off() -> !;
}

/// One CPU, able to run the guest through second-level tables.
pub trait Cpu: Sized + 'static {
    /// The tables that its walker reads.
    type Format: Format;
    /// The guest's program: position-independent, entered at its first byte, with the members of
    /// [`Command`] in registers. Less than a page.
    fn program() -> &'static [u8];
    /// A guest function that does nothing but return to the program: what [`Op::Execute`] calls.
    const RETURN: &'static [u8];
    /// Whether the walker reports the engine's MMIO entries in a way of their own ([`Cause::Mmio`]).
    const REPORTS_MMIO: bool;

    /// Sets the guest's registers so that its next run begins `command` with the program at `entry`.
    fn begin(&mut self, entry: Gpa, command: &Command);

    /// Runs the guest of `vm`, through the tables at `root`, until it leaves. The tables of a VM that
    /// is gone may have been at the same place: what this CPU remembers of them must not be used.
    fn run(&mut self, vm: VmId, root: Hpa) -> Exit;

    /// Completes the access that [`Exit::Fault`] reported, and that no memory answers: a load reads
    /// `value`, a store is dropped. The guest goes on behind it.
    fn complete_mmio(&mut self, value: u32);

    /// Whether the walker sets the accessed bit in leaves itself.
    fn sets_accessed(&self) -> bool {
        true
    }

    /// Whether the walker sets the dirty bit in leaves itself. (A format may allow it, and the CPU
    /// not have it.)
    fn sets_dirty(&self) -> bool {
        Self::Format::SETS_DIRTY
    }
}

/// Why a CPU left the guest.
#[derive(Clone, Copy, Debug)]
pub enum Exit {
    /// The second-level walk did not allow an access.
    Fault {
        /// What was accessed; exact to the page.
        gpa: Gpa,
        /// How.
        access: Access,
        /// What the walker says about it.
        cause: Cause,
    },
    /// The command is done.
    Done {
        /// Of [`Op::Read`], the sum of what was read, modulo 2³².
        result: u32,
    },
    /// An interrupt for the monitor came in ([`Machine::kick`]).
    Kicked,
    /// Anything else: no scenario expects it.
    Other {
        /// The machine's code for it.
        code: u64,
        /// What it says beside that.
        info: u64,
    },
}

/// What the walker found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Nothing.
    NotPresent,
    /// A leaf that does not allow the access, or that wants an accessed or dirty bit set by software.
    Protection,
    /// An entry of the engine's for MMIO, which the walker reports in a way of its own: a reserved bit,
    /// a misconfiguration. Where [`Cpu::REPORTS_MMIO`] is false it is `NotPresent`.
    Mmio,
}

/// What the guest is to do with `count` addresses from `gpa` on, `step` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// What.
    pub op: Op,
    /// The first address, below 4 GiB, a multiple of 4.
    pub gpa: Gpa,
    /// Bytes from one to the next.
    pub step: u64,
    /// How many, at least 1.
    pub count: u64,
    /// For [`Op::Write`]: what goes to the first; each next gets one more.
    pub value: u32,
}

/// What the guest does at each address of a [`Command`], by the number that its program is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Op {
    /// Stores 32 bits.
    Write = 0,
    /// Loads 32 bits, and adds them up.
    Read = 1,
    /// Calls it.
    Execute = 2,
}

/// [`Cpu::program`]: what a monitor's assembly has put between the symbols `guest_program` and
/// `guest_program_end`.
#[macro_export]
macro_rules! guest_program {
    () => {{
        unsafe extern "C" {
            static guest_program: u8;
            static guest_program_end: u8;
        }
        let (start, end) = (&raw const guest_program, &raw const guest_program_end);
        // SAFETY: the symbols enclose the program, which nobody changes.
        unsafe { core::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
    }};
}

/// The machine's memory, as far as it is the scenarios' to use.
#[derive(Clone, Debug)]
pub struct Memory {
    /// For the heap, page tables, and the guest's program: 64 MiB or more.
    pub monitor: Range<Hpa>,
    /// The guest's data: 1 GiB, at a multiple of 1 GiB.
    pub data: Hpa,
}
