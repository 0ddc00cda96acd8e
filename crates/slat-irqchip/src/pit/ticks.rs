//! Computes the times of counter 0's ticks, and counts them.

use super::channel::{Mode, Run};
use super::time::{nanoseconds, ticks};

/// The shortest period of the ticks in nanoseconds: KVM's `min_timer_period_us`. A shorter count ticks with this
/// period, but the guest reads the count that it wrote.
const MIN_PERIOD: u64 = 200_000;

/// The ticks that follow from one count that the guest has written: the times at which the counter's output raises the
/// timer interrupt. The default value has no ticks.
#[derive(Clone, Debug, Default)]
pub(super) struct Ticks {
    schedule: Option<Schedule>,
    /// The number of ticks that were counted.
    seen: u64,
}

#[derive(Clone, Debug)]
enum Schedule {
    /// The counter ticks once, at this time.
    Once(u64),
    /// The counter ticks after every `count` ticks of the clock from the time `since` on. The time of each tick is
    /// computed from `since`, so that rounding errors do not add up.
    Periodic { since: u64, count: u64 },
    /// The counter ticks first at this time, and then every [`MIN_PERIOD`] nanoseconds.
    Limited(u64),
}

impl Ticks {
    /// Creates the ticks of a count in `mode`. Modes that need a rising gate have no ticks, because the gate of counter
    /// 0 is always high.
    pub(super) fn new(mode: Mode, run: Run) -> Self {
        let period = nanoseconds(run.ticks.into());
        let first = run.since.saturating_add(period);
        let schedule = match mode {
            Mode::OneShot | Mode::HardwareStrobe => None,
            Mode::TerminalCount | Mode::SoftwareStrobe => Some(Schedule::Once(first)),
            Mode::RateGenerator | Mode::SquareWave if period < MIN_PERIOD => {
                Some(Schedule::Limited(first))
            }
            Mode::RateGenerator | Mode::SquareWave => Some(Schedule::Periodic {
                since: run.since,
                count: run.ticks,
            }),
        };
        Ticks { schedule, seen: 0 }
    }

    /// Returns the time of the first tick that was not counted yet. `None`: no such tick follows.
    pub(super) fn next(&self) -> Option<u64> {
        match *self.schedule.as_ref()? {
            Schedule::Once(at) => (self.seen == 0).then_some(at),
            Schedule::Periodic { since, count } => {
                let ticks = u128::from(count) * (u128::from(self.seen) + 1);
                Some(since.saturating_add(nanoseconds(ticks)))
            }
            Schedule::Limited(first) => {
                Some(first.saturating_add(self.seen.saturating_mul(MIN_PERIOD)))
            }
        }
    }

    /// Counts the ticks until `now`. Returns the number of ticks that no earlier call has counted.
    pub(super) fn expire(&mut self, now: u64) -> u64 {
        let all = match self.schedule {
            None => 0,
            Some(Schedule::Once(at)) => u64::from(at <= now),
            Some(Schedule::Periodic { since, count }) => ticks(now.saturating_sub(since)) / count,
            Some(Schedule::Limited(first)) => now
                .checked_sub(first)
                .map_or(0, |late| late / MIN_PERIOD + 1),
        };
        let new = all.saturating_sub(self.seen);
        self.seen += new;
        new
    }
}
