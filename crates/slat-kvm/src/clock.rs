//! Time in a VM: the TSC, nanoseconds for the APIC timers, and the paravirtual clock's page.

use crate::cpuid::host_leaf;
use crate::errno::{Result, fail};
use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_CLOCK_TSC_STABLE};
use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The flags that `KVM_GET_CLOCK` returns and `KVM_SET_CLOCK` accepts: guests' clocks follow the host's TSC, which is the same on all
/// vCPUs.
pub const FLAGS: u32 = KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC;

/// A VM's clock.
#[derive(Debug)]
pub struct VmClock {
    start: Instant,
    /// What `KVM_SET_CLOCK` added to the nanoseconds since the VM was created.
    offset: AtomicI64,
    /// How often `KVM_SET_CLOCK` was called: after each change the pages of the clock are rewritten.
    changes: AtomicU64,
    /// The last TSC that was set.
    last_tsc: Mutex<Option<LastTsc>>,
    /// The TSC's frequency of new vCPUs.
    tsc_khz: AtomicU32,
}

impl VmClock {
    /// Creates a clock that starts at zero now.
    pub fn new() -> Self {
        VmClock {
            start: Instant::now(),
            offset: AtomicI64::new(0),
            changes: AtomicU64::new(0),
            last_tsc: Mutex::default(),
            tsc_khz: AtomicU32::new(host_tsc_khz()),
        }
    }

    /// Nanoseconds since the VM was created; never decreases.
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// The moment at which [`now`](Self::now) is `nanoseconds`, but at most a year from now.
    pub fn instant(&self, nanoseconds: u64) -> Instant {
        let far = Duration::from_secs(365 * 24 * 3600);
        self.start + Duration::from_nanos(nanoseconds).min(self.start.elapsed() + far)
    }

    /// The clock that `KVM_GET_CLOCK` shows.
    pub fn kvmclock(&self) -> u64 {
        self.now()
            .wrapping_add_signed(self.offset.load(Ordering::Relaxed))
    }

    /// Sets the clock that `KVM_GET_CLOCK` shows.
    pub fn set_kvmclock(&self, clock: u64) {
        self.offset
            .store(clock.wrapping_sub(self.now()) as i64, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How often [`set_kvmclock`](Self::set_kvmclock) was called.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Reads the clock, the host's wall clock and the host's TSC at one moment.
    pub fn read(&self) -> Reading {
        let host_tsc = host_tsc();
        let clock = self.kvmclock();
        Reading {
            clock,
            realtime: realtime(),
            host_tsc,
        }
    }

    /// Returns the TSC of a new vCPU: zero for the first one of a VM, else the TSC that was set last.
    pub(crate) fn new_tsc(&self) -> Tsc {
        let khz = self.tsc_khz();
        let mut tsc = Tsc {
            khz,
            ratio: ratio(khz),
            offset: 0,
        };
        self.set_tsc(&mut tsc, 0, false);
        tsc
    }

    /// Sets a vCPU's TSC to `value`, for the client or for a new vCPU. Zero, or a value within a second of what the TSC that the
    /// client set last would be now, synchronizes with the last TSC of the same frequency: as with KVM, a client that sets its vCPUs
    /// one after the other gets the same TSC on all.
    pub(crate) fn set_tsc(&self, tsc: &mut Tsc, value: u64, by_client: bool) {
        let host = host_tsc();
        let mut last = (self.last_tsc.lock()).unwrap_or_else(PoisonError::into_inner);
        let same = last.filter(|last| {
            let second = 1000 * u64::from(tsc.khz);
            let expected = last.tsc.at(host);
            let close = expected.wrapping_sub(value).wrapping_add(second) < 2 * second;
            last.tsc.khz == tsc.khz && (value == 0 || last.by_client && close)
        });
        match same {
            Some(same) => tsc.offset = same.tsc.offset,
            None => tsc.shift(value.wrapping_sub(tsc.at(host))),
        }
        *last = Some(LastTsc {
            tsc: *tsc,
            by_client: by_client || last.is_some_and(|last| last.by_client),
        });
    }

    /// Sets the offset of a vCPU's TSC for the client.
    pub(crate) fn set_tsc_offset(&self, tsc: &mut Tsc, offset: u64) {
        tsc.offset = offset;
        let mut last = (self.last_tsc.lock()).unwrap_or_else(PoisonError::into_inner);
        *last = Some(LastTsc {
            tsc: *tsc,
            by_client: true,
        });
    }

    /// The TSC's frequency of new vCPUs.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz.load(Ordering::Relaxed)
    }

    /// Sets the TSC's frequency of new vCPUs.
    pub(crate) fn set_tsc_khz(&self, khz: u32) {
        self.tsc_khz.store(khz, Ordering::Relaxed);
    }
}

/// The TSC of a vCPU: the host's, scaled, plus an offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tsc {
    khz: u32,
    /// Cycles per cycle of the host, in units of 2^-32.
    ratio: u64,
    /// Added to the scaled cycles of the host.
    offset: u64,
}

