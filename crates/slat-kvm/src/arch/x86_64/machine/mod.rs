//! The machine around one software CPU: CPUID, MSRs and time. Address translation is in module [`mmu`].

mod async_pf;
pub(crate) mod frames;
pub(crate) mod hypercall;
pub(crate) mod hyperv;
mod kvmclock;
mod mmu;
pub(crate) mod msrs;
mod nested_paging;
mod peek;
mod pv_eoi;
mod services;
mod smm;
mod speculation;
mod steal_time;

pub(crate) use frames::MOST as MOST_FRAMES;

use crate::arch::x86_64::clock::{Tsc, TscChange};
use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::exit::ClientCall;
use crate::arch::x86_64::hyperv::VcpuHyperv;
use crate::arch::x86_64::limits::ORDINARY;
use crate::arch::x86_64::msr::index;
use crate::arch::x86_64::msr::mce::MachineCheck;
use crate::arch::x86_64::msr::stored::Stored;
use crate::arch::x86_64::table_cache::TableCache;
use crate::engine::EngineVcpu;
use crate::entered::thread_id;
use crate::errno::Result;
use crate::guest_memory::GuestMemory;
use crate::thread::bits;
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::kvm_cpuid_entry2;
use slat::{MmuKind, Shared};
use slat_irqchip::lapic::{self, BASE_X2APIC, Effect, Lapic};
use slat_trace::{Eoi, point};
use slat_x86::MsrFault;
use std::sync::{Arc, MutexGuard};
use steal_time::Steal;

/// The parts of a vCPU besides its registers.
pub(crate) struct VcpuMachine {
    /// The engine's vCPU, and the last translations of guest-physical pages.
    pub(crate) memory: GuestMemory,
    pub(crate) vm: Arc<VmObject>,
    pub(crate) common: Shared<VcpuCommon>,
    pub(crate) tables: TableCache,
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    /// The width of guest-physical addresses, according to the guest's CPUID.
    pub(crate) physical_bits: u32,
    msrs: Stored,
    pub(crate) mce: MachineCheck,
    pub(crate) hyperv: VcpuHyperv,
    /// The hypercall that the client has to carry out. The CPU has stopped because of this hypercall.
    pub(crate) client_call: Option<ClientCall>,
    steal: Steal,
    /// The guest-physical address of the word in which the guest keeps its task priority (`KVM_SET_VAPIC_ADDR`).
    pub(crate) vapic: Option<u64>,
    /// Whether the guest may end the interrupt in service by clearing a bit in its memory.
    pub(crate) pv_eoi_offered: bool,
    /// Whether the guest must still get the asynchronous page fault event "all pages are ready", which wakes all tasks
    /// that wait for pages.
    pages_are_ready: bool,
    pub(crate) tsc: Tsc,
    /// The number of this vCPU in the VM's clock.
    clock_number: usize,
    /// APIC_BASE of a vCPU without local APIC.
    base: u64,
    clock_changed: bool,
    /// The value of [`VmClock::changes`](crate::arch::x86_64::clock::VmClock::changes) when the page of the clock was
    /// written.
    clock_set: u64,
    /// The host's TSC at which the clock's page has to be written again. `None`: the page stays valid.
    clock_due: Option<u64>,
    guest_paused: bool,
    wall_clock_wanted: bool,
    /// Whether the guest has only the paravirtual features that its CPUID names (`KVM_CAP_ENFORCE_PV_FEATURE_CPUID`).
    pub(crate) enforces_pv_features: bool,
    /// The vector whose EOI exits to the client (`KVM_EXIT_IOAPIC_EOI`) before the guest continues.
    pub(crate) ioapic_eoi: Option<u8>,
    /// The address space that the engine's vCPU uses.
    space: usize,
    /// Whether the engine's VM uses the shadow MMU.
    shadows: bool,
    /// Whether the engine shadows the nested tables of a guest that is a hypervisor.
    shadows_nested: bool,
    /// Whether the client has set the registers. Then the client may also have restored guest memory, so the shadow MMU
    /// has to compare its shadow tables with the guest's tables.
    pub(crate) memory_restored: bool,
}

