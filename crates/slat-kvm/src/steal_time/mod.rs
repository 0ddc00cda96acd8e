//! Steal time (`KVM_FEATURE_STEAL_TIME`): how long a vCPU was ready to run while the host ran other threads.
//!
//! As in KVM, steal time is the time that the host's scheduler counts for the thread that runs the vCPU: the second
//! number of the thread's `schedstat`. Clients may forbid that thread to read files (seccomp). So one of slat's own
//! threads, the observer, reads these files for all vCPUs. It reads every [`PERIOD`] while a vCPU is in `KVM_RUN`, and
//! at once for a vCPU that runs again after a pause. The observer has a separate descriptor table, so that its
//! descriptors are not among the client's.

mod schedstat;

use crate::background::{self, Background, leave_descriptors};
use crate::entered::thread_id;
use crate::errno::{Result, no_memory};
use crate::heap;
use crate::process::PerProcess;
use schedstat::Schedstat;
use slat::Shared;
use slat_process::once::Computed;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The interval at which the observer reads the `schedstat` of threads that run vCPUs.
const PERIOD: Duration = Duration::from_millis(10);
/// The length of a pause of a vCPU after which the vCPU waits for a new reading before it runs again.
const PAUSE: Duration = Duration::from_micros(100);
/// The longest time that a vCPU waits for a new reading.
const PATIENCE: Duration = Duration::from_millis(5);

/// The state that the observer shares with a thread that runs a vCPU.
#[derive(Debug)]
struct Thread {
    id: usize,
    /// Whether the thread is in `KVM_RUN` and does not sleep in a halt.
    runs: AtomicBool,
    /// Whether the thread asks for a new reading now.
    asks: AtomicBool,
    /// Whether the thread no longer runs the vCPU.
    gone: AtomicBool,
    /// The nanoseconds that the thread waited for a CPU, as of the observer's last reading.
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
    /// The condition that a thread signals when it asks for a reading, or runs a vCPU again while the observer sleeps.
    called: Condvar,
    /// The condition that the observer signals after it has read for all threads that asked.
    answered: Condvar,
    /// Whether the observer sleeps until it is called.
    parked: AtomicBool,
    /// Whether the observer cannot read the threads' waiting times. Then slat does not offer steal time to guests.
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

/// Whether the host counts how long a thread waits for a CPU, and the observer, if started, can read this count.
pub(crate) fn is_available() -> bool {
    static COUNTS: Computed<bool> = Computed::new();
    let counts = *COUNTS.get_or_init(schedstat::exists);
    let failed = || (OBSERVER.peek()).is_some_and(|it| it.failed.load(Ordering::Relaxed));
    counts && !failed()
}

impl Observed {
    /// Reads the thread's `schedstat`. If the thread has ended, keeps the last reading.
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
        if !leave_descriptors() {
            self.failed.store(true, Ordering::Relaxed);
            return;
        }
        let mut threads = self.lock();
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
            if busy {
                let waited = self.called.wait_timeout(threads, PERIOD);
                threads = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else if !self.parked.swap(true, Ordering::SeqCst) {
                // Makes one more round, because a vCPU may have begun to run before `parked` was set.
                continue;
            } else {
                let called = self.called.wait(threads);
                threads = called.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// The steal time of a vCPU.
#[derive(Debug, Default)]
pub(crate) struct StealTime {
    thread: Option<Shared<Thread>>,
    /// The reading of `thread` up to which the guest's steal time counts; `None` before the first reading.
    told: Option<u64>,
    /// The time at which the vCPU stopped running.
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

    /// Stops watching the thread. The observer then closes the thread's `schedstat`. Call when the thread does not run
    /// this vCPU any more.
    pub(crate) fn forget(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.runs.store(false, Ordering::SeqCst);
            thread.gone.store(true, Ordering::Relaxed);
        }
        (self.told, self.left) = (None, None);
    }

    /// Starts counting for the calling thread. May wait up to [`PATIENCE`]. Call before the vCPU runs. If there is no
    /// memory to watch the thread, counts nothing.
    pub(crate) fn begin(&mut self) {
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

    /// Whether a thread is watched.
    pub(crate) fn is_watching(&self) -> bool {
        self.thread.is_some()
    }

    /// Records that the guest's steal time now counts up to the reading `waited`. Call after updating the guest's
    /// structure.
    pub(crate) fn was_told(&mut self, waited: u64) {
        self.told = Some(waited);
    }

    /// Stops counting. Call when the vCPU stops running.
    pub(crate) fn end(&mut self) {
        if let Some(thread) = &self.thread {
            thread.runs.store(false, Ordering::SeqCst);
            self.left = Some(Instant::now());
        }
    }

    /// Returns the time that was stolen since the guest's last update, and the new value of `told`. `None`: there is no
    /// reading.
    pub(crate) fn stolen(&mut self) -> Option<(u64, u64)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads run on one CPU, so each thread waits while the other thread runs.
    #[test]
    fn the_observer_sees_a_thread_wait() {
        prepare();
        if !is_available() {
            return;
        }
        // SAFETY: the calls get sets of CPUs on the stack, and the sizes of the sets.
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
