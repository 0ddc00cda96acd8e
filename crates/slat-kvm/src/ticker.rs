//! The ticker: one thread of the process that raises attention bits, or calls a function, at deadlines.
//!
//! The thread serves three kinds of clients. Timers of APICs and VMs have a deadline each. vCPUs that wait for an event
//! that raises no bit have to poll ([`bits::POLL`]). For a vCPU that executes, the ticker raises a bit periodically.
//! Then the vCPU checks whether its code in memory has changed, because the client may write to it, and so may the
//! guest through another memslot. For a profile, another periodic bit makes the vCPU take a sample ([`bits::SAMPLE`]).
//! The first client starts the thread. A forked child has no such thread and starts its own if it creates VMs.

use crate::arch::VmTimer;
use crate::background::{self, Background};
use crate::errno::{Result, no_memory};
use crate::heap;
use crate::process::PerProcess;
use crate::profile;
use crate::thread::bits;
use slat::{Attention, Shared};
use slat_process::calls::{self, Call};
use slat_process::wait;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// The interval at which [`bits::POLL`] is raised for a polled vCPU.
pub const POLL_PERIOD: Duration = Duration::from_millis(1);
/// The interval at which [`bits::POLL`] is raised for a vCPU that executes.
const LOOK_PERIOD: Duration = Duration::from_millis(10);
/// The number of rounds without a polled vCPU after which the thread stops ticking, and sleeps until the next deadline
/// or call.
const IDLE_ROUNDS: u32 = 16;

/// A bit that is raised periodically for vCPUs that execute.
struct Periodic {
    bit: u32,
    period: Duration,
    next: Instant,
}

impl Periodic {
    fn new(bit: u32, period: Duration) -> Self {
        let next = Instant::now();
        Periodic { bit, period, next }
    }

    /// Returns the bit if its time has come, and sets its next time, one period later. Otherwise returns 0.
    fn due(&mut self, now: Instant) -> u32 {
        if self.next > now {
            return 0;
        }
        self.next = now + self.period;
        self.bit
    }
}

/// The action of the ticker at a client's deadline.
pub(crate) enum Alarm {
    /// A vCPU's timer: the ticker raises [`bits::TIMER`] in this attention word.
    Vcpu(Attention),
    /// Calls [`VmTimers::expired`] with this timer.
    Vm(Weak<dyn VmTimers>, VmTimer),
}

impl From<(Weak<dyn VmTimers>, VmTimer)> for Alarm {
    fn from((timers, timer): (Weak<dyn VmTimers>, VmTimer)) -> Self {
        Alarm::Vm(timers, timer)
    }
}

/// The owner of a VM's timers.
pub(crate) trait VmTimers: Send + Sync {
    /// Handles the deadline of `timer`. The ticker calls this on its own thread, and holds no lock. The method must not
    /// wait.
    fn expired(&self, timer: VmTimer);
}

