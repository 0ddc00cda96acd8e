//! A processor with its translations: executes at EL0 and EL1, and takes EL1's exceptions, until its embedder is
//! needed.

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

/// The number of instructions and exceptions after which the processor asks for its machine's attention.
const POLLED: u64 = 64;

/// The greatest number of instructions that compiled code executes before the processor asks.
const COMPILED_POLLED: u64 = 4096;

/// The reason why a run ends.
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
    /// A debug exception that a debugger outside of the guest takes ([`State::debugger`]). The program counter is the
    /// instruction's address, or that of the next one after software step.
    Debug(Debug),
    /// The machine below has refused an access. The instruction has changed nothing, and the program counter is its
    /// address: a run executes the instruction again, and [`Syndrome::complete`] completes it instead.
    Stage2 {
        /// The access.
        fault: Stage2<E>,
        /// The access of the instruction, if the instruction transfers one general register and does nothing else.
        syndrome: Option<Syndrome>,
    },
    /// The processor has invalidated translations or code. The other processors must drop these, too, before this
    /// processor goes on ([`Cpu::invalidate`]).
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
    /// Returns ISR_EL1.
    fn bits(&self) -> u64 {
        u64::from(self.serror.is_some()) << 8 | u64::from(self.irq) << 7 | u64::from(self.fiq) << 6
    }
}

/// A processor.
pub struct Cpu {
    /// The registers. After a change of system registers by other means than [`Cpu::set_system`], call
    /// [`Cpu::forget_pages`].
    pub state: State,
    /// The interrupts that are pending. The embedder sets them between runs.
    pub pending: Pending,
    caches: Caches,
    pub(crate) compiled: Compiled,
    /// Software step has executed an instruction: its exception is next. Whether the instruction was an exclusive load.
    stepped: Option<bool>,
}

impl Cpu {
    /// Makes a processor with a state.
    pub fn new(state: State) -> Self {
        Self {
            state,
            pending: Pending::default(),
            caches: Caches::new(),
            compiled: Compiled::new(),
            stepped: None,
        }
    }

    /// Sets the bits of a system register that can be written, for the embedder. Returns whether the processor holds
    /// the register.
    pub fn set_system(&mut self, name: SystemName, value: u64) -> bool {
        let is_held = self.state.set_system(name, value);
        self.caches.register_written(&self.state.system, name);
        is_held
    }

    /// Drops all pages, and the code in them. Call before the memory behind a page changes, or may not be accessed any
    /// more.
    pub fn forget_pages(&mut self) {
        self.caches.flush();
    }

    /// Drops translations or code that another processor has invalidated.
    pub fn invalidate(&mut self, invalidation: Invalidation) {
        self.caches.invalidate(invalidation);
    }

    /// Returns the intermediate physical address at which EL1 would read an address, for a debugger: the flags of the
    /// tables stay as they are. `None`: the address is not mapped, or the machine below has no such table.
    pub fn translate<H: Hypervisor>(&self, below: &mut H, address: u64) -> Option<u64> {
        peek(&self.state, below, address)
    }

    /// Replaces the probes of a debugger outside of the guest.
    pub fn set_probes(&mut self, probes: Vec<AccessProbe>) {
        self.caches.probes = Probes::new(probes);
        self.caches.flush();
    }

    /// Returns the index of the probe that the guest has accessed since the last call, and the address. A device's
    /// access meets no probe.
    pub fn take_probe_hit(&mut self) -> Option<(usize, u64)> {
        self.caches.probes.take()
    }

    /// Returns the number of instructions that compiled code has executed.
    pub fn compiled_instructions(&self) -> u64 {
        self.compiled.instructions
    }

    /// Returns the pending interrupt that is taken next: PSTATE does not mask it.
    fn interrupt(&self) -> Option<Interrupt> {
        let pending = self.pending;
        let fiq = pending.fiq.then_some(Interrupt::Fiq);
        let irq = pending.irq.then_some(Interrupt::Irq);
        let all = [pending.serror.map(Interrupt::SError), fiq, irq];
        let mut taken = all.into_iter().flatten();
        taken.find(|interrupt| !self.state.masks(*interrupt))
    }

    /// Takes an interrupt, unless the machine asks for attention: since the embedder set [`Cpu::pending`], an access of
    /// the processor may have ended the interrupt, for example the read that acknowledges it.
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

    /// Executes instructions, at most `limit`, and takes EL1's exceptions, until the embedder is needed.
    pub fn run<H: Hypervisor>(&mut self, below: &mut H, limit: u64) -> Leave<H::Fault> {
        self.caches.pending = self.pending.bits();
        let mut done = 0;
        // Whether compiled code may begin here: at the beginning of a run, after a jump, and after an instruction that
        // it has left to the interpreter.
        let mut may_enter = true;
        while done < limit {
            if may_enter && self.compiled.is_attached() {
                let ran = self.run_compiled(below, (limit - done).min(COMPILED_POLLED));
                done += ran.instructions;
                // Also if no instruction was executed: a look-up, or the first access, may have waited.
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
            // Also exceptions count: those of vectors that cannot be fetched follow one another without end.
            if done % POLLED == 0 && below.attention() {
                return Leave::Attention;
            }
        }
        Leave::Limit
    }

    /// Runs compiled code for at most `budget` instructions, if the next thing to do is to execute an instruction, and
    /// no debug exception can come before or after it.
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

    /// Takes an exception, or executes an instruction. `None`: go on.
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

    /// Finishes an instruction that was executed. `None`: the run goes on.
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

    /// Executes an instruction, after which software step's exception is due.
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
            // An exception return has set PSTATE.SS, which is the guest's.
            if insn != Some(Insn::Eret) || self.state.debugger.is_some() {
                self.state.end_step();
            }
            self.stepped = Some(matches!(insn, Some(Insn::LoadExclusive { .. })));
        }
        self.went(went, insn)
    }

    /// Finishes an instruction that has ended early: takes its exception, or ends the run.
    #[cold]
    fn stopped<E>(&mut self, stop: Stop<Fault<E>>, insn: Decoded) -> Option<Leave<E>> {
        let stop = match stop {
            // At EL0 the calls are UNDEFINED.
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

    /// Takes a debug exception, or leaves with it.
    #[cold]
    fn debug<E>(&mut self, debug: Debug) -> Option<Leave<E>> {
        if self.state.leaves_to_debugger() {
            return Some(Leave::Debug(debug));
        }
        self.state.take_debug(&debug);
        None
    }

    /// Goes on after a call, which may be the instruction that software step executes.
    fn pass_call(&mut self) {
        if self.state.may_debug() && self.state.steps() {
            self.stepped = Some(false);
        }
        self.state.skip();
    }
}
