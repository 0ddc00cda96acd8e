//! The common part of all monitors: the engine's platform on a machine without an OS, a guest that executes commands,
//! and the scenarios with their expected counts. This part does not depend on the architecture: a monitor describes its
//! machine ([`Machine`]), and how one of its CPUs runs the guest ([`Cpu`]).
//!
//! A monitor boots, starts its second CPU, which calls [`Second::serve`], and calls [`run`] on the first CPU. Physical
//! and virtual addresses are equal. Interrupts are masked, except while the guest runs: an interrupt that is pending
//! when a CPU enters the guest makes the CPU leave the guest at once.
//!
//! The guest is one small program per architecture. The guest runs with its own paging off, so that every access is one
//! second-level translation and faults can be counted exactly. If the CPU walks shadow tables ([`Format::SHADOWS`]),
//! the guest has its own tables. These tables map addresses to themselves by the largest leaves, except for some
//! windows.
#![no_std]
#![warn(missing_docs)]

extern crate alloc;

mod bench;
mod frames;
mod guest;
mod guest_tables;
mod heap;
mod host;
mod report;
mod scenarios;
mod second;
mod shadowed;
mod shootdown;
mod vmids;

use core::ops::Range;

use slat::{Access, Format, Gfn, Gpa, Hpa, Stale, VmId};

pub use heap::Heap;
pub use host::Host;
pub use report::{Console, run};
pub use second::Second;
pub use shootdown::Shootdown;
pub use vmids::Vmids;

/// A machine without an OS.
pub trait Machine: Sized + Send + Sync + 'static {
    /// The machine's CPUs.
    type Cpu: Cpu;
    /// The name of the machine on the console and of `run --arch`.
    const NAME: &'static str;

    /// Returns the width of physical addresses ([`slat::Config::physical_bits`]).
    fn physical_bits() -> u32;

    /// Writes to the console, from any CPU.
    fn print(text: &str);

    /// Flushes, as in [`slat::Platform::flush`]: when it returns, no CPU uses a second-level translation of `range` of
    /// `vm` that was removed from the tables before the call, as far as `stale` includes it. Flushes by a broadcast if
    /// the machine has one, otherwise by interrupts ([`Shootdown`]). Called while no CPU in the guest waits for the
    /// caller.
    fn flush_guests(vm: VmId, range: &Range<Gfn>, stale: Stale);

    /// Call when `vm` has been dropped. A machine that keeps data for each VM ([`Vmids`]) drops the data of `vm`.
    fn end_vm(vm: VmId) {
        let _ = vm;
    }

    /// Makes `cpu` leave the guest soon with [`Exit::Kicked`], if it is in the guest. Another CPU calls this.
    fn kick(cpu: usize);

    /// Returns the queue of work for the second CPU.
    fn second() -> &'static Second<Self::Cpu>;

    /// Ends the emulator.
    fn power_off() -> !;
}

/// A CPU that can run the guest through second-level tables.
pub trait Cpu: Sized + 'static {
    /// The tables that the CPU's walker reads.
    type Format: Format;
    /// Returns the guest's program. The program is position-independent, is entered at its first byte with the members
    /// of [`Command`] in registers, and is smaller than a page.
    fn program() -> &'static [u8];
    /// A guest function that only returns to the program: [`Op::Execute`] calls it.
    const RETURN: &'static [u8];
    /// Whether the walker reports the engine's MMIO entries differently from other entries ([`Cause::Mmio`]).
    const REPORTS_MMIO: bool;

    /// Sets the guest's registers so that its next run begins `command` with the program at `entry`.
    fn begin(&mut self, entry: Gpa, command: &Command);

    /// Runs the guest of `vm`, through the tables at `root`, until it leaves. The tables of a deleted VM may have had
    /// the same address: this CPU must not use translations that it cached from them. A shadow table may be used until
    /// the next flush. A flush that is requested after the call makes the CPU leave with [`Exit::Kicked`] before the
    /// guest runs.
    fn run(&mut self, vm: VmId, root: Hpa) -> Exit;

    /// Completes the access that [`Exit::Fault`] reported, to an address without memory: a load reads `value`, and a
    /// store is dropped. The guest continues after the access.
    fn complete_mmio(&mut self, value: u32);

    /// Whether the walker sets the accessed bit in leaves itself.
    fn sets_accessed(&self) -> bool {
        true
    }

    /// Whether the walker itself sets the dirty bit in leaves. The default is what the format allows. An architecture
    /// overrides this if some of its CPUs do not set the bit.
    fn sets_dirty(&self) -> bool {
        Self::Format::SETS_DIRTY
    }

    /// Whether the walker writes the address of each leaf whose dirty bit it has set to a buffer (Intel's PML).
    const FILLS_BUFFER: bool = false;

    /// Empties the buffer of [`Cpu::FILLS_BUFFER`]: calls `note` for the address of each entry. Call after each run.
    fn drain(&mut self, note: &mut dyn FnMut(Gpa)) {
        let _ = note;
    }
}

