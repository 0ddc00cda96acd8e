//! The times that exits take, by reason, for `slat stat`. A time is measured from the exit of the CPU to its next
//! entry, and includes the client's work.
//!
//! Reading the clock twice takes a tenth of the time of a short exit. So only one exit in [`ONE_IN`] is timed. The
//! clock is the host's counter (`arch::ticks`), because no seccomp filter forbids it. Halts are counted separately
//! ([`Halts::waited`](crate::counters::Halts::waited)).

use crate::arch::{self, Reason};
use crate::counters::{Count, Histogram};

/// One exit of this number of exits is timed. The number is a power of two.
const ONE_IN: u64 = 16;

/// The number of buckets of a histogram. The last bucket counts exits that take longer than 4 ms. There are fewer
/// buckets than for halts, because each vCPU has a histogram for each exit reason.
const BUCKETS: usize = 24;

/// The times of exits for one reason.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// The sum of the measured times, in nanoseconds.
    pub(crate) ns: Count,
    /// The number of exits of each duration.
    pub(crate) hist: Histogram<BUCKETS>,
}

/// The times of a vCPU's exits.
#[derive(Debug, Default)]
pub(crate) struct ExitTimes([Times; Reason::NAMES.len()]);

impl ExitTimes {
    /// Returns the times of each reason, after its name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, &Times)> {
        Reason::NAMES.into_iter().zip(&self.0)
    }
}

/// The exit that is being timed, and when it began. Only the thread that runs the vCPU uses this.
#[derive(Default)]
pub(crate) struct Stopwatch(Option<(Reason, u64)>);

impl Stopwatch {
    /// Begins to time an exit, if it is one of those that are timed. Call after each exit of the CPU. `number` is the
    /// number of exits so far. `reason` returns the exit's reason; `None` for a halt, whose time is counted separately.
    #[inline]
    pub(crate) fn exits(&mut self, number: u64, reason: impl FnOnce() -> Option<Reason>) {
        if number.is_multiple_of(ONE_IN) {
            self.0 = reason().map(|reason| (reason, arch::ticks()));
        }
    }

    /// Ends the timing of an exit, if one is being timed. Call before the CPU executes the guest again.
    #[inline]
    pub(crate) fn enters(&mut self, times: &ExitTimes) {
        if let Some((reason, begin)) = self.0.take() {
            let cycles = arch::ticks().saturating_sub(begin);
            let ns = u128::from(cycles) * 1_000_000 / u128::from(arch::ticks_khz());
            let times = &times.0[reason as usize];
            times.ns.add(ns as u64);
            times.hist.add(ns as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn the_time_of_one_exit_in_sixteen_is_taken() {
        let times = ExitTimes::default();
        let mut stopwatch = Stopwatch::default();
        for number in 1..=2 * ONE_IN {
            stopwatch.exits(number, || Some(Reason::Interrupt));
            thread::sleep(Duration::from_millis(2));
            stopwatch.enters(&times);
        }
        stopwatch.exits(3 * ONE_IN, || None);
        stopwatch.enters(&times);
        let sum = |times: &Times| times.hist.iter().sum::<u64>();
        for (name, times) in times.iter() {
            let expected = if name == "interrupt" { 2 } else { 0 };
            assert_eq!(sum(times), expected, "{name}");
        }
        let taken = times.0[Reason::Interrupt as usize].ns.get();
        assert!((4_000_000..2_000_000_000).contains(&taken), "{taken} ns");
    }
}
