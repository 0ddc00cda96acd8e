//! The interrupts that other threads send to a vCPU: by its local APIC, and by events that stay pending until the vCPU
//! accepts them.

use crate::vcpu_common::VcpuCommon;
use slat_irqchip::lapic::{Lapic, Request};
use slat_irqchip::message::{DeliveryMode, Destination, Message};
use slat_x86::state::MAX_NMIS;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

impl VcpuCommon {
    /// Pending NMIs, one bit for each NMI. One NMI can wait while another NMI is delivered.
    const NMIS: [u32; MAX_NMIS as usize] = [1, 1 << 4];
    const ALL_NMIS: u32 = Self::NMIS[0] | Self::NMIS[1];
    pub(crate) const INIT: u32 = 2;
    pub(crate) const SIPI: u32 = 4;
    /// The bit of an event: another vCPU has ended this vCPU's halt ([`end_halt`](Self::end_halt)).
    pub(crate) const UNHALT: u32 = 8;
    /// The bit of an event: a system management interrupt is pending.
    pub(crate) const SMI: u32 = 1 << 5;

    /// Whether the vCPU has a local APIC.
    pub(crate) fn has_lapic(&self) -> bool {
        self.arch.lapic.is_some()
    }

    /// Locks and returns the local APIC, if the VM has an interrupt controller.
    pub(crate) fn lapic(&self) -> Option<MutexGuard<'_, Lapic>> {
        Some(
            self.arch
                .lapic
                .as_ref()?
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        )
    }

    /// Delivers a message to this vCPU. A level-triggered message without assert only ends a level. Such a message
    /// requests no interrupt, so the result is "refused".
    pub(crate) fn deliver(&self, message: &Message) -> Request {
        let level_ends = message.level && !message.assert;
        let taken = match message.mode {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority | DeliveryMode::Init
                if level_ends =>
            {
                Request::Refused
            }
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => match self.lapic() {
                Some(mut lapic) => lapic.request(message.vector, message.level),
                None => Request::Refused,
            },
            DeliveryMode::Nmi => self.signal_nmi(),
            DeliveryMode::Init => {
                // INIT cancels an earlier SIPI.
                self.arch.signals.fetch_and(!Self::SIPI, Ordering::SeqCst);
                self.signal(Self::INIT)
            }
            DeliveryMode::StartUp => {
                self.arch
                    .sipi_vector
                    .store(message.vector.into(), Ordering::SeqCst);
                self.signal(Self::SIPI)
            }
            // As in KVM, a message with the reserved delivery mode ends the vCPU's halt.
            DeliveryMode::Reserved => self.signal(Self::UNHALT),
            DeliveryMode::Smi => self.signal(Self::SMI),
            // ExtInt is refused: the 8259 uses its INTR line, not messages.
            DeliveryMode::ExtInt => Request::Refused,
        };
        if taken == Request::Pending {
            self.notice();
        }
        taken
    }

    /// Requests an edge-triggered interrupt of this vCPU.
    pub(crate) fn request(&self, vector: u8) -> Request {
        self.deliver(&Message {
            vector,
            mode: DeliveryMode::Fixed,
            level: false,
            assert: true,
            destination: Destination::Physical(self.id),
        })
    }

    /// Sends a non-maskable interrupt.
    pub(crate) fn non_maskable(&self) {
        self.signal_nmi();
        self.notice();
    }

    /// Sends a system management interrupt.
    pub(crate) fn system_management(&self) {
        self.signal(Self::SMI);
        self.notice();
    }

    /// Clears the pending system management interrupt. Returns whether an interrupt was pending.
    pub(crate) fn take_smi(&self) -> bool {
        // This check is first and cheap, because every entry into the guest calls this method, and usually no SMI is
        // pending.
        self.arch.signals.load(Ordering::SeqCst) & Self::SMI != 0
            && self.arch.signals.fetch_and(!Self::SMI, Ordering::SeqCst) & Self::SMI != 0
    }

    /// Ends the vCPU's halt (`KVM_HC_KICK_CPU`). If the vCPU is not halted, ends its next halt.
    pub(crate) fn end_halt(&self) {
        if self.signal(Self::UNHALT) == Request::Pending {
            self.notice();
        }
    }

    /// Makes an NMI pending. At most [`MAX_NMIS`] NMIs are pending.
    pub(crate) fn signal_nmi(&self) -> Request {
        let mut bits = Self::NMIS.into_iter();
        match bits.any(|bit| self.signal(bit) == Request::Pending) {
            true => Request::Pending,
            false => Request::Merged,
        }
    }

    /// Returns the number of pending NMIs.
    pub(crate) fn nmis(&self) -> u8 {
        Self::nmis_in(self.arch.signals.load(Ordering::SeqCst))
    }

    /// Clears the pending NMIs. Returns their number.
    pub(crate) fn take_nmis(&self) -> u8 {
        // This check is first and cheap, because every entry into the guest calls this method, and usually no NMI is
        // pending.
        match self.nmis() {
            0 => 0,
            _ => Self::nmis_in(
                self.arch
                    .signals
                    .fetch_and(!Self::ALL_NMIS, Ordering::SeqCst),
            ),
        }
    }

    fn nmis_in(signals: u32) -> u8 {
        (signals & Self::ALL_NMIS).count_ones() as u8
    }

    fn signal(&self, signal: u32) -> Request {
        match self.arch.signals.fetch_or(signal, Ordering::SeqCst) & signal {
            0 => Request::Pending,
            _ => Request::Merged,
        }
    }
}
