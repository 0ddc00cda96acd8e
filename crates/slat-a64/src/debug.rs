//! Self-hosted debug: software step, breakpoints and watchpoints (DDI 0487, D2).

use crate::abort::{Abort, Right, status};
use crate::bits::sign_extend;
use crate::pstate::{MASK_DEBUG, Pstate};
use crate::registers::{
    BREAKPOINTS, CONTEXT_BREAKPOINTS, CONTEXTIDR, MDSCR, MDSCR_KDE, MDSCR_MDE, MDSCR_SS, OSLSR,
    OSLSR_LOCKED, Row, WATCHPOINTS,
};
use crate::state::State;

/// Fields of DBGBCR_EL1 and DBGWCR_EL1: E; the exception levels (PMC, PAC); SSC; the linked breakpoint; the type.
const ENABLED: u64 = 1 << 0;
const FOR_EL1: u64 = 1 << 1;
const FOR_EL0: u64 = 1 << 2;
const SSC_SHIFT: u32 = 14;
/// SSC: in Secure state alone, in which this processor never is.
const SECURE_ALONE: u64 = 2;
const LINKED_SHIFT: u32 = 16;
const TYPE_SHIFT: u32 = 20;
/// The types of breakpoints that exist: of an address, or of CONTEXTIDR_EL1, alone or linked.
const ADDRESS: u64 = 0;
const LINKED_ADDRESS: u64 = 1;
const CONTEXT: u64 = 2;
const LINKED_CONTEXT: u64 = 3;
/// DBGWCR_EL1: loads, stores, the watched bytes, WT, and the number of ignored bits.
const LOADS: u64 = 1 << 3;
const STORES: u64 = 1 << 4;
const BAS_SHIFT: u32 = 5;
const LINKED: u64 = 1 << 20;
const MASK_SHIFT: u32 = 24;
/// The number of bits that addresses in debug registers have.
const ADDRESS_BITS: u32 = 49;

/// Returns the address that debug registers hold for an address: without the upper bits, which they do not have.
fn comparable(address: u64) -> u64 {
    sign_extend(address, ADDRESS_BITS)
}

/// An access that watchpoints look at.
#[derive(Clone, Copy)]
pub(crate) struct Watched {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) right: Right,
    /// The access reads, and writes.
    pub(crate) is_atomic: bool,
    /// The access has the rights of EL0.
    pub(crate) for_el0: bool,
}

impl State {
    /// Whether debug exceptions are generated at a level with this mask (AArch64.GenerateDebugExceptionsFrom). From a
    /// lower level than the one that takes them, they always are. The lock is the guest's, and does not stop a
    /// debugger.
    fn debugs_in(&self, pstate: Pstate) -> bool {
        let has_kernel = self.system.get(MDSCR) & MDSCR_KDE != 0;
        let is_masked = pstate.daif & MASK_DEBUG != 0;
        let is_locked = self.system.get(OSLSR) & OSLSR_LOCKED != 0;
        self.debugger.is_some() || !is_locked && (!pstate.el1 || has_kernel && !is_masked)
    }

    /// Whether breakpoints and watchpoints are in use.
    fn monitors(&self) -> bool {
        self.debugger.is_some() || self.system.get(MDSCR) & MDSCR_MDE != 0
    }

    /// Returns the value and the control of a breakpoint, which is the debugger's or the guest's.
    fn breakpoint(&self, n: usize) -> [u64; 2] {
        match &self.debugger {
            Some(debugger) => debugger.breakpoint(n),
            None => Row::breakpoint(n).map(|row| self.system.get(row)),
        }
    }

    /// Like [`breakpoint`](Self::breakpoint), for a watchpoint.
    fn watchpoint_registers(&self, n: usize) -> [u64; 2] {
        match &self.debugger {
            Some(debugger) => debugger.watchpoint(n),
            None => Row::watchpoint(n).map(|row| self.system.get(row)),
        }
    }

    /// Whether software step, breakpoints or watchpoints are in use at all.
    #[inline(always)]
    pub(crate) fn may_debug(&self) -> bool {
        self.debugger.is_some() || self.system.get(MDSCR) & (MDSCR_SS | MDSCR_MDE) != 0
    }

    /// Whether software step is active. [`is_step_due`](Self::is_step_due) says whether an instruction is executed
    /// before its exception.
    pub(crate) fn steps(&self) -> bool {
        match &self.debugger {
            Some(debugger) => debugger.steps(),
            None => self.system.get(MDSCR) & MDSCR_SS != 0 && self.debugs_in(self.pstate),
        }
    }

    /// Returns PSTATE.SS after a return from an exception to `to`, from SPSR_EL1.SS (DebugExceptionReturnSS).
    pub(crate) fn returned_step(&self, to: Pstate, is_set: bool) -> bool {
        is_set
            && self.system.get(MDSCR) & MDSCR_SS != 0
            && !self.debugs_in(self.pstate)
            && self.debugs_in(to)
    }

    /// Whether the fields about level and security state match (AArch64.StateMatch).
    fn matches_state(&self, control: u64, for_el0: bool) -> bool {
        let who = if for_el0 { FOR_EL0 } else { FOR_EL1 };
        control & ENABLED != 0 && control & who != 0 && control >> SSC_SHIFT & 3 != SECURE_ALONE
    }

    /// Whether a breakpoint is one of contexts, and its context is the current one.
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

    /// Whether a watchpoint may match some access, now or at another level.
    pub(crate) fn watches(&self) -> bool {
        self.monitors() && (0..WATCHPOINTS).any(|n| self.watchpoint_registers(n)[1] & ENABLED != 0)
    }

    /// Returns the exception of an access that a watchpoint matches.
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

    /// Call after an instruction or an exception: if it was the step of software step, the step's exception is next.
    pub(crate) fn end_step(&mut self) {
        match &mut self.debugger {
            Some(debugger) => debugger.end_step(),
            None => self.pstate.ss = false,
        }
    }

    /// Whether the exception of software step, which is active, is next.
    pub(crate) fn is_step_due(&self) -> bool {
        match &self.debugger {
            Some(debugger) => debugger.is_due,
            None => !self.pstate.ss,
        }
    }

    /// Call before a debug exception. Returns whether the debugger takes the exception. Then the next step begins.
    pub(crate) fn leaves_to_debugger(&mut self) -> bool {
        match &mut self.debugger {
            Some(debugger) => {
                debugger.is_due = false;
                true
            }
            None => false,
        }
    }

    /// Goes on after the instruction at the program counter, which the embedder has carried out.
    pub fn skip(&mut self) {
        self.pc = self.pc.wrapping_add(4);
        self.end_step();
    }
}

/// Returns the address of the first byte of an access that a watchpoint watches.
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
            // The bytes are those of the doubleword, or of the upper word if the address is in the upper word.
            let is_upper = value & 4 != 0;
            let select = control >> BAS_SHIFT & if is_upper { 0xf } else { 0xff };
            let start = value & !3;
            let offset = at.wrapping_sub(start);
            offset < 8 && select >> offset & 1 != 0
        })
}
