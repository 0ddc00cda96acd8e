//! A debugger outside of the guest.

use crate::registers::{BREAKPOINTS, WATCHPOINTS};

/// The breakpoints, watchpoints and single steps of a debugger outside of the guest.
///
/// While a processor has a debugger, the guest's own breakpoints, watchpoints and software step have no effect. The
/// guest still reads and writes its debug registers. Debug exceptions and BRK end the run
/// ([`Leave::Debug`](crate::Leave::Debug)) at EL0 and EL1, even if PSTATE masks debug exceptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Debugger {
    /// Whether a run ends after each instruction, and after each exception that the guest takes.
    steps: bool,
    breakpoints: [[u64; 2]; BREAKPOINTS],
    watchpoints: [[u64; 2]; WATCHPOINTS],
    /// The single-stepped instruction was executed; the step's exception is next.
    pub(crate) is_due: bool,
}

impl Debugger {
    /// Makes a debugger from the values and the controls of its breakpoints and watchpoints, which have the formats of
    /// DBGBVR, DBGBCR, DBGWVR and DBGWCR. `steps`: whether a run ends after each instruction.
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

    /// Whether a run ends after each instruction.
    pub(crate) fn steps(&self) -> bool {
        self.steps
    }

    /// Marks the step's exception as next, if this debugger steps.
    pub(crate) fn end_step(&mut self) {
        self.is_due = self.steps;
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