/// A client of the ticker: a vCPU, or a timer of a VM.
pub(crate) struct Client {
    alarm: Alarm,
    /// The number of [`Polling`] guards of the vCPU.
    polls: AtomicU32,
    /// Whether the vCPU executes guest code now.
    executes: AtomicBool,
    deadline: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Ticker {
    clients: Mutex<Vec<Shared<Client>>>,
    changed: Condvar,
    /// Whether the thread ticks. If not, a new [`Polling`], or a vCPU that begins to execute, has to wake the thread.
    ///
    /// A client first stores that it polls or executes, and then reads `ticks`. The thread first clears `ticks`, and
    /// then checks its clients once more. At least one of the two must see the other's store, so all four accesses are
    /// sequentially consistent.
    ticks: AtomicBool,
    /// Whether the thread was started.
    started: AtomicBool,
}

static TICKER: PerProcess<Ticker> = PerProcess::new();

/// Creates the ticker that all vCPUs of the process share. The first timer or poll starts the thread later.
pub(crate) fn prepare() {
    TICKER.get();
}

/// Starts the thread if it does not run.
pub(crate) fn start() {
    ticker();
}

/// Returns the ticker; starts its thread if it does not run.
fn ticker() -> &'static Ticker {
    let ticker = TICKER.get();
    if !ticker.started.swap(true, Ordering::Relaxed) {
        background::start(ticker);
    }
    ticker
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Background for Ticker {
    const NAME: &CStr = c"slat-ticker";
    const WITHOUT: &str = "guests' timers and KVM_SET_SIGNAL_MASK will not work";

    fn run(&'static self) {
        let mut clients = lock(&self.clients);
        let mut idle = 0;
        let look = Periodic::new(bits::POLL, LOOK_PERIOD);
        let sample = profile::is_wanted().then(|| Periodic::new(bits::SAMPLE, profile::PERIOD));
        let mut periodic = [Some(look), sample];
        loop {
            let now = Instant::now();
            let mut next: Option<Instant> = None;
            let (mut polled, mut executes) = (false, false);
            let raised = (periodic.iter_mut().flatten()).fold(0, |bits, one| bits | one.due(now));
            let mut call = None;
            for client in &*clients {
                let mut deadline = lock(&client.deadline);
                let due = deadline.is_some_and(|deadline| deadline <= now);
                match &client.alarm {
                    Alarm::Vcpu(attention) => {
                        if due {
                            *deadline = None;
                            raise(attention, bits::TIMER);
                        }
                        if client.polls.load(Ordering::SeqCst) != 0 {
                            polled = true;
                            raise(attention, bits::POLL);
                        }
                        if client.is_executing() {
                            executes = true;
                            if raised != 0 {
                                attention.raise(raised);
                            }
                        }
                    }
                    // The ticker makes at most one call in each round. If more timers are due, the next round finds
                    // them.
                    Alarm::Vm(timers, timer) if due && call.is_none() => {
                        *deadline = None;
                        call = Some((timers.clone(), *timer));
                    }
                    Alarm::Vm(..) => {}
                }
                next = [next, *deadline].into_iter().flatten().min();
            }
            if let Some((timers, timer)) = call {
                drop(clients);
                if let Some(timers) = timers.upgrade() {
                    timers.expired(timer);
                }
                clients = lock(&self.clients);
                continue;
            }
            idle = if polled { 0 } else { idle + 1 };
            let ticking = idle < IDLE_ROUNDS;
            if ticking {
                let tick = now + POLL_PERIOD;
                next = Some(next.map_or(tick, |next| next.min(tick)));
            } else if executes {
                let periodic = periodic.iter().flatten().map(|one| one.next);
                next = periodic.chain(next).min();
            } else if self.ticks.swap(false, Ordering::SeqCst) {
                // Makes one more round, because a client may have begun to poll or to execute before `ticks` was
                // cleared.
                continue;
            }
            clients = match next {
                None => self
                    .changed
                    .wait(clients)
                    .unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(next) => {
                    let left = next.saturating_duration_since(Instant::now());
                    self.changed
                        .wait_timeout(clients, left)
                        .unwrap_or_else(|poisoned| poisoned.into_inner())
                        .0
                }
            };
        }
    }
}

impl Ticker {
    fn wake(&self) {
        let _clients = lock(&self.clients);
        self.ticks.store(true, Ordering::SeqCst);
        self.changed.notify_one();
    }
}

impl Client {
    /// Registers a client until it calls [`leave`](Self::leave).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn register(alarm: Alarm) -> Result<Shared<Self>> {
        let client = Shared::try_new(Client {
            alarm,
            polls: AtomicU32::new(0),
            executes: AtomicBool::new(false),
            deadline: Mutex::new(None),
        })
        .map_err(no_memory)?;
        let mut clients = lock(&TICKER.get().clients);
        heap::reserve(&mut clients, 1)?;
        clients.push(client.clone());
        Ok(client)
    }

