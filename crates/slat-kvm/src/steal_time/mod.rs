//! Steal time (`KVM_FEATURE_STEAL_TIME`): how long a vCPU was ready to run while the host ran something else.
//!
//! As in KVM, steal time is what the host's scheduler counts for the thread that runs the vCPU: the second number of its
//! `schedstat`. Clients may forbid that thread to read files (seccomp), so one thread of slat's own, the observer, reads them for
//! all: every [`PERIOD`] while a vCPU is in `KVM_RUN`, and at once for a vCPU that runs again after a pause. The observer has a
//! descriptor table of its own ([`schedstat`]), so that its descriptors are not among the client's.

mod schedstat;

use crate::background::{self, Background};
use crate::entered::thread_id;
use crate::errno::{Result, no_memory};
use crate::heap;
use crate::machine::VcpuMachine;
use crate::msr::{KVM_ENABLED, index};
use crate::process::PerProcess;
use crate::thread::bits;
use schedstat::Schedstat;
use slat::Shared;
use slat_x86::MsrFault;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the observer reads the `schedstat` of threads that run vCPUs.
const PERIOD: Duration = Duration::from_millis(10);
/// A vCPU that did not run for this long waits for a new reading before it runs again.
const PAUSE: Duration = Duration::from_micros(100);
/// The longest wait for a new reading.
const PATIENCE: Duration = Duration::from_millis(5);
/// Rounds without a running vCPU after which the observer sleeps until it is called.
const IDLE_ROUNDS: u32 = 16;

/// The low bits of the MSR that have to be clear: the structure is aligned to 64 bytes.
const RESERVED: u64 = 0x3e;
/// Offsets of fields in the guest's structure (`struct kvm_steal_time`).
const VERSION: u64 = 8;
const PREEMPTED: u64 = 16;
/// Value of the field `preempted` while the vCPU does not run: `KVM_VCPU_PREEMPTED`.
const PREEMPTED_NOW: u8 = 1;

/// What a thread that runs a vCPU and the observer share.
#[derive(Debug)]
struct Thread {
    id: usize,
    /// Whether the thread is in `KVM_RUN`, and not asleep in a halt.
    runs: AtomicBool,
    /// Whether the thread asks for a new reading now.
    asks: AtomicBool,
    /// Whether the thread runs the vCPU no more.
    gone: AtomicBool,
    /// Nanoseconds that the thread waited for a CPU, at the observer's last reading.
    waited: AtomicU64,
}

/// One entry of the observer's list.
struct Observed {
    thread: Shared<Thread>,
    schedstat: Option<Schedstat>,
}

#[derive(Default)]
struct Observer {
    threads: Mutex<Vec<Observed>>,
    /// Signalled by a thread that asks for a reading, or runs a vCPU again while the observer sleeps.
    called: Condvar,
    /// Signalled by the observer after it has read for all threads that asked.
    answered: Condvar,
    /// Whether the observer sleeps until it is called.
    parked: AtomicBool,
    /// Whether the observer cannot read: the guest does not get the feature.
    failed: AtomicBool,
}

static OBSERVER: PerProcess<Observer> = PerProcess::new();

/// Starts the observer. Call before the client installs a seccomp filter, which could forbid a new thread.
pub(crate) fn prepare() {
    if is_available() {
        OBSERVER.get_or_start(|observer| {
            background::start(observer);
        });
    }
}

/// Whether the host counts how long a thread waits for a CPU, and the observer, if started, can read it.
pub(crate) fn is_available() -> bool {
    static COUNTS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    let counts = *COUNTS.get_or_init(schedstat::exists);
    let failed = || (OBSERVER.peek()).is_some_and(|it| it.failed.load(Ordering::Relaxed));
    counts && !failed()
}

impl Observed {
    /// Reads the thread's `schedstat`. A thread that has ended keeps its last reading.
    fn look(&mut self) {
        if self.schedstat.is_none() {
            self.schedstat = Schedstat::open(self.thread.id);
        }
        if let Some(waited) = self.schedstat.as_ref().and_then(Schedstat::waited) {
            self.thread.waited.store(waited, Ordering::Relaxed);
        }
        self.thread.asks.store(false, Ordering::Release);
    }
}

impl Observer {
    fn lock(&self) -> MutexGuard<'_, Vec<Observed>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Background for Observer {
    const NAME: &CStr = c"slat-steal";
    const WITHOUT: &str = "guests' steal time will not advance";

