//! The machine around a CPU: guest memory, by the engine; the timers; and the registers that identify the processor.

mod memory;
mod registers;
mod steal_time;

use crate::arch::aarch64::cpu::Executor;
use crate::arch::aarch64::settings::Settings;
use crate::arch::aarch64::timer::{Timers, Which};
use crate::engine::EngineVcpu;
use crate::entered::{Entered, thread_id};
use crate::exit::MemoryFault;
use crate::guest_memory::GuestMemory;
use crate::steal_time::StealTime;
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use slat::{Attention, Gpa, Shared};
use slat_a64::SystemName;
use slat_host::granule;
use std::sync::{Arc, MutexGuard};

/// The greatest number of addresses in a call stack of the guest.
pub(crate) const MOST_FRAMES: usize = 64;

/// The bits of `kvm_run`'s `device_irq_level`: the outputs of the timers.
const LEVEL_VTIMER: u64 = 1 << 0;
const LEVEL_PTIMER: u64 = 1 << 1;

/// The parts of a vCPU besides its registers.
pub(crate) struct VcpuMachine {
    memory: GuestMemory,
    vm: Arc<VmObject>,
    common: Shared<VcpuCommon>,
    pub(crate) timers: Timers,
    /// CSSELR_EL1: the cache that CCSIDR_EL1 describes.
    cache_selector: u64,
    /// CLIDR_EL1: the levels of caches.
    cache_levels: u64,
    /// The registers that a client can save and restore although the guest does not have them.
    kept: Vec<(SystemName, u64)>,
    steal: StealTime,
    /// The guest-physical address of the structure for stolen time.
    stolen_time: Option<u64>,
    /// The outputs of the timers that were last passed to the GIC. `None`: unknown.
    driven: Option<u64>,
    /// The value of [`Chips::restores`](crate::arch::aarch64::chips::Chips::restores) at the time when `driven` was
    /// set.
    restores: u32,
}

impl AsMut<EngineVcpu> for VcpuMachine {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        &mut self.memory.engine
    }
}

impl VcpuMachine {
    /// Creates the machine of the engine's vCPU `engine`.
    pub(crate) fn new(engine: EngineVcpu, vm: Arc<VmObject>, common: Shared<VcpuCommon>) -> Self {
        VcpuMachine {
            memory: GuestMemory::new(engine, vm.engine.clone()),
            timers: Timers::new(vm.arch.counter_offsets.clone()),
            vm,
            common,
            cache_selector: 0,
            // No cache level exists that software has to manage.
            cache_levels: 0,
            kept: registers::kept(),
            steal: StealTime::default(),
            stolen_time: None,
            driven: None,
            restores: 0,
        }
    }

    /// Resets the machine's registers, except those that identify the processor. The outputs of the timers become
    /// inactive, and so do the GIC's lines that these outputs drive.
    pub(crate) fn reset(&mut self) {
        self.timers.reset();
        self.cache_selector = 0;
        self.kept = registers::kept();
        self.driven = None;
        self.drive_timers();
    }

