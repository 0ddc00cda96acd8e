//! Time in a VM. All clocks that a guest can read are computed from the host's TSC:
//!
//! | clock | what it is |
//! |---|---|
//! | a vCPU's TSC (`Tsc`) | the host's TSC, scaled if the client has set another frequency, plus an offset |
//! | kvmclock ([`VmClock::kvmclock`]) | the VM's pair of a host TSC and nanoseconds, from which the clock counts on |
//! | a vCPU's page (`VmClock::parameters`) | the pair in terms of the vCPU's TSC, and nanoseconds per cycle |
//! | `KVM_GET_CLOCK`, the wall clock's page, Hyper-V's reference clock and its page | kvmclock |
//! | the time of timers ([`VmClock::now`]) | the host's TSC since the VM was created, in nanoseconds |
//!
//! Steal time is no clock: it adds up durations that the host's scheduler measures.
//!
//! # kvmclock
//! A VM has one pair, like KVM's master clock. While the TSCs of all vCPUs are equal, `KVM_GET_CLOCK` computes the
//! clock exactly as guests do, with the same multiplier. So no reading depends on the vCPU or on the time at which the
//! vCPU's page was written. Guests are told that the clock is stable, so they do not compare readings. The TSCs differ,
//! for example, after a guest has written one of them. Then the clock is not stable, and `KVM_GET_CLOCK` reports
//! neither stability nor the host's TSC. In this case `KVM_GET_CLOCK` computes the clock exactly. Each vCPU's page has
//! the scale of that vCPU's TSC, and is written again each minute (`REFRESH`). A scale is rounded down. So a guest that
//! uses the page is at most 30 ns behind the exact clock, and never ahead.
//!
//! The pair changes in two cases:
//! * `KVM_SET_CLOCK`. After the change, a vCPU executes guest code only when it has the new pair (`VmClock::update`).
//!   So guests do not see the old clock on one vCPU after the new clock on another vCPU. While the clock is stable, the
//!   first vCPU that executes guest code has written the pages of all vCPUs before (`VmClock::page_turn`), because a
//!   guest may read any of the pages then: Linux reads the page of CPU 0 on all CPUs.
//! * The vCPUs' TSCs become equal or different, or all of them get a new frequency. Then the clock continues from its
//!   present value, rounded up.
//!
//! # Frequencies
//! The process has one number for the host's frequency (`host`). A VM that is migrated to another process, or another
//! host, continues from the clock that the client sets, by the new host's frequency. So only the rate of the clock
//! changes, by the difference between the two hosts' measurements. As in KVM, the TSC is not scaled if the client sets
//! a frequency within 250 ppm of the host's. The TSC then counts up to 250 ppm faster or slower than the guest was
//! told. kvmclock, Hyper-V's clock and timers have no such error, because they count by the host's frequency, not by
//! the client's.
//!
//! # Timers
//! [`VmClock::now`] is computed from the TSC. So a deadline in TSC cycles and the same deadline in nanoseconds expire
//! at the same time, and no timer expires before the guest's clocks show its time. The ticker sleeps by the host's
//! `CLOCK_MONOTONIC`, which NTP makes faster or slower, by at most 500 ppm. The differences do not add up, because
//! [`VmClock::instant`] converts only the remaining time of one wait. If the ticker wakes too early, it finds the timer
//! not expired and waits again. The 8254 counts by `CLOCK_MONOTONIC`, because `KVM_GET_PIT2` reports the beginning of a
//! count by that clock.
//!
//! # Sleep of the host
//! If the TSC counts while the host sleeps, guests' clocks jump forward, as KVM's do. slat does not notice if the TSC
//! restarts at 0 (S3 on machines without `nonstop_tsc_s3`).

pub(crate) mod host;
mod page;
mod tsc;

pub use host::tsc_khz as host_tsc_khz;
pub(crate) use host::{monotonic, note_start, ordered_tsc, tsc as host_tsc};
/// The host's counter and its frequency in kHz. Neutral code uses them for measurements.
pub(crate) use host::{tsc as ticks, tsc_khz as ticks_khz};
pub(crate) use page::{FLAGS_AT, Parameters, Scale, is_paused};
pub(crate) use tsc::{Tsc, frequency};

