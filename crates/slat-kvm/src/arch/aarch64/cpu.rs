//! The CPU of a vCPU, and what it tells its machine. The CPU has no value, because slat has no processor for AArch64 code yet.

use std::sync::atomic::AtomicU32;

/// The registers of a CPU.
#[derive(Clone, Debug)]
pub(crate) enum State {}

/// The CPU of a vCPU.
pub(crate) struct Executor {
    pub(crate) state: State,
}

/// Why a run of the CPU ended.
#[derive(Debug)]
pub(crate) enum Exit {}

/// The counters of a CPU's own work.
#[derive(Debug)]
pub enum Counters {}

impl Counters {
    /// The names of the counters.
    pub const NAMES: [&'static str; Self::COUNT] = [];
    /// The number of counters.
    pub const COUNT: usize = 0;

    /// Returns the values.
    pub fn to_array(&self) -> [u64; Self::COUNT] {
        match *self {}
    }
}

/// The kind of access that a probe watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeKind {
    /// The execution of an instruction.
    Execute,
    /// A store.
    Write,
    /// A load.
    Read,
    /// A load or a store.
    Access,
}

/// A debugger's probe: virtual addresses, and the kind of access to them that ends the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    /// The kind of access that ends the run.
    pub(crate) kind: ProbeKind,
    /// The first virtual address.
    pub(crate) first: u64,
    /// The number of bytes. A code probe has one.
    pub(crate) bytes: u64,
}

/// Why a probe has stopped a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeHit {
    /// A code probe is at the next instruction.
    Code,
    /// The last instruction has accessed this virtual address, which a data probe of this kind watches.
    Data(ProbeKind, u64),
    /// An instruction was executed by a step.
    Step,
}

impl Executor {
    /// Executes guest code until an exit.
    pub(crate) fn run(&mut self, _: &mut impl Sized, _: &AtomicU32) -> Exit {
        match self.state {}
    }

    /// Finishes the instruction that the last exit interrupted. `None`: it is finished, and has no other exit.
    pub(crate) fn complete(&mut self, _: &mut impl Sized, _: &AtomicU32) -> Option<Exit> {
        match self.state {}
    }

    /// Whether the last exit has interrupted an instruction.
    pub(crate) fn is_unfinished(&self) -> bool {
        match self.state {}
    }

    /// Provides the data that an MMIO read has asked for.
    pub(crate) fn complete_mmio_read(&mut self, _: &[u8]) {
        match self.state {}
    }

    /// Makes the CPU try an interrupted access again.
    pub(crate) fn forget_interrupted(&mut self) {
        match self.state {}
    }

    /// Whether the CPU runs a nested guest.
    pub(crate) fn is_in_guest_mode(&self) -> bool {
        match self.state {}
    }

    /// Returns the counters of the CPU's work.
    pub(crate) fn counters(&self) -> &Counters {
        match self.state {}
    }

    /// Replaces the debugger's probes.
    pub(crate) fn set_probes(&mut self, _: Vec<Probe>, _steps: bool) {
        match self.state {}
    }

    /// Makes the CPU pass a code probe at the next instruction.
    pub(crate) fn pass_probe(&mut self) {
        match self.state {}
    }
}