    fn run(&'static self) {
        if !schedstat::leave_descriptors() {
            self.failed.store(true, Ordering::Relaxed);
            return;
        }
        let mut threads = self.lock();
        let mut idle = 0;
        loop {
            threads.retain(|observed| !observed.thread.gone.load(Ordering::Relaxed));
            let mut busy = false;
            for observed in &mut *threads {
                let thread = &observed.thread;
                let runs = thread.runs.load(Ordering::SeqCst);
                busy |= runs;
                if runs || thread.asks.load(Ordering::Acquire) {
                    observed.look();
                }
            }
            self.answered.notify_all();
            idle = if busy { 0 } else { idle + 1 };
            if idle < IDLE_ROUNDS {
                let waited = self.called.wait_timeout(threads, PERIOD);
                threads = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else if !self.parked.swap(true, Ordering::SeqCst) {
                // Read once more: a vCPU may have begun to run before `parked` was set.
                continue;
            } else {
                let called = self.called.wait(threads);
                threads = called.unwrap_or_else(PoisonError::into_inner);
                idle = 0;
            }
        }
    }
}

/// The steal time of a vCPU.
#[derive(Debug, Default)]
pub(crate) struct StealTime {
    thread: Option<Shared<Thread>>,
    /// The reading of `thread` up to which the guest was told; `None` before the first reading.
    told: Option<u64>,
    /// Whether the guest's structure has to be written though nothing was stolen.
    changed: bool,
    /// Whether the guest's structure says that the vCPU does not run.
    preempted: bool,
    /// When the vCPU stopped running.
    left: Option<Instant>,
}

impl StealTime {
    /// Puts the calling thread, which is about to run the vCPU, on the observer's list.
    fn watch(&mut self, observer: &'static Observer) -> Result<Shared<Thread>> {
        let id = thread_id();
        if let Some(thread) = self.thread.as_ref().filter(|thread| thread.id == id) {
            return Ok(thread.clone());
        }
        self.forget();
        let thread = Shared::try_new(Thread {
            id,
            runs: AtomicBool::new(false),
            asks: AtomicBool::new(true),
            gone: AtomicBool::new(false),
            waited: AtomicU64::new(0),
        })
        .map_err(no_memory)?;
        let mut threads = observer.lock();
        heap::reserve(&mut threads, 1)?;
        threads.push(Observed {
            thread: thread.clone(),
            schedstat: None,
        });
        self.thread = Some(thread.clone());
        Ok(thread)
    }

    /// Stops watching the thread; the observer then closes its `schedstat`. Call when the thread runs this vCPU no more.
    fn forget(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.runs.store(false, Ordering::SeqCst);
            thread.gone.store(true, Ordering::Relaxed);
        }
        (self.told, self.left) = (None, None);
    }

    /// Starts counting for the calling thread; may wait up to [`PATIENCE`]. Call before the vCPU runs. Without memory to watch the
    /// thread, counts nothing.
    fn begin(&mut self) {
        let Some(observer) = OBSERVER.peek() else {
            return;
        };
        let Ok(thread) = self.watch(observer) else {
            return;
        };
        thread.runs.store(true, Ordering::SeqCst);
        let paused = self.left.is_none_or(|left| left.elapsed() >= PAUSE);
        if !paused && !observer.parked.load(Ordering::SeqCst) {
            return;
        }
        let mut threads = observer.lock();
        thread.asks.store(paused, Ordering::Release);
        observer.parked.store(false, Ordering::SeqCst);
        observer.called.notify_one();
        let until = Instant::now() + PATIENCE;
        while thread.asks.load(Ordering::Acquire) && !observer.failed.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = observer.answered.wait_timeout(threads, left);
            threads = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&mut self) {
        if let Some(thread) = &self.thread {
            thread.runs.store(false, Ordering::SeqCst);
            self.left = Some(Instant::now());
        }
    }

    /// Returns what was stolen since the guest was told last, and the new value of `told`. `None` without a reading.
    fn stolen(&mut self) -> Option<(u64, u64)> {
        let thread = self.thread.as_ref()?;
        if self.told.is_none() && thread.asks.load(Ordering::Acquire) {
            return None;
        }
        let waited = thread.waited.load(Ordering::Relaxed);
        let told = *self.told.get_or_insert(waited);
        Some((waited.saturating_sub(told), waited))
    }
}

impl Drop for StealTime {
    fn drop(&mut self) {
        self.forget();
    }
}

