//! The synthetic timers of a vCPU: when they expire, and how the guest is notified.

use crate::arch::x86_64::machine::VcpuMachine;
use crate::thread::bits;
use slat_hyperv::message;
use slat_hyperv::stimer::{Delivery, Moment, Notice};
use slat_irqchip::lapic::Request;

impl VcpuMachine {
    /// If a timer has to be examined, makes the run loop examine the timers before the guest continues.
    pub(super) fn look_at_timers(&self) {
        if self.hyperv.timers.is_any_due() {
            self.common.attention.raise(bits::TIMER);
        }
    }

    /// Returns the time, by the VM's clock, at which the next synthetic timer expires.
    pub(in crate::arch::x86_64::machine) fn timers_deadline(&self) -> Option<u64> {
        self.hyperv.timers.deadline()
    }

    /// Examines the synthetic timers: notifies the guest of timers that have expired, and starts timers that have to be
    /// started. Call inside the engine's reader section.
    pub(crate) fn run_timers(&mut self) {
        let now = self.vm.arch.clock.now();
        self.hyperv.timers.tick(now);
        if !self.hyperv.timers.is_any_due() {
            return;
        }
        let moment = Moment {
            reference: self.reference_time(),
            host: now,
        };
        let mut timers = std::mem::take(&mut self.hyperv.timers);
        timers.run(moment, |notice| self.deliver_notice(notice));
        self.hyperv.timers = timers;
        // The message of a timer was interrupted. The timer tries again when the run loop examines the timers.
        self.look_at_timers();
    }

    fn deliver_notice(&mut self, notice: Notice) -> Delivery {
        let request = match notice {
            Notice::Interrupt(vector) => self.common.request(vector),
            Notice::Message {
                sint,
                timer,
                expiration,
                may_be_dropped,
            } => {
                let message = message::timer(timer, expiration, self.reference_time());
                match self.store_message(sint, &message, may_be_dropped) {
                    Ok(()) => {}
                    Err(delivery) => return delivery,
                }
                let vector = self.common.arch.vp.vector(sint);
                vector.map_or(Request::Refused, |vector| self.common.request(vector))
            }
        };
        match request {
            Request::Refused => Delivery::Failed,
            Request::Merged | Request::Pending => Delivery::Done,
        }
    }

    /// Stores a message in the message slot of a SynIC source, if the slot is free.
    ///
    /// # Errors
    /// The outcome for the message that was not stored.
    fn store_message(
        &mut self,
        sint: u32,
        message: &[u8],
        may_be_dropped: bool,
    ) -> Result<(), Delivery> {
        let slot = self.common.arch.vp.synic().message_slot(sint);
        let slot = slot.ok_or(Delivery::Failed)?;
        let first = self.read_guest_word(slot);
        let first = first.ok_or_else(|| self.delivery_without_access())?;
        if !message::is_taken(first) {
            return match self.write_guest(slot, message) {
                true => Ok(()),
                false => Err(self.delivery_without_access()),
            };
        }
        if may_be_dropped {
            return Err(Delivery::Done);
        }
        // The slot is in use. PENDING makes the guest notify the SynIC when it frees the slot.
        match self.write_guest(slot + message::FLAGS, &[message::PENDING]) {
            true => Err(Delivery::Failed),
            false => Err(self.delivery_without_access()),
        }
    }

    /// Returns the outcome for a message whose slot cannot be accessed.
    fn delivery_without_access(&self) -> Delivery {
        match self.is_called_out() {
            true => Delivery::Interrupted,
            false => Delivery::Failed,
        }
    }
}
