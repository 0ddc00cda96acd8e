//! Delivery of lines and messages to vCPUs, guests' accesses to controllers, and delivery of EOIs to controllers and
//! clients.

use crate::arch::x86_64::chips::{Ended, Model, TIMER};
use crate::arch::x86_64::devices::{Device, SPEAKER, VmTimer};
use crate::arch::x86_64::target::Target;
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use crate::routing::Routes;
use crate::ticker::VmTimers;
use crate::vcpu_common::VcpuCommon;
use kvm_bindings::{kvm_irq_routing_entry, kvm_msi};
use slat_irqchip::lapic::Request;
use slat_irqchip::line::Outcome;
use slat_irqchip::message::Message;
use slat_trace::{AckIrq, MsiSetIrq, point};

impl Interrupts {
    /// Sets the level that `source` gives a target of a GSI. Returns the status of `KVM_IRQ_LINE_STATUS`.
    pub(crate) fn set_target(&self, target: Target, source: u8, level: bool) -> i32 {
        let (chips, vcpus) = (self.chips(), &self.vcpus);
        match (target, chips) {
            (Target::Pic(line), Some(chips)) => {
                chips.set_pic_line(vcpus, line, source, level).status()
            }
            (Target::IoApic(pin), Some(chips)) => {
                chips.set_ioapic_pin(vcpus, pin, source, level).status()
            }
            (Target::Msi { address, data }, _) if level => self.send_msi(address, data).status(),
            (Target::Sint { vp, sint }, _) if level => self.signal_source(vp, sint).status(),
            // Nothing is sent: either a message's level is low, or the target is a chip that the client emulates. (No
            // route of such a VM leads to a chip.)
            _ => -1,
        }
    }

    /// Raises and lowers a target of a GSI. At a chip, both happen under one lock of the chip.
    pub(crate) fn pulse_target(&self, target: Target, source: u8) {
        let (chips, vcpus) = (self.chips(), &self.vcpus);
        match (target, chips) {
            (Target::Pic(line), Some(chips)) => chips.pulse_pic_line(vcpus, line, source),
            (Target::IoApic(pin), Some(chips)) => chips.pulse_ioapic_pin(vcpus, pin, source),
            (Target::Msi { address, data }, _) => {
                self.send_msi(address, data);
            }
            (Target::Sint { vp, sint }, _) => {
                self.signal_source(vp, sint);
            }
            (Target::Pic(_) | Target::IoApic(_), None) => {}
        }
    }

    /// Returns the target that an entry of the client's routing table names.
    ///
    /// # Errors
    /// `EINVAL` for numbers beyond the limits, and for unknown kinds.
    pub(crate) fn target(&self, entry: &kvm_irq_routing_entry) -> Result<Target> {
        Target::of(entry, self.chips().is_some(), self.has_wide_ids())
    }

    /// Carries out `KVM_SIGNAL_MSI`. Returns the number of vCPUs that accepted the interrupt, including vCPUs in which
    /// the interrupt was already pending.
    ///
    /// # Errors
    /// `EINVAL` for bits of the address that must be 0.
    pub(crate) fn signal_msi(&self, msi: &kvm_msi) -> Result<i32> {
        if self.has_wide_ids() && msi.address_hi & 0xff != 0 {
            return fail(libc::EINVAL);
        }
        let address = u64::from(msi.address_hi) << 32 | u64::from(msi.address_lo);
        let message = self.message(address, msi.data);
        Ok(self.vcpus.send(None, &message).taken as i32)
    }

    /// Whether slat can lower a line when the guest ends the line's interrupt. Resampled irqfds need this.
    pub(crate) fn can_resample(&self) -> bool {
        self.chips().is_some()
    }

    /// Returns the message of a device that writes `data` to `address`.
    pub(crate) fn message(&self, address: u64, data: u32) -> Message {
        Message::from_msi(address, data, self.msi_ids())
    }

    /// Sends the message of a device that writes `data` to `address`.
    fn send_msi(&self, address: u64, data: u32) -> Outcome {
        point(|| MsiSetIrq {
            address,
            data: data.into(),
        });
        let sent = self.vcpus.send(None, &self.message(address, data));
        match sent.taken {
            0 => Outcome::Ignored,
            _ if sent.new == 0 => Outcome::Coalesced,
            taken => Outcome::Delivered(taken),
        }
    }