use crate::errno::Result;
use crate::heap;
use host::Moment;
use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_CLOCK_TSC_STABLE};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The flags that `KVM_GET_CLOCK` can return and `KVM_SET_CLOCK` accepts.
pub const FLAGS: u32 = KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC;
/// The number of seconds after which a vCPU's kvmclock page is written again, if its clock is not stable.
const REFRESH: u64 = 60;
/// The longest time, in nanoseconds, that [`VmClock::instant`] adds to a deadline so that the ticker does not wake too
/// early.
const MARGIN: u64 = 50_000;
const YEAR: u64 = 365 * 24 * 3600 * 1_000_000_000;

/// A VM's clock.
#[derive(Debug)]
pub struct VmClock {
    /// The host's TSC when the VM was created.
    start: u64,
    /// Nanoseconds per cycle of the host's TSC.
    scale: Scale,
    kvmclock: Mutex<Kvmclock>,
    /// The number of times that the kvmclock pair has changed. After each change, vCPUs write their pages again.
    changes: AtomicU64,
    /// The lock that is held while the kvmclock pair is updated.
    turn: Mutex<()>,
    /// Whether an update is in progress.
    is_updating: AtomicBool,
    /// The lock that is held while vCPUs' pages are written. It holds the number of the change after which the pages of
    /// all vCPUs were written last.
    page_turn: Mutex<u64>,
    /// The TSC frequency of new vCPUs.
    tsc_khz: AtomicU32,
}

/// A VM's kvmclock: a pair of a host TSC and nanoseconds, and what the clock knows of the VM's vCPUs.
#[derive(Debug)]
struct Kvmclock {
    /// The host's TSC at a moment.
    host_tsc: u64,
    /// The VM's clock, in nanoseconds, at the moment of `host_tsc`.
    nanoseconds: u64,
    /// If the TSCs of all vCPUs are equal: the ratio of these TSCs to the host's TSC, and nanoseconds per cycle.
    /// `None`: the TSCs differ.
    common: Option<(u64, Scale)>,
    /// The vCPUs, indexed by number; `None`: the number is free.
    vcpus: Vec<Option<ClockVcpu>>,
    /// The TSC that was last set by the client or for a new vCPU.
    last: Option<LastTsc>,
}

/// The part of the clock's state that belongs to one vCPU.
#[derive(Clone, Copy, Debug)]
struct ClockVcpu {
    tsc: Tsc,
    /// The guest-physical address of the vCPU's kvmclock page. `None`: the guest does not use the clock on this vCPU.
    page: Option<u64>,
}

/// The TSC that was set last on a vCPU of the VM.
#[derive(Clone, Copy, Debug)]
struct LastTsc {
    tsc: Tsc,
    /// Whether the client has set the TSC of any vCPU.
    by_client: bool,
}

/// A change of a vCPU's TSC. The variants are the ways to set a TSC.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TscChange {
    /// The client writes the TSC, or a new vCPU sets it to 0. The value is synchronized with the last TSC of the same
    /// frequency in two cases: the value is 0, or it differs by less than a second from the present value of the TSC
    /// that the client set last. So, as with KVM, a client that sets the TSCs of its vCPUs one after the other gets the
    /// same TSC on all vCPUs.
    Value(u64),
    /// The client sets `KVM_VCPU_TSC_OFFSET`.
    Offset(u64),
    /// The client sets the frequency, and the TSC continues from its value. If that value is within a second of another
    /// vCPU's TSC of the new frequency, the two TSCs are synchronized.
    Khz(u32),
    /// The guest writes its TSC, or TSC_ADJUST. The number is the difference that is added to the TSC.
    Shift(u64),
}

impl Kvmclock {
    /// Returns the TSCs of the VM's vCPUs.
    fn tscs(&self) -> impl Iterator<Item = Tsc> {
        self.vcpus.iter().flatten().map(|vcpu| vcpu.tsc)
    }

