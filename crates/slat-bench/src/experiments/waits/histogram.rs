//! A histogram of the durations of calls.

use std::time::Duration;

/// The number of steps in which the histogram divides each doubling of the time. So a quantile is at most a 32nd too
/// long.
const STEPS: u64 = 32;
const STEP_BITS: u32 = STEPS.ilog2();
/// The number of steps of the histogram. Each time below `STEPS` ns has its own step. Above that, each doubling of the
/// time, up to 2^64 ns, has `STEPS` steps.
const LEN: usize = ((u64::BITS - STEP_BITS + 1) as u64 * STEPS) as usize;

/// The times of calls. The memory is constant, and recording a call takes a few instructions.
pub(super) struct Histogram {
    counts: Box<[u64]>,
    calls: u64,
    max: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Histogram {
            counts: vec![0; LEN].into_boxed_slice(),
            calls: 0,
            max: 0,
        }
    }

    pub(super) fn record(&mut self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[step(time)] += 1;
        self.calls += 1;
        self.max = self.max.max(time);
    }

    /// Adds the calls of another histogram.
    pub(super) fn add(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.calls += other.calls;
        self.max = self.max.max(other.max);
    }

    /// Returns the number of calls.
    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    /// Returns the longest time. `None` if there is no call.
    pub(super) fn max(&self) -> Option<Duration> {
        (self.calls > 0).then(|| Duration::from_nanos(self.max))
    }

    /// Returns the time that the fraction `share` of the calls did not exceed. `None` if there is no call.
    pub(super) fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = ((share * self.calls as f64).ceil() as u64).clamp(1, self.calls.max(1));
        let mut seen = 0;
        self.steps().find_map(|(time, count)| {
            seen += count;
            (seen >= rank).then(|| Duration::from_nanos(time))
        })
    }

    /// Returns how long a caller must wait if it arrives at a random moment and waits until the end of the current
    /// call. The returned wait is not exceeded at the fraction `share` of all moments. It is assumed that the recorded
    /// calls follow one another without a gap. `None` if there is no call.
    ///
    /// For example, if there is one call of one second and there are a thousand calls of a millisecond, only one call
    /// in a thousand is long. But half of all moments are in that call. A caller that arrives at such a moment waits
    /// until the call ends.
    pub(super) fn quantile_of_moments(&self, share: f64) -> Option<Duration> {
        let steps: Vec<_> = self.steps().collect();
        let all: f64 = steps.iter().map(|(time, n)| *time as f64 * *n as f64).sum();
        let exceeding = (1.0 - share) * all;
        // A caller waits longer than `wait` only if it arrives in a call that is longer than `wait`, and not in the
        // last `wait` of that call. The total of such moments is the sum of these calls' times, minus `wait` for each
        // call. The loop adds calls, longest first, until that total is `exceeding`.
        let (mut calls, mut sum) = (0.0, 0.0);
        let mut shorter = steps.iter().rev().skip(1);
        for (time, count) in steps.iter().rev() {
            calls += *count as f64;
            sum += *time as f64 * *count as f64;
            let wait = (sum - exceeding) / calls;
            if shorter.next().is_none_or(|(next, _)| wait >= *next as f64) {
                return Some(Duration::from_nanos(wait.max(0.0) as u64));
            }
        }
        None
    }

    /// Returns the steps that contain calls, in ascending order: the longest time of each step, and its number of
    /// calls.
    fn steps(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.counts.iter().enumerate();
        let counts = counts.filter(|(_, count)| **count > 0);
        counts.map(|(index, count)| (longest(index).min(self.max), *count))
    }
}

/// Returns the index of the step for a time in nanoseconds.
fn step(time: u64) -> usize {
    let doubling = time.checked_ilog2().unwrap_or(0).saturating_sub(STEP_BITS);
    (u64::from(doubling) * STEPS + (time >> doubling)) as usize
}

