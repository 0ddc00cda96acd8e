//! Delivers INIT, SIPI, NMIs and interrupts to a vCPU. Such an event ends a halt.

use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::vcpu_state::Unfinished;
use crate::errno::Result;
use crate::fields::field;
use crate::signals::Masked;
use crate::vcpu::{Inner, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use kvm_bindings::*;
use slat_irqchip::lapic::BASE_BSP;
use slat_trace::{InjVirq, point};
use slat_x86::Segment;
use std::sync::atomic::Ordering;

impl VcpuObject {
    /// Delivers INIT, SIPI, NMIs and interrupts. A halted vCPU waits for such an event. Returns `false` if the run
    /// returns to the client.
    pub(crate) fn deliver_events(
        &self,
        inner: &mut Inner,
        masked: Option<&Masked>,
    ) -> Result<bool> {
        loop {
            self.accept_init_sipi(inner);
            if inner.arch.mp_state == KVM_MP_STATE_RUNNABLE {
                break;
            }
            // AP_RESET_HOLD is for encrypted guests, which slat does not have. If a client sets this state, slat treats
            // it like HALTED.
            let halted = [KVM_MP_STATE_HALTED, KVM_MP_STATE_AP_RESET_HOLD];
            if halted.contains(&inner.arch.mp_state) && self.wakes_up(inner) {
                inner.arch.mp_state = KVM_MP_STATE_RUNNABLE;
                (self.common().arch.signals).fetch_and(!VcpuCommon::UNHALT, Ordering::SeqCst);
                self.common().exits.halts.wakeup.add(1);
                break;
            }
            // A halted vCPU can accept an interrupt of the client. The interrupt window (`KVM_EXIT_IRQ_WINDOW_OPEN`) is
            // reported before the vCPU sleeps, because the halt causes no other exit.
            if self.asks_client(inner) && self.opens_window(inner, true) {
                return Ok(false);
            }
            self.block(inner, masked)?;
        }
        let common = self.common();
        inner.cpu.requests.interrupt_window = false;
        if inner.arch.interrupts_blocked || inner.cpu.makes_probe_steps() {
            return Ok(true);
        }
        self.accept_smi(inner);
        self.accept_nmis(inner);
        if common.lapic().is_none() {
            return Ok(!self.opens_window(inner, inner.cpu.state.events.interrupt.is_none()));
        }
        inner.sync_cr8_to_lapic();
        let has_external = self.has_external(inner);
        let allowed = inner.cpu.can_take_interrupt();
        if allowed && inner.cpu.exits_on_interrupt() && self.has_interrupt(inner) {
            // A nested guest runs. The interrupt is for the hypervisor of the nested guest, so the interrupt stays
            // pending until this hypervisor has set GIF and accepts it.
            inner.cpu.exit_on_interrupt();
            inner.cpu.requests.interrupt_window = true;
            return Ok(true);
        }
        if allowed && let Some(vector) = self.next_interrupt(inner, has_external) {
            common.exits.irq_injections.add(1);
            point(|| InjVirq {
                vector: vector.into(),
                soft: 0,
                reinjected: 0,
            });
            inner.cpu.inject_interrupt(vector);
            // If another interrupt is pending, the CPU exits as soon as it can accept that interrupt.
            inner.cpu.requests.interrupt_window = self.has_interrupt(inner);
            return Ok(true);
        }
        if self.has_interrupt(inner) {
            inner.cpu.requests.interrupt_window = true;
        }
        Ok(!(self.asks_client(inner) && self.opens_window(inner, true)))
    }

    /// Acknowledges the interrupt that the vCPU accepts now. The 8259's interrupts come before those of the vCPU's
    /// APIC. `None`: the interrupt is not pending any more.
    fn next_interrupt(&self, inner: &mut Inner, has_external: bool) -> Option<u8> {
        if has_external {
            let external = match self.vm.interrupts.chips() {
                Some(_) => self.vm.interrupts.acknowledge_external(),
                None => inner.arch.external.take(),
            };
            if external.is_some() {
                return external;
            }
        }
        let mut lapic = self.common().lapic()?;
        let vector = lapic.pending()?;
        if self.common().arch.vp.ends_itself(vector) {
            lapic.accept_ended(vector);
            return Some(vector);
        }
        lapic.accept(vector);
        drop(lapic);
        if !self.vm.interrupts.waits_for_end(vector) {
            inner.machine.offer_pv_eoi();
        }
        Some(vector)
    }

    /// Whether an 8259 has an interrupt that reaches this vCPU.
    fn has_external(&self, inner: &Inner) -> bool {
        let waits = match self.vm.interrupts.chips() {
            Some(chips) => chips.has_external(),
            None => inner.arch.external.is_some(),
        };
        waits && (self.common().lapic()).is_some_and(|lapic| lapic.accepts_external())
    }

    /// Whether an interrupt for this vCPU is pending. The vCPU may not be able to accept it now.
    fn has_interrupt(&self, inner: &Inner) -> bool {
        self.has_external(inner)
            || (self.common().lapic()).is_some_and(|lapic| lapic.pending().is_some())
    }

    /// Whether the client emulates the 8259, and may inject an interrupt now. If slat emulates the local APICs, the
    /// vCPU's local APIC decides whether the client may inject.
    fn asks_client(&self, inner: &Inner) -> bool {
        match self.vm.has_irqchip() {
            true => self.vm.interrupts.is_split() && self.accepts_from_client(inner),
            false => true,
        }
    }

    /// Whether a client that emulates the 8259 may inject another interrupt now: the vCPU has accepted the client's
    /// last interrupt, and the vCPU's local APIC, which slat emulates, accepts interrupts of an 8259.
    pub(crate) fn accepts_from_client(&self, inner: &Inner) -> bool {
        inner.arch.external.is_none()
            && (self.common().lapic()).is_some_and(|lapic| lapic.accepts_external())
    }

    /// Whether the run returns because the client asked for an interrupt window and the window is open. If so, stores
    /// the exit in `kvm_run`. `free` says whether the client's last interrupt was accepted.
    fn opens_window(&self, inner: &mut Inner, free: bool) -> bool {
        if field!(self.page, request_interrupt_window) == 0 {
            return false;
        }
        if free && inner.cpu.can_take_interrupt() {
            self.common().exits.request_irq_exits.add(1);
            self.page.set_exit_reason(KVM_EXIT_IRQ_WINDOW_OPEN);
            return true;
        }
        inner.cpu.requests.interrupt_window = true;
        false
    }

    fn accept_nmis(&self, inner: &mut Inner) {
        let nmis = self.common().take_nmis();
        if nmis != 0 {
            inner.cpu.inject_nmis(nmis);
            self.common().exits.nmi_injections.add(nmis.into());
        }
    }

    fn wakes_up(&self, inner: &mut Inner) -> bool {
        // NMIs are accepted before `takes_nmi` is asked, because `takes_nmi` depends on accepted NMIs: an NMI ends no
        // halt while the CPU blocks NMIs.
        if !inner.arch.interrupts_blocked {
            self.accept_smi(inner);
            self.accept_nmis(inner);
        }
        let events = &inner.cpu.state.events;
        let latched = if events.smm { VcpuCommon::INIT } else { 0 };
        if self.common().arch.signals.load(Ordering::SeqCst) & !latched != 0
            || events.takes_smi()
            || inner.cpu.takes_nmi()
            || inner.cpu.takes_virtual_interrupt()
        {
            return true;
        }
        inner.sync_cr8_to_lapic();
        let state = &inner.cpu.state;
        let enabled = inner.cpu.interrupts_enabled();
        state.events.exception.is_some()
            || state.events.interrupt.is_some()
            || enabled && self.has_interrupt(inner)
    }

    /// Carries out INIT and SIPI. In system management mode an INIT waits, and a SIPI is lost.
    pub(crate) fn accept_init_sipi(&self, inner: &mut Inner) {
        let common = self.common();
        let both = VcpuCommon::INIT | VcpuCommon::SIPI;
        inner.cpu.requests.gif_window = false;
        if common.arch.signals.load(Ordering::SeqCst) & both == 0 {
            return;
        }
        if inner.cpu.state.events.smm {
            common
                .arch
                .signals
                .fetch_and(!VcpuCommon::SIPI, Ordering::SeqCst);
            return;
        }
        // An INIT also waits while GIF is clear, until the hypervisor of a nested guest sets GIF.
        let waits = common.arch.signals.load(Ordering::SeqCst) & VcpuCommon::INIT != 0
            && (inner.cpu.state.events.gif_clear || inner.cpu.exit_on_init());
        inner.cpu.requests.gif_window = waits;
        if waits {
            return;
        }
        // Clear both bits at once. A SIPI that arrives later may belong to a later INIT, so its bit must stay set.
        let sent = common.arch.signals.fetch_and(!both, Ordering::SeqCst);
        if sent & VcpuCommon::INIT != 0 {
            inner.cpu.drop_guest_mode();
            let [signature, ..] = cpuid::lookup(&inner.machine.cpuid, 1, 0);
            inner.cpu.state.init((signature != 0).then_some(signature));
            inner.flush_translations();
            inner.machine.init();
            common.take_nmis();
            inner.arch.unfinished = Unfinished::Nothing;
            inner.arch.requested.exception = None;
            let bootstrap = inner.machine.apic_base() & BASE_BSP != 0;
            inner.arch.mp_state = if bootstrap {
                KVM_MP_STATE_RUNNABLE
            } else {
                KVM_MP_STATE_INIT_RECEIVED
            };
            if let Some(mut lapic) = common.lapic() {
                lapic.reset();
                if bootstrap && self.vm.arch.quirks.has(KVM_X86_QUIRK_LINT0_REENABLED) {
                    lapic.accept_external();
                }
                drop(lapic);
                self.vm.interrupts.vcpus.addresses_changed();
            }
        }
        if sent & VcpuCommon::SIPI != 0 && inner.arch.mp_state == KVM_MP_STATE_INIT_RECEIVED {
            let vector = common.arch.sipi_vector.load(Ordering::SeqCst) & 0xff;
            inner.cpu.state.cs = Segment::real((vector << 8) as u16, inner.cpu.state.cs.rights);
            inner.cpu.state.rip = 0;
            inner.arch.mp_state = KVM_MP_STATE_RUNNABLE;
        }
    }
}
