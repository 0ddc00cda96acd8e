//! A debugger outside of the guest.

use crate::registers::{BREAKPOINTS, WATCHPOINTS};
use crate::state::State;

/// The breakpoints, watchpoints and steps of a debugger outside of the guest.
///
/// While a processor has a debugger, the guest's own breakpoints, watchpoints and software step have no effect. The
/// guest reads and writes its debug registers as before. Debug exceptions and BRK leave the run
/// ([`Leave::Debug`](crate::Leave::Debug)), at both levels, whatever PSTATE masks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Debugger {
    /// Whether a run leaves after each instruction, and after each exception that the guest takes.
    steps: bool,
    breakpoints: [[u64; 2]; BREAKPOINTS],
    watchpoints: [[u64; 2]; WATCHPOINTS],
    /// The step's exception is next: the instruction of the step is done.
    is_due: bool,
}

impl Debugger {
    /// Makes a debugger from the values and the controls of its breakpoints and watchpoints, which have the formats of
    /// DBGBVR, DBGBCR, DBGWVR and DBGWCR. `steps`: a run leaves after each instruction.
    pub fn new(
        steps: bool,
        breakpoints: [[u64; 2]; BREAKPOINTS],
        watchpoints: [[u64; 2]; WATCHPOINTS],
    ) -> Self {
        Debugger {
            steps,
            breakpoints,
            watchpoints,
            is_due: false,
        }
    }

    /// Whether a run leaves after each instruction.
    pub(crate) fn steps(&self) -> bool {
        self.steps
    }

    /// Returns the value and the control of a breakpoint.
    pub(crate) fn breakpoint(&self, n: usize) -> [u64; 2] {
        self.breakpoints[n]
    }

    /// Returns the value and the control of a watchpoint.
    pub(crate) fn watchpoint(&self, n: usize) -> [u64; 2] {
        self.watchpoints[n]
    }
}

impl State {
    /// Call after an instruction or an exception: if it was the step of software step, the step's exception is next.
    pub(crate) fn end_step(&mut self) {
        match &mut self.debugger {
            Some(debugger) => debugger.is_due = debugger.steps,
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