impl VcpuMachine {
    /// The guest-physical address of the guest's structure, if it wants one.
    fn steal_time_address(&self) -> Option<u64> {
        let value = self.msr(index::KVM_STEAL_TIME);
        (value & KVM_ENABLED != 0).then_some(value & !(RESERVED | KVM_ENABLED))
    }

    /// Writes `MSR_KVM_STEAL_TIME`.
    pub(crate) fn set_steal_time(&mut self, value: u64) -> std::result::Result<(), MsrFault> {
        if value & RESERVED != 0 || !is_available() {
            return Err(MsrFault::Invalid);
        }
        if value & KVM_ENABLED == 0 {
            self.end_steal_time();
        }
        self.store(index::KVM_STEAL_TIME, value);
        self.steal.changed = value & KVM_ENABLED != 0;
        self.common.attention.raise(bits::RETRY);
        Ok(())
    }

    /// Clears `MSR_KVM_STEAL_TIME` and stops watching the thread.
    pub(crate) fn end_steal_time(&mut self) {
        self.store(index::KVM_STEAL_TIME, 0);
        self.steal.forget();
        (self.steal.changed, self.steal.preempted) = (false, false);
    }

    /// Call before the vCPU runs: in `KVM_RUN`, and after a halt. The vCPU is not entered.
    pub(crate) fn begin_to_run(&mut self) {
        if self.steal_time_address().is_some() {
            self.steal.begin();
        }
    }

    /// Call when the vCPU, which is entered, stops running: before a halt, and before `KVM_RUN` returns.
    pub(crate) fn stop_running(&mut self) {
        if let Some(address) = self.steal_time_address() {
            self.steal.end();
            // As with KVM, the version says how often the vCPU has begun to run.
            self.steal.changed = true;
            self.steal.preempted = self.write_guest(address + PREEMPTED, &[PREEMPTED_NOW]);
        }
    }

    /// Tells the guest what was stolen since it was told last. The vCPU is entered. A structure that is not memory is skipped.
    pub(crate) fn write_steal_time(&mut self) {
        let Some(address) = self.steal_time_address() else {
            return;
        };
        if self.steal.thread.is_none() {
            // The guest has just enabled steal time.
            self.outside(|machine| machine.steal.begin());
        }
        if std::mem::take(&mut self.steal.preempted) {
            self.write_guest(address + PREEMPTED, &[0]);
        }
        let Some((stolen, waited)) = self.steal.stolen() else {
            return;
        };
        if !std::mem::take(&mut self.steal.changed) && stolen == 0 {
            return;
        }
        let words = (
            self.read_guest_word(address),
            self.read_guest_word(address + VERSION),
        );
        let (Some(before), Some(version)) = words else {
            return;
        };
        // The version is odd while the rest changes.
        let odd = (version as u32).wrapping_add(1) | 1;
        if self.write_guest(address + VERSION, &odd.to_le_bytes())
            && self.write_guest(address, &before.wrapping_add(stolen).to_le_bytes())
            && self.write_guest(address + VERSION, &odd.wrapping_add(1).to_le_bytes())
        {
            self.steal.told = Some(waited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads on one CPU: each waits while the other one runs.
    #[test]
    fn the_observer_sees_a_thread_wait() {
        prepare();
        if !is_available() {
            return;
        }
        // SAFETY: sets of CPUs on the stack.
        let pin = || unsafe {
            let mut set = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of_val(&set), &mut set);
            let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| libc::CPU_ISSET(*cpu, &set));
            let mut one = std::mem::zeroed();
            libc::CPU_SET(first.unwrap(), &mut one);
            libc::sched_setaffinity(0, size_of_val(&one), &one);
        };
        let spins = |time| {
            let begin = Instant::now();
            while begin.elapsed() < time {
                std::hint::spin_loop();
            }
        };
        let test = move || {
            pin();
            let mut steal = StealTime::default();
            steal.begin();
            let begin = Instant::now();
            let (mut stolen, other) = (
                0,
                std::thread::spawn(move || {
                    pin();
                    spins(Duration::from_millis(100));
                }),
            );
            while stolen < 10_000_000 && begin.elapsed() < Duration::from_secs(60) {
                spins(Duration::from_millis(1));
                stolen = steal.stolen().map_or(0, |(stolen, _)| stolen);
            }
            other.join().unwrap();
            (stolen, begin.elapsed())
        };
        let (stolen, wall) = std::thread::spawn(test).join().unwrap();
        assert!(stolen >= 10_000_000, "{stolen} ns in {wall:?}");
        assert!(u128::from(stolen) <= wall.as_nanos());
    }
}
