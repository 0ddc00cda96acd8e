//! The time of records. Tracepoints read the processor's counter (`arch`). A read takes about 10 ns, and needs no
//! system call on any machine. Two moments, each shown by the counter and by `CLOCK_MONOTONIC`, determine how to
//! convert the counter to nanoseconds.

pub(crate) use crate::arch::cycles;
use std::time::Duration;

/// One moment, as both clocks show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) cycles: u64,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub(crate) ns: u64,
}

impl Moment {
    pub(crate) fn now() -> Self {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let before = cycles();
        // SAFETY: the call writes only to the struct.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
        let after = cycles();
        Moment {
            cycles: before + after.wrapping_sub(before) / 2,
            ns: Duration::new(time.tv_sec as u64, time.tv_nsec as u32).as_nanos() as u64,
        }
    }
}

/// Converts cycles of the counter to nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    start: Moment,
    ns_per_cycle: f64,
}

impl Scale {
    /// Makes a scale from two moments. If `end` equals `start`, one cycle counts as one nanosecond.
    pub(crate) fn new(start: Moment, end: Moment) -> Self {
        let cycles = end.cycles.saturating_sub(start.cycles);
        let ns = end.ns.saturating_sub(start.ns);
        let ns_per_cycle = match cycles {
            0 => 1.0,
            cycles => ns as f64 / cycles as f64,
        };
        Scale {
            start,
            ns_per_cycle,
        }
    }

    /// Returns the nanoseconds of `CLOCK_MONOTONIC` at which the counter was `cycles`.
    pub(crate) fn ns(&self, cycles: u64) -> u64 {
        let since = cycles.wrapping_sub(self.start.cycles) as i64;
        let ns = (since as f64 * self.ns_per_cycle) as i64;
        self.start.ns.saturating_add_signed(ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_become_nanoseconds_on_both_sides_of_the_start() {
        let moment = |cycles, ns| Moment { cycles, ns };
        let scale = Scale::new(moment(1000, 50_000), moment(4000, 51_000));
        assert_eq!(scale.ns(1000), 50_000);
        assert_eq!(scale.ns(7000), 52_000);
        assert_eq!(scale.ns(400), 49_800);
    }

    #[test]
    fn the_two_clocks_run_alike() {
        let start = Moment::now();
        std::thread::sleep(Duration::from_millis(20));
        let scale = Scale::new(start, Moment::now());
        std::thread::sleep(Duration::from_millis(20));
        let later = Moment::now();
        let error = scale.ns(later.cycles).abs_diff(later.ns);
        assert!(error < 2_000_000, "{error} ns");
    }
}
