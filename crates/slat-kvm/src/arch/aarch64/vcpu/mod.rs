//! The calls of a vCPU that read and change the state of arm64. The file `one_reg` reads and sets registers by their
//! ids, and the file `timers` has the attributes of the timers.

mod one_reg;
mod timers;

use crate::arch::aarch64::cpu::Executor;
use crate::arch::aarch64::guest_debug;
use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::state::{Power, Start, VcpuShared};
use crate::arch::aarch64::vcpu_state::VcpuState;
use crate::engine::EngineVcpu;
use crate::errno::{Result, fail};
use crate::vcpu::{Inner, Locked, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use crate::{steal_time, user};
use kvm_bindings::*;
use slat::Shared;
use std::sync::Arc;

/// The features that a vCPU can have.
const FEATURES: u32 = 1 << KVM_ARM_VCPU_POWER_OFF | 1 << KVM_ARM_VCPU_PSCI_0_2;
/// The features that KVM for arm64 knows, including those that a processor may lack.
const KNOWN_FEATURES: u32 = (1 << (KVM_ARM_VCPU_HAS_EL2_E2H0 + 1)) - 1;

impl VmObject {
    /// Creates arm64's state of a new vCPU that other threads use.
    pub(crate) fn shared_of_vcpu(&self, id: u32, index: u32) -> VcpuShared {
        VcpuShared::new(id, index as usize)
    }

    /// Creates the CPU of a new vCPU, its machine, and the other state that only one thread at a time uses.
    ///
    /// # Errors
    /// `EBUSY` when the GIC is initialised. `EINVAL` when the GIC supports no more vCPUs, and when its frames overlap.
    pub(crate) fn parts_of_vcpu(
        self: &Arc<Self>,
        engine: EngineVcpu,
        common: Shared<VcpuCommon>,
    ) -> Result<(Executor, VcpuMachine, VcpuState)> {
        if let Some(chips) = self.interrupts.gic() {
            chips.vcpu_created(common.arch.index)?;
        }
        let machine = VcpuMachine::new(engine, self.clone(), common);
        let mut cpu = Executor::new();
        if let Some((compiler, compile)) = &self.arch.compiler {
            cpu.set_compiler(compiler.clone(), *compile);
            // SAFETY: the machine's pages are at host addresses of guest memory, as the engine has translated them, and
            // the engine's flushes make the CPU forget its pages. `slat_guard::install` was called before the first VM
            // was created.
            unsafe { cpu.access_directly() };
        }
        Ok((cpu, machine, VcpuState::default()))
    }
}

impl VcpuObject {
    /// Carries out `KVM_ARM_VCPU_INIT`: chooses the processor and its features, and resets the vCPU.
    ///
    /// # Errors
    /// `EINVAL` for another target than `KVM_ARM_PREFERRED_TARGET` returns, for a feature that the processor does not
    /// have, and for other features than the vCPU was initialised with before. `ENOENT` for an unknown feature.
    pub fn init(&self, asked: &kvm_vcpu_init) -> Result<()> {
        let mut inner = self.lock()?;
        if asked.target != KVM_ARM_TARGET_GENERIC_V8 {
            return fail(libc::EINVAL);
        }
        let [features, others @ ..] = asked.features;
        if features & !KNOWN_FEATURES != 0 || others.iter().any(|word| *word != 0) {
            return fail(libc::ENOENT);
        }
        let power_off = 1 << KVM_ARM_VCPU_POWER_OFF;
        // The client may change whether the vCPU is off after its reset, but no other feature.
        let lasting = features & !power_off;
        let differs = inner.arch.features.is_some_and(|before| before != lasting);
        if features & !FEATURES != 0 || differs {
            return fail(libc::EINVAL);
        }
        inner.arch.features = Some(lasting);
        inner.reset(None);
        self.common().arch.set_power(match features & power_off {
            0 => Power::On,
            _ => Power::Off,
        });
        Ok(())
    }

    /// Carries out `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        let _inner = self.lock()?;
        Ok(kvm_mp_state {
            mp_state: match self.common().arch.power() {
                Power::On | Power::Starting(_) => KVM_MP_STATE_RUNNABLE,
                Power::Off => KVM_MP_STATE_STOPPED,
                Power::Suspended => KVM_MP_STATE_SUSPENDED,
            },
        })
    }

    /// Carries out `KVM_SET_MP_STATE`. If another vCPU has started this vCPU, the registers are first reset for that
    /// start.
    ///
    /// # Errors
    /// `EINVAL` for any state but runnable, stopped and suspended.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<()> {
        let mut inner = self.lock()?;
        self.accept_start(&mut inner);
        self.common().arch.set_power(match state.mp_state {
            KVM_MP_STATE_RUNNABLE => Power::On,
            KVM_MP_STATE_STOPPED => Power::Off,
            KVM_MP_STATE_SUSPENDED => Power::Suspended,
            _ => return fail(libc::EINVAL),
        });
        Ok(())
    }

    /// Carries out `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        let inner = self.lock()?;
        inner.check_initialised()?;
        let mut events = kvm_vcpu_events::default();
        if let Some(syndrome) = inner.cpu.pending.serror {
            events.exception.serror_pending = 1;
            events.exception.serror_has_esr = 1;
            events.exception.serror_esr = syndrome.into();
        }
        Ok(events)
    }

    /// Carries out `KVM_SET_VCPU_EVENTS`: makes a system error pending, or lets EL1 take an external abort at the
    /// address of the last access to a device.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`. `EINVAL` for a syndrome with other bits than 0 to 24, and for reserved
    /// fields.
    pub fn set_vcpu_events(&self, events: &kvm_vcpu_events) -> Result<()> {
        /// The bits of ESR_EL1 that a system error's syndrome has: IDS, and the 24 bits below it. api.rst names only
        /// the lower ones, but KVM accepts IDS, because KVM itself shows IDS for a system error without a syndrome.
        const SYNDROME: u64 = (1 << 25) - 1;
        /// The bit IDS: the error has no syndrome with an architectural meaning.
        const NO_SYNDROME: u64 = 1 << 24;
        let mut inner = self.lock()?;
        inner.check_initialised()?;
        let exception = &events.exception;
        let has_syndrome = exception.serror_has_esr != 0;
        let bad_syndrome = has_syndrome && exception.serror_esr & !SYNDROME != 0;
        if events.reserved != [0; 12] || exception.pad != [0; 5] || bad_syndrome {
            return fail(libc::EINVAL);
        }
        if exception.ext_dabt_pending != 0 {
            inner.take_external_abort();
        }
        if exception.serror_pending != 0 {
            let syndrome = if has_syndrome {
                exception.serror_esr
            } else {
                NO_SYNDROME
            };
            inner.cpu.pending.serror = Some(syndrome as u32);
        }
        Ok(())
    }

    /// Carries out `KVM_SET_GUEST_DEBUG`.
    ///
    /// # Errors
    /// `EINVAL` for a control that arm64 does not have.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<()> {
        let mut inner = self.lock()?;
        if debug.control & !guest_debug::CONTROLS != 0 {
            return fail(libc::EINVAL);
        }
        inner.cpu.state.debugger = guest_debug::debugger(debug).map(Box::new);
        inner.cpu.forget_pages();
        Ok(())
    }
}

