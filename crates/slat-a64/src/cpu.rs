//! A processor with its translations: executes at EL0 and EL1, and takes EL1's exceptions, until its embedder is
//! needed.

use crate::abort::{Fault, Stage2};
use crate::caches::Caches;
use crate::code::Decoded;
use crate::exception::Interrupt;
use crate::hypervisor::Hypervisor;
use crate::insn::{Hint, SystemName};
use crate::memory::Invalidation;
use crate::mmu::{Mmu, peek};
use crate::now::Stop;
use crate::run::{Exit, Went, one};
use crate::stage1::regime::asid;
use crate::state::State;
use crate::syndrome::Syndrome;
use crate::tier::Exception;

/// Why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave<E> {
    /// The given number of instructions was executed.
    Limit,
    /// [`Hypervisor::attention`] is raised.
    Attention,
    /// The processor has executed WFI, WFE, SEV, SEVL or YIELD.
    Hint(Hint),
    /// The processor has executed HVC with this immediate. The program counter is after it.
    Hvc(u16),
    /// The processor has executed SMC with this immediate. The program counter is after it.
    Smc(u16),
    /// The machine below has refused an access. The instruction has changed nothing, and the program counter is its
    /// address: a run executes the instruction again, and [`Syndrome::complete`] completes it instead.
    Stage2 {
        /// The access.
        fault: Stage2<E>,
        /// What the instruction does, if it accesses one general register and does nothing else.
        syndrome: Option<Syndrome>,
    },
    /// The processor has invalidated what other processors must drop, too, before this one goes on
    /// ([`Cpu::invalidate`]).
    Invalidated(Invalidation),
}

/// The interrupts that are pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// The level of the IRQ line.
    pub irq: bool,
    /// The level of the FIQ line.
    pub fiq: bool,
    /// A virtual SError with its syndrome, which is pending until it is taken.
    pub serror: Option<u32>,
}

/// A processor.
pub struct Cpu {
    /// The registers. After a change of system registers by other means than [`Cpu::set_system`], call
    /// [`Cpu::forget_pages`].
    pub state: State,
    /// The interrupts that are pending. The embedder sets them between runs.
    pub pending: Pending,
    caches: Caches,
}

impl Cpu {
    /// Makes a processor with a state.
    pub fn new(state: State) -> Self {
        Self {
            state,
            pending: Pending::default(),
            caches: Caches::new(),
        }
    }

    /// Sets the bits of a system register that can be written, for the embedder. Returns whether the processor holds
    /// the register.
    pub fn set_system(&mut self, name: SystemName, value: u64) -> bool {
        let is_held = self.state.set_system(name, value);
        self.caches.tlb.flush();
        self.caches.tlb.switch(asid(&self.state.system));
        is_held
    }

    /// Drops all pages, and the code in them. Call before the memory behind a page changes, or may not be accessed any
    /// more.
    pub fn forget_pages(&mut self) {
        self.caches.flush();
    }

    /// Drops what another processor has invalidated.
    pub fn invalidate(&mut self, invalidation: Invalidation) {
        self.caches.invalidate(invalidation);
    }

    /// Returns the intermediate physical address at which EL1 would read an address, for a debugger: the flags of the
    /// tables stay as they are. `None`: the address is not mapped, or the machine below has no such table.
    pub fn translate<H: Hypervisor>(&self, below: &mut H, address: u64) -> Option<u64> {
        peek(&self.state, below, address)
    }

    /// Takes an interrupt that is pending, unless PSTATE masks it. Returns whether it did.
    fn take_pending(&mut self) -> bool {
        let pending = self.pending;
        if let Some(syndrome) = pending.serror
            && self.state.take_interrupt(Interrupt::SError(syndrome))
        {
            self.pending.serror = None;
            return true;
        }
        (pending.fiq && self.state.take_interrupt(Interrupt::Fiq))
            || (pending.irq && self.state.take_interrupt(Interrupt::Irq))
    }

    /// Executes instructions, at most `limit`, and takes EL1's exceptions, until the embedder is needed.
    pub fn run<H: Hypervisor>(&mut self, below: &mut H, limit: u64) -> Leave<H::Fault> {
        for _ in 0..limit {
            if let Some(leave) = self.step(below) {
                return leave;
            }
        }
        Leave::Limit
    }

    /// Takes an exception, or executes an instruction. `None`: go on.
    #[inline(always)]
    fn step<H: Hypervisor>(&mut self, below: &mut H) -> Option<Leave<H::Fault>> {
        if self.pending != Pending::default() && self.take_pending() {
            return None;
        }
        let state = &mut self.state;
        if state.pc & 3 != 0 {
            state.take_misaligned_fetch();
            return None;
        }
        let mut mmu = Mmu {
            caches: &mut self.caches,
            below,
        };
        let insn = match mmu.instruction(state, state.pc) {
            Ok(insn) => insn,
            Err(Fault::Stage1(abort)) => {
                state.take_fetch_abort(abort);
                return None;
            }
            Err(Fault::Stage2(fault)) => {
                return Some(Leave::Stage2 {
                    fault,
                    syndrome: None,
                });
            }
        };
        if state.pstate().il {
            state.take_exception(Exception::Illegal);
            return None;
        }
        match one(state, &mut mmu, &insn) {
            Went::On => None,
            Went::Elsewhere => match self.caches.shared.take() {
                Some(invalidation) => Some(Leave::Invalidated(invalidation)),
                None => below.attention().then_some(Leave::Attention),
            },
            Went::Out(Exit::Hint(hint)) => Some(Leave::Hint(hint)),
            Went::Out(Exit::Stop(stop)) => self.stopped(stop, insn),
            Went::Out(Exit::Limit | Exit::Fetch(_) | Exit::MisalignedFetch) => {
                unreachable!("a single instruction")
            }
        }
    }

    /// Ends an instruction that has ended early.
    #[cold]
    fn stopped<E>(&mut self, stop: Stop<Fault<E>>, insn: Decoded) -> Option<Leave<E>> {
        let stop = match stop {
            // At EL0 the calls are UNDEFINED.
            Stop::Exception(Exception::Hvc(immediate)) if self.state.pstate().el1 => {
                self.state.pc = self.state.pc.wrapping_add(4);
                return Some(Leave::Hvc(immediate));
            }
            Stop::Exception(Exception::Smc(immediate)) if self.state.pstate().el1 => {
                self.state.pc = self.state.pc.wrapping_add(4);
                return Some(Leave::Smc(immediate));
            }
            Stop::Exception(exception) => Stop::Exception(exception),
            Stop::Memory(Fault::Stage1(abort)) => Stop::Memory(abort),
            Stop::Memory(Fault::Stage2(fault)) => {
                let syndrome = insn.and_then(|insn| insn.syndrome());
                return Some(Leave::Stage2 { fault, syndrome });
            }
        };
        self.state.take_stop(stop);
        None
    }
}
