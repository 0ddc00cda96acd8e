//! Self-hosted debug: software step, breakpoints and watchpoints (DDI 0487, D2).

use crate::abort::{Abort, Right, status};
use crate::bits::sign_extend;
use crate::pstate::{MASK_DEBUG, Pstate};
use crate::registers::{
    BREAKPOINTS, CONTEXT_BREAKPOINTS, CONTEXTIDR, MDSCR, MDSCR_KDE, MDSCR_MDE, MDSCR_SS, OSLSR,
    OSLSR_LOCKED, Row, WATCHPOINTS,
};
use crate::state::State;

/// Fields of DBGBCR_EL1 and DBGWCR_EL1, in this order: E; the exception levels (PMC, PAC); SSC; the linked breakpoint
/// (LBN); the type (BT).
const ENABLED: u64 = 1 << 0;
const FOR_EL1: u64 = 1 << 1;
const FOR_EL0: u64 = 1 << 2;
const SSC_SHIFT: u32 = 14;
/// SSC: match in Secure state only. This processor is never in Secure state.
const SECURE_ALONE: u64 = 2;
const LINKED_SHIFT: u32 = 16;
const TYPE_SHIFT: u32 = 20;
/// The supported breakpoint types: of an address, or of CONTEXTIDR_EL1, each unlinked or linked.
const ADDRESS: u64 = 0;
const LINKED_ADDRESS: u64 = 1;
const CONTEXT: u64 = 2;
const LINKED_CONTEXT: u64 = 3;
/// Fields of DBGWCR_EL1, in this order: loads, stores (LSC), the watched bytes (BAS), WT, and the number of ignored
/// address bits (MASK).
const LOADS: u64 = 1 << 3;
const STORES: u64 = 1 << 4;
const BAS_SHIFT: u32 = 5;
const LINKED: u64 = 1 << 20;
const MASK_SHIFT: u32 = 24;
/// The number of bits that addresses in debug registers have.
const ADDRESS_BITS: u32 = 49;

/// Returns `address` as a debug register would hold it: sign-extended from its 49 bits.
fn comparable(address: u64) -> u64 {
    sign_extend(address, ADDRESS_BITS)
}

/// An access to compare with the watchpoints.
#[derive(Clone, Copy)]
pub(crate) struct Watched {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) right: Right,
    /// The access reads and writes, as one atomic operation.
    pub(crate) is_atomic: bool,
    /// Whether the access is made with the rights of EL0.
    pub(crate) for_el0: bool,
}

impl State {
    /// Whether debug exceptions are generated in state `pstate` (AArch64.GenerateDebugExceptionsFrom). They always are
    /// at EL0, and at EL1 only if MDSCR_EL1.KDE is set and PSTATE.D is clear. The OS lock stops the guest's debug
    /// exceptions, but not those of a debugger outside of the guest.
    fn debugs_in(&self, pstate: Pstate) -> bool {
        let has_kernel = self.system.get(MDSCR) & MDSCR_KDE != 0;
        let is_masked = pstate.daif & MASK_DEBUG != 0;
        let is_locked = self.system.get(OSLSR) & OSLSR_LOCKED != 0;
        self.debugger.is_some() || !is_locked && (!pstate.el1 || has_kernel && !is_masked)
    }

    /// Whether breakpoints and watchpoints are enabled.
    fn monitors(&self) -> bool {
        self.debugger.is_some() || self.system.get(MDSCR) & MDSCR_MDE != 0
    }

    /// Returns the value and the control of breakpoint `n`: the debugger's if there is one, else the guest's.
    fn breakpoint(&self, n: usize) -> [u64; 2] {
        match &self.debugger {
            Some(debugger) => debugger.breakpoint(n),
            None => Row::breakpoint(n).map(|row| self.system.get(row)),
        }
    }

    /// Returns the value and the control of watchpoint `n`: the debugger's if there is one, else the guest's.
    fn watchpoint_registers(&self, n: usize) -> [u64; 2] {
        match &self.debugger {
            Some(debugger) => debugger.watchpoint(n),
            None => Row::watchpoint(n).map(|row| self.system.get(row)),
        }
    }

    /// Whether software step, breakpoints or watchpoints are enabled.
    #[inline(always)]
    pub(crate) fn may_debug(&self) -> bool {
        self.debugger.is_some() || self.system.get(MDSCR) & (MDSCR_SS | MDSCR_MDE) != 0
    }

    /// Whether software step is active. Then [`is_step_due`](Self::is_step_due) says whether its exception is next, or
    /// an instruction.
    pub(crate) fn steps(&self) -> bool {
        match &self.debugger {
            Some(debugger) => debugger.steps(),
            None => self.system.get(MDSCR) & MDSCR_SS != 0 && self.debugs_in(self.pstate),
        }
    }

    /// Returns PSTATE.SS after an exception return to `to`; `is_set` is SPSR_EL1.SS (DebugExceptionReturnSS).
    pub(crate) fn returned_step(&self, to: Pstate, is_set: bool) -> bool {
        is_set
            && self.system.get(MDSCR) & MDSCR_SS != 0
            && !self.debugs_in(self.pstate)
            && self.debugs_in(to)
    }