    /// Returns the value of the clock when the host's TSC is `host_tsc`, which must not be before the kvmclock pair's
    /// TSC.
    fn at(&self, host_tsc: u64) -> u64 {
        let host_tsc = host_tsc.max(self.host_tsc);
        let since = match self.common {
            Some((ratio, scale)) => {
                let cycles = |host_tsc| tsc::scaled(host_tsc, ratio);
                scale.nanoseconds(cycles(host_tsc).wrapping_sub(cycles(self.host_tsc)))
            }
            None => {
                let cycles = u128::from(host_tsc - self.host_tsc);
                (cycles * 1_000_000 / u128::from(host_tsc_khz().max(1))) as u64
            }
        };
        self.nanoseconds.wrapping_add(since)
    }

    /// Computes `common` again. If `common` has changed, makes a new pair: the clock continues from its value at
    /// `host_tsc`. This value is rounded up, so that no reading by the new pair is earlier than a reading by the old
    /// pair. Returns whether `common` has changed.
    fn look_at_tscs(&mut self, host_tsc: u64) -> bool {
        let ratio = match self.tscs().next() {
            None => Some(tsc::SAME),
            Some(first) => (self.tscs().all(|tsc| tsc.is_same(&first))).then_some(first.ratio()),
        };
        let changes = self.common.map(|(ratio, _)| ratio) != ratio;
        if changes {
            let now = self.at(host_tsc).wrapping_add(1);
            (self.host_tsc, self.nanoseconds) = (host_tsc.max(self.host_tsc), now);
            self.common = ratio.map(|ratio| (ratio, Scale::new(ratio)));
        }
        changes
    }

    /// Applies `change` to `tsc` when the host's TSC is `host_tsc`. Returns the new TSC.
    fn changed(&mut self, mut tsc: Tsc, change: TscChange, host_tsc: u64, by_client: bool) -> Tsc {
        let second = 1000 * u64::from(tsc.khz());
        let is_near = |other: &Tsc, value: u64| {
            let expected = other.at(host_tsc);
            expected.wrapping_sub(value).wrapping_add(second) < 2 * second
        };
        match change {
            TscChange::Shift(change) => {
                tsc.shift(change);
                return tsc;
            }
            TscChange::Offset(offset) => tsc.set_offset(offset),
            TscChange::Value(value) => {
                let same = self.last.filter(|last| {
                    let synchronizes = value == 0 || last.by_client && is_near(&last.tsc, value);
                    last.tsc.khz() == tsc.khz() && synchronizes
                });
                match same {
                    Some(same) => tsc.set_offset(same.tsc.offset()),
                    None => tsc.shift(value.wrapping_sub(tsc.at(host_tsc))),
                }
            }
            TscChange::Khz(khz) => {
                let value = tsc.at(host_tsc);
                tsc.set_khz(khz, host_tsc);
                let mut others = self.tscs();
                if let Some(same) = others.find(|it| it.khz() == khz && is_near(it, value)) {
                    tsc.set_offset(same.offset());
                }
                return tsc;
            }
        }
        let by_client = by_client || self.last.is_some_and(|last| last.by_client);
        self.last = Some(LastTsc { tsc, by_client });
        tsc
    }
}