    /// Removes the client from the ticker's list. Call when its owner is dropped.
    pub(crate) fn leave(&self) {
        if let Some(ticker) = TICKER.peek() {
            lock(&ticker.clients).retain(|client| !std::ptr::eq(&**client, self));
        }
    }

    /// Sets the deadline of the alarm; `None` cancels it.
    pub(crate) fn set_deadline(&self, deadline: Option<Instant>) {
        *lock(&self.deadline) = deadline;
        if deadline.is_some() {
            ticker().wake();
        }
    }

    /// Raises [`bits::POLL`] every [`POLL_PERIOD`] until the guard is dropped.
    pub(crate) fn poll(&self) -> Polling<'_> {
        let ticker = ticker();
        self.polls.fetch_add(1, Ordering::SeqCst);
        if !ticker.ticks.load(Ordering::SeqCst) {
            ticker.wake();
        }
        Polling(self)
    }

    /// Records that the vCPU executes, until [`rests`](Self::rests) is called.
    #[inline]
    pub(crate) fn executes(&self) {
        self.executes.store(true, Ordering::SeqCst);
        if !TICKER.get().ticks.load(Ordering::SeqCst) {
            ticker().wake();
        }
    }

    /// Records that the vCPU executes nothing. All accesses of its guest are done.
    #[inline]
    pub(crate) fn rests(&self) {
        self.executes.store(false, Ordering::Release);
    }

    /// Whether the vCPU executes now. If not, the vCPU sees all bits that were raised before this call, and sees them
    /// before its guest's next access to memory. The reason: the vCPU first records that it executes, and then reads
    /// the attention word, and both accesses are sequentially consistent.
    pub(crate) fn is_executing(&self) -> bool {
        self.executes.load(Ordering::SeqCst)
    }
}

/// The ticker polls a client as long as this guard lives.
pub(crate) struct Polling<'a>(&'a Client);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.polls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Raises bits and wakes a vCPU that sleeps on the word.
pub(crate) fn raise(attention: &Attention, bits: u32) {
    attention.raise(bits);
    wait::wake(attention.flag());
}

/// Sleeps until a bit is raised, a signal handler has run, or the time `longest` has passed. Returns whether a signal
/// ended the sleep.
///
/// If a wait has a time limit, the kernel does not restart it after a signal handler, even if the handler has the flag
/// SA_RESTART. But the kernel may then use `restart_syscall`. If a seccomp filter forbids `restart_syscall`, the wait
/// has no time limit. Then signal handlers have to raise a bit ([`crate::watch_signals`]).
pub(crate) fn sleep(attention: &Attention, longest: Duration) -> bool {
    let longest = calls::is_allowed(Call::RestartSyscall).then_some(longest);
    wait::sleep(attention.flag(), 0, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_wakes_a_sleeper() {
        let attention = Attention::new().unwrap();
        let client = Client::register(Alarm::Vcpu(attention.clone())).unwrap();
        client.set_deadline(Some(Instant::now() + Duration::from_millis(5)));
        while attention.take(bits::TIMER) == 0 {
            sleep(&attention, Duration::from_secs(10));
        }
    }

    #[test]
    fn polling_stops_when_it_is_dropped() {
        let attention = Attention::new().unwrap();
        let client = Client::register(Alarm::Vcpu(attention.clone())).unwrap();
        let polling = client.poll();
        while attention.take(bits::POLL) == 0 {
            sleep(&attention, Duration::from_secs(10));
        }
        drop(polling);
        attention.take(bits::POLL);
        std::thread::sleep(5 * POLL_PERIOD);
        assert_eq!(attention.take(bits::POLL), 0);
        std::thread::sleep(2 * IDLE_ROUNDS * POLL_PERIOD);
        let _polling = client.poll();
        while attention.take(bits::POLL) == 0 {
            sleep(&attention, Duration::from_secs(10));
        }
    }
}
