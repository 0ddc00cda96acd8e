//! Exceptions (DDI 0487, D1.3 and D17.2.37): their syndromes and their delivery to EL1. Also interrupts.

use crate::abort::{Abort, status};
use crate::insn::{Hint, SystemName};
use crate::now::Stop;
use crate::pstate::{MASK_FIQ, MASK_IRQ, MASK_SERROR, Pstate};
use crate::registers::{ELR, ESR, FAR, SCTLR, SCTLR_SPAN, SPSR, VBAR};
use crate::state::State;
use crate::tier::Exception;

/// An interrupt, or a system error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Interrupt {
    Irq,
    Fiq,
    /// A system error with its syndrome.
    SError(u32),
}

/// Exception classes.
mod class {
    pub(super) const UNKNOWN: u32 = 0x00;
    pub(super) const WAIT: u32 = 0x01;
    pub(super) const VECTOR: u32 = 0x07;
    pub(super) const ILLEGAL: u32 = 0x0e;
    pub(super) const SVC: u32 = 0x15;
    pub(super) const SYSTEM: u32 = 0x18;
    pub(super) const FETCH: u32 = 0x20;
    pub(super) const MISALIGNED_PC: u32 = 0x22;
    pub(super) const DATA: u32 = 0x24;
    pub(super) const MISALIGNED_SP: u32 = 0x26;
    pub(super) const SERROR: u32 = 0x2f;
    pub(super) const BREAKPOINT: u32 = 0x30;
    pub(super) const STEP: u32 = 0x32;
    pub(super) const WATCHPOINT: u32 = 0x34;
    pub(super) const BRK: u32 = 0x3c;
}
/// Added to the class of an abort that comes from EL1 itself.
const SAME_LEVEL: u32 = 1;

const CLASS_SHIFT: u32 = 26;
/// Syndrome bit: the instruction has 32 bits.
const IL: u32 = 1 << 25;
/// The condition field of a trapped instruction's syndrome: CV is set, and the condition is "always".
const CONDITION: u32 = 0b1_1110 << 20;
const WRITE: u32 = 1 << 6;
const MAINTENANCE: u32 = 1 << 8;
/// The fields ISV (an instruction was stepped) and EX (the instruction was an exclusive load) of the software step
/// syndrome.
const STEPPED: u32 = 1 << 24;
const STEPPED_EXCLUSIVE: u32 = 1 << 6;

/// The offset of an exception vector is the sum of two parts: one for the source level and stack pointer, one for the
/// kind of exception.
const FROM_OWN_STACK: u64 = 0x200;
const FROM_EL0: u64 = 0x400;
const SYNCHRONOUS: u64 = 0x000;
const IRQ: u64 = 0x080;
const FIQ: u64 = 0x100;
const SERROR: u64 = 0x180;

/// Returns the syndrome of a trapped access to a system register.
fn access(name: SystemName, rt: u8, reads: bool) -> u32 {
    let [op0, op1, crn, crm, op2] = name.parts().map(u32::from);
    op0 << 20 | op2 << 17 | op1 << 14 | crn << 10 | u32::from(rt) << 5 | crm << 1 | u32::from(reads)
}

/// A debug exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Debug {
    class: u32,
    details: u32,
    /// The address of the access that a watchpoint has matched. `None`: the exception is not a watchpoint's.
    pub address: Option<u64>,
}

impl Debug {
    pub(crate) const BREAKPOINT: Debug = Debug {
        class: class::BREAKPOINT,
        details: status::DEBUG as u32,
        address: None,
    };

    /// Makes software step's exception. `stepped`: whether the stepped instruction was an exclusive load; `None` if no
    /// instruction was stepped.
    pub(crate) fn step(stepped: Option<bool>) -> Self {
        let details = match stepped {
            None => 0,
            Some(false) => STEPPED,
            Some(true) => STEPPED | STEPPED_EXCLUSIVE,
        };
        Debug {
            class: class::STEP,
            details: details | u32::from(status::DEBUG),
            address: None,
        }
    }

    pub(crate) fn watchpoint(abort: &Abort) -> Self {
        let write = if abort.is_write { WRITE } else { 0 };
        Debug {
            class: class::WATCHPOINT,
            details: write | u32::from(abort.status),
            address: Some(abort.address),
        }
    }

    pub(crate) fn brk(immediate: u16) -> Self {
        Debug {
            class: class::BRK,
            details: immediate.into(),
            address: None,
        }
    }

    fn is_brk(&self) -> bool {
        self.class == class::BRK
    }

    /// Returns the exception class (ESR_EL2.EC) that EL2 would see if the exception came from a lower level.
    pub fn class(&self) -> u32 {
        self.class
    }

    /// Returns the ESR_EL2 that EL2 would see if the exception came from a lower level.
    pub fn esr(&self) -> u32 {
        self.class << CLASS_SHIFT | IL | self.details
    }
}

impl State {
    /// Takes an exception to EL1 (AArch64.TakeException).
    fn take(&mut self, vector: u64, return_address: u64) {
        let from = match (self.pstate.el1, self.pstate.own_stack) {
            (false, _) => FROM_EL0,
            (true, true) => FROM_OWN_STACK,
            (true, false) => 0,
        };
        let spsr = self.pstate.bits() | u64::from(self.nzcv());
        self.system.set(SPSR, spsr);
        self.system.set(ELR, return_address);
        let pan = self.pstate.pan || self.system.get(SCTLR) & SCTLR_SPAN == 0;
        self.set_pstate(Pstate {
            el1: true,
            own_stack: true,
            daif: 15,
            pan,
            dit: self.pstate.dit,
            il: false,
            ss: false,
        });
        self.pc = self.system.get(VBAR).wrapping_add(from + vector);
        self.end_step();
    }

