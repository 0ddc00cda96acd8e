//! Decides which ticks become interrupts.

/// The ticks of counter 0 whose interrupts the guest has not acknowledged yet.
#[derive(Clone, Debug)]
pub(super) struct Reinjection {
    on: bool,
    /// The number of ticks that the guest has not acknowledged. The first tick is being delivered; all later ticks
    /// wait.
    unacknowledged: u64,
}

impl Reinjection {
    pub(super) const fn new() -> Self {
        Reinjection {
            on: true,
            unacknowledged: 0,
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    pub(super) fn set(&mut self, on: bool) {
        if self.on != on {
            self.on = on;
            self.reset();
        }
    }

    pub(super) fn reset(&mut self) {
        self.unacknowledged = 0;
    }

    /// Adds `due` ticks. Returns whether the caller has to inject an interrupt now.
    pub(super) fn tick(&mut self, due: u64) -> bool {
        if !self.on {
            return due != 0;
        }
        let idle = self.unacknowledged == 0;
        self.unacknowledged = self.unacknowledged.saturating_add(due);
        idle && due != 0
    }

    /// Notes that the guest has acknowledged the interrupt of a tick. Returns whether the caller has to inject the
    /// interrupt of the next tick now.
    pub(super) fn acknowledge(&mut self) -> bool {
        self.unacknowledged = self.unacknowledged.saturating_sub(1);
        self.unacknowledged != 0
    }
}
