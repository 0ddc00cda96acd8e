//! The host's clocks: its TSC, the frequency of the TSC, its monotonic clock and its wall clock.
//!
//! # The frequency
//! All VMs of a process use one frequency, in kHz, which never changes ([`tsc_khz`]). CPUID gives the frequency if the
//! hypervisor's timing leaf or the TSC leaf is exact. Otherwise the frequency is measured against
//! `CLOCK_MONOTONIC_RAW`. The kernel computes that clock from the TSC with the frequency that it has calibrated, and
//! NTP does not correct that clock. So the measurement finds the kernel's calibrated frequency. A long baseline makes
//! the measurement exact. A measurement is two readings that are 16 ms apart. Each reading is repeated many times, and
//! the most exact one is used. The error is at most 0.3 ppm, and rounding to kHz adds 0.2 ppm at 2.5 GHz. The first
//! reading is taken when `/dev/kvm` is opened ([`note_start`]), so that most programs need not wait before the second
//! reading.
//!
//! If several threads need the frequency before it is known, each thread measures it, and all use the first result. No
//! thread waits for another one. So a child that is forked during a measurement does not wait for a thread that exists
//! only in its parent.
//!
//! # Simulation
//! Unit tests replace the clocks of their thread (`simulated`), so that hours of guest time pass at once.

use crate::arch::x86_64::cpuid::host_leaf;
use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// CPUID leaf 1, ECX: the host itself runs on a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// The hypervisor's timing leaf. Its EAX is the TSC's frequency in kHz.
const HYPERVISOR_TIMING: u32 = 0x4000_0010;
/// The TSC leaf. The TSC's frequency is ECX (Hz of the crystal) times EBX / EAX.
const TSC_LEAF: u32 = 0x15;
/// The number of times that a reading for a measurement is repeated to find the most exact one.
const MANY: u32 = 32;
/// The number of times that a reading for a client is repeated to find the most exact one.
const FEW: u32 = 4;
/// The distance of a measurement's two readings, in multiples of the time that a reading takes. If a reading takes 40
/// ns, the distance is about 16 ms.
const BASELINE: u64 = 200_000;
/// The longest measurement, in nanoseconds. Without this limit, a measurement would be long on hosts where a reading is
/// a system call.
const LONGEST_NS: u64 = 100_000_000;

/// Reads the host's TSC. The read is not ordered: the processor may execute an earlier load after it.
pub(crate) fn tsc() -> u64 {
    #[cfg(test)]
    if let Some(host) = simulated::advance() {
        return host.tsc;
    }
    // SAFETY: RDTSC is available on every x86-64 host; user space may execute it unless the process has forbidden it by
    // prctl(2).
    unsafe { _rdtsc() }
}

/// Reads the host's TSC after all loads before this call. So if another thread has read the TSC and stored its value,
/// and this thread has loaded that value, this call does not return an earlier TSC.
pub(crate) fn ordered_tsc() -> u64 {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_lfence() };
    tsc()
}

/// Reads a clock of the host, in nanoseconds.
fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the time is written to a struct on the stack.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the host's monotonic clock, in nanoseconds. `KVM_GET_PIT2` reports the beginning of a count by this clock,
/// and perf uses the same clock for the times of compiled code.
pub(crate) fn monotonic() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// One moment, as the host's TSC and another clock of the host show it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) tsc: u64,
    /// The value of the host's other clock, in nanoseconds.
    pub(crate) ns: u64,
    /// The cycles that the reading took. The TSC and the other clock were read within this time.
    width: u64,
}

impl Moment {
    fn once(clock: libc::clockid_t) -> Self {
        let before = ordered_tsc();
        let ns = read(clock);
        let width = ordered_tsc().wrapping_sub(before);
        Moment {
            tsc: before.wrapping_add(width / 2),
            ns,
            width,
        }
    }

    /// Takes `readings` readings. Returns the reading that took the fewest cycles.
    fn best(clock: libc::clockid_t, readings: u32) -> Self {
        let rest = (1..readings).map(|_| Self::once(clock));
        rest.fold(Self::once(clock), |best, one| {
            match one.width < best.width {
                true => one,
                false => best,
            }
        })
    }

    /// Reads the clock against which the frequency is measured, and the TSC.
    fn for_measurement() -> Self {
        Self::best(libc::CLOCK_MONOTONIC_RAW, MANY)
    }

    /// Reads the TSC and the wall clock, whose nanoseconds count from 1970, UTC.
    pub(crate) fn of_realtime() -> Self {
        #[cfg(test)]
        if let Some(host) = simulated::advance() {
            return Moment {
                tsc: host.tsc,
                ns: host.realtime(),
                width: 0,
            };
        }
        Self::best(libc::CLOCK_REALTIME, FEW)
    }
}

/// The first reading of the measurement. The reading is valid if [`START_STATE`] is [`NOTED`].
static START: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static START_STATE: AtomicU8 = AtomicU8::new(EMPTY);
const EMPTY: u8 = 0;
/// A thread is writing [`START`]. A child that is forked at this moment stays in this state, because the writing thread
/// does not exist in the child. So each measurement in the child takes its own first reading.
const BEING_NOTED: u8 = 1;
const NOTED: u8 = 2;
/// The frequency in kHz; 0 while it is not known.
static KHZ: AtomicU32 = AtomicU32::new(0);

