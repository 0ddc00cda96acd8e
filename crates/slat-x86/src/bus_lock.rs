//! Locked accesses that cross a cache line, for which a processor locks the bus (SDM volume 3, "Bus Locking").

use crate::machine::{BusLocks, Exit};

/// What a CPU does at bus locks, and has done.
#[derive(Default)]
pub(crate) struct BusLock {
    pub(crate) when: BusLocks,
    /// The last instruction has locked the bus, which ends the run.
    locked: bool,
    /// The next bus lock does not end the run, because it has already ended the last one.
    passes: bool,
    /// RIP of the instruction that ended the last run because it would lock the bus.
    rip: Option<u64>,
}

impl BusLock {
    /// Call when a run begins at `rip`.
    pub(crate) fn begin_run(&mut self, rip: u64) {
        self.passes = self.rip.take() == Some(rip);
    }

    /// Call when a run that began at `began` ends at `rip`, with `exit`.
    pub(crate) fn end_run(&mut self, began: u64, rip: u64, exit: &Exit) {
        if *exit == Exit::BusLock && self.when == BusLocks::ExitBefore {
            self.rip = Some(rip);
        } else if self.passes {
            // The run ended before the instruction.
            self.rip = Some(began);
        }
    }

    /// Whether the run ends before the instruction, which is about to lock the bus.
    pub(crate) fn ends_run(&self) -> bool {
        self.when == BusLocks::ExitBefore && !self.passes
    }

    /// Call after an instruction has locked the bus. Returns whether the run ends after it.
    pub(crate) fn note(&mut self) -> bool {
        self.passes = false;
        self.locked = self.when == BusLocks::ExitAfter;
        self.locked
    }

    /// Whether a bus lock has to end the run.
    pub(crate) fn is_due(&self) -> bool {
        self.locked
    }

    /// Like [`is_due`](Self::is_due), and forgets the bus lock.
    pub(crate) fn take(&mut self) -> bool {
        std::mem::take(&mut self.locked)
    }
}
