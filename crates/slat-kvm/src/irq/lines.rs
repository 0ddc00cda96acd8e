//! Delivery of lines and messages to vCPUs, and of ends of interrupts to controllers and clients.

use crate::errno::{Result, fail};
use crate::irq::routing::{MAX_ROUTES, Routes, Target};
use crate::irq::{Model, USERSPACE};
use crate::vm::VmObject;
use kvm_bindings::*;
use slat_irqchip::line::Outcome;
use slat_irqchip::message::Message;
use std::sync::{PoisonError, RwLockReadGuard};

/// The interrupts that a guest has ended, as lines of the controllers: collected while a controller is locked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    /// Lines of the 8259 pair, a bit each.
    lines: u16,
    /// Pins of the I/O APIC, a bit each.
    pins: u32,
}

impl Ended {
    pub(crate) fn lines(lines: u16) -> Self {
        Ended { lines, pins: 0 }
    }

    pub(crate) fn add_pin(&mut self, pin: usize) {
        self.pins |= 1 << pin;
    }
}

impl VmObject {
    fn routes(&self) -> RwLockReadGuard<'_, Routes> {
        (self.interrupts.routes.read()).unwrap_or_else(PoisonError::into_inner)
    }

    /// `KVM_IRQ_LINE_STATUS`, and `KVM_IRQ_LINE` without the result. Returns how many vCPUs accepted the interrupt, 0 if it was
    /// coalesced with a pending one, -1 if it was ignored (masked).
    ///
    /// # Errors
    /// `ENXIO` without interrupt controllers.
    pub fn irq_line(&self, gsi: u32, level: bool) -> Result<i32> {
        let _call = self.begin()?;
        if !self.has_irqchip() {
            return fail(libc::ENXIO);
        }
        Ok(self.set_line(gsi, USERSPACE, level))
    }

    /// Sets the level that `source` gives the line of a GSI. Returns the status of `KVM_IRQ_LINE_STATUS`.
    pub(crate) fn set_line(&self, gsi: u32, source: u8, level: bool) -> i32 {
        let chips = self.interrupts.chips();
        let mut status = -1;
        for target in self.routes().of(gsi) {
            let one = match (target, chips) {
                (Target::Pic(line), Some(chips)) => {
                    chips.set_pic_line(self, line, source, level).status()
                }
                (Target::IoApic(pin), Some(chips)) => {
                    chips.set_ioapic_pin(self, pin, source, level).status()
                }
                (Target::Msi { address, data }, _) if level => {
                    self.send_msi(address, data).status()
                }
                // Lowering sends no message; and without chips there are no routes to them.
                _ => -1,
            };
            if one >= 0 {
                status = one + status.max(0);
            }
        }
        status
    }

    /// Raises and lowers the line of a GSI, at each chip under one lock. So no other thread finds the line high: a change of routes
    /// cannot leave it high, and a guest that ends the interrupt at once can get the next one.
    pub(crate) fn pulse_line(&self, gsi: u32, source: u8) {
        let chips = self.interrupts.chips();
        for target in self.routes().of(gsi) {
            match (target, chips) {
                (Target::Pic(line), Some(chips)) => chips.pulse_pic_line(self, line, source),
                (Target::IoApic(pin), Some(chips)) => chips.pulse_ioapic_pin(self, pin, source),
                (Target::Msi { address, data }, _) => {
                    self.send_msi(address, data);
                }
                (Target::Pic(_) | Target::IoApic(_), None) => {}
            }
        }
    }

    /// Sends the message of a device that writes `data` to `address`.
    fn send_msi(&self, address: u64, data: u32) -> Outcome {
        let message = Message::from_msi(address, data, self.interrupts.msi_ids());
        let sent = self.send_message(None, &message);
        match sent.taken {
            0 => Outcome::Ignored,
            _ if sent.new == 0 => Outcome::Coalesced,
            taken => Outcome::Delivered(taken),
        }
    }

    /// `KVM_SIGNAL_MSI`. Returns how many vCPUs accepted the interrupt, those for which it was pending already included.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controller, for flags (a device's id, which other architectures use, has no effect), and for bits of
    /// the address that must be 0.
    pub fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        let _call = self.begin()?;
        if !self.has_irqchip()
            || msi.flags & !KVM_MSI_VALID_DEVID != 0
            || self.interrupts.has_wide_ids() && msi.address_hi & 0xff != 0
        {
            return fail(libc::EINVAL);
        }
        let address = u64::from(msi.address_hi) << 32 | u64::from(msi.address_lo);
        let message = Message::from_msi(address, msi.data, self.interrupts.msi_ids());
        Ok(self.send_message(None, &message).taken as i32)
    }

    /// `KVM_SET_GSI_ROUTING`: replaces all routes. When it returns, no interrupt is delivered by an old route any more.
    ///
    /// # Errors
    /// `EINVAL` without interrupt controllers, for flags, for more than 4096 routes, and for invalid routes; `ENOMEM`.
    pub fn set_gsi_routing(&self, flags: u32, entries: &[kvm_irq_routing_entry]) -> Result<()> {
        let _call = self.begin()?;
        if !self.has_irqchip() || flags != 0 || entries.len() > MAX_ROUTES as usize {
            return fail(libc::EINVAL);
        }
        let interrupts = &self.interrupts;
        let has_chips = interrupts.chips().is_some();
        let routes = Routes::from_client(entries, has_chips, interrupts.has_wide_ids())?;
        self.replace_routes(routes);
        Ok(())
    }

    pub(crate) fn replace_routes(&self, routes: Routes) {
        let mut current = (self.interrupts.routes.write()).unwrap_or_else(PoisonError::into_inner);
        *current = routes;
        if let Some(Model::Split { pins, reported }) = self.interrupts.model.get() {
            let mut vectors = [0; 4];
            for (address, data) in current.messages_below(*pins) {
                let message = Message::from_msi(address, data, self.interrupts.msi_ids());
                if message.level {
                    vectors[usize::from(message.vector >> 6)] |= 1 << (message.vector & 63);
                }
            }
            reported.store(vectors);
        }
    }

    /// The GSI that is routed to a pin of the I/O APIC. `None`: no GSI is.
    pub(crate) fn gsi_of_pin(&self, pin: usize) -> Option<u32> {
        self.routes().gsi_of(Target::IoApic(pin as u8))
    }

    /// Whether the I/O APIC, slat's or the client's, has to learn of the end of interrupts with this vector.
    pub(crate) fn waits_for_end(&self, vector: u8) -> bool {
        match self.interrupts.model.get() {
            Some(Model::Pc(chips)) => chips.ioapic_has(vector),
            Some(Model::Split { reported, .. }) => reported.contains(vector),
            None => false,
        }
    }

    /// Call after a guest's end of interrupt at its local APIC, with that APIC unlocked. Returns whether the vCPU has to exit to the
    /// client with `KVM_EXIT_IOAPIC_EOI`.
    pub(crate) fn end_of_interrupt(&self, vector: u8, level: bool) -> bool {
        if !self.waits_for_end(vector) {
            return false;
        }
        let chips = self.interrupts.chips();
        if let Some(chips) = chips {
            chips.end_of_interrupt(self, vector, level);
        }
        chips.is_none()
    }

    /// Signals resampled irqfds and reinjects the 8254's missed ticks, for interrupts that the guest has ended. Call with no
    /// controller locked.
    pub(crate) fn carry_out_ends(&self, ended: Ended) {
        let Ended { lines, pins } = ended;
        if lines == 0 && pins == 0 {
            return;
        }
        let set = |bits: u32| (0..u32::BITS as u8).filter(move |bit| bits >> bit & 1 != 0);
        let targets = (set(lines.into()).map(Target::Pic)).chain(set(pins).map(Target::IoApic));
        for target in targets {
            let gsi = self.routes().gsi_of(target);
            if let Some(gsi) = gsi {
                self.resample(gsi);
                if gsi == 0 {
                    self.timer_acknowledged();
                }
            }
        }
    }

    /// Notifies the vCPUs whose local APIC accepts interrupts of the 8259 pair.
    pub(crate) fn notice_external(&self) {
        for vcpu in self.vcpus().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.accepts_external()) {
                vcpu.notice();
            }
        }
    }

    /// Sends an NMI to the vCPUs whose LINT0 delivers NMIs: guests use the 8254 as a watchdog this way.
    pub(crate) fn pulse_lint0(&self) {
        for vcpu in self.vcpus().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.lint0_is_nmi()) {
                vcpu.non_maskable();
            }
        }
    }
}
