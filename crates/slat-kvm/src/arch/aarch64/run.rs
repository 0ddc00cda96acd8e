//! arm64's part of `KVM_RUN`: the work before and after the guest runs, and the handling of the CPU's exits.

use crate::arch::aarch64::cpu::{Exit, Refusal};
use crate::arch::aarch64::devices::Device;
use crate::arch::aarch64::firmware::{Outcome, SYSTEM_CALL_RETURNED};
use crate::arch::aarch64::guest_debug;
use crate::arch::aarch64::state::{LINE_FIQ, LINE_IRQ, Power};
use crate::arch::aarch64::trace::{calls, waits};
use crate::arch::aarch64::vcpu_state::Unfinished;
use crate::errno::{Result, fail};
use crate::exit::memory_fault;
use crate::fields::{field, set_field};
use crate::run::Next;
use crate::signals::Masked;
use crate::thread::bits;
use crate::trace;
use crate::vcpu::{Inner, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use kvm_bindings::*;
use slat::{Attention, Shared};
use slat_a64::{Invalidation, Right, Stage2, Stop, Syndrome};
use std::sync::atomic::Ordering;

/// The number of times that a vCPU which invalidates translations yields while it waits for other vCPUs to drop these
/// translations. Then it interrupts the vCPUs that have not dropped them.
const PATIENCE: u32 = 1000;

impl VcpuObject {
    /// Prepares the GIC, and completes the access that the client has carried out. Returns `false` if `KVM_RUN` has to
    /// return at once, with success.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`. The errors of
    /// [`Interrupts::make_ready`](crate::irq::Interrupts::make_ready).
    pub(crate) fn prepare(&self, inner: &mut Inner, _: Option<&Masked>) -> Result<bool> {
        inner.check_initialised()?;
        let interrupts = &self.vm.interrupts;
        interrupts.make_ready(|start, len| self.vm.place_device(start, len, Device::Gic))?;
        if !inner.has_run {
            let has_gic = interrupts.has_system_registers();
            inner.machine.settings().vcpu_runs(has_gic);
            inner.identify();
            self.common().arch.begin_to_run();
        }
        inner.machine.begin_timers();
        match std::mem::take(&mut inner.arch.unfinished) {
            Unfinished::Nothing => {}
            Unfinished::MmioRead(len) => {
                let data = field!(self.page, __bindgen_anon_1.mmio.data);
                let gpa = field!(self.page, __bindgen_anon_1.mmio.phys_addr);
                trace::mmio_read(gpa, &data[..len]);
                inner.cpu.complete_mmio_read(&data[..len]);
            }
            Unfinished::MmioWrite => inner.cpu.complete_mmio_write(),
        }
        Ok(true)
    }

    /// Does nothing: on arm64, no setting of the VM has to be copied to the CPU.
    pub(crate) fn begin_run(&self, _: &mut Inner) {}

    /// Records in the dirty ring the pages that were not recorded yet, and updates the structure for stolen time.
    /// Returns `true`: the guest may run.
    pub(crate) fn update_guest(&self, inner: &mut Inner) -> bool {
        inner.machine.log_tables();
        inner.machine.write_steal_time();
        true
    }

    /// Waits while the vCPU is off or suspended, and gives the CPU the levels of its interrupt lines. Returns `false`
    /// if the run returns to the client.
    ///
    /// # Errors
    /// `EINTR` for a signal.
    pub(crate) fn deliver_events(
        &self,
        inner: &mut Inner,
        masked: Option<&Masked>,
    ) -> Result<bool> {
        loop {
            self.accept_start(inner);
            match self.common().arch.power() {
                Power::On => break,
                // The client decides whether the vCPU runs again.
                Power::Suspended if self.is_interrupted(inner) => {
                    self.system_event(KVM_SYSTEM_EVENT_WAKEUP, None);
                    return Ok(false);
                }
                Power::Suspended => inner.machine.timer_rang(),
                Power::Off | Power::Starting(_) => {}
            }
            self.block(inner, masked)?;
        }
        let lines = self.common().arch.lines.load(Ordering::SeqCst);
        inner.cpu.pending.irq = lines & LINE_IRQ != 0;
        inner.cpu.pending.fiq = lines & LINE_FIQ != 0;
        if self.vm.interrupts.exist() {
            return Ok(true);
        }
        // The client's own interrupt controller has the timers' outputs as inputs, so the client has to see when they
        // change.
        if inner.machine.timer_levels() != field!(self.page, s.regs.device_irq_level) {
            self.page.set_exit_reason(KVM_EXIT_INTR);
            return fail(libc::EINTR);
        }
        Ok(true)
    }

    /// If another vCPU has started this vCPU, resets it. Call before the registers are used.
    pub(crate) fn accept_start(&self, inner: &mut Inner) {
        if let Some(start) = self.common().arch.take_start() {
            inner.reset(Some(start));
        }
    }

    /// Handles an exit of the CPU.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); `ENOSYS` for an access to a device by an instruction that the client cannot
    /// carry out.
    pub(crate) fn handle(
        &self,
        inner: &mut Inner,
        exit: Exit,
        masked: Option<&Masked>,
    ) -> Result<Next> {
        let page = &self.page;
        match exit {
            Exit::Attention => self.attend(inner, masked)?,
            Exit::Wfi => self.wait_for_interrupt(inner, masked)?,
            Exit::Yield => {
                self.common().exits.wfe_exit_stat.add(1);
                waits(&inner.cpu.state, true);
                inner.outside(|_| std::thread::yield_now());
            }
            // As in KVM, the immediate of HVC has no meaning, and an SMC with an immediate other than 0 calls no
            // firmware.
            Exit::Hvc(immediate) => {
                calls(&inner.cpu.state, immediate);
                return self.call(inner, 0, masked);
            }
            Exit::Smc(0) => return self.call(inner, KVM_HYPERCALL_EXIT_SMC, masked),
            Exit::Smc(_) => inner.cpu.state.x[0] = u64::MAX,
            Exit::Mmio { fault, syndrome } => return self.access_device(inner, &fault, syndrome),
            Exit::Invalidated(invalidation) => self.invalidate_others(inner, invalidation),
            Exit::Debug(debug) => {
                guest_debug::exit(page, &debug);
                return Ok(Next::Return);
            }
            Exit::BadAddress => {
                match inner.machine.take_memory_fault() {
                    Some(fault) => memory_fault(page, fault),
                    // Without a memory fault to report, `kvm_run` must not keep the fault of an earlier exit.
                    None => page.set_exit_reason(KVM_EXIT_UNKNOWN),
                }
                return fail(libc::EFAULT);
            }
            Exit::OutOfMemory => return fail(libc::ENOMEM),
            Exit::Probe(hit) => self.probe_hit(hit),
        }
        Ok(Next::Again)
    }

    /// Waits until an interrupt is pending, even if PSTATE masks it.
    fn wait_for_interrupt(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        self.common().exits.wfi_exit_stat.add(1);
        waits(&inner.cpu.state, false);
        loop {
            inner.machine.timer_rang();
            if self.is_interrupted(inner) {
                self.common().exits.halts.wakeup.add(1);
                return Ok(());
            }
            self.block(inner, masked)?;
        }
    }

    /// Whether an interrupt is pending, even if PSTATE masks it.
    fn is_interrupted(&self, inner: &Inner) -> bool {
        self.common().arch.lines.load(Ordering::SeqCst) != 0
            || inner.cpu.pending.serror.is_some()
            || self.device_irq_level(inner) != 0
    }

    /// Makes all other vCPUs drop the translations or the code that this vCPU has invalidated, and waits until none of
    /// them uses these. The guest's TLBI or IC has to have this effect before its DSB completes.
    fn invalidate_others(&self, inner: &mut Inner, invalidation: Invalidation) {
        let id = self.common().id;
        let vcpus = &self.vm.interrupts.vcpus;
        let mut has_others = false;
        for vcpu in vcpus.read().iter().filter(|vcpu| vcpu.id != id) {
            vcpu.arch.invalidated.add(invalidation);
            // A vCPU that sleeps need not be woken for this request, because it sees the request bit before it
            // executes.
            vcpu.attention.raise(bits::GUEST_FLUSH);
            has_others = true;
        }
        if !has_others {
            return;
        }
        let is_due = |attention: &Attention| {
            attention.flag().load(Ordering::SeqCst) & bits::GUEST_FLUSH != 0
        };
        inner.machine.outside(|machine| {
            for _ in 0..PATIENCE {
                // A vCPU that does not execute now sees the request bit before its next instruction.
                let is_used = |vcpu: &Shared<VcpuCommon>| {
                    vcpu.id != id && vcpu.client.is_executing() && is_due(&vcpu.attention)
                };
                if !vcpus.read().iter().any(is_used) {
                    return;
                }
                std::thread::yield_now();
            }
            // A vCPU may still be waiting in an access to memory that its client has to provide first. This call
            // interrupts such accesses.
            machine.synchronize(&is_due);
        });
    }

    /// Drops the translations and the code that other vCPUs have invalidated. Call after clearing
    /// [`bits::GUEST_FLUSH`].
    pub(crate) fn drop_invalidated(&self, inner: &mut Inner) {
        for invalidation in self.common().arch.invalidated.take().as_slice() {
            inner.cpu.invalidate(*invalidation);
        }
    }

    /// Carries out the guest's call of the firmware. `flags`: the flags of `KVM_EXIT_HYPERCALL`, if the call exits to
    /// the client.
    fn call(&self, inner: &mut Inner, flags: u32, masked: Option<&Masked>) -> Result<Next> {
        self.common().exits.hvc_exit_stat.add(1);
        let [a, b, c, d, ..] = inner.cpu.state.x;
        let page = &self.page;
        match (self.vm).call_firmware(self.common(), &mut inner.machine, [a, b, c, d]) {
            Outcome::Return(values) => inner.cpu.state.x[..4].copy_from_slice(&values),
            // The vCPU waits in the next iteration of the run loop.
            Outcome::Off => {}
            Outcome::Standby => {
                inner.cpu.state.x[0] = 0;
                self.wait_for_interrupt(inner, masked)?;
            }
            Outcome::System { kind, flags } => {
                // The client is expected to reset the vCPUs. If it lets the guest continue instead, the guest sees this
                // error.
                inner.cpu.state.x[0] = SYSTEM_CALL_RETURNED;
                self.vm.stop_vcpus();
                self.system_event(kind, Some(flags));
                return Ok(Next::Return);
            }
            Outcome::Suspend => {
                self.system_event(KVM_SYSTEM_EVENT_SUSPEND, None);
                return Ok(Next::Return);
            }
            Outcome::Forward => {
                page.set_exit_reason(KVM_EXIT_HYPERCALL);
                set_field!(page, a as u32 as u64, __bindgen_anon_1.hypercall.nr);
                set_field!(
                    page,
                    u64::from(flags),
                    __bindgen_anon_1.hypercall.__bindgen_anon_1.flags
                );
                return Ok(Next::Return);
            }
        }
        Ok(Next::Again)
    }

    /// Sets the exit `KVM_EXIT_SYSTEM_EVENT`, with or without a word of data.
    fn system_event(&self, kind: u32, word: Option<u64>) {
        let page = &self.page;
        page.set_exit_reason(KVM_EXIT_SYSTEM_EVENT);
        set_field!(page, kind, __bindgen_anon_1.system_event.type_);
        set_field!(
            page,
            word.iter().count() as u32,
            __bindgen_anon_1.system_event.ndata
        );
        let mut data = [0; 16];
        data[0] = word.unwrap_or(0);
        set_field!(
            page,
            data,
            __bindgen_anon_1.system_event.__bindgen_anon_1.data
        );
    }

    /// Carries out an access to an address without memory, or asks the client to do so.
    ///
    /// # Errors
    /// `ENOSYS` if the syndrome does not describe the instruction, so that the client cannot carry it out, and the
    /// client has not enabled `KVM_CAP_ARM_NISV_TO_USER`.
    fn access_device(
        &self,
        inner: &mut Inner,
        fault: &Stage2<Refusal>,
        syndrome: Option<Syndrome>,
    ) -> Result<Next> {
        let page = &self.page;
        let gpa = fault.ipa;
        if fault.is_fetch || fault.is_walk {
            // No device answers a fetch or a walk: devices contain neither code nor tables.
            inner.take_abort(fault);
            return Ok(Next::Again);
        }
        if fault.is_maintenance {
            inner.cpu.skip();
            return Ok(Next::Again);
        }
        let Some(syndrome) = syndrome else {
            if !self.vm.arch.reports_nisv() {
                return fail(libc::ENOSYS);
            }
            inner.arch.device_access = Some(*fault);
            page.set_exit_reason(KVM_EXIT_ARM_NISV);
            let esr = fault.esr(None, TRANSLATION_FAULT_LEVEL_1);
            set_field!(page, esr & ISS, __bindgen_anon_1.arm_nisv.esr_iss);
            set_field!(page, gpa, __bindgen_anon_1.arm_nisv.fault_ipa);
            return Ok(Next::Return);
        };
        inner.arch.device_access = Some(*fault);
        let len = 1 << syndrome.size;
        let write = fault.right == Right::Write;
        let data = match write {
            true => syndrome.stored(&inner.cpu.state).to_le_bytes(),
            false => [0; 8],
        };
        if write {
            trace::mmio_write(gpa, &data[..len]);
        }
        inner.cpu.expect(syndrome);
        if self.memory_access(inner, gpa, write, &data[..len]) {
            if write {
                inner.machine.log_tables();
                inner.cpu.complete_mmio_write();
            }
            self.common().exits.mmio_exit_kernel.add(1);
            return Ok(Next::Again);
        }
        self.common().exits.mmio_exit_user.add(1);
        page.set_exit_reason(KVM_EXIT_MMIO);
        set_field!(page, gpa, __bindgen_anon_1.mmio.phys_addr);
        set_field!(page, len as u32, __bindgen_anon_1.mmio.len);
        set_field!(page, u8::from(write), __bindgen_anon_1.mmio.is_write);
        if write {
            set_field!(page, data, __bindgen_anon_1.mmio.data);
            inner.arch.unfinished = Unfinished::MmioWrite;
        } else {
            trace::mmio_asked(gpa, len as u8);
            inner.arch.unfinished = Unfinished::MmioRead(len);
        }
        Ok(Next::Return)
    }

    /// Whether a run has to exit after a completed instruction to report it to the client. Always `false` on arm64.
    pub(crate) fn has_late_exit(&self, _: &mut Inner) -> bool {
        false
    }

    /// Stores the fields that the client reads in `kvm_run` after every run.
    pub(crate) fn publish(&self, inner: &mut Inner) {
        let levels = self.device_irq_level(inner);
        set_field!(self.page, levels, s.regs.device_irq_level);
    }

    /// Returns the outputs of the timers for the client's interrupt controller: none if the VM has a GIC.
    fn device_irq_level(&self, inner: &Inner) -> u64 {
        match self.vm.interrupts.exist() {
            true => 0,
            false => inner.machine.timer_levels(),
        }
    }
}

/// The fault status code of a translation fault at level 1, and the part of ESR_EL2 that a client sees.
const TRANSLATION_FAULT_LEVEL_1: u8 = 0b00_0101;
const ISS: u64 = (1 << 25) - 1;

impl Inner {
    /// Makes EL1 take an external abort for an access that no device has answered.
    fn take_abort(&mut self, fault: &Stage2<Refusal>) {
        let abort = fault.external();
        match fault.is_fetch {
            true => self.cpu.state.take_fetch_abort(abort),
            false => self.cpu.state.take_stop(Stop::Memory(abort)),
        }
    }

    /// Makes EL1 take an external abort for its last access to a device. If this access still waits for the client, it
    /// ends without an effect.
    pub(crate) fn take_external_abort(&mut self) {
        self.arch.unfinished = Unfinished::Nothing;
        if let Some(fault) = self.arch.device_access.take() {
            self.take_abort(&fault);
        }
    }

    /// Does nothing: on arm64, EL1 takes an exception at the moment at which the client requests it, so no exception is
    /// left for the run loop to begin.
    pub(crate) fn begin_requested(&mut self) {}

    /// Does nothing. Called before guest code runs.
    pub(crate) fn enters_guest(&mut self) {}

    /// Does nothing. Called after guest code has run.
    pub(crate) fn left_guest(&mut self) {}
}