/// The reason why a CPU left the guest.
#[derive(Clone, Copy, Debug)]
pub enum Exit {
    /// The second-level walk did not allow an access.
    Fault {
        /// The address that was accessed, exact to the page. If the CPU walks shadow tables, the address is
        /// guest-virtual.
        gpa: Gpa,
        /// The kind of access.
        access: Access,
        /// The walker's report about the access.
        cause: Cause,
    },
    /// The command is done.
    Done {
        /// For [`Op::Read`], the sum of the words read, modulo 2³².
        result: u32,
    },
    /// A guest with its own tables invalidates the entries that the engine made from these tables for an address. The
    /// guest continues after the instruction.
    Invalidate {
        /// The guest-virtual address.
        gva: u64,
    },
    /// A guest with its own tables loads their root. The guest continues after the instruction.
    Root {
        /// The address of the root.
        cr3: u64,
    },
    /// An interrupt for the monitor arrived ([`Machine::kick`]).
    Kicked,
    /// The buffer that the walker fills is full ([`Cpu::drain`]).
    BufferFull,
    /// Any other exit: no scenario expects it.
    Other {
        /// The machine's code for the exit.
        code: u64,
        /// Further information that the machine gives about the exit.
        info: u64,
    },
}

/// The kind of entry that the walker found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The walker found no valid entry.
    NotPresent,
    /// The walker found a leaf that does not allow the access, or whose accessed or dirty bit software has to set.
    Protection,
    /// The walker found one of the engine's MMIO entries, and reports it differently from other entries: as a reserved
    /// bit, or as a misconfiguration. If [`Cpu::REPORTS_MMIO`] is false, the walker reports `NotPresent` instead.
    Mmio,
}

/// A command to the guest, for `count` addresses from `gpa` on, `step` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The operation.
    pub op: Op,
    /// The first address, below 4 GiB, a multiple of 4.
    pub gpa: Gpa,
    /// The number of bytes from one address to the next.
    pub step: u64,
    /// The number of addresses, at least 1.
    pub count: u64,
    /// For [`Op::Write`]: the value for the first address. The value for each next address is larger by one.
    pub value: u32,
}

/// The guest's operation at each address of a [`Command`], with the number that its program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Op {
    /// Stores 32 bits.
    Write = 0,
    /// Loads 32 bits, and sums them.
    Read = 1,
    /// Calls the address.
    Execute = 2,
    /// Invalidates the entries that the engine made from the guest's own tables for the address. Only for a guest with
    /// its own tables.
    Invalidate = 3,
    /// Loads the address as the root of the guest's own tables. Only for a guest with its own tables.
    Root = 4,
}

/// Returns [`Cpu::program`]: the code that a monitor's assembly has between the symbols `guest_program` and
/// `guest_program_end`.
#[macro_export]
macro_rules! guest_program {
    () => {{
        unsafe extern "C" {
            static guest_program: u8;
            static guest_program_end: u8;
        }
        let (start, end) = (&raw const guest_program, &raw const guest_program_end);
        // SAFETY: the symbols enclose the program, which is never changed.
        unsafe { core::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
    }};
}

/// The part of the machine's memory that the scenarios may use.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The memory for the heap, page tables, and the guest's program: 64 MiB or more.
    pub monitor: Range<Hpa>,
    /// The guest's data: 1 GiB, at a multiple of 1 GiB.
    pub data: Hpa,
}