    /// Signals an interrupt source (SINT) of the SynIC of a virtual processor.
    fn signal_source(&self, vp: u32, sint: u32) -> Outcome {
        let vcpus = self.vcpus.read();
        let request = vcpus
            .iter()
            .find(|vcpu| vcpu.arch.vp.index() == vp)
            .and_then(|vcpu| {
                let vector = vcpu.arch.vp.vector(sint)?;
                Some(vcpu.request(vector))
            });
        match request {
            None | Some(Request::Refused) => Outcome::Ignored,
            Some(Request::Merged) => Outcome::Coalesced,
            Some(Request::Pending) => Outcome::Delivered(1),
        }
    }

    /// Lowers the line that resampled irqfds hold for a source of a SynIC, and signals their client. Call after the
    /// guest has read the message or event for which the source was signalled.
    pub(crate) fn source_acknowledged(&self, vp: u32, sint: u32) {
        if !self.irqfds.has_resampled() {
            return;
        }
        let gsi = self.routes().gsi_of(Target::Sint { vp, sint });
        if let Some(gsi) = gsi {
            self.irqfds.resample(self, gsi);
        }
    }

    /// Records the vectors whose EOIs are reported to the client. Call with the new routes while they are locked.
    pub(crate) fn routes_changed(&self, routes: &Routes) {
        if let Some(Model::Split { pins, reported }) = self.arch.model.get() {
            let mut vectors = [0; 4];
            for (_, target) in routes.0.iter().take_while(|route| route.0 < *pins) {
                let Target::Msi { address, data } = *target else {
                    continue;
                };
                let message = self.message(address, data);
                if message.level {
                    vectors[usize::from(message.vector >> 6)] |= 1 << (message.vector & 63);
                }
            }
            reported.store(vectors);
        }
    }

    /// Whether the EOI of an interrupt with this vector has to be reported to the I/O APIC, slat's or the client's.
    pub(crate) fn waits_for_end(&self, vector: u8) -> bool {
        match self.arch.model.get() {
            Some(Model::Pc(chips)) => chips.ioapic_has(vector),
            Some(Model::Split { reported, .. }) => reported.contains(vector),
            None => false,
        }
    }

    /// Reports the end of an interrupt to slat's I/O APIC, if there is one. Call after a guest's EOI at its local APIC,
    /// with that APIC unlocked. Returns whether the vCPU has to exit to the client with `KVM_EXIT_IOAPIC_EOI`.
    pub(crate) fn end_of_interrupt(&self, vector: u8, level: bool) -> bool {
        if !self.waits_for_end(vector) {
            return false;
        }
        let chips = self.chips();
        if let Some(chips) = chips {
            self.carry_out(chips.end_of_interrupt(&self.vcpus, vector, level));
        }
        chips.is_none()
    }

    /// Acknowledges the 8259 pair's interrupt. Returns the interrupt's vector; `None` if the pair's INTR line has
    /// fallen meanwhile.
    pub(crate) fn acknowledge_external(&self) -> Option<u8> {
        let (vector, ended) = self.chips()?.acknowledge(&self.vcpus)?;
        self.carry_out(ended);
        Some(vector)
    }

