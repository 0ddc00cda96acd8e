//! A vCPU's calls for interrupts, exceptions and its local APIC.

use crate::arch::x86_64::events;
use crate::arch::x86_64::guest_debug;
use crate::arch::x86_64::msr::mce::Reported;
use crate::entered::Entered;
use crate::errno::{Result, fail};
use crate::vcpu::{Inner, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use kvm_bindings::*;
use slat_irqchip::lapic::{Effect, REGISTERS, reg};
use slat_x86::state::{MAX_NMIS, control};
use slat_x86::vector;
use std::sync::atomic::Ordering;

impl VcpuObject {
    /// Carries out `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        let mut inner = self.lock()?;
        self.accept_init_sipi(&mut inner);
        let kicked = self.common().arch.signals.load(Ordering::SeqCst) & VcpuCommon::UNHALT != 0;
        let mp_state = match inner.arch.mp_state {
            // As in KVM, clients see a vCPU without a local APIC as runnable.
            KVM_MP_STATE_HALTED if kicked || !self.common().has_lapic() => KVM_MP_STATE_RUNNABLE,
            KVM_MP_STATE_AP_RESET_HOLD if kicked => KVM_MP_STATE_RUNNABLE,
            state => state,
        };
        Ok(kvm_mp_state { mp_state })
    }

    /// Carries out `KVM_SET_MP_STATE`.
    ///
    /// # Errors
    /// `EINVAL` for states that x86 does not have, and, without a local APIC, for any state but runnable.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<()> {
        let mut inner = self.lock()?;
        match state.mp_state {
            KVM_MP_STATE_RUNNABLE => {}
            KVM_MP_STATE_UNINITIALIZED
            | KVM_MP_STATE_HALTED
            | KVM_MP_STATE_AP_RESET_HOLD
            | KVM_MP_STATE_INIT_RECEIVED
                if self.common().has_lapic() => {}
            KVM_MP_STATE_SIPI_RECEIVED if self.common().has_lapic() => {
                inner.arch.mp_state = KVM_MP_STATE_INIT_RECEIVED;
                self.common()
                    .arch
                    .signals
                    .fetch_or(VcpuCommon::SIPI, Ordering::SeqCst);
                return Ok(());
            }
            _ => return fail(libc::EINVAL),
        }
        inner.arch.mp_state = state.mp_state;
        Ok(())
    }

    /// Carries out `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        Ok(self.events(&mut *self.lock()?))
    }

    pub(crate) fn events(&self, inner: &mut Inner) -> kvm_vcpu_events {
        self.accept_smi(inner);
        let mut events = events::get(
            &inner.cpu.state,
            self.common().nmis(),
            self.common().arch.sipi_vector.load(Ordering::SeqCst),
        );
        if let Some(event) = inner.cpu.injected_event() {
            events::show_injected(&mut events, event);
        }
        let latched = self.common().has_lapic()
            && self.common().arch.signals.load(Ordering::SeqCst) & VcpuCommon::INIT != 0;
        events.smi.latched_init = latched.into();
        inner
            .arch
            .requested
            .show(&mut events, &self.vm.arch.options);
        events
    }

    /// Carries out `KVM_SET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags and impossible events.
    pub fn set_vcpu_events(&self, events: &kvm_vcpu_events) -> Result<()> {
        self.put_events(&mut *self.lock()?, events)
    }

    pub(crate) fn put_events(&self, inner: &mut Inner, given: &kvm_vcpu_events) -> Result<()> {
        let requested = inner
            .arch
            .requested
            .changed_by(given, &self.vm.arch.options)?;
        let more = events::set(&mut inner.cpu.state, given)?;
        inner.arch.requested = requested;
        inner.follow_smm();
        if let Some(pending) = more.nmis_pending {
            self.common().take_nmis();
            for _ in 0..pending.min(MAX_NMIS) {
                self.common().signal_nmi();
            }
        }
        if let Some(vector) = more.sipi_vector.filter(|_| self.common().has_lapic()) {
            self.common()
                .arch
                .sipi_vector
                .store(vector, Ordering::SeqCst);
        }
        match more.latched_init.filter(|_| self.common().has_lapic()) {
            Some(true) => self
                .common()
                .arch
                .signals
                .fetch_or(VcpuCommon::INIT, Ordering::SeqCst),
            Some(false) => self
                .common()
                .arch
                .signals
                .fetch_and(!VcpuCommon::INIT, Ordering::SeqCst),
            None => 0,
        };
        Ok(())
    }

    /// Carries out `KVM_X86_SETUP_MCE`.
    ///
    /// # Errors
    /// `EINVAL` for capabilities that are not supported.
    pub fn setup_mce(&self, capabilities: u64) -> Result<()> {
        self.lock()?.machine.mce.set_up(capabilities)
    }

    /// Carries out `KVM_X86_SET_MCE`: reports an error of the machine to the guest.
    ///
    /// # Errors
    /// `EINVAL` for a bank that does not exist, and for an error that is not valid.
    pub fn set_mce(&self, error: &kvm_x86_mce) -> Result<()> {
        let mut inner = self.lock()?;
        let enabled = inner.cpu.state.cr4 & control::CR4_MCE != 0;
        match inner.machine.mce.report(error, enabled)? {
            Reported::Logged => {}
            Reported::Exception => {
                inner.cpu.inject_exception(vector::MC, None);
            }
            Reported::Shutdown => inner.arch.requested.triple_fault = true,
        }
        Ok(())
    }

    /// Carries out `KVM_GET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller.
    pub fn get_lapic(&self) -> Result<kvm_lapic_state> {
        let mut inner = self.lock()?;
        inner.sync_cr8_to_lapic();
        if inner.machine.pv_eoi_offered {
            Entered::enter(&mut *inner).machine.collect_pv_eoi();
        }
        self.vm.interrupts.irqfds.inject_signalled();
        match self.common().lapic() {
            Some(lapic) => {
                let mut registers = lapic.save(self.vm.arch.clock.now());
                if lapic.x2apic() && !self.vm.interrupts.has_wide_ids() {
                    // Without KVM_X2APIC_API_USE_32BIT_IDS, the id is returned in xAPIC format, in the upper 8 bits.
                    registers[(reg::ID >> 4) as usize] <<= 24;
                }
                Ok(lapic_state(&registers))
            }
            None => fail(libc::EINVAL),
        }
    }

    /// Carries out `KVM_SET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller. If the client uses 32-bit ids, also `EINVAL` in x2APIC mode for an
    /// APIC id that is not the vCPU's.
    pub fn set_lapic(&self, state: &kvm_lapic_state) -> Result<()> {
        let mut inner = self.lock()?;
        let registers = lapic_registers(state);
        match self.common().lapic() {
            Some(lapic)
                if lapic.x2apic()
                    && self.vm.interrupts.has_wide_ids()
                    && registers[(reg::ID >> 4) as usize] != self.common().id =>
            {
                return fail(libc::EINVAL);
            }
            Some(mut lapic) => lapic.restore(&registers, self.vm.arch.clock.now()),
            None => return fail(libc::EINVAL),
        }
        self.vm.interrupts.vcpus.addresses_changed();
        inner.sync_cr8_from_lapic();
        inner.machine.carry_out(Effect::Timer);
        Ok(())
    }

    /// Carries out `KVM_INTERRUPT`: injects an interrupt of the client's own interrupt controller.
    ///
    /// # Errors
    /// `EINVAL` for a vector beyond 255, `ENXIO` if the VM has an 8259, `EEXIST` if a vCPU with a local APIC has not
    /// accepted the last interrupt.
    pub fn interrupt(&self, vector: u32) -> Result<()> {
        let Ok(vector) = u8::try_from(vector) else {
            return fail(libc::EINVAL);
        };
        let mut inner = self.lock()?;
        if !self.common().has_lapic() {
            inner.cpu.state.events.interrupt = Some(vector);
            return Ok(());
        }
        if !self.vm.interrupts.is_split() {
            return fail(libc::ENXIO);
        }
        if inner.arch.external.is_some() {
            return fail(libc::EEXIST);
        }
        inner.arch.external = Some(vector);
        Ok(())
    }

    /// Carries out `KVM_NMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn nmi(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        self.common().non_maskable();
        Ok(())
    }

    /// Carries out `KVM_SMI`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn smi(&self) -> Result<()> {
        let _call = self.vm.begin()?;
        self.common().system_management();
        Ok(())
    }

    /// Carries out `KVM_SET_GUEST_DEBUG`.
    ///
    /// # Errors
    /// `EBUSY` if the call asks to inject #DB or #BP and an exception is pending.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<()> {
        let mut inner = self.lock()?;
        let injected = match debug.control {
            control if control & KVM_GUESTDBG_INJECT_DB != 0 => Some(vector::DB),
            control if control & KVM_GUESTDBG_INJECT_BP != 0 => Some(vector::BP),
            _ => None,
        };
        if let Some(vector) = injected {
            if inner.cpu.state.events.exception.is_some()
                || inner.arch.requested.exception.is_some()
            {
                return fail(libc::EBUSY);
            }
            inner.cpu.inject_exception(vector, None);
        }
        inner.cpu.requests.debugger = guest_debug::debugger(debug);
        let blocking = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_BLOCKIRQ;
        inner.arch.interrupts_blocked = debug.control & blocking == blocking;
        Ok(())
    }
}

/// Returns the APIC page as bytes, which is the format of KVM's API.
fn lapic_state(registers: &[u32; REGISTERS]) -> kvm_lapic_state {
    let mut state = kvm_lapic_state::default();
    for (place, value) in state.regs.chunks_exact_mut(16).zip(registers) {
        for (to, from) in place.iter_mut().zip(value.to_le_bytes()) {
            *to = from as _;
        }
    }
    state
}

fn lapic_registers(state: &kvm_lapic_state) -> [u32; REGISTERS] {
    std::array::from_fn(|index| {
        u32::from_le_bytes(std::array::from_fn(|byte| {
            state.regs[index * 16 + byte] as u8
        }))
    })
}
