//! Time in a VM: the TSC, nanoseconds for the APIC timers, and the paravirtual clock's page.

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// A VM's clock.
#[derive(Debug)]
pub struct VmClock {
    start: Instant,
    /// What `KVM_SET_CLOCK` added to the nanoseconds since the VM was made.
    offset: AtomicI64,
    /// How often `KVM_SET_CLOCK` was called: the pages of the clock have to follow.
    changes: AtomicU64,
    /// The host's TSC when the VM was made: guests start at zero.
    tsc_start: AtomicU64,
}

impl VmClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        VmClock {
            start: Instant::now(),
            offset: AtomicI64::new(0),
            changes: AtomicU64::new(0),
            tsc_start: AtomicU64::new(host_tsc()),
        }
    }

    /// Nanoseconds since the VM was made; never goes back.
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// The moment at which [`now`](Self::now) is `nanoseconds`.
    pub fn instant(&self, nanoseconds: u64) -> Instant {
        let far = Duration::from_secs(365 * 24 * 3600);
        self.start + Duration::from_nanos(nanoseconds).min(self.start.elapsed() + far)
    }

    /// The clock that `KVM_GET_CLOCK` shows.
    pub fn kvmclock(&self) -> u64 {
        self.now()
            .wrapping_add_signed(self.offset.load(Ordering::Relaxed))
    }

    /// Sets it.
    pub fn set_kvmclock(&self, clock: u64) {
        self.offset
            .store(clock.wrapping_sub(self.now()) as i64, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How often it was set.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The clock, the host's wall clock and the host's TSC at one moment.
    pub fn read(&self) -> Reading {
        let host_tsc = host_tsc();
        let clock = self.kvmclock();
        Reading {
            clock,
            realtime: realtime(),
            host_tsc,
        }
    }

    /// The guest's TSC before any offset of its vCPU.
    pub fn tsc(&self) -> u64 {
        host_tsc().wrapping_sub(self.tsc_start.load(Ordering::Relaxed))
    }

    /// The TSC's frequency.
    pub fn tsc_khz(&self) -> u32 {
        host_tsc_khz()
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

fn host_tsc() -> u64 {
    // SAFETY: RDTSC is available on every x86-64 host; user space may execute it unless prctl forbids.
    unsafe { _rdtsc() }
}

/// The frequency of the host's TSC: what CPUID says, or else a measurement of a few milliseconds.
pub fn host_tsc_khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| {
        // The hypervisor's timing leaf is exact; CPUs without one are measured.
        let hypervisor = std::arch::x86_64::__cpuid(0x4000_0000);
        if std::arch::x86_64::__cpuid(1).ecx & 1 << 31 != 0
            && (0x4000_0010..0x4000_0100).contains(&hypervisor.eax)
        {
            let khz = std::arch::x86_64::__cpuid(0x4000_0010).eax;
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

/// What the paravirtual clock's page holds: how to get nanoseconds from the TSC.
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
