//! The synthetic timers of one virtual processor. There are four, one-shot or periodic. An expired timer sends a
//! message for an interrupt source (SINT) of the SynIC, or raises an interrupt directly at the local APIC.
//!
//! A timer counts by the reference clock, but its alarm is set by the host's clock; a [`Moment`] has both times. As in
//! KVM, a timer whose message finds no free slot waits for a slot, and does not count meanwhile. A periodic timer skips
//! ticks that are late.

use crate::msr::STIMER0_CONFIG;
use crate::{Refused, Writer};

/// The number of synthetic timers of a virtual processor.
pub const TIMERS: usize = 4;

const ENABLED: u64 = 1;
const PERIODIC: u64 = 1 << 1;
const AUTO_ENABLE: u64 = 1 << 3;
const DIRECT: u64 = 1 << 12;

/// The values of two clocks at the same moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The value of the guest's reference clock, in units of 100 ns.
    pub reference: u64,
    /// The value of the host's clock, in nanoseconds.
    pub host: u64,
}

impl Moment {
    /// Returns the time of the host's clock at which the reference clock shows `reference`. If `reference` is before
    /// this moment, returns `host`, the time of this moment.
    fn host_at(self, reference: u64) -> u64 {
        let left = reference.saturating_sub(self.reference);
        self.host
            .saturating_add(left.saturating_mul(crate::clock::UNIT))
    }
}

/// The notice by which a timer tells the guest that the timer has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The timer raises an interrupt with this vector at the local APIC.
    Interrupt(u8),
    /// The timer sends a message.
    Message {
        /// The SINT whose slot gets the message.
        sint: u32,
        /// The index of the timer.
        timer: u32,
        /// The time at which the timer expired, by the reference clock.
        expiration: u64,
        /// Whether the message may be dropped if the message slot is occupied. A dropped message counts as delivered,
        /// because the timer's next message has the same effect.
        may_be_dropped: bool,
    },
}

/// Whether a timer's [`Notice`], a message or an interrupt, was delivered to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The guest has got the notice.
    Done,
    /// The message slot of the SINT was occupied, or the guest cannot be notified. The timer waits for
    /// [`Timers::acknowledged`].
    Failed,
    /// The attempt was interrupted, and has to be repeated.
    Interrupted,
}

#[derive(Clone, Copy, Debug, Default)]
struct Timer {
    config: u64,
    count: u64,
    /// The time at which the timer expires, by the reference clock; 0 if the timer was not started.
    expiration: u64,
    /// The time of the host's clock at which the timer has to be examined. `None`: the timer does not count.
    alarm: Option<u64>,
    /// Whether the timer has to be examined: it was changed, its alarm has gone off, or its message slot may be free.
    is_due: bool,
    /// Whether the timer's message waits for a free slot.
    waits: bool,
}

impl Timer {
    fn has(&self, bit: u64) -> bool {
        self.config & bit != 0
    }

    fn sint(&self) -> u32 {
        (self.config >> 16 & 15) as u32
    }

    fn stop(&mut self) {
        *self = Timer {
            config: self.config,
            count: self.count,
            ..Timer::default()
        };
    }

    /// Sets the alarm of an enabled timer whose count is not 0.
    fn start(&mut self, now: Moment) {
        let reference = now.reference;
        if !self.has(PERIODIC) {
            self.expiration = self.count;
            // A timer whose time has already passed expires at once.
            self.is_due = reference >= self.count;
        } else if self.expiration == 0 {
            self.expiration = reference.wrapping_add(self.count);
        } else if reference >= self.expiration {
            let since = (reference - self.expiration) % self.count;
            self.expiration = reference.wrapping_add(self.count - since);
        }
        self.alarm = (!self.is_due).then(|| now.host_at(self.expiration));
    }

    fn notice(&self, index: usize) -> Notice {
        match self.has(DIRECT) {
            true => Notice::Interrupt((self.config >> 4) as u8),
            false => Notice::Message {
                sint: self.sint(),
                timer: index as u32,
                expiration: self.expiration,
                may_be_dropped: self.has(PERIODIC),
            },
        }
    }
}

/// The rights of a writer of a timer's register.
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    /// Whether the virtual processor has a SynIC. Without a SynIC, the host may write only zeros.
    pub has_synic: bool,
    /// Whether interrupts can go directly to the local APIC.
    pub direct_mode: bool,
}

