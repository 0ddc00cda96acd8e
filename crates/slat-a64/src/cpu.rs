//! A processor with its translations. It executes guest code at EL0 and EL1, and takes EL1's exceptions, until the
//! embedder has to act.

use crate::abort::{Fault, Stage2, status};
use crate::caches::Caches;
use crate::code::Decoded;
use crate::exception::{Debug, Interrupt};
use crate::hypervisor::Hypervisor;
use crate::insn::{Hint, Insn, SystemName};
use crate::jit::Compiled;
use crate::memory::Invalidation;
use crate::mmu::{Mmu, peek};
use crate::now::Stop;
use crate::probes::{AccessProbe, Probes};
use crate::ran::Ran;
use crate::run::{Exit, Went, one};
use crate::state::State;
use crate::syndrome::Syndrome;
use crate::tier::Exception;
use alloc::vec::Vec;

/// The number of instructions and exceptions after which the processor calls [`Hypervisor::attention`].
const POLLED: u64 = 64;

/// The greatest number of instructions that compiled code executes before the processor calls
/// [`Hypervisor::attention`].
const COMPILED_POLLED: u64 = 4096;

/// The reason why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave<E> {
    /// The processor has executed as many instructions as the caller allowed.
    Limit,
    /// [`Hypervisor::attention`] is raised.
    Attention,
    /// The processor has executed WFI, WFE, SEV, SEVL or YIELD.
    Hint(Hint),
    /// The processor has executed HVC with this immediate. The program counter is after it.
    Hvc(u16),
    /// The processor has executed SMC with this immediate. The program counter is after it.
    Smc(u16),
    /// A debug exception for a debugger outside of the guest ([`State::debugger`]). The program counter is the address
    /// of the instruction; after software step, of the next instruction.
    Debug(Debug),
    /// The machine below has refused an access. The instruction has changed nothing, and the program counter is its
    /// address. The next run executes the instruction again, unless [`Syndrome::complete`] has completed it.
    Stage2 {
        /// The access that the machine has refused.
        fault: Stage2<E>,
        /// The description of the instruction, if the instruction only loads or stores one general register.
        syndrome: Option<Syndrome>,
    },
    /// The processor has invalidated translations or code. The embedder must have the other processors drop these, too
    /// ([`Cpu::invalidate`]), before this processor runs again.
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

impl Pending {
    /// Returns the pending interrupts in the format of ISR_EL1.
    fn bits(&self) -> u64 {
        u64::from(self.serror.is_some()) << 8 | u64::from(self.irq) << 7 | u64::from(self.fiq) << 6
    }
}

/// A software processor: its registers, caches and compiled code.
pub struct Cpu {
    /// The registers. After changing system registers without [`Cpu::set_system`], call [`Cpu::forget_pages`].
    pub state: State,
    /// The interrupts that are pending. The embedder sets them between runs.
    pub pending: Pending,
    caches: Caches,
    pub(crate) compiled: Compiled,
    /// `Some` after software step has executed an instruction: its exception is next. The value says whether the
    /// instruction was an exclusive load.
    stepped: Option<bool>,
}

impl Cpu {
    /// Makes a processor with the registers in `state`.
    pub fn new(state: State) -> Self {
        Self {
            state,
            pending: Pending::default(),
            caches: Caches::new(),
            compiled: Compiled::new(),
            stepped: None,
        }
    }

    /// Sets the writable bits of a system register, for the embedder. Returns whether the processor holds the register.
    pub fn set_system(&mut self, name: SystemName, value: u64) -> bool {
        let is_held = self.state.set_system(name, value);
        self.caches.register_written(&self.state.system, name);
        is_held
    }

    /// Drops all pages, and the decoded code in them. Call before the memory that backs a page changes, or before
    /// accesses to it are forbidden.
    pub fn forget_pages(&mut self) {
        self.caches.flush();
    }

    /// Drops translations or code that another processor has invalidated.
    pub fn invalidate(&mut self, invalidation: Invalidation) {
        self.caches.invalidate(invalidation);
    }

    /// Translates `address` with EL1's rights to read, for a debugger: returns the intermediate physical address, and
    /// changes no flags in the translation tables. `None`: the address is not mapped, or the machine below has no
    /// memory for a table.
    pub fn translate<H: Hypervisor>(&self, below: &mut H, address: u64) -> Option<u64> {
        peek(&self.state, below, address)
    }

