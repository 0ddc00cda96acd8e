//! What a vCPU counts besides its memory: exits, injections, halts. Written by the thread that runs it, read by anybody.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets of a histogram: KVM's number.
pub(super) const BUCKETS: usize = 32;

macro_rules! exits {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one vCPU, with the names of KVM's.
        #[derive(Debug, Default)]
        pub(crate) struct Exits {
            $($(#[$doc])* pub(crate) $name: Count,)*
            /// How long the halts lasted, by the position of the highest bit of the nanoseconds.
            pub(super) halt_wait_hist: [Count; BUCKETS],
            /// It waits in a halt now.
            blocking: AtomicBool,
        }

        impl Exits {
            /// The names of the plain counters.
            pub(super) const NAMES: &[&str] = &[$(stringify!($name),)*];

            /// The counter of that place in [`Self::NAMES`].
            pub(super) fn value(&self, index: usize) -> u64 {
                [$(&self.$name,)*][index].0.load(Relaxed)
            }
        }
    };
}

exits! {
    /// The CPU stopped, for whatever reason.
    exits,
    /// Port accesses.
    io_exits,
    /// Accesses to addresses without memory that the client answers.
    mmio_exits,
    /// `KVM_RUN` ended because of a signal.
    signal_exits,
    /// An interrupt could be delivered that had waited for it.
    irq_window_exits,
    /// The client's interrupt could be delivered.
    request_irq_exits,
    /// Somebody wanted the vCPU to look: the counterpart of a host interrupt.
    irq_exits,
    /// HLT.
    halt_exits,
    /// Instructions that real KVM would emulate: those that access addresses without memory (the client answers them, or the local
    /// APIC does), and those that the CPU does not have.
    insn_emulation,
    /// Instructions that the CPU does not have.
    insn_emulation_fail,
    /// VMCALL.
    hypercalls,
    /// Interrupts of the local APIC that were delivered.
    irq_injections,
    /// NMIs that were delivered.
    nmi_injections,
    /// All translations were dropped.
    tlb_flush,
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

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Exits {
    /// A halt begins, or ends.
    pub(crate) fn set_blocking(&self, blocking: bool) {
        self.blocking.store(blocking, Relaxed);
    }

    pub(super) fn is_blocking(&self) -> bool {
        self.blocking.load(Relaxed)
    }

    /// A halt, or a part of one, is over.
    pub(crate) fn waited(&self, time: Duration) {
        let ns = time.as_nanos() as u64;
        self.halt_wait_ns.add(ns);
        let bits = (u64::BITS - ns.leading_zeros()) as usize;
        self.halt_wait_hist[bits.min(BUCKETS - 1)].add(1);
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
        let hist: Vec<_> = exits.halt_wait_hist.iter().map(Count::get).collect();
        assert_eq!((hist[0], hist[1], hist[10], hist[31]), (1, 1, 1, 1));
        assert_eq!(exits.halt_wait_ns.get(), 1024 + 1_000_000_000_000);
    }
}