/// Returns the longest time in a step, in nanoseconds.
fn longest(index: usize) -> u64 {
    let index = index as u64;
    let doubling = (index / STEPS).saturating_sub(1);
    let next = index - doubling * STEPS + 1;
    (u128::from(next) << doubling).wrapping_sub(1) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: impl IntoIterator<Item = (u64, u64)>) -> Histogram {
        let mut histogram = Histogram::new();
        for (time, count) in times {
            for _ in 0..count {
                histogram.record(Duration::from_nanos(time));
            }
        }
        histogram
    }

    fn about(found: Option<Duration>, expected: u64) {
        let found = found.unwrap().as_nanos() as u64;
        assert!(
            found.abs_diff(expected) <= expected / STEPS,
            "{found}, not {expected}"
        );
    }

    #[test]
    fn every_time_has_a_step_and_longer_ones_no_earlier_one() {
        let mut before = 0;
        for doubling in 0..u64::BITS {
            for time in [
                (1 << doubling) - 1,
                1 << doubling,
                1 << doubling | 1 << doubling >> 1,
            ] {
                let step = step(time);
                assert!(step < LEN && before <= step, "{time}");
                assert!(longest(step) >= time, "{time}");
                assert!(longest(step) - time <= time / STEPS, "{time}");
                before = step;
            }
        }
        assert_eq!(step(u64::MAX), LEN - 1);
        assert_eq!(longest(LEN - 1), u64::MAX);
        assert!((1..LEN).all(|index| step(longest(index - 1) + 1) == index));
    }

    #[test]
    fn quantiles_are_those_of_the_calls() {
        let histogram = of((1..=10_000).map(|time| (time * 1000, 1)));
        about(histogram.quantile(0.5), 5_000_000);
        about(histogram.quantile(0.99), 9_900_000);
        about(histogram.quantile(0.999), 9_990_000);
        assert_eq!(histogram.calls(), 10_000);
        assert_eq!(histogram.max(), Some(Duration::from_millis(10)));
        // No quantile exceeds the longest call.
        assert_eq!(histogram.quantile(1.0), histogram.max());
    }

    #[test]
    fn one_call_in_a_thousand_is_beyond_the_quantile_and_two_are_not() {
        about(of([(1000, 999), (1_000_000, 1)]).quantile(0.999), 1000);
        about(of([(1000, 998), (1_000_000, 2)]).quantile(0.999), 1_000_000);
    }

    #[test]
    fn one_long_call_is_many_moments() {
        let histogram = of([(1_000_000, 1000), (1_000_000_000, 1)]);
        about(histogram.quantile(0.999), 1_000_000);
        // All calls together take 2 s, so a fraction of 0.001 of all moments is 2 ms. A caller that arrives in the
        // first 2 ms of the long call waits longer than 998 ms.
        about(histogram.quantile_of_moments(0.999), 998_000_000);
        // In three quarters of all moments, the wait is shorter: in the second half of the long call, and in all other
        // calls.
        about(histogram.quantile_of_moments(0.75), 500_000_000);
        // If all calls are equally long, half of the moments are in the second half of a call.
        about(of([(1_000_000, 10)]).quantile_of_moments(0.5), 500_000);
    }

    #[test]
    fn two_together_have_the_calls_of_both() {
        let mut both = of([(1000, 999)]);
        both.add(&of([(1_000_000, 1), (5_000_000, 1)]));
        assert_eq!(both.calls(), 1001);
        assert_eq!(both.max(), Some(Duration::from_millis(5)));
        about(both.quantile(0.999), 1_000_000);
        both.add(&of([(1000, 1)]));
        assert_eq!(both.max(), Some(Duration::from_millis(5)));
    }

    #[test]
    fn without_calls_there_is_nothing_to_say() {
        let nothing = Histogram::new();
        assert_eq!(nothing.calls(), 0);
        assert_eq!(nothing.max(), None);
        assert_eq!(nothing.quantile(0.5), None);
        assert_eq!(nothing.quantile_of_moments(0.999), None);
    }
}