    fn take_synchronous(&mut self, class: u32, syndrome: u32, return_address: u64) {
        self.system
            .set(ESR, (class << CLASS_SHIFT | IL | syndrome).into());
        self.take(SYNCHRONOUS, return_address);
    }

    fn take_abort(&mut self, class: u32, abort: Abort) {
        let class = class + self.same_level();
        let write = if abort.is_write { WRITE } else { 0 };
        let maintenance = if abort.is_maintenance { MAINTENANCE } else { 0 };
        self.system.set(FAR, abort.address);
        self.take_synchronous(
            class,
            write | maintenance | u32::from(abort.status),
            self.pc,
        );
    }

    /// Takes the exception that has ended the instruction at the program counter.
    ///
    /// This function treats HVC and SMC as UNDEFINED. A caller that implements these calls must handle them itself,
    /// instead of calling this function.
    pub fn take_exception(&mut self, exception: Exception) {
        let pc = self.pc;
        match exception {
            Exception::Undefined | Exception::Hvc(_) | Exception::Smc(_) | Exception::Hlt(_) => {
                self.take_synchronous(class::UNKNOWN, 0, pc);
            }
            Exception::Svc(immediate) => {
                // Software step counts SVC as its executed instruction.
                self.end_step();
                self.take_synchronous(class::SVC, immediate.into(), pc.wrapping_add(4));
            }
            Exception::Brk(immediate) => self.take_debug(&Debug::brk(immediate)),
            Exception::Illegal => self.take_synchronous(class::ILLEGAL, 0, pc),
            Exception::VectorTrap => self.take_synchronous(class::VECTOR, CONDITION, pc),
            Exception::WaitTrap(hint) => {
                let is_event = u32::from(hint == Hint::Wfe);
                self.take_synchronous(class::WAIT, CONDITION | is_event, pc);
            }
            Exception::SystemTrap { name, rt, reads } => {
                self.take_synchronous(class::SYSTEM, access(name, rt, reads), pc);
            }
            Exception::StackAlignment => self.take_synchronous(class::MISALIGNED_SP, 0, pc),
            Exception::Alignment { address, is_write } => {
                let abort = Abort {
                    address,
                    status: status::ALIGNMENT,
                    is_write,
                    is_maintenance: false,
                };
                self.take_abort(class::DATA, abort);
            }
        }
    }

    /// Takes the exception of an instruction that has ended early.
    pub fn take_stop(&mut self, stop: Stop<Abort>) {
        match stop {
            Stop::Exception(exception) => self.take_exception(exception),
            Stop::Memory(abort) if abort.status == status::DEBUG => {
                self.take_debug(&Debug::watchpoint(&abort));
            }
            Stop::Memory(abort) => self.take_abort(class::DATA, abort),
        }
    }

    /// Makes EL1 take the exception of an instruction fetch that has failed.
    pub fn take_fetch_abort(&mut self, abort: Abort) {
        self.take_abort(
            class::FETCH,
            Abort {
                is_write: false,
                is_maintenance: false,
                ..abort
            },
        );
    }

    /// Takes a debug exception at the program counter.
    pub(crate) fn take_debug(&mut self, debug: &Debug) {
        let same = if debug.is_brk() { 0 } else { self.same_level() };
        if let Some(address) = debug.address {
            self.system.set(FAR, address);
        }
        self.take_synchronous(debug.class + same, debug.details, self.pc);
    }

    /// Returns 0 if an exception comes from EL0, and 1 if it comes from EL1: the number to add to the class of an
    /// exception that has a class for each.
    fn same_level(&self) -> u32 {
        if self.pstate.el1 { SAME_LEVEL } else { 0 }
    }

    /// Takes the exception for a program counter that is not a multiple of 4.
    pub fn take_misaligned_fetch(&mut self) {
        self.system.set(FAR, self.pc);
        self.take_synchronous(class::MISALIGNED_PC, 0, self.pc);
    }

    /// Whether PSTATE masks an interrupt. PSTATE.DAIF masks at EL0 as at EL1.
    pub(crate) fn masks(&self, interrupt: Interrupt) -> bool {
        let mask = match interrupt {
            Interrupt::Irq => MASK_IRQ,
            Interrupt::Fiq => MASK_FIQ,
            Interrupt::SError(_) => MASK_SERROR,
        };
        self.pstate.daif & mask != 0
    }

    /// Takes an interrupt, unless PSTATE masks it. Returns whether the interrupt was taken.
    pub fn take_interrupt(&mut self, interrupt: Interrupt) -> bool {
        if self.masks(interrupt) {
            return false;
        }
        let vector = match interrupt {
            Interrupt::Irq => IRQ,
            Interrupt::Fiq => FIQ,
            Interrupt::SError(_) => SERROR,
        };
        if let Interrupt::SError(syndrome) = interrupt {
            let syndrome = syndrome & (IL - 1);
            self.system
                .set(ESR, (class::SERROR << CLASS_SHIFT | IL | syndrome).into());
        }
        self.take(vector, self.pc);
        true
    }
}
