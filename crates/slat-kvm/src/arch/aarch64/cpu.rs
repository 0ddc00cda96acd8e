//! The CPU of a vCPU: the processor of slat-a64, an access to a device that the client completes, and a debugger's
//! probes.

use slat_a64::{
    AccessProbe, Cpu, Debug, Hint, Hypervisor, Invalidation, Leave, Pending, Right, Stage2,
    Syndrome,
};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) use slat_a64::State;

/// The tiers of the CPU's compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Cranelift.
    Full,
}

/// The number of instructions that one call of the processor executes at most.
const BATCH: u64 = 1 << 16;

/// The CPU of a vCPU.
pub(crate) struct Executor {
    cpu: Cpu,
    counters: Counters,
    /// The access to a device that the instruction at the program counter has begun and the device has not completed
    /// yet.
    access: Option<Syndrome>,
    probes: Vec<Probe>,
    /// Whether the debugger lets the CPU execute one instruction only.
    steps: bool,
    /// Whether the CPU ignores a code probe at the next instruction.
    passes: bool,
}

/// The parts of a vCPU around its CPU: memory, timers, and the registers outside of the processor.
pub(crate) trait Machine: Hypervisor<Fault = Refusal> {}

impl<M: Hypervisor<Fault = Refusal>> Machine for M {}

/// The reason why a run of the CPU ended.
#[derive(Debug)]
pub(crate) enum Exit {
    /// A bit of the attention word is set.
    Attention,
    /// The processor has executed WFI.
    Wfi,
    /// The processor has executed WFE or YIELD, by which a guest waits for another processor.
    Yield,
    /// The processor calls the firmware by HVC with this immediate. The program counter is after the instruction.
    Hvc(u16),
    /// The processor calls the firmware by SMC with this immediate. The program counter is after the instruction.
    Smc(u16),
    /// An access to an address without memory. The program counter is at the instruction that makes the access.
    /// [`Executor::complete_mmio_read`] or [`Executor::complete_mmio_write`] completes the instruction, after
    /// [`Executor::expect`].
    Mmio {
        fault: Stage2<Refusal>,
        syndrome: Option<Syndrome>,
    },
    /// The guest has invalidated translations or code. All vCPUs have to drop these.
    Invalidated(Invalidation),
    /// A debug exception that exits to the client (`KVM_EXIT_DEBUG`).
    Debug(Debug),
    /// The host memory that backs guest memory is not accessible.
    BadAddress,
    /// There was no memory for a second-level table.
    OutOfMemory,
    /// A debugger's probe was hit, or a step was made.
    Probe(ProbeHit),
}

/// The reason why the processor cannot access guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No memslot has the address, or a write is to a read-only memslot.
    Device,
    /// The access has to be tried again after the vCPU has served the requests in its attention word, in which a bit is
    /// set now.
    Retry,
    /// The host memory that backs the accessed page is not accessible.
    BadAddress,
    /// There was no memory for a second-level table.
    OutOfMemory,
}

/// The counters of a CPU's own work.
#[derive(Debug, Default)]
pub struct Counters {
    /// The number of batches of instructions, which is how often the processor was entered.
    batches: u64,
    /// Instructions that compiled code has executed.
    compiled: u64,
}

impl Counters {
    /// The names of the counters.
    pub const NAMES: [&'static str; Self::COUNT] = ["batches", "instructions_compiled"];
    /// The number of counters.
    pub const COUNT: usize = 2;

    /// Returns the values of all counters.
    pub fn to_array(&self) -> [u64; Self::COUNT] {
        [self.batches, self.compiled]
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
    /// The first virtual address that the probe watches.
    pub(crate) first: u64,
    /// The number of bytes. A code probe has one.
    pub(crate) bytes: u64,
}

/// The reason why a probe has stopped a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeHit {
    /// A code probe is at the next instruction.
    Code,
    /// The last instruction has accessed this virtual address, which a data probe of this kind watches.
    Data(ProbeKind, u64),
    /// The vCPU has executed one instruction, because the debugger steps it.
    Step,
}

impl Deref for Executor {
    type Target = Cpu;

    fn deref(&self) -> &Cpu {
        &self.cpu
    }
}

impl DerefMut for Executor {
    fn deref_mut(&mut self) -> &mut Cpu {
        &mut self.cpu
    }
}

impl Executor {
    /// Creates a CPU in its reset state.
    pub(crate) fn new() -> Self {
        Executor {
            cpu: Cpu::new(State::reset()),
            counters: Counters::default(),
            access: None,
            probes: Vec::new(),
            steps: false,
            passes: false,
        }
    }

    /// Resets the processor, which then begins at address 0, with EL1's own stack pointer and with all interrupts
    /// masked. What the client has set for debugging the guest is kept.
    pub(crate) fn reset(&mut self) {
        let debugger = self.cpu.state.debugger.take();
        self.cpu.state = State::reset();
        self.cpu.state.debugger = debugger;
        self.cpu.pending = Pending::default();
        self.access = None;
        self.cpu.forget_pages();
    }