    /// Carries out a guest's read from a device at `address`, which is one read for each unit of `units`. Returns
    /// whether the device has accepted all reads.
    pub(crate) fn read<'a>(
        &self,
        _vcpu: &VcpuCommon,
        device: Device,
        address: u64,
        units: &mut impl Iterator<Item = &'a mut [u8]>,
    ) -> bool {
        let port = address as u16;
        match device {
            Device::Pics => units.all(|unit| self.read_pics(port, unit)),
            Device::Speaker if address != SPEAKER => false,
            Device::Timer | Device::Speaker => units.all(|unit| self.read_timer(port, unit)),
            Device::IoApic => units.all(|unit| self.read_ioapic(address, unit)),
        }
    }

    /// Carries out a guest's write to a device at `address`, which is one write for each unit of `units`. Returns
    /// whether the device has accepted all writes.
    pub(crate) fn write<'a>(
        &self,
        _vcpu: &VcpuCommon,
        device: Device,
        address: u64,
        units: &mut impl Iterator<Item = &'a [u8]>,
    ) -> bool {
        let port = address as u16;
        match device {
            Device::Pics => units.all(|unit| self.write_pics(port, unit)),
            Device::Speaker if address != SPEAKER => false,
            Device::Timer | Device::Speaker => units.all(|unit| self.write_timer(port, unit)),
            Device::IoApic => units.all(|unit| self.write_ioapic(address, unit)),
        }
    }

    /// Reads `data.len()` bytes from a port of the 8259 pair. Returns `false` without an 8259 pair.
    fn read_pics(&self, port: u16, data: &mut [u8]) -> bool {
        let ended = (self.chips()).map(|chips| chips.read_pics(&self.vcpus, port, data));
        ended.map(|ended| self.carry_out(ended)).is_some()
    }

    /// Writes to a port of the 8259 pair. Returns `false` without an 8259 pair.
    fn write_pics(&self, port: u16, data: &[u8]) -> bool {
        let ended = (self.chips()).map(|chips| chips.write_pics(&self.vcpus, port, data));
        ended.map(|ended| self.carry_out(ended)).is_some()
    }

    /// Reads `data.len()` bytes from a port of the 8254. Returns `false` without an 8254.
    fn read_timer(&self, port: u16, data: &mut [u8]) -> bool {
        let Some(timer) = self.timer() else {
            return false;
        };
        data.fill(0);
        data[0] = timer.read(port);
        true
    }

    /// Writes to a port of the 8254. Returns `false` without an 8254.
    fn write_timer(&self, port: u16, data: &[u8]) -> bool {
        let timer = self.timer();
        timer.map(|timer| timer.write(port, data[0])).is_some()
    }

    /// Reads registers of the I/O APIC. Returns `false` if `gpa` is not one of its addresses.
    fn read_ioapic(&self, gpa: u64, data: &mut [u8]) -> bool {
        let chips = self.chips().filter(|chips| chips.ioapic_contains(gpa));
        chips.map(|chips| chips.read_ioapic(gpa, data)).is_some()
    }

    /// Writes registers of the I/O APIC. Returns `false` if `gpa` is not one of its addresses.
    fn write_ioapic(&self, gpa: u64, data: &[u8]) -> bool {
        let Some(chips) = self.chips().filter(|chips| chips.ioapic_contains(gpa)) else {
            return false;
        };
        let is_timers = |pin| self.routes().gsi_of(Target::IoApic(pin as u8)) == Some(0);
        self.carry_out(chips.write_ioapic(&self.vcpus, gpa, data, is_timers));
        true
    }

    /// For the interrupts in `ended`, which the guest has ended: signals resampled irqfds, and reinjects ticks of the
    /// 8254 that the guest has missed. Call with no controller locked.
    fn carry_out(&self, ended: Ended) {
        let Ended { lines, pins } = ended;
        if lines == 0 && pins == 0 {
            return;
        }
        let set = |bits: u32| (0..u32::BITS as u8).filter(move |bit| bits >> bit & 1 != 0);
        let targets = (set(lines.into()).map(Target::Pic)).chain(set(pins).map(Target::IoApic));
        for target in targets {
            point(|| acknowledged(target));
            let gsi = self.routes().gsi_of(target);
            if let Some(gsi) = gsi {
                self.irqfds.resample(self, gsi);
                if gsi == 0 && self.timer().is_some_and(|timer| timer.acknowledged()) {
                    self.pulse_timer();
                }
            }
        }
    }

    /// Raises the interrupt line of the 8254 (IRQ 0), and lowers it at once.
    fn pulse_timer(&self) {
        self.pulse_line(0, TIMER);
        self.vcpus.pulse_lint0();
    }
}

impl VmTimers for Interrupts {
    fn expired(&self, timer: VmTimer) {
        match timer {
            VmTimer::Pit => {
                if self.timer().is_some_and(|timer| timer.expire()) {
                    self.pulse_timer();
                }
            }
            VmTimer::Storm => {
                if let Some(chips) = self.chips() {
                    chips.storm_paused(&self.vcpus);
                }
            }
        }
    }
}

/// Returns the trace record for the EOI of an interrupt of this line.
fn acknowledged(line: Target) -> AckIrq {
    let (irqchip, pin) = match line {
        Target::Pic(line) => (u32::from(line) / 8, u32::from(line) % 8),
        Target::IoApic(pin) => (2, pin.into()),
        Target::Msi { .. } | Target::Sint { .. } => unreachable!("these are no lines"),
    };
    AckIrq { irqchip, pin }
}
