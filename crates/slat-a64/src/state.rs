//! The architectural state of a processor.

use crate::debugger::Debugger;
use crate::insn::SystemName;
use crate::pstate::Pstate;
use crate::registers::{
    CPACR, CPACR_FPEN_SHIFT, SCTLR, SCTLR_DZE, SCTLR_NTWE, SCTLR_NTWI, SCTLR_UCI, SCTLR_UCT,
    Values, find,
};
use alloc::boxed::Box;

/// The flags N, Z, C, V in bits 31 to 28, as in NZCV and SPSR_EL1.
pub const NZCV_SHIFT: u32 = 28;

/// The bits of FPCR that exist: AHP, DN, FZ, RMode, FZ16. Floating-point exceptions cannot be trapped.
const FPCR_WRITABLE: u32 = 0x07c8_0000;
/// The bits of FPSR that exist: QC, and the cumulative exception bits.
const FPSR_WRITABLE: u32 = 0x0800_009f;

/// The address and the value of the last exclusive load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exclusive {
    /// The virtual address of the exclusive load.
    pub address: u64,
    /// The logarithm of the number of bytes loaded.
    pub size: u8,
    /// The value that the exclusive load has returned.
    pub value: u128,
}

/// The registers of a processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// X0 to X30.
    pub x: [u64; 31],
    /// The stack pointer.
    pub sp: u64,
    /// The address of the next instruction.
    pub pc: u64,
    /// The flags N, Z, C, V.
    pub flags: [bool; 4],
    /// V0 to V31.
    pub v: [u128; 32],
    /// FPCR.
    pub fpcr: u32,
    /// FPSR.
    pub fpsr: u32,
    /// PSTATE without the flags N, Z, C, V.
    pub(crate) pstate: Pstate,
    /// The one of SP_EL0 and SP_EL1 that PSTATE does not select.
    pub(crate) other_sp: u64,
    /// The system registers that the processor holds.
    pub(crate) system: Values,
    /// The debugger outside of the guest, if there is one. Call [`Cpu::forget_pages`](crate::Cpu::forget_pages) after a
    /// change.
    pub debugger: Option<Box<Debugger>>,
    /// The local monitor of exclusive accesses.
    pub exclusive: Option<Exclusive>,
}

impl Default for State {
    /// Returns the initial state of a program at EL0, with the rights that Linux gives to programs.
    fn default() -> Self {
        let mut system = Values::reset();
        let permissions = SCTLR_DZE | SCTLR_UCT | SCTLR_UCI | SCTLR_NTWI | SCTLR_NTWE;
        system.set(SCTLR, system.get(SCTLR) | permissions);
        system.set(CPACR, 3 << CPACR_FPEN_SHIFT);
        Self {
            x: [0; 31],
            sp: 0,
            pc: 0,
            flags: [false; 4],
            v: [0; 32],
            fpcr: 0,
            fpsr: 0,
            pstate: Pstate::default(),
            other_sp: 0,
            system,
            debugger: None,
            exclusive: None,
        }
    }
}

impl State {
    /// Returns the state after reset: EL1 with its own stack pointer. All interrupts are masked.
    pub fn reset() -> Self {
        let pstate = Pstate {
            el1: true,
            own_stack: true,
            daif: 15,
            ..Pstate::default()
        };
        Self {
            pstate,
            system: Values::reset(),
            ..Self::default()
        }
    }

    /// Returns PSTATE without the flags N, Z, C, V.
    pub fn pstate(&self) -> Pstate {
        self.pstate
    }

    /// Changes PSTATE. If the new PSTATE selects the other stack pointer, exchanges `sp` and `other_sp`.
    pub fn set_pstate(&mut self, pstate: Pstate) {
        let is_own = |pstate: Pstate| pstate.el1 && pstate.own_stack;
        if is_own(self.pstate) != is_own(pstate) {
            core::mem::swap(&mut self.sp, &mut self.other_sp);
        }
        self.pstate = pstate;
    }

    /// Returns SP_EL1 if `el1`, else SP_EL0.
    pub fn stack_pointer(&self, el1: bool) -> u64 {
        match el1 == self.uses_own_stack() {
            true => self.sp,
            false => self.other_sp,
        }
    }

    /// Sets SP_EL1 if `el1`, else SP_EL0.
    pub fn set_stack_pointer(&mut self, el1: bool, value: u64) {
        match el1 == self.uses_own_stack() {
            true => self.sp = value,
            false => self.other_sp = value,
        }
    }

    /// Whether PSTATE selects SP_EL1 as the stack pointer.
    fn uses_own_stack(&self) -> bool {
        self.pstate.el1 && self.pstate.own_stack
    }

    /// Sets the bits of FPCR that exist.
    pub fn set_fpcr(&mut self, value: u32) {
        self.fpcr = value & FPCR_WRITABLE;
    }

    /// Sets the bits of FPSR that exist.
    pub fn set_fpsr(&mut self, value: u32) {
        self.fpsr = value & FPSR_WRITABLE;
    }

    /// Returns a system register, or `None` if the processor does not hold it.
    pub fn system(&self, name: SystemName) -> Option<u64> {
        find(name).map(|row| self.system.get(row))
    }

    /// Sets the writable bits of a system register. Returns whether the processor holds the register.
    pub fn set_system(&mut self, name: SystemName, value: u64) -> bool {
        let Some(row) = find(name) else { return false };
        self.system.write(row, value);
        true
    }

    /// Sets an identification register, which the guest cannot write. This does not change how the processor behaves.
    /// Returns whether the processor holds such a register.
    pub fn identify(&mut self, name: SystemName, value: u64) -> bool {
        let Some(row) = find(name).filter(|row| row.register().writable == 0) else {
            return false;
        };
        self.system.set(row, value);
        true
    }

    /// Returns N, Z, C, V in bits 31 to 28.
    pub fn nzcv(&self) -> u32 {
        let bits = self
            .flags
            .iter()
            .fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        bits << NZCV_SHIFT
    }

    /// Sets N, Z, C, V from bits 31 to 28.
    pub fn set_nzcv(&mut self, value: u32) {
        self.flags = core::array::from_fn(|i| value >> (31 - i) & 1 != 0);
    }
}
