//! Locked accesses that cross a cache line: for these, a processor locks the bus (SDM volume 3, "Bus Locking").

use crate::machine::{BusLocks, Exit};

/// The CPU's setting for bus locks, and the bus locks that have happened.
#[derive(Default)]
pub(crate) struct BusLock {
    pub(crate) when: BusLocks,
    /// Whether the last instruction has locked the bus. If so, the run ends.
    locked: bool,
    /// Whether the next bus lock does not end the run, because the last run has ended before this instruction.
    passes: bool,
    /// RIP of the instruction before which the last run ended, because the instruction would lock the bus.
    rip: Option<u64>,
}

impl BusLock {
    /// Call when a run begins at `rip`.
    pub(crate) fn begin_run(&mut self, rip: u64) {
        self.passes = self.rip.take() == Some(rip);
    }

    /// Call at the end of a run. The run began at the address `began`, and ended at `rip` with the exit `exit`.
    pub(crate) fn end_run(&mut self, began: u64, rip: u64, exit: &Exit) {
        if *exit == Exit::BusLock && self.when == BusLocks::ExitBefore {
            self.rip = Some(rip);
        } else if self.passes {
            // The run ended before it reached the instruction at `rip`. So the next run may execute that instruction,
            // although the instruction locks the bus.
            self.rip = Some(began);
        }
    }

    /// Call when an instruction is about to lock the bus. Returns whether the run ends before that instruction.
    pub(crate) fn ends_run(&self) -> bool {
        self.when == BusLocks::ExitBefore && !self.passes
    }

    /// Call after an instruction has locked the bus. Returns whether this ends the run.
    pub(crate) fn note(&mut self) -> bool {
        self.passes = false;
        self.locked = self.when == BusLocks::ExitAfter;
        self.locked
    }

    /// Whether the run must end because of a bus lock.
    pub(crate) fn is_due(&self) -> bool {
        self.locked
    }

    /// Returns whether a bus lock is to be reported, like [`is_due`](Self::is_due), and clears the record of the bus
    /// lock.
    pub(crate) fn take(&mut self) -> bool {
        std::mem::take(&mut self.locked)
    }
}
