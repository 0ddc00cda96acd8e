//! Delivers interrupt messages to the vCPUs of a VM.

use crate::vcpu_common::VcpuCommon;
use crate::vcpus::Targets;
use slat_irqchip::lapic::Request;
use slat_irqchip::message::{Destination, Message};

/// The number of vCPUs that a message has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// The number of vCPUs that accepted the message, including those in which the interrupt was already pending.
    pub(crate) taken: usize,
    /// The number of vCPUs in which the interrupt was not pending before.
    pub(crate) new: usize,
}

impl Targets {
    /// Delivers a message to the local APICs that the message addresses. `from` is the vCPU that sends the message.
    /// `None`: a device sends the message.
    pub(crate) fn send(&self, from: Option<&VcpuCommon>, message: &Message) -> Sent {
        let vcpus = self.read();
        let sender = from.and_then(|from| vcpus.place(from.id).ok());
        let mut sent = Sent::default();
        vcpus.map.route(message, sender, |place| {
            match vcpus[place].deliver(message) {
                Request::Refused => {}
                Request::Merged => sent.taken += 1,
                Request::Pending => {
                    sent.taken += 1;
                    sent.new += 1;
                }
            }
        });
        sent
    }

    /// Rebuilds the map from addresses to vCPUs. Call after a change that may give a vCPU another address. The caller
    /// holds no lock of a local APIC.
    pub(crate) fn addresses_changed(&self) {
        self.write().map_again();
    }

    /// Ends the halt of the vCPU with this APIC id. If the vCPU is not halted, ends its next halt.
    pub(crate) fn end_halt(&self, apic_id: u32) {
        let vcpus = self.read();
        vcpus
            .map
            .visit(Destination::Physical(apic_id), None, |place| {
                vcpus[place].end_halt();
            });
    }

    /// Notifies the vCPUs whose local APIC accepts interrupts of the 8259 pair.
    pub(crate) fn notice_external(&self) {
        for vcpu in self.read().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.accepts_external()) {
                vcpu.notice();
            }
        }
    }

    /// Sends an NMI to the vCPUs whose LINT0 delivers NMIs. Guests use this to make the 8254 a watchdog.
    pub(crate) fn pulse_lint0(&self) {
        for vcpu in self.read().iter() {
            if vcpu.lapic().is_some_and(|lapic| lapic.lint0_is_nmi()) {
                vcpu.non_maskable();
            }
        }
    }
}