impl VcpuObject {
    /// Carries out `KVM_HAS_DEVICE_ATTR`: the attributes are the address of the vCPU's structure for stolen time
    /// (`KVM_ARM_VCPU_PVTIME_IPA`), if the host counts stolen time, and the PPIs of its timers.
    ///
    /// # Errors
    /// `ENXIO` for another attribute.
    pub fn has_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        let _inner = self.lock()?;
        match (attribute.group, attribute.attr) {
            (KVM_ARM_VCPU_TIMER_CTRL, _) => self.has_timer(attribute),
            (KVM_ARM_VCPU_PVTIME_CTRL, address)
                if address == KVM_ARM_VCPU_PVTIME_IPA.into() && steal_time::is_available() =>
            {
                Ok(())
            }
            _ => fail(libc::ENXIO),
        }
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`: gets the PPI of a timer, or the guest-physical address of the structure for
    /// stolen time. If there is no structure, the address has all bits set.
    ///
    /// # Errors
    /// `ENXIO` for another attribute. `EFAULT`.
    pub fn get_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        if attribute.group == KVM_ARM_VCPU_TIMER_CTRL {
            return self.get_timer_ppi(attribute);
        }
        self.has_attribute(attribute)?;
        let address = self.lock()?.machine.stolen_time().unwrap_or(u64::MAX);
        user::write(attribute.addr, &address)
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`: sets the PPI of a timer of all vCPUs, or the guest-physical address of the
    /// structure for stolen time.
    ///
    /// # Errors
    /// `ENXIO` for another attribute. `EFAULT`. For the address, `EINVAL` if it is no multiple of 64 or no memslot has
    /// it, and `EEXIST` if the address was set before. For a PPI, `EINVAL` without GIC and for a number that is no PPI,
    /// and `EBUSY` after a vCPU has run.
    pub fn set_attribute(&self, attribute: &kvm_device_attr) -> Result<()> {
        if attribute.group == KVM_ARM_VCPU_TIMER_CTRL {
            return self.set_timer_ppi(attribute);
        }
        self.has_attribute(attribute)?;
        let address: u64 = user::read(attribute.addr)?;
        let mut inner = self.lock()?;
        match () {
            () if address & 63 != 0 => fail(libc::EINVAL),
            () if inner.machine.stolen_time().is_some() => fail(libc::EEXIST),
            () if !inner.machine.has_memory(address) => fail(libc::EINVAL),
            () => {
                inner.machine.set_stolen_time(address);
                Ok(())
            }
        }
    }

    /// Locks a vCPU that the client has initialised. If another vCPU has started this vCPU and its reset is not done
    /// yet, resets it first.
    ///
    /// # Errors
    /// `ENOEXEC` before `KVM_ARM_VCPU_INIT`. `EIO`.
    fn lock_initialised(&self) -> Result<Locked<'_>> {
        let mut inner = self.lock()?;
        inner.check_initialised()?;
        if let Some(start) = self.common().arch.take_start() {
            inner.reset(Some(start));
        }
        Ok(inner)
    }
}

impl Inner {
    /// Does nothing on arm64: a new vCPU waits for `KVM_ARM_VCPU_INIT`. Call when the vCPU exists.
    pub(crate) fn begin_life(&mut self) {}

    /// Resets the vCPU. If another vCPU has started this vCPU (PSCI CPU_ON), it begins to execute at `start`.
    pub(crate) fn reset(&mut self, start: Option<Start>) {
        self.cpu.reset();
        self.machine.reset();
        self.identify();
        if let Some(start) = start {
            self.cpu.state.pc = start.pc;
            self.cpu.state.x[0] = start.context;
        }
    }

    /// Gives the processor the values of the VM's identification registers.
    pub(crate) fn identify(&mut self) {
        let settings = self.machine.settings();
        settings.identification().apply(&mut self.cpu.state);
    }

    /// Whether the last run has begun an access that the next run has to complete.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.cpu.is_unfinished()
    }

    /// Drops all cached translations.
    pub(crate) fn flush_translations(&mut self) {
        self.cpu.forget_pages();
        self.machine.forget_pages();
    }
}