    /// Returns the settings of the VM.
    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.vm.arch.settings()
    }

    /// Whether the VM has memory at a guest-physical address.
    pub(crate) fn has_memory(&self, gpa: u64) -> bool {
        let gfn = granule().gfn(Gpa(gpa));
        let slot = self.vm.engine.memslot_from(0, gfn);
        slot.is_some_and(|slot| slot.gpa.0 <= gpa)
    }

    /// Leaves the engine, runs `work`, which may wait, and enters again. Call inside the engine's reader section.
    pub(crate) fn outside<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.memory.engine.leave();
        let result = work(self);
        self.memory.engine.enter_unguarded(thread_id());
        result
    }

    /// Waits for all vCPUs for whose attention word `wanted` returns true, until each has served its requests. Call
    /// outside the engine's reader section.
    pub(crate) fn synchronize(&self, wanted: &dyn Fn(&Attention) -> bool) {
        self.vm.engine.synchronize_those(wanted);
    }

    /// Begins to count stolen time. Call when a run begins, and when it continues after a wait. Call outside the
    /// engine's reader section.
    pub(crate) fn begin_to_run(&mut self) {
        if self.stolen_time.is_some() {
            self.steal.begin();
        }
    }

    /// Stops counting stolen time. Call when a run ends, and before it waits.
    pub(crate) fn stop_running(&mut self) {
        if self.stolen_time.is_some() {
            self.steal.end();
        }
    }

    /// Forgets the memory fault and the interruption of the last execution of guest code. Call before the next
    /// execution.
    pub(crate) fn begin_execution(&mut self) {
        self.memory.begin_execution();
    }

    /// Removes and returns the memory fault that has stopped the last access, if there is one.
    pub(crate) fn take_memory_fault(&mut self) -> Option<MemoryFault> {
        self.memory.memory_fault.take()
    }

    /// Does nothing. On arm64, guests have no pages of paravirtual clocks.
    pub(crate) fn write_clocks(&mut self) {}

    /// Handles the timers that have expired, and sets the next deadline.
    pub(crate) fn timer_rang(&mut self) {
        // The deadline is computed before the outputs, so that a timer that expires between the two computations has
        // its output asserted.
        self.common.client.set_deadline(self.timers.deadline());
        self.drive_timers();
    }

    /// Passes the outputs of the timers to the GIC before a run. If the client has set a counter through another vCPU,
    /// sets the deadline again, because the timers of this vCPU then expire at another time.
    pub(crate) fn begin_timers(&mut self) {
        match self.timers.are_shifted() {
            true => self.timer_rang(),
            false => self.drive_timers(),
        }
    }

    /// If there is a GIC, passes the outputs of the timers to it. Takes no lock if no output has changed.
    pub(crate) fn drive_timers(&mut self) {
        let interrupts = &self.vm.interrupts;
        let Some(chips) = interrupts.gic() else {
            return;
        };
        if !chips.is_initialised() {
            return;
        }
        let (levels, restores) = (self.timer_levels(), chips.restores());
        if self.driven != Some(levels) || self.restores != restores {
            interrupts.drive_timers(&self.common, chips, levels);
            (self.driven, self.restores) = (Some(levels), restores);
        }
    }

    /// Returns the outputs of the timers, as bits of `device_irq_level`.
    pub(crate) fn timer_levels(&self) -> u64 {
        let level = |which, bit| if self.timers.output(which) { bit } else { 0 };
        level(Which::Virtual, LEVEL_VTIMER) | level(Which::Physical, LEVEL_PTIMER)
    }

    /// Drops the translations that the machine has cached. The CPU has cached translations of its own, which stay.
    pub(crate) fn forget_pages(&mut self) {
        self.memory.flush();
    }

    /// Translates a virtual address as a load of EL1 would.
    pub(crate) fn translate_for_client(&mut self, cpu: &Executor, gva: u64) -> Option<u64> {
        let mut entered = Entered::enter(self);
        cpu.translate(&mut *entered, gva)
    }

    /// Writes the return addresses of the guest's call stack to `stack`, and returns their number. Follows the frame
    /// records of the procedure call standard (IHI 0055): X29 has the address of a record, which holds the caller's X29
    /// and the return address.
    pub(crate) fn stack(&mut self, cpu: &Executor, stack: &mut [u64; MOST_FRAMES]) -> usize {
        let (mut frame, mut count) = (cpu.state.x[29], 1);
        stack[0] = cpu.state.pc;
        while count < MOST_FRAMES && frame != 0 && frame % 16 == 0 {
            let mut record = [0; 16];
            // A record does not cross a page, because its address is a multiple of 16.
            let Some(gpa) = cpu.translate(self, frame) else {
                break;
            };
            if !self.read_here(gpa, &mut record) {
                break;
            }
            let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| record[at + n]));
            if word(8) == 0 {
                break;
            }
            stack[count] = word(8);
            count += 1;
            // The stack grows downwards: a caller's record is at a higher address.
            if word(0) <= frame {
                break;
            }
            frame = word(0);
        }
        count
    }
}
