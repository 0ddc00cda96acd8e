//! The machine around a CPU. It has no value, because there is no CPU yet.

use crate::arch::aarch64::cpu::Executor;
use crate::engine::EngineVcpu;

/// The greatest number of addresses in a stack.
pub(crate) const MOST_FRAMES: usize = 1;

/// The parts of a vCPU besides its registers.
pub(crate) enum VcpuMachine {}

impl AsMut<EngineVcpu> for VcpuMachine {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        match *self {}
    }
}

impl VcpuMachine {
    /// Call when a run begins, or continues after a wait.
    pub(crate) fn begin_to_run(&mut self) {
        match *self {}
    }

    /// Call when a run ends, or waits.
    pub(crate) fn stop_running(&mut self) {
        match *self {}
    }

    /// Call before guest code is executed.
    pub(crate) fn begin_execution(&mut self) {
        match *self {}
    }

    /// Writes the pages of paravirtual clocks.
    pub(crate) fn write_clocks(&mut self) {
        match *self {}
    }

    /// Handles the timers that have expired.
    pub(crate) fn timer_rang(&mut self) {
        match *self {}
    }

    /// Compares shadow tables with the guest's tables.
    pub(crate) fn flush_shadowed(&mut self) -> bool {
        match *self {}
    }

    /// Drops the translations that the machine keeps.
    pub(crate) fn forget_pages(&mut self) {
        match *self {}
    }

    /// Reads guest-physical memory.
    pub(crate) fn read_here(&mut self, _gpa: u64, _bytes: &mut [u8]) -> bool {
        match *self {}
    }

    /// Writes guest-physical memory.
    pub(crate) fn write_here(&mut self, _gpa: u64, _bytes: &[u8]) -> bool {
        match *self {}
    }

    /// Translates a virtual address as a load would.
    pub(crate) fn translate_for_client(&mut self, _: &Executor, _gva: u64) -> Option<u64> {
        match *self {}
    }

    /// Writes the addresses of the guest's stack to `stack`.
    pub(crate) fn stack(&self, _: &Executor, _stack: &mut [u64; MOST_FRAMES]) -> usize {
        match *self {}
    }
}