    /// Executes guest code until an exit.
    pub(crate) fn run(&mut self, machine: &mut impl Machine, attention: &AtomicU32) -> Exit {
        let is_probed = !self.probes.is_empty() || self.steps;
        loop {
            if attention.load(Ordering::SeqCst) != 0 {
                return Exit::Attention;
            }
            self.counters.batches += 1;
            let exit = match is_probed {
                true => self.step(machine),
                false => {
                    let leave = self.cpu.run(machine, BATCH);
                    self.counters.compiled = self.cpu.compiled_instructions();
                    self.exit(leave)
                }
            };
            if let Some(exit) = exit {
                return exit;
            }
        }
    }

    /// Executes one instruction for a debugger. `None`: the run continues.
    #[cold]
    fn step(&mut self, machine: &mut impl Machine) -> Option<Exit> {
        let pc = self.cpu.state.pc;
        let is_code = |probe: &Probe| probe.kind == ProbeKind::Execute && probe.first == pc;
        let passes = std::mem::take(&mut self.passes);
        if !passes && !self.steps && self.probes.iter().any(is_code) {
            return Some(Exit::Probe(ProbeHit::Code));
        }
        let leave = self.cpu.run(machine, 1);
        let hit = self.cpu.take_probe_hit();
        match (self.exit(leave), hit) {
            (None, Some((n, address))) => {
                let kind = self
                    .data_probes()
                    .nth(n)
                    .map_or(ProbeKind::Access, |probe| probe.kind);
                Some(Exit::Probe(ProbeHit::Data(kind, address)))
            }
            (None, None) if self.steps => Some(Exit::Probe(ProbeHit::Step)),
            (exit, _) => exit,
        }
    }

    /// Returns the probes of data, in their order.
    fn data_probes(&self) -> impl Iterator<Item = &Probe> {
        let is_data = |probe: &&Probe| probe.kind != ProbeKind::Execute;
        self.probes.iter().filter(is_data)
    }

    /// Converts the reason why the processor stopped to an exit of the CPU. `None`: the run continues.
    fn exit(&mut self, leave: Leave<Refusal>) -> Option<Exit> {
        Some(match leave {
            Leave::Limit => return None,
            Leave::Attention => Exit::Attention,
            Leave::Hint(Hint::Wfi) => Exit::Wfi,
            Leave::Hint(Hint::Wfe | Hint::Yield) => Exit::Yield,
            Leave::Hint(_) => return None,
            Leave::Hvc(immediate) => Exit::Hvc(immediate),
            Leave::Smc(immediate) => Exit::Smc(immediate),
            Leave::Invalidated(invalidation) => Exit::Invalidated(invalidation),
            Leave::Debug(debug) => Exit::Debug(debug),
            Leave::Stage2 { fault, syndrome } => match fault.reason {
                Refusal::Device => Exit::Mmio { fault, syndrome },
                // The machine has raised a bit of the attention word.
                Refusal::Retry => Exit::Attention,
                Refusal::BadAddress => Exit::BadAddress,
                Refusal::OutOfMemory => Exit::OutOfMemory,
            },
        })
    }

    /// Does nothing: an instruction has at most one exit, so none of its work is left after an exit.
    pub(crate) fn complete(&mut self, _: &mut impl Machine, _: &AtomicU32) -> Option<Exit> {
        None
    }

    /// Whether the last exit has interrupted an instruction that executes in parts. Always `false`: arm64 has no such
    /// instruction.
    pub(crate) fn is_unfinished(&self) -> bool {
        false
    }

    /// Notes that a device will complete this access, which the instruction at the program counter makes.
    pub(crate) fn expect(&mut self, access: Syndrome) {
        self.access = Some(access);
    }

    /// Completes the store at the program counter.
    pub(crate) fn complete_mmio_write(&mut self) {
        self.complete_mmio_read(&[]);
    }

    /// Completes the load at the program counter with the data that the device has returned.
    pub(crate) fn complete_mmio_read(&mut self, data: &[u8]) {
        let mut bytes = [0; 8];
        bytes[..data.len()].copy_from_slice(data);
        if let Some(access) = self.access.take() {
            access.complete(&mut self.cpu.state, u64::from_le_bytes(bytes));
        }
    }

    /// Skips the instruction at the program counter, which has no effect.
    pub(crate) fn skip(&mut self) {
        self.cpu.state.skip();
    }

    /// Does nothing: the CPU always tries an interrupted access again.
    pub(crate) fn forget_interrupted(&mut self) {}

    /// Whether the CPU runs a nested guest. Always `false`: the processor has no EL2.
    pub(crate) fn is_in_guest_mode(&self) -> bool {
        false
    }

    /// Returns the counters of the CPU's work.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Replaces the debugger's probes.
    pub(crate) fn set_probes(&mut self, probes: Vec<Probe>, steps: bool) {
        self.probes = probes;
        self.steps = steps;
        let data = self.data_probes().map(|probe| AccessProbe {
            first: probe.first,
            bytes: probe.bytes,
            reads: probe.kind != ProbeKind::Write,
            writes: probe.kind != ProbeKind::Read,
        });
        let data = data.collect();
        self.cpu.set_probes(data);
    }

    /// Makes the CPU ignore a code probe at the next instruction.
    pub(crate) fn pass_probe(&mut self) {
        self.passes = true;
    }
}

/// Converts a right for which the processor asks to the engine's kind of access.
pub(crate) fn access(right: Right) -> slat::Access {
    match right {
        Right::Read => slat::Access::Read,
        Right::Write => slat::Access::Write,
        Right::Execute => slat::Access::Execute,
    }
}