    /// Replaces the probes of a debugger outside of the guest.
    pub fn set_probes(&mut self, probes: Vec<AccessProbe>) {
        self.caches.probes = Probes::new(probes);
        self.caches.flush();
    }

    /// Returns the index of the probe that the guest has hit since the last call, and the address. Accesses to devices
    /// hit no probe.
    pub fn take_probe_hit(&mut self) -> Option<(usize, u64)> {
        self.caches.probes.take()
    }

    /// Returns the number of instructions that compiled code has executed.
    pub fn compiled_instructions(&self) -> u64 {
        self.compiled.instructions
    }

    /// Returns the pending interrupt that PSTATE does not mask and that is taken first.
    fn interrupt(&self) -> Option<Interrupt> {
        let pending = self.pending;
        let fiq = pending.fiq.then_some(Interrupt::Fiq);
        let irq = pending.irq.then_some(Interrupt::Irq);
        let all = [pending.serror.map(Interrupt::SError), fiq, irq];
        let mut taken = all.into_iter().flatten();
        taken.find(|interrupt| !self.state.masks(*interrupt))
    }

    /// Takes an interrupt, unless the machine asks for attention: after the embedder set [`Cpu::pending`], an access by
    /// the processor, such as the read that acknowledges the interrupt, may have ended it.
    #[cold]
    fn take_pending<H: Hypervisor>(
        &mut self,
        below: &H,
        interrupt: Interrupt,
    ) -> Option<Leave<H::Fault>> {
        if below.attention() {
            return Some(Leave::Attention);
        }
        self.stepped = None;
        self.state.take_interrupt(interrupt);
        if matches!(interrupt, Interrupt::SError(_)) {
            self.pending.serror = None;
            self.caches.pending = self.pending.bits();
        }
        None
    }

    /// Executes at most `limit` instructions, and takes EL1's exceptions, until the embedder has to act.
    pub fn run<H: Hypervisor>(&mut self, below: &mut H, limit: u64) -> Leave<H::Fault> {
        self.caches.pending = self.pending.bits();
        let mut done = 0;
        // Whether compiled code may begin at this instruction: at the beginning of a run, after a jump, and after an
        // instruction that compiled code left to the interpreter.
        let mut may_enter = true;
        while done < limit {
            if may_enter && self.compiled.is_attached() {
                let ran = self.run_compiled(below, (limit - done).min(COMPILED_POLLED));
                done += ran.instructions;
                // Ask even if no instruction was executed: the machine may have waited in the look-up or the first
                // access.
                if below.attention() {
                    return Leave::Attention;
                }
                if !ran.needs_interpreter && ran.instructions > 0 {
                    continue;
                }
                may_enter = ran.needs_interpreter;
                if done == limit {
                    break;
                }
            }
            let pc = self.state.pc;
            if let Some(leave) = self.step(below) {
                return leave;
            }
            done += 1;
            may_enter |= self.state.pc != pc.wrapping_add(4);
            // `done` counts exceptions, too: if the vectors cannot be fetched, exceptions follow one another without
            // end.
            if done % POLLED == 0 && below.attention() {
                return Leave::Attention;
            }
        }
        Leave::Limit
    }

    /// Runs compiled code for at most `budget` instructions. Runs nothing if an interrupt, another exception or a debug
    /// exception may come first.
    fn run_compiled<H: Hypervisor>(&mut self, below: &mut H, budget: u64) -> Ran {
        let is_interrupted = || self.pending != Pending::default() && self.interrupt().is_some();
        if self.stepped.is_some()
            || self.state.may_debug()
            || self.state.pc & 3 != 0
            || self.state.pstate.il
            || is_interrupted()
        {
            return Ran::default();
        }
        self.compiled
            .run(&mut self.state, &mut self.caches, below, budget)
    }

