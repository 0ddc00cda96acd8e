//! A vCPU's counters of exits, injections and halts. (The engine has counters of its own.) Only the thread that runs
//! the vCPU writes these counters; any thread may read them.

use slat_x86::Counters;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The number of buckets of a histogram, as in KVM.
pub(crate) const BUCKETS: usize = 32;

macro_rules! exits {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one vCPU, under KVM's names.
        #[derive(Debug, Default)]
        pub(crate) struct Exits {
            $($(#[$doc])* pub(crate) $name: Count,)*
            /// Counts of the waits in halts. The bucket is the position of the highest set bit of the nanoseconds.
            pub(crate) halt_wait_hist: Histogram<BUCKETS>,
            /// Whether the vCPU waits in a halt now.
            blocking: AtomicBool,
        }

        impl Exits {
            /// The names of the plain counters.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name),)*];

            /// The value of the counter with this index in [`Self::NAMES`].
            pub(crate) fn value(&self, index: usize) -> u64 {
                [$(&self.$name,)*][index].0.load(Relaxed)
            }
        }
    };
}

exits! {
    /// Exits of the CPU, for any reason.
    exits,
    /// Port accesses.
    io_exits,
    /// Accesses to addresses without memory that exit to the client.
    mmio_exits,
    /// The number of `KVM_RUN` calls that a signal ended.
    signal_exits,
    /// Exits because a pending interrupt could be delivered.
    irq_window_exits,
    /// Exits because the client could inject an interrupt.
    request_irq_exits,
    /// Exits because an attention bit was raised. KVM counts host interrupts here.
    irq_exits,
    /// HLT.
    halt_exits,
    /// Instructions that real KVM would emulate: those that access addresses without memory (which the client, an
    /// interrupt controller or an eventfd handles), and those that the CPU does not have.
    insn_emulation,
    /// Instructions that the CPU does not have.
    insn_emulation_fail,
    /// VMCALL.
    hypercalls,
    /// Interrupts of the local APIC or the 8259 that were delivered.
    irq_injections,
    /// NMIs that were delivered.
    nmi_injections,
    /// Times that the vCPU dropped all translations.
    tlb_flush,
    /// Times that the notify window expired.
    notify_window_exits,
    /// Halts that ended.
    halt_wakeup,
    /// Nanoseconds spent in halts.
    halt_wait_ns,
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

/// Counts of durations. The bucket is the position of the highest set bit of the nanoseconds, counted from 1. The last
/// bucket has all longer durations.
#[derive(Debug)]
pub(crate) struct Histogram<const BUCKETS: usize>([Count; BUCKETS]);

impl<const BUCKETS: usize> Default for Histogram<BUCKETS> {
    fn default() -> Self {
        Histogram(std::array::from_fn(|_| Count::default()))
    }
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// Counts a time.
    pub(crate) fn add(&self, ns: u64) {
        let bits = (u64::BITS - ns.leading_zeros()) as usize;
        self.0[bits.min(BUCKETS - 1)].add(1);
    }

    /// Returns the counts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(Count::get)
    }
}

/// The CPU's counters, as of the end of its last run.
#[derive(Debug, Default)]
pub(crate) struct CpuCounts([AtomicU64; Counters::COUNT]);

impl CpuCounts {
    /// Publishes the counters. Only the thread that runs the vCPU calls this.
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

impl Exits {
    /// Call when a halt begins (`true`) or ends.
    pub(crate) fn set_blocking(&self, blocking: bool) {
        self.blocking.store(blocking, Relaxed);
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking.load(Relaxed)
    }

    /// Counts the time of a halt, or of a part of a halt. Call after the wait.
    pub(crate) fn waited(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.halt_wait_ns.add(ns);
        self.halt_wait_hist.add(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_sorted_by_their_highest_bit() {
        let exits = Exits::default();
        exits.waited(Duration::ZERO);
        exits.waited(Duration::from_nanos(1));
        exits.waited(Duration::from_nanos(1023));
        exits.waited(Duration::from_secs(1000));
        let hist: Vec<_> = exits.halt_wait_hist.iter().collect();
        assert_eq!((hist[0], hist[1], hist[10], hist[31]), (1, 1, 1, 1));
        assert_eq!(exits.halt_wait_ns.get(), 1024 + 1_000_000_000_000);
    }
}