/// The timers of one virtual processor.
#[derive(Clone, Debug, Default)]
pub struct Timers([Timer; TIMERS]);

impl Timers {
    fn timer(&mut self, index: u32) -> (&mut Timer, bool) {
        let offset = index - STIMER0_CONFIG;
        (&mut self.0[(offset / 2) as usize], offset.is_multiple_of(2))
    }

    /// Reads the configuration or the count of a timer.
    ///
    /// # Panics
    /// If the MSR `index` is no register of a timer.
    pub fn read(&self, index: u32) -> u64 {
        let offset = index - STIMER0_CONFIG;
        let timer = &self.0[(offset / 2) as usize];
        match offset % 2 {
            0 => timer.config,
            _ => timer.count,
        }
    }

    /// Writes the configuration or the count of a timer. Either write stops the timer. [`run`](Self::run) starts the
    /// timer again if it is enabled.
    ///
    /// # Errors
    /// `rights` do not allow the write.
    ///
    /// # Panics
    /// If the MSR `index` is no register of a timer.
    pub fn write(
        &mut self,
        index: u32,
        value: u64,
        by: Writer,
        rights: Rights,
    ) -> Result<(), Refused> {
        let by_guest = by == Writer::Guest;
        if !rights.has_synic && (by_guest || value != 0) {
            return Err(Refused);
        }
        let (timer, is_config) = self.timer(index);
        if is_config {
            if by_guest && value & DIRECT != 0 && !rights.direct_mode {
                return Err(Refused);
            }
            let was_enabled = timer.has(ENABLED);
            timer.stop();
            timer.config = value;
            if was_enabled && !timer.has(DIRECT) && timer.sint() == 0 {
                timer.config &= !ENABLED;
            }
        } else {
            timer.stop();
            timer.count = value;
            // When the host restores a timer, it writes the two registers (configuration and count) one after the
            // other. So neither of these writes changes the other register.
            if by_guest && value == 0 {
                timer.config &= !ENABLED;
            } else if by_guest && timer.has(AUTO_ENABLE) {
                timer.config |= ENABLED;
            }
        }
        timer.is_due = timer.has(ENABLED);
        Ok(())
    }

    /// Whether a timer has to be examined: call [`run`](Self::run) before the guest continues.
    pub fn is_any_due(&self) -> bool {
        self.0.iter().any(|timer| timer.is_due)
    }

    /// Returns the time of the host's clock at which the next timer has to be examined. `None`: no timer counts.
    pub fn deadline(&self) -> Option<u64> {
        self.0.iter().filter_map(|timer| timer.alarm).min()
    }

    /// Marks the timers that have to be examined because their alarm is at or before `host`, the time of the host's
    /// clock.
    pub fn tick(&mut self, host: u64) {
        for timer in &mut self.0 {
            if timer.alarm.is_some_and(|alarm| alarm <= host) {
                timer.alarm = None;
                timer.is_due = true;
            }
        }
    }

    /// Marks timers to be examined if their message waits for the slot of the source `sint`. Call after the guest has
    /// read the message in this slot.
    pub fn acknowledged(&mut self, sint: u32) {
        for timer in &mut self.0 {
            let waits = timer.waits && timer.has(ENABLED) && !timer.has(DIRECT);
            timer.is_due |= waits && timer.sint() == sint;
        }
    }

    /// Examines all timers that are due: calls `deliver` for those that have expired, and starts those
    /// that have to be started.
    pub fn run(&mut self, now: Moment, mut deliver: impl FnMut(Notice) -> Delivery) {
        for (index, timer) in self.0.iter_mut().enumerate() {
            // A one-shot timer whose time has passed takes two rounds: it is started, and then expires.
            while core::mem::take(&mut timer.is_due) {
                if !timer.has(ENABLED) {
                    break;
                }
                if timer.expiration != 0 && now.reference >= timer.expiration {
                    match deliver(timer.notice(index)) {
                        Delivery::Interrupted => {
                            timer.is_due = true;
                            return;
                        }
                        Delivery::Failed => timer.waits = true,
                        Delivery::Done => {
                            timer.waits = false;
                            if !timer.has(PERIODIC) {
                                timer.config &= !ENABLED;
                            }
                        }
                    }
                }
                if !timer.has(ENABLED) || timer.count == 0 {
                    timer.stop();
                } else if !timer.waits {
                    timer.start(now);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