    /// Takes an exception, or executes an instruction. Returns `None` if the run goes on.
    #[inline(always)]
    fn step<H: Hypervisor>(&mut self, below: &mut H) -> Option<Leave<H::Fault>> {
        if self.pending != Pending::default()
            && let Some(interrupt) = self.interrupt()
        {
            return self.take_pending(below, interrupt);
        }
        let stepped = self.stepped.take();
        let state = &mut self.state;
        let steps = state.may_debug() && state.steps();
        if steps && state.is_step_due() {
            return self.debug(Debug::step(stepped));
        }
        if state.pc & 3 != 0 {
            state.take_misaligned_fetch();
            return None;
        }
        let mut mmu = Mmu {
            caches: &mut self.caches,
            below,
        };
        let insn = match mmu.instruction(state, state.pc) {
            Ok(place) => mmu.caches.code.get(place),
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
        if state.may_debug() && state.is_at_breakpoint() {
            return self.debug(Debug::BREAKPOINT);
        }
        if state.pstate().il {
            state.take_exception(Exception::Illegal);
            return None;
        }
        if steps {
            return self.step_once(below, insn);
        }
        let went = one(state, &mut mmu, &insn);
        self.went(went, insn)
    }

    /// Handles the result of an executed instruction. Returns `None` if the run goes on.
    #[inline(always)]
    fn went<E>(&mut self, went: Went<Fault<E>>, insn: Decoded) -> Option<Leave<E>> {
        match went {
            Went::On => None,
            Went::Elsewhere => self.caches.shared.take().map(Leave::Invalidated),
            Went::Out(Exit::Hint(hint)) => Some(Leave::Hint(hint)),
            Went::Out(Exit::Stop(stop)) => self.stopped(stop, insn),
            Went::Out(Exit::Limit | Exit::Fetch(_) | Exit::MisalignedFetch) => {
                unreachable!("a single instruction")
            }
        }
    }

    /// Executes one instruction for software step, and marks the step's exception as due.
    #[cold]
    fn step_once<H: Hypervisor>(
        &mut self,
        below: &mut H,
        insn: Decoded,
    ) -> Option<Leave<H::Fault>> {
        let mut mmu = Mmu {
            caches: &mut self.caches,
            below,
        };
        let went = one(&mut self.state, &mut mmu, &insn);
        let is_done = !matches!(went, Went::Out(Exit::Stop(_)));
        if is_done {
            // ERET has loaded PSTATE.SS from SPSR. This value must not be cleared after the instruction.
            if insn != Some(Insn::Eret) || self.state.debugger.is_some() {
                self.state.end_step();
            }
            self.stepped = Some(matches!(insn, Some(Insn::LoadExclusive { .. })));
        }
        self.went(went, insn)
    }

    /// Handles an instruction that has ended early: takes its exception, or ends the run.
    #[cold]
    fn stopped<E>(&mut self, stop: Stop<Fault<E>>, insn: Decoded) -> Option<Leave<E>> {
        let stop = match stop {
            // At EL0, HVC and SMC are UNDEFINED.
            Stop::Exception(Exception::Hvc(immediate)) if self.state.pstate().el1 => {
                self.pass_call();
                return Some(Leave::Hvc(immediate));
            }
            Stop::Exception(Exception::Smc(immediate)) if self.state.pstate().el1 => {
                self.pass_call();
                return Some(Leave::Smc(immediate));
            }
            Stop::Exception(Exception::Brk(immediate)) => return self.debug(Debug::brk(immediate)),
            Stop::Exception(exception) => Stop::Exception(exception),
            Stop::Memory(Fault::Stage1(abort)) if abort.status == status::DEBUG => {
                return self.debug(Debug::watchpoint(&abort));
            }
            Stop::Memory(Fault::Stage1(abort)) => Stop::Memory(abort),
            Stop::Memory(Fault::Stage2(fault)) => {
                let syndrome = insn.and_then(|insn| insn.syndrome());
                return Some(Leave::Stage2 { fault, syndrome });
            }
        };
        self.state.take_stop(stop);
        None
    }

    /// Takes a debug exception, or ends the run with it if there is a debugger outside of the guest.
    #[cold]
    fn debug<E>(&mut self, debug: Debug) -> Option<Leave<E>> {
        if self.state.leaves_to_debugger() {
            return Some(Leave::Debug(debug));
        }
        self.state.take_debug(&debug);
        None
    }

    /// Advances after HVC or SMC. If software step executed the call, the step's exception is due.
    fn pass_call(&mut self) {
        if self.state.may_debug() && self.state.steps() {
            self.stepped = Some(false);
        }
        self.state.skip();
    }
}