/// The TSC that was set last on a vCPU of the VM.
#[derive(Clone, Copy, Debug)]
struct LastTsc {
    tsc: Tsc,
    /// Whether the client has set the TSC of any vCPU.
    by_client: bool,
}

/// One cycle per cycle of the host.
const SAME: u64 = 1 << 32;
/// A frequency that differs from the host's by at most this many millionths is not scaled, as in KVM: the same machine was
/// measured again.
const TOLERANCE_PPM: u64 = 250;
/// The lowest frequency that is refused.
const TOO_MANY_KHZ: u32 = 1 << 31;

/// Returns the frequency that a client's `KVM_SET_TSC_KHZ` asks for: 0 is the host's.
///
/// # Errors
/// `EINVAL` for a frequency of 2^31 kHz or more.
pub(crate) fn frequency(khz: u32) -> Result<u32> {
    match khz {
        0 => Ok(host_tsc_khz()),
        TOO_MANY_KHZ.. => fail(libc::EINVAL),
        khz => Ok(khz),
    }
}

/// Cycles of `khz` per cycle of the host, in units of 2^-32.
fn ratio(khz: u32) -> u64 {
    let (khz, host) = (u64::from(khz), u64::from(host_tsc_khz()));
    match khz.abs_diff(host) * 1_000_000 <= host * TOLERANCE_PPM {
        true => SAME,
        false => (khz << 32) / host,
    }
}

impl Tsc {
    /// The guest's TSC when the host's is `host`.
    fn at(&self, host: u64) -> u64 {
        let scaled = (u128::from(host) * u128::from(self.ratio)) >> 32;
        (scaled as u64).wrapping_add(self.offset)
    }

    /// The guest's TSC now. The host's TSC is read after all loads before this call: a guest that has seen another vCPU's TSC must
    /// not read an older one.
    pub(crate) fn now(&self) -> u64 {
        // SAFETY: SSE2 is part of x86-64.
        unsafe { _mm_lfence() };
        self.at(host_tsc())
    }

    /// Adds `change` to the TSC.
    pub(crate) fn shift(&mut self, change: u64) {
        self.offset = self.offset.wrapping_add(change);
    }

    pub(crate) fn khz(&self) -> u32 {
        self.khz
    }

    /// Returns the time in which the TSC counts `cycles`.
    pub(crate) fn duration(&self, cycles: u64) -> Duration {
        let nanoseconds = u128::from(cycles) * 1_000_000 / u128::from(self.khz.max(1));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Changes the frequency; the TSC continues from its present value.
    pub(crate) fn set_khz(&mut self, khz: u32) {
        let host = host_tsc();
        let before = self.at(host);
        (self.khz, self.ratio) = (khz, ratio(khz));
        self.shift(before.wrapping_sub(self.at(host)));
    }

    /// `KVM_VCPU_TSC_OFFSET`: the difference to the scaled TSC of the host.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }
}

/// What [`VmClock::read`] returns.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Nanoseconds of the VM's clock.
    pub clock: u64,
    /// Nanoseconds since 1970, UTC.
    pub realtime: u64,
    /// Cycles.
    pub host_tsc: u64,
}

/// Returns the nanoseconds of the host's monotonic clock: `KVM_GET_PIT2` says in them when a count began, and perf takes them for the
/// times of compiled code.
pub(crate) fn monotonic() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the time is written to a struct on the stack.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The host's wall clock: nanoseconds since 1970, UTC.
pub fn realtime() -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.unwrap_or_default().as_nanos() as u64
}

impl Default for VmClock {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) fn host_tsc() -> u64 {
    // SAFETY: RDTSC is available on every x86-64 host; user space may execute it unless prctl forbids.
    unsafe { _rdtsc() }
}

