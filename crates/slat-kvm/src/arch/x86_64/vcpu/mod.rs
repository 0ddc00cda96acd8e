//! The calls of a vCPU that read and change the state of x86.
//!
//! | file | calls for |
//! |---|---|
//! | `registers` | the state of the CPU |
//! | `one_reg` | registers by id |
//! | `interrupts` | interrupts, exceptions and the local APIC |
//! | `vapic` | the task priority in guest memory |

mod interrupts;
mod one_reg;
mod registers;
mod vapic;

use crate::arch::x86_64::clock;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::state::VcpuShared;
use crate::arch::x86_64::vcpu_state::VcpuState;
use crate::engine::EngineVcpu;
use crate::errno::{Result, fail, no_memory};
use crate::vcpu::{Inner, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::*;
use slat::Shared;
use slat_irqchip::lapic::{BASE_BSP, BASE_ENABLE, DEFAULT_BASE, Lapic};
use slat_x86::Executor;
use std::sync::Arc;

impl VmObject {
    /// Creates the part of a new vCPU's x86 state that other threads use. The VM has `index` other vCPUs.
    pub(crate) fn shared_of_vcpu(&self, id: u32, index: u32) -> VcpuShared {
        let lapic = self.has_irqchip().then(|| {
            let bootstrap = self.is_bootstrap(id);
            let mut lapic = Lapic::new(id, bootstrap, self.tsc_khz().into());
            lapic.set_bus_cycle(self.arch.options.apic_bus_cycle_ns());
            if bootstrap && self.arch.quirks.has(KVM_X86_QUIRK_LINT0_REENABLED) {
                lapic.accept_external();
            }
            lapic
        });
        VcpuShared::new(index, lapic)
    }

    /// Creates the parts of a new vCPU that only one thread at a time uses: its CPU, its machine and its other x86
    /// state. Without an interrupt controller all vCPUs are runnable. With an interrupt controller, all vCPUs except
    /// the bootstrap processor wait for INIT and SIPI.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn parts_of_vcpu(
        self: &Arc<Self>,
        engine: EngineVcpu,
        common: Shared<VcpuCommon>,
    ) -> Result<(Executor, VcpuMachine, VcpuState)> {
        let bootstrap = self.is_bootstrap(common.id);
        let mut cpu = Executor::try_new(self.arch.code.clone()).map_err(no_memory)?;
        // As in KVM, the x87 state of a new vCPU is the state after FNINIT, not the state of a processor after RESET.
        cpu.state.initialize_x87();
        if let Some((compiler, compile)) = &self.arch.compiler {
            (cpu.set_compiler(compiler.clone(), *compile)).map_err(no_memory)?;
        }
        let base = DEFAULT_BASE | BASE_ENABLE | if bootstrap { BASE_BSP } else { 0 };
        let machine = VcpuMachine::new(engine, self.clone(), common, base)?;
        let waits = self.has_irqchip() && !bootstrap;
        let state = VcpuState::new(match waits {
            true => KVM_MP_STATE_UNINITIALIZED,
            false => KVM_MP_STATE_RUNNABLE,
        });
        Ok((cpu, machine, state))
    }
}

impl VcpuObject {
    /// Carries out `KVM_GET_TSC_KHZ`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn tsc_khz(&self) -> Result<u32> {
        Ok(self.lock()?.machine.tsc.khz())
    }

    /// Carries out `KVM_SET_TSC_KHZ`. `khz` 0 asks for the host's frequency.
    ///
    /// # Errors
    /// `EINVAL` for a frequency beyond KVM's own limits.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let khz = clock::frequency(khz)?;
        self.lock()?.machine.change_tsc(clock::TscChange::Khz(khz));
        Ok(())
    }

    /// Carries out `KVM_TRANSLATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn translate(&self, address: u64) -> Result<kvm_translation> {
        let mut inner = self.lock()?;
        let Inner { cpu, machine, .. } = &mut *inner;
        let found = machine.translate_for_client(cpu, address);
        Ok(kvm_translation {
            linear_address: address,
            physical_address: found.unwrap_or(u64::MAX),
            valid: u8::from(found.is_some()),
            writeable: 1,
            usermode: 0,
            pad: [0; 5],
        })
    }

    /// Carries out `KVM_ENABLE_CAP` of a vCPU: `KVM_CAP_ENFORCE_PV_FEATURE_CPUID`, `KVM_CAP_HYPERV_SYNIC`,
    /// `KVM_CAP_HYPERV_SYNIC2` and `KVM_CAP_HYPERV_ENFORCE_CPUID`.
    ///
    /// # Errors
    /// `EINVAL` for any other capability, for flags and bad arguments, and for a SynIC without a local APIC.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        let mut inner = self.lock()?;
        if cap.flags != 0 {
            return fail(libc::EINVAL);
        }
        let [argument, ..] = cap.args;
        match cap.cap {
            KVM_CAP_ENFORCE_PV_FEATURE_CPUID => {
                inner.machine.enforces_pv_features = argument != 0;
            }
            KVM_CAP_HYPERV_ENFORCE_CPUID => inner.machine.hyperv.enforces_cpuid = argument != 0,
            KVM_CAP_HYPERV_SYNIC2 if argument != 0 => return fail(libc::EINVAL),
            KVM_CAP_HYPERV_SYNIC | KVM_CAP_HYPERV_SYNIC2 if self.common().has_lapic() => {
                (self.common().arch.vp).activate_synic(cap.cap == KVM_CAP_HYPERV_SYNIC);
            }
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// Carries out `KVM_KVMCLOCK_CTRL`: tells the guest that it was paused.
    ///
    /// # Errors
    /// `EINVAL` when the guest does not use the clock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        let mut inner = self.lock()?;
        if inner.machine.mark_guest_paused() {
            Ok(())
        } else {
            fail(libc::EINVAL)
        }
    }
}

impl Inner {
    /// Gives a new vCPU the state that a client expects of a new vCPU.
    pub(crate) fn begin_life(&mut self) {
        // As in KVM, a guest has no CPUID leaves, and so no optional features, until the client sets them.
        self.adopt_cpuid(Vec::new());
    }

    /// Whether the last exit's instruction is not finished yet, or has an effect that the client has not seen.
    pub(crate) fn is_unfinished(&self) -> bool {
        let machine = &self.machine;
        self.cpu.is_unfinished() || machine.ioapic_eoi.is_some() || machine.hyperv.exit.is_some()
    }

    /// Drops all translations that the CPU and its machine have cached.
    pub(crate) fn flush_translations(&mut self) {
        self.cpu.flush_tlb();
        self.machine.forget_pages();
    }

    /// Copies CR8 to the APIC's task priority. On a processor, both names refer to the same register. In slat, the
    /// CPU's copy is current while the vCPU runs.
    pub(crate) fn sync_cr8_to_lapic(&mut self) {
        if let Some(mut lapic) = self.machine.common.lapic()
            && lapic.cr8() != self.cpu.state.cr8
        {
            lapic.set_cr8(self.cpu.state.cr8);
        }
    }

    /// Copies the APIC's task priority to CR8. Call after the APIC's register was written.
    pub(crate) fn sync_cr8_from_lapic(&mut self) {
        if let Some(lapic) = self.machine.common.lapic() {
            self.cpu.state.cr8 = lapic.cr8();
        }
    }
}
