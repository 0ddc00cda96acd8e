//! A vCPU's counters of exits, injections and halts. (The engine has counters of its own.) Only the thread that runs
//! the vCPU writes these counters; any thread may read them.

use crate::arch::Counters;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The number of buckets of a histogram, as in KVM.
pub(crate) const BUCKETS: usize = 32;

/// Defines `Exits`: the counters of one vCPU, under the names that KVM has for the architecture. Architecture-neutral
/// code counts three of them, so every architecture must define `exits`, `signal_exits` and `tlb_flush`.
macro_rules! exits {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one vCPU, under KVM's names.
        #[derive(Debug, Default)]
        pub(crate) struct Exits {
            $($(#[$doc])* pub(crate) $name: $crate::counters::Count,)*
            pub(crate) halts: $crate::counters::Halts,
        }

        impl Exits {
            /// The names of the counters that are single numbers.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name),)* "halt_wakeup", "halt_wait_ns"];

            /// Returns the value of the counter with this index in [`Self::NAMES`].
            pub(crate) fn value(&self, index: usize) -> u64 {
                [$(&self.$name,)* &self.halts.wakeup, &self.halts.wait_ns][index].get()
            }
        }
    };
}
pub(crate) use exits;

/// The counters of a vCPU's halts, which every architecture has.
#[derive(Debug, Default)]
pub(crate) struct Halts {
    /// The number of halts that have ended.
    pub(crate) wakeup: Count,
    /// The nanoseconds spent in halts.
    pub(crate) wait_ns: Count,
    /// The number of waits in halts, by duration. A wait's bucket is the position of the highest set bit of its
    /// nanoseconds.
    pub(crate) wait_hist: Histogram<BUCKETS>,
    /// Whether the vCPU waits in a halt now.
    blocking: AtomicBool,
}

/// A counter with one writer at a time.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The number of events, by duration. An event's bucket is the position of the highest set bit of its nanoseconds,
/// counted from 1. The last bucket has all longer durations.
#[derive(Debug)]
pub(crate) struct Histogram<const BUCKETS: usize>([Count; BUCKETS]);

impl<const BUCKETS: usize> Default for Histogram<BUCKETS> {
    fn default() -> Self {
        Histogram(std::array::from_fn(|_| Count::default()))
    }
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// Counts a duration of `ns` nanoseconds.
    pub(crate) fn add(&self, ns: u64) {
        let bits = (u64::BITS - ns.leading_zeros()) as usize;
        self.0[bits.min(BUCKETS - 1)].add(1);
    }

    /// Returns the count of each bucket.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(Count::get)
    }
}

/// The counters of a vCPU's CPU. The values are those at the end of the CPU's last run.
#[derive(Debug, Default)]
pub(crate) struct CpuCounts([AtomicU64; Counters::COUNT]);

impl CpuCounts {
    /// Publishes the values of `counters`. Only the thread that runs the vCPU calls this.
    pub(crate) fn publish(&self, counters: &Counters) {
        for (to, value) in self.0.iter().zip(counters.to_array()) {
            to.store(value, Relaxed);
        }
    }

    /// Adds the counters to `sum`.
    pub(crate) fn add_to(&self, sum: &mut [u64; Counters::COUNT]) {
        for (sum, value) in sum.iter_mut().zip(&self.0) {
            *sum = sum.wrapping_add(value.load(Relaxed));
        }
    }
}

impl Halts {
    /// Records that a halt begins (`true`) or ends (`false`).
    pub(crate) fn set_blocking(&self, blocking: bool) {
        self.blocking.store(blocking, Relaxed);
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking.load(Relaxed)
    }

    /// Adds `time` to the time of halts. Call after each wait in a halt.
    pub(crate) fn waited(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.wait_ns.add(ns);
        self.wait_hist.add(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_sorted_by_their_highest_bit() {
        let halts = Halts::default();
        halts.waited(Duration::ZERO);
        halts.waited(Duration::from_nanos(1));
        halts.waited(Duration::from_nanos(1023));
        halts.waited(Duration::from_secs(1000));
        let hist: Vec<_> = halts.wait_hist.iter().collect();
        assert_eq!((hist[0], hist[1], hist[10], hist[31]), (1, 1, 1, 1));
        assert_eq!(halts.wait_ns.get(), 1024 + 1_000_000_000_000);
    }
}