/// Takes the first reading of the measurement, unless the process has taken it. Call early: [`tsc_khz`] waits until
/// this reading is about 16 ms old.
pub(crate) fn note_start() {
    let claimed =
        START_STATE.compare_exchange(EMPTY, BEING_NOTED, Ordering::Relaxed, Ordering::Relaxed);
    if claimed.is_ok() {
        let moment = Moment::for_measurement();
        for (word, value) in START.iter().zip([moment.tsc, moment.ns, moment.width]) {
            word.store(value, Ordering::Relaxed);
        }
        START_STATE.store(NOTED, Ordering::Release);
    }
}

fn start() -> Moment {
    if START_STATE.load(Ordering::Acquire) != NOTED {
        return Moment::for_measurement();
    }
    let [tsc, ns, width] = [0, 1, 2].map(|word| START[word].load(Ordering::Relaxed));
    Moment { tsc, ns, width }
}

/// Returns the frequency of the host's TSC. The result is always the same in this process, even after a fork. The first
/// call may take 16 ms.
pub fn tsc_khz() -> u32 {
    #[cfg(test)]
    if let Some(host) = simulated::get() {
        return host.khz;
    }
    let known = KHZ.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    note_start();
    let khz = khz_of_cpuid().unwrap_or_else(|| measure(start()));
    match KHZ.compare_exchange(0, khz, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => khz,
        Err(first) => first,
    }
}

/// Returns the frequency if CPUID gives it exactly. Leaf 0x16 is not used, because its values are rounded to MHz.
fn khz_of_cpuid() -> Option<u32> {
    let virtualized = host_leaf(1, 0).ecx & HYPERVISOR != 0;
    let khz = if virtualized {
        host_leaf(HYPERVISOR_TIMING, 0).eax.into()
    } else {
        let leaf = host_leaf(TSC_LEAF, 0);
        let hz = u64::from(leaf.ecx) * u64::from(leaf.ebx);
        hz.checked_div(leaf.eax.into())? / 1000
    };
    u32::try_from(khz).ok().filter(|&khz| khz != 0)
}

/// Measures the frequency from the reading `start` to a second reading that is late enough. Waits without sleeping,
/// because the program's seccomp filter may forbid system calls that sleep.
fn measure(start: Moment) -> u32 {
    loop {
        let now = Moment::once(libc::CLOCK_MONOTONIC_RAW);
        let (cycles, ns) = (
            now.tsc.wrapping_sub(start.tsc),
            now.ns.wrapping_sub(start.ns),
        );
        if cycles >= BASELINE * (start.width + now.width) || ns >= LONGEST_NS {
            let end = Moment::for_measurement();
            return khz_between(&start, &end);
        }
        std::hint::spin_loop();
    }
}

/// Returns the frequency that results from two readings of a clock.
fn khz_between(start: &Moment, end: &Moment) -> u32 {
    let cycles = u128::from(end.tsc.wrapping_sub(start.tsc));
    let ns = u128::from(end.ns.wrapping_sub(start.ns)).max(1);
    u32::try_from((cycles * 1_000_000 + ns / 2) / ns).unwrap_or(u32::MAX)
}

/// The clocks that a unit test has set for its thread.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;

    /// The clocks that the thread reads in place of the host's.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Host {
        pub(crate) tsc: u64,
        /// The frequency that slat assumes for the host's TSC.
        pub(crate) khz: u32,
        /// The wall clock, in nanoseconds, when the TSC is 0.
        pub(crate) realtime: u64,
        /// The number of cycles that pass with each reading.
        pub(crate) step: u64,
    }

    impl Host {
        pub(super) fn realtime(&self) -> u64 {
            let ns = u128::from(self.tsc) * 1_000_000 / u128::from(self.khz);
            self.realtime + ns as u64
        }
    }

    thread_local! {
        static HOST: Cell<Option<Host>> = const { Cell::new(None) };
    }

    pub(crate) fn get() -> Option<Host> {
        HOST.get()
    }

    /// Sets the clocks of the thread. `None`: the thread reads the host's clocks.
    pub(crate) fn set(host: Option<Host>) {
        HOST.set(host);
    }

    /// Advances the clocks by the time of one reading, and returns them.
    pub(super) fn advance() -> Option<Host> {
        let mut host = HOST.get()?;
        host.tsc += host.step;
        HOST.set(Some(host));
        Some(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the greatest error, in kHz, of a measurement from `start` to `end`, or of a measurement that is a tenth
    /// as long. The error is 1 ppm, plus rounding, plus a part of the cycles that the readings took.
    fn tolerance(start: &Moment, end: &Moment) -> u64 {
        let ms = (end.ns - start.ns) / 1_000_000;
        let khz = end.tsc.wrapping_sub(start.tsc) / ms.max(1);
        khz / 1_000_000 + 1 + 10 * (start.width + end.width) / ms.max(1)
    }

    /// A short measurement finds the same frequency as a longer measurement.
    #[test]
    fn the_frequency_is_the_kernels() {
        let start = Moment::for_measurement();
        let short = measure(start);
        std::thread::sleep(std::time::Duration::from_millis(200));
        let end = Moment::for_measurement();
        let long = khz_between(&start, &end);
        // In a child that was forked while its parent took the first reading, START_STATE is BEING_NOTED.
        let noted = START_STATE.swap(BEING_NOTED, Ordering::Relaxed);
        let of_child = measure(super::start());
        START_STATE.store(noted, Ordering::Release);
        for khz in [short, of_child, tsc_khz()] {
            let error = u64::from(khz.abs_diff(long));
            assert!(
                error <= tolerance(&start, &end),
                "{khz} kHz, {long} kHz by {start:?} and {end:?}"
            );
        }
    }
}