/// Returns the frequency of the host's TSC from CPUID, or else from a measurement of 5 ms.
pub fn host_tsc_khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| {
        // The hypervisor's timing leaf is exact; without it the frequency is measured.
        if host_leaf(1, 0).ecx & 1 << 31 != 0 {
            let khz = host_leaf(0x4000_0010, 0).eax;
            if khz != 0 {
                return khz;
            }
        }
        let (start, before) = (Instant::now(), host_tsc());
        while start.elapsed() < Duration::from_millis(5) {
            std::hint::spin_loop();
        }
        let cycles = u128::from(host_tsc() - before);
        (cycles * 1_000_000 / start.elapsed().as_nanos().max(1)) as u32
    })
}

/// Returns the contents of the paravirtual clock's page: the parameters by which a guest gets nanoseconds from the TSC.
///
/// `version` is odd while the page changes; a guest reads until it sees the same even value twice.
pub fn system_time(version: u32, tsc: u64, nanoseconds: u64, tsc_khz: u32) -> [u8; 32] {
    // ns = ((tsc - then) << shift) * mul >> 32, with the multiplier as large as 32 bits hold.
    let mut shift = 0i8;
    let mut scaled = u64::from(tsc_khz) * 1000;
    while scaled > 2_000_000_000 {
        scaled >>= 1;
        shift -= 1;
    }
    while scaled <= 1_000_000_000 {
        scaled <<= 1;
        shift += 1;
    }
    let mul = ((1_000_000_000u128 << 32) / u128::from(scaled)) as u32;
    let mut page = [0; 32];
    page[0..4].copy_from_slice(&version.to_le_bytes());
    page[8..16].copy_from_slice(&tsc.to_le_bytes());
    page[16..24].copy_from_slice(&nanoseconds.to_le_bytes());
    page[24..28].copy_from_slice(&mul.to_le_bytes());
    page[28] = shift as u8;
    // The TSC is the same on all vCPUs.
    page[29] = 1;
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tsc_of_another_frequency_is_scaled() {
        let clock = VmClock::new();
        let host = host_tsc_khz();
        clock.set_tsc_khz(host / 2);
        let mut tsc = clock.new_tsc();
        let second = 1000 * u64::from(host);
        let steps = |tsc: &Tsc| tsc.at(second * 101).wrapping_sub(tsc.at(second * 100));
        assert!(steps(&tsc).abs_diff(second / 2) < 1000);
        assert!(tsc.now() < second);
        let before = tsc.now();
        tsc.set_khz(3 * (host / 4));
        assert!(tsc.now() >= before && tsc.now() - before < second);
        assert!(steps(&tsc).abs_diff(3 * (second / 4)) < 10_000);
        // The host's own frequency, measured again.
        tsc.set_khz(host + host / 5000);
        assert_eq!(steps(&tsc), second);
        assert_eq!(tsc.khz(), host + host / 5000);
    }

    #[test]
    fn vcpus_that_are_set_one_after_the_other_have_the_same_tsc() {
        let clock = VmClock::new();
        let (mut first, mut second) = (clock.new_tsc(), clock.new_tsc());
        assert_eq!(first.offset, second.offset);
        clock.set_tsc(&mut first, 1 << 40, true);
        std::thread::sleep(Duration::from_millis(2));
        clock.set_tsc(&mut second, 1 << 40, true);
        assert_eq!(first.offset, second.offset);
        assert_eq!(clock.new_tsc().offset, first.offset, "of a new vCPU");
        clock.set_tsc(&mut second, 1 << 41, true);
        assert_ne!(first.offset, second.offset);
    }

    #[test]
    fn the_clock_can_be_set() {
        let clock = VmClock::new();
        clock.set_kvmclock(1 << 50);
        assert!(clock.kvmclock() >= 1 << 50);
        assert!(clock.kvmclock() < (1 << 50) + 10_000_000_000);
    }

    #[test]
    fn the_time_page_turns_cycles_into_nanoseconds() {
        for khz in [500_000u32, 1_000_000, 2_300_000, 4_700_000] {
            let page = system_time(2, 0, 0, khz);
            let mul = u64::from(u32::from_le_bytes(page[24..28].try_into().unwrap()));
            let shift = page[28] as i8;
            let cycles = u64::from(khz) * 1000;
            let shifted = if shift < 0 {
                cycles >> -shift
            } else {
                cycles << shift
            };
            let ns = ((u128::from(shifted) * u128::from(mul)) >> 32) as u64;
            assert!(ns.abs_diff(1_000_000_000) < 1000, "{khz} kHz: {ns}");
        }
    }
}
