//! The 8254 of a VM, and its alarm.
//!
//! The alarm rings when the counter's output rises. The alarm's owner then calls [`Timer::expire`], which unlocks the
//! 8254 again, and pulses the VM's line afterwards.

use crate::arch::x86_64::clock::monotonic;
use crate::errno::{Result, no_memory};
use crate::ticker::{Alarm, Client};
use slat::Shared;
use slat_irqchip::pit::{Pit, PitState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The 8254 of a VM.
pub(crate) struct Timer {
    pit: Mutex<Pit>,
    alarm: Shared<Client>,
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.alarm.leave();
    }
}

impl Timer {
    /// Creates a timer with this alarm. If `speaker`, the 8254 also has port 0x61.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(alarm: Alarm, speaker: bool) -> Result<Shared<Self>> {
        Shared::try_new(Timer {
            pit: Mutex::new(Pit::new(speaker, monotonic())),
            alarm: Client::register(alarm)?,
        })
        .map_err(no_memory)
    }

    fn lock(&self) -> MutexGuard<'_, Pit> {
        self.pit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the alarm to the 8254's next deadline. Call after the counters have changed.
    fn arm(&self, pit: &Pit) {
        self.alarm.set_deadline(pit.next_deadline().map(|deadline| {
            Instant::now() + Duration::from_nanos(deadline.saturating_sub(monotonic()))
        }));
    }

    pub(crate) fn read(&self, port: u16) -> u8 {
        self.lock().read(port, monotonic())
    }

    pub(crate) fn write(&self, port: u16, value: u8) {
        let mut pit = self.lock();
        pit.write(port, value, monotonic());
        self.arm(&pit);
    }

    /// Counts the edges of the counter's output that are due. Returns whether the line has to be pulsed.
    pub(crate) fn expire(&self) -> bool {
        let mut pit = self.lock();
        let pulse = pit.expire(monotonic());
        self.arm(&pit);
        pulse
    }

    /// Notes that the guest has ended the 8254's interrupt. Returns whether the line has to be pulsed for a tick that
    /// the guest has missed.
    pub(crate) fn acknowledged(&self) -> bool {
        self.lock().acknowledged()
    }

    pub(crate) fn reset_reinjection(&self) {
        self.lock().reset_reinjection();
    }

    pub(crate) fn set_reinject(&self, on: bool) {
        self.lock().set_reinject(on);
    }

    pub(crate) fn save(&self) -> PitState {
        self.lock().save()
    }

    pub(crate) fn restore(&self, state: &PitState) {
        let mut pit = self.lock();
        pit.restore(state, monotonic());
        self.arm(&pit);
    }
}