    /// Whether the exception level and security fields of `control` match (AArch64.StateMatch).
    fn matches_state(&self, control: u64, for_el0: bool) -> bool {
        let who = if for_el0 { FOR_EL0 } else { FOR_EL1 };
        control & ENABLED != 0 && control & who != 0 && control >> SSC_SHIFT & 3 != SECURE_ALONE
    }

    /// Whether breakpoint `n` is an enabled context breakpoint of type `kind`, and its value equals CONTEXTIDR_EL1.
    fn matches_context(&self, n: usize, kind: u64) -> bool {
        if !(BREAKPOINTS - CONTEXT_BREAKPOINTS..BREAKPOINTS).contains(&n) {
            return false;
        }
        let [value, control] = self.breakpoint(n);
        control & ENABLED != 0
            && control >> TYPE_SHIFT & 15 == kind
            && value as u32 == self.system.get(CONTEXTIDR) as u32
    }

    /// Whether a breakpoint matches the instruction at the program counter.
    pub(crate) fn is_at_breakpoint(&self) -> bool {
        if !self.monitors() || !self.debugs_in(self.pstate) {
            return false;
        }
        (0..BREAKPOINTS).any(|n| {
            let [value, control] = self.breakpoint(n);
            let linked = (control >> LINKED_SHIFT & 15) as usize;
            let is_here = comparable(value) == comparable(self.pc);
            self.matches_state(control, !self.pstate.el1)
                && match control >> TYPE_SHIFT & 15 {
                    ADDRESS => is_here,
                    LINKED_ADDRESS => is_here && self.matches_context(linked, LINKED_CONTEXT),
                    CONTEXT => self.matches_context(n, CONTEXT),
                    _ => false,
                }
        })
    }

    /// Whether any watchpoint is enabled, even if no access at the current exception level can match it.
    pub(crate) fn watches(&self) -> bool {
        self.monitors() && (0..WATCHPOINTS).any(|n| self.watchpoint_registers(n)[1] & ENABLED != 0)
    }

    /// Returns the abort to raise if `access` matches a watchpoint.
    pub(crate) fn watchpoint(&self, access: &Watched) -> Option<Abort> {
        if !self.watches() || !self.debugs_in(self.pstate) {
            return None;
        }
        (0..WATCHPOINTS).find_map(|n| {
            let [value, control] = self.watchpoint_registers(n);
            let kinds = match (access.right, access.is_atomic) {
                (_, true) => LOADS | STORES,
                (Right::Write, _) => STORES,
                _ => LOADS,
            };
            let linked = (control >> LINKED_SHIFT & 15) as usize;
            let is_linked = control & LINKED != 0;
            if control & kinds == 0
                || !self.matches_state(control, access.for_el0)
                || (is_linked && !self.matches_context(linked, LINKED_CONTEXT))
            {
                return None;
            }
            let address = watched_bytes(value, control, access)?;
            Some(Abort {
                address,
                status: status::DEBUG,
                is_write: control & kinds & LOADS == 0,
                is_maintenance: false,
            })
        })
    }

    /// Call after an instruction or an exception. If software step is active, its exception is next.
    pub(crate) fn end_step(&mut self) {
        match &mut self.debugger {
            Some(debugger) => debugger.end_step(),
            None => self.pstate.ss = false,
        }
    }

    /// Whether software step's exception is next. Call only if software step is active.
    pub(crate) fn is_step_due(&self) -> bool {
        match &self.debugger {
            Some(debugger) => debugger.is_due,
            None => !self.pstate.ss,
        }
    }

    /// Call before a debug exception. Returns whether a debugger outside of the guest takes it; then the next step
    /// begins.
    pub(crate) fn leaves_to_debugger(&mut self) -> bool {
        match &mut self.debugger {
            Some(debugger) => {
                debugger.is_due = false;
                true
            }
            None => false,
        }
    }

    /// Skips the instruction at the program counter. Call after the embedder has carried out the instruction.
    pub fn skip(&mut self) {
        self.pc = self.pc.wrapping_add(4);
        self.end_step();
    }
}

/// Returns the address of the first byte of `access` that the watchpoint watches.
fn watched_bytes(value: u64, control: u64, access: &Watched) -> Option<u64> {
    let value = comparable(value);
    let mask = (control >> MASK_SHIFT & 31) as u32;
    (0..access.bytes)
        .map(|n| access.address.wrapping_add(n))
        .find(|at| {
            let at = comparable(*at);
            if mask >= 3 {
                return (at ^ value) >> mask == 0;
            }
            // BAS selects bytes of the doubleword at `value`; if bit 2 of `value` is set, of the word at `value` alone.
            let is_upper = value & 4 != 0;
            let select = control >> BAS_SHIFT & if is_upper { 0xf } else { 0xff };
            let start = value & !3;
            let offset = at.wrapping_sub(start);
            offset < 8 && select >> offset & 1 != 0
        })
}