impl Drop for VcpuMachine {
    fn drop(&mut self) {
        // In a forked child the clock's lock may be held forever.
        if !self.vm.is_foreign() && self.vm.arch.clock.forget_vcpu(self.clock_number) {
            self.vm.clock_pages_changed();
        }
    }
}

impl VcpuMachine {
    /// Creates the machine around a vCPU.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(
        engine: EngineVcpu,
        vm: Arc<VmObject>,
        common: Shared<VcpuCommon>,
        base: u64,
    ) -> Result<Self> {
        let (tsc, clock_number, changes) = vm.arch.clock.new_tsc()?;
        if changes {
            vm.clock_pages_changed();
        }
        if let Some(mut lapic) = common.lapic() {
            lapic.set_tsc_khz(tsc.actual_khz().into());
        }
        let shadows = vm.engine.mmu() == MmuKind::Shadow;
        let shadows_nested = vm.engine.shadows_nested();
        Ok(VcpuMachine {
            memory: GuestMemory::new(engine, vm.engine.clone()),
            vm,
            common,
            tables: TableCache::default(),
            cpuid: Vec::new(),
            physical_bits: cpuid::PHYS_BITS,
            msrs: Stored::default(),
            mce: MachineCheck::default(),
            hyperv: VcpuHyperv::default(),
            client_call: None,
            steal: Steal::default(),
            vapic: None,
            pv_eoi_offered: false,
            pages_are_ready: false,
            tsc,
            clock_number,
            base,
            clock_changed: false,
            clock_set: 0,
            clock_due: None,
            guest_paused: false,
            wall_clock_wanted: false,
            enforces_pv_features: false,
            ioapic_eoi: None,
            space: ORDINARY,
            shadows,
            shadows_nested,
            memory_restored: false,
        })
    }

    /// Leaves the engine, runs `work`, which may wait, and enters again. Call only inside the engine's reader section.
    pub(crate) fn outside<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.memory.engine.leave();
        let result = work(self);
        self.memory.engine.enter_unguarded(thread_id());
        result
    }

    /// Drops the translations that the machine keeps. The CPU has its own translations, which stay.
    pub(crate) fn forget_pages(&mut self) {
        self.memory.flush();
    }

    /// Forgets the memory fault and the interruption of the last execution of guest code. Call before the next
    /// execution.
    pub(crate) fn begin_execution(&mut self) {
        self.memory.begin_execution();
    }

    /// Returns the stored value of an MSR, 0 if the MSR was never written.
    pub(crate) fn msr(&self, index: u32) -> u64 {
        self.stored(index).unwrap_or(0)
    }

    pub(crate) fn stored(&self, index: u32) -> Option<u64> {
        self.msrs.get(index)
    }

    pub(crate) fn store(&mut self, index: u32, value: u64) {
        self.msrs.set(index, value);
    }

    /// Whether the guest may use the paravirtual feature with this bit.
    pub(crate) fn has_pv_feature(&self, bit: u32) -> bool {
        let features = || cpuid::kvm_features_in(&self.cpuid);
        !self.enforces_pv_features || features() >> bit & 1 != 0
    }

    pub(crate) fn guest_tsc(&self) -> u64 {
        self.tsc.now()
    }

    /// Changes the guest's TSC. Pages of clocks that depend on this TSC are written again.
    pub(crate) fn change_tsc(&mut self, change: TscChange) {
        if (self.vm.arch.clock).change_tsc(self.clock_number, &mut self.tsc, change) {
            self.vm.clock_pages_changed();
        }
        if let Some(mut lapic) = self.common.lapic() {
            lapic.set_tsc_khz(self.tsc.actual_khz().into());
        }
        self.clock_page_changed();
    }

    /// Returns the value of the MSR APIC_BASE.
    pub(crate) fn apic_base(&self) -> u64 {
        self.common.lapic().map_or(self.base, |lapic| lapic.base())
    }

    pub(crate) fn set_apic_base(
        &mut self,
        base: u64,
        by_guest: bool,
    ) -> std::result::Result<(), MsrFault> {
        let before = self.apic_base();
        if base == before {
            return Ok(());
        }
        let beyond = base >> self.physical_bits != 0;
        let has_x2apic = || cpuid::lookup(&self.cpuid, 1, 0)[2] & cpuid::LEAF1_ECX_X2APIC != 0;
        if beyond || base & BASE_X2APIC != 0 && !has_x2apic() {
            return Err(MsrFault::Invalid);
        }
        match self.common.lapic() {
            Some(mut lapic) => lapic.set_base(base, by_guest),
            None => lapic::check_base(before, base, by_guest).map(|()| self.base = base),
        }
        .map_err(|_| MsrFault::Invalid)?;
        self.vm.interrupts.vcpus.addresses_changed();
        self.look_for_interrupts();
        Ok(())
    }

    /// Carries out INIT. Afterwards, the guest's structures for steal time, clock, PV EOI and page faults are ordinary
    /// memory.
    pub(crate) fn init(&mut self) {
        self.end_steal_time();
        self.set_kvmclock(0);
        self.store(index::KVM_PV_EOI, 0);
        self.pv_eoi_offered = false;
        self.store(index::KVM_ASYNC_PF_EN, 0);
        self.store(index::KVM_ASYNC_PF_INT, 0);
    }

    /// Carries out the effect of a write to an APIC register. Call with no local APIC locked.
    pub(crate) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Send(message) => {
                let vcpus = &self.vm.interrupts.vcpus;
                vcpus.send(Some(&self.common), &message);
            }
            Effect::Address => self.vm.interrupts.vcpus.addresses_changed(),
            Effect::Timer => {
                self.arm_timer();
                self.task_priority_changed();
            }
            Effect::Eoi(vector, level) => {
                point(|| Eoi {
                    apicid: self.common.id,
                    vector: vector.into(),
                });
                self.acknowledge_vector(vector);
                if self.vm.interrupts.end_of_interrupt(vector, level) {
                    self.ioapic_eoi = Some(vector);
                }
                // An EOI may make another interrupt deliverable.
                self.common.attention.raise(bits::IRQ);
            }
        }
    }

    /// If the APIC has an interrupt that can be delivered, makes the run loop check for interrupts.
    pub(crate) fn task_priority_changed(&self) {
        let pending = |lapic: MutexGuard<'_, Lapic>| lapic.pending().is_some();
        if self.common.lapic().is_some_and(pending) {
            self.common.attention.raise(bits::IRQ);
        }
    }

    /// Makes the run loop check for interrupts. Call when an interrupt that is pending at the APIC or an 8259 may have
    /// become deliverable.
    pub(crate) fn look_for_interrupts(&self) {
        self.common.attention.raise(bits::IRQ);
    }

    /// Handles the timers of the APIC and of Hyper-V that have expired, and sets the next deadline.
    pub(crate) fn timer_rang(&mut self) {
        if let Some(mut lapic) = self.common.lapic() {
            lapic.tick(self.vm.arch.clock.now());
        }
        self.run_timers();
        self.arm_timer();
    }

    /// Sets the ticker's deadline to the next deadline of the APIC timer and the synthetic timers.
    pub(crate) fn arm_timer(&self) {
        let apic = self.common.lapic().and_then(|lapic| lapic.deadline());
        let deadline = [apic, self.timers_deadline()].into_iter().flatten().min();
        self.common
            .client
            .set_deadline(deadline.map(|at| self.vm.arch.clock.instant(at)));
    }
}