impl VmClock {
    /// Creates a clock that starts at zero now.
    pub fn new() -> Self {
        let scale = Scale::new(tsc::SAME);
        let start = ordered_tsc();
        VmClock {
            start,
            scale,
            kvmclock: Mutex::new(Kvmclock {
                host_tsc: start,
                nanoseconds: 0,
                common: Some((tsc::SAME, scale)),
                vcpus: Vec::new(),
                last: None,
            }),
            changes: AtomicU64::new(0),
            turn: Mutex::default(),
            is_updating: AtomicBool::new(false),
            page_turn: Mutex::default(),
            tsc_khz: AtomicU32::new(host_tsc_khz()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kvmclock> {
        self.kvmclock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the nanoseconds since the VM was created, for timers. `KVM_SET_CLOCK` does not change this time.
    pub fn now(&self) -> u64 {
        self.timer_time(ordered_tsc())
    }

    /// Returns the value that [`now`](Self::now) has when the host's TSC is `host_tsc`.
    pub(crate) fn timer_time(&self, host_tsc: u64) -> u64 {
        (self.scale).nanoseconds(host_tsc.saturating_sub(self.start))
    }

    /// Returns the moment at which [`now`](Self::now) is `nanoseconds`, but at most a year from now. The result is
    /// later than the exact moment, by 1/2048 of the wait but at most 50 µs. This margin covers the difference in rate
    /// between the host's monotonic clock and the TSC. Without it, the ticker might wake too early and have to wait a
    /// second time.
    pub fn instant(&self, nanoseconds: u64) -> Instant {
        let wait = nanoseconds.saturating_sub(self.now()).min(YEAR);
        Instant::now() + Duration::from_nanos(wait + (wait / 2048).min(MARGIN))
    }

    /// Returns the value that `KVM_GET_CLOCK` shows when the host's TSC is `host_tsc`.
    pub(crate) fn kvmclock_at(&self, host_tsc: u64) -> u64 {
        self.lock().at(host_tsc)
    }

    /// Reads the clock, the host's wall clock and the host's TSC at one moment.
    pub(crate) fn read(&self) -> Reading {
        let Moment { tsc, ns, .. } = Moment::of_realtime();
        let kvmclock = self.lock();
        Reading {
            clock: kvmclock.at(tsc),
            realtime: ns,
            host_tsc: tsc,
            is_stable: kvmclock.common.is_some(),
        }
    }

    /// Returns the wall-clock time at which the VM's clock was zero, in nanoseconds since 1970, UTC. The client may
    /// have set the clock to any value, so the result is modulo 2^64.
    pub(crate) fn boot_time(&self) -> u64 {
        let now = self.read();
        now.realtime.wrapping_sub(now.clock)
    }

    /// Sets the clock to `clock`, for `KVM_SET_CLOCK`. If `since`, a wall-clock time, is given, adds the time that has
    /// passed since then. A time in the future adds nothing. Call in [`update`](Self::update).
    pub(crate) fn set(&self, clock: u64, since: Option<u64>) {
        let (host_tsc, passed) = match since {
            None => (ordered_tsc(), 0),
            Some(since) => {
                let now = Moment::of_realtime();
                (now.tsc, now.ns.saturating_sub(since))
            }
        };
        let mut kvmclock = self.lock();
        (kvmclock.host_tsc, kvmclock.nanoseconds) = (host_tsc, clock.wrapping_add(passed));
        drop(kvmclock);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Runs `work`, which changes the kvmclock pair, while no vCPU executes guest code. Call outside reader sections.
    /// `stop` returns when each vCPU has left the engine's reader section or has called
    /// [`is_updating`](Self::is_updating). A vCPU that finds an update in progress leaves the reader section and waits
    /// for the end of the update.
    pub(crate) fn update(&self, stop: impl FnOnce(), work: impl FnOnce()) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // The store and the vCPUs' loads are SeqCst: if a vCPU enters its reader section after `stop` has checked that
        // vCPU, the vCPU's load sees this store.
        self.is_updating.store(true, Ordering::SeqCst);
        stop();
        work();
        self.is_updating.store(false, Ordering::SeqCst);
    }

    /// Whether an update is in progress. During an update, a vCPU has to wait for its end before it executes guest
    /// code.
    pub(crate) fn is_updating(&self) -> bool {
        self.is_updating.load(Ordering::SeqCst)
    }

    /// Waits for the end of an update. Call outside reader sections.
    pub(crate) fn wait_for_update(&self) {
        drop(self.turn.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns the number of changes of the kvmclock pair.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Whether the clock is the same on all vCPUs.
    pub(crate) fn is_stable(&self) -> bool {
        self.lock().common.is_some()
    }

    /// Returns the parameters for the page of a vCPU that has this TSC.
    pub(crate) fn parameters(&self, tsc: &Tsc) -> Parameters {
        let kvmclock = self.lock();
        match kvmclock.common {
            Some((_, scale)) => Parameters {
                tsc: tsc.at(kvmclock.host_tsc),
                nanoseconds: kvmclock.nanoseconds,
                scale,
                is_stable: true,
            },
            None => {
                let host_tsc = ordered_tsc();
                Parameters {
                    tsc: tsc.at(host_tsc),
                    nanoseconds: kvmclock.at(host_tsc),
                    scale: Scale::new(tsc.ratio()),
                    is_stable: false,
                }
            }
        }
    }

    /// Returns the host's TSC at which a page of `parameters` has to be written again. `None`: the page stays valid.
    pub(crate) fn refresh(&self, parameters: &Parameters) -> Option<u64> {
        let cycles = REFRESH * 1000 * u64::from(host_tsc_khz());
        (!parameters.is_stable).then(|| host_tsc().wrapping_add(cycles))
    }

    /// Takes the turn to write vCPUs' pages: the number of the change after which the pages of all vCPUs were written
    /// last. `None`: another vCPU has the turn. That vCPU may be waiting for guest memory, so do not wait for the turn
    /// where a signal would not end the wait.
    pub(crate) fn page_turn(&self) -> Option<MutexGuard<'_, u64>> {
        match self.page_turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sets the guest-physical address of the page of the vCPU with this number. `None`: the guest does not use the
    /// clock.
    pub(crate) fn set_page(&self, number: usize, page: Option<u64>) {
        if let Some(vcpu) = &mut self.lock().vcpus[number] {
            vcpu.page = page;
        }
    }

    /// Returns a number that is greater than the numbers of all vCPUs.
    pub(crate) fn numbers(&self) -> usize {
        self.lock().vcpus.len()
    }

    /// Returns the guest-physical address of the page of the vCPU with this number, and the page's parameters. `None`:
    /// there is no such vCPU, or the guest does not use the clock on it.
    pub(crate) fn page(&self, number: usize) -> Option<(u64, Parameters)> {
        let vcpu = self.lock().vcpus.get(number).copied().flatten()?;
        Some((vcpu.page?, self.parameters(&vcpu.tsc)))
    }

    /// Returns the TSC of a new vCPU, the number of that vCPU in this clock, and whether the kvmclock pair has changed.
    /// The TSC is zero for the first vCPU of a VM, otherwise the TSC that was set last. Call
    /// [`forget_vcpu`](Self::forget_vcpu) when the vCPU is dropped.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new_tsc(&self) -> Result<(Tsc, usize, bool)> {
        let mut kvmclock = self.lock();
        let free = kvmclock.vcpus.iter().position(Option::is_none);
        let number = free.unwrap_or(kvmclock.vcpus.len());
        if free.is_none() {
            heap::reserve(&mut kvmclock.vcpus, 1)?;
            kvmclock.vcpus.push(None);
        }
        let host_tsc = ordered_tsc();
        let tsc = Tsc::new(self.tsc_khz());
        let tsc = kvmclock.changed(tsc, TscChange::Value(0), host_tsc, false);
        kvmclock.vcpus[number] = Some(ClockVcpu { tsc, page: None });
        Ok((tsc, number, self.follow_tscs(kvmclock, host_tsc)))
    }

    /// Changes the TSC of the vCPU with this number. Returns whether the kvmclock pair has changed. If so, all vCPUs
    /// have to write their pages again; otherwise only this vCPU has to write its pages again.
    pub(crate) fn change_tsc(&self, number: usize, tsc: &mut Tsc, change: TscChange) -> bool {
        let mut kvmclock = self.lock();
        let host_tsc = ordered_tsc();
        *tsc = kvmclock.changed(*tsc, change, host_tsc, true);
        if let Some(vcpu) = &mut kvmclock.vcpus[number] {
            vcpu.tsc = *tsc;
        }
        self.follow_tscs(kvmclock, host_tsc)
    }

    fn follow_tscs(&self, mut kvmclock: MutexGuard<'_, Kvmclock>, host_tsc: u64) -> bool {
        let changes = kvmclock.look_at_tscs(host_tsc);
        drop(kvmclock);
        if changes {
            self.changes.fetch_add(1, Ordering::Release);
        }
        changes
    }

    /// Removes a vCPU that is dropped. Returns whether the kvmclock pair has changed, like
    /// [`change_tsc`](Self::change_tsc).
    pub(crate) fn forget_vcpu(&self, number: usize) -> bool {
        let mut kvmclock = self.lock();
        kvmclock.vcpus[number] = None;
        self.follow_tscs(kvmclock, ordered_tsc())
    }

    /// Returns the TSC frequency of new vCPUs.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz.load(Ordering::Relaxed)
    }

    /// Sets the TSC frequency of new vCPUs.
    pub(crate) fn set_tsc_khz(&self, khz: u32) {
        self.tsc_khz.store(khz, Ordering::Relaxed);
    }
}

impl Default for VmClock {
    fn default() -> Self {
        Self::new()
    }
}

/// The result of [`VmClock::read`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// The nanoseconds of the VM's clock.
    pub(crate) clock: u64,
    /// The nanoseconds since 1970, UTC.
    pub(crate) realtime: u64,
    /// The host's TSC, in cycles.
    pub(crate) host_tsc: u64,
    /// Whether all vCPUs' pages show the same clock.
    pub(crate) is_stable: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_vcpu(clock: &VmClock) -> (usize, Tsc) {
        let (tsc, number, _) = clock.new_tsc().unwrap();
        (number, tsc)
    }

    #[test]
    fn vcpus_that_are_set_one_after_the_other_have_the_same_tsc() {
        let clock = VmClock::new();
        let (mut first, mut second) = (new_vcpu(&clock), new_vcpu(&clock));
        assert_eq!(first.1.offset(), second.1.offset());
        let set = |vcpu: &mut (usize, Tsc), change| clock.change_tsc(vcpu.0, &mut vcpu.1, change);
        assert!(set(&mut first, TscChange::Value(1 << 40)), "they differ");
        std::thread::sleep(Duration::from_millis(2));
        assert!(
            set(&mut second, TscChange::Value(1 << 40)),
            "they are equal"
        );
        assert_eq!(first.1.offset(), second.1.offset());
        assert_eq!(
            new_vcpu(&clock).1.offset(),
            first.1.offset(),
            "of a new vCPU"
        );
        set(&mut second, TscChange::Value(1 << 41));
        assert_ne!(first.1.offset(), second.1.offset());
        assert!(!clock.read().is_stable);
        assert!(clock.forget_vcpu(1) && clock.read().is_stable);
    }

    #[test]
    fn vcpus_whose_frequency_is_set_one_after_the_other_have_the_same_tsc() {
        let clock = VmClock::new();
        let (mut first, mut second) = (new_vcpu(&clock), new_vcpu(&clock));
        let khz = TscChange::Khz(host_tsc_khz() / 3);
        clock.change_tsc(first.0, &mut first.1, khz);
        assert!(!clock.read().is_stable);
        clock.change_tsc(second.0, &mut second.1, khz);
        assert!(clock.read().is_stable && first.1.is_same(&second.1));
    }

    #[test]
    fn the_clock_can_be_set() {
        let clock = VmClock::new();
        clock.set(1 << 50, None);
        assert!(clock.kvmclock_at(ordered_tsc()) >= 1 << 50);
        assert!(clock.kvmclock_at(ordered_tsc()) < (1 << 50) + 10_000_000_000);
    }

    #[test]
    fn a_deadline_is_not_before_its_time() {
        let clock = VmClock::new();
        for wait in [0, 1, 1_000_000, 1 << 40, u64::MAX] {
            let begin = Instant::now();
            let now = clock.now();
            let deadline = clock.instant(now.saturating_add(wait));
            let left = (deadline - begin).as_nanos() as u64;
            assert!(left >= wait.min(YEAR), "{wait}: {left}");
        }
    }
}
