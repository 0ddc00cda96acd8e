//! Supervises the threads of a stream: kicks them, limits the time of their calls, and reports findings.
//!
//! Each thread of a stream has a [`Lane`], in which the thread announces its next step. One more thread, the watchman,
//! checks all lanes every half millisecond. When the slice of time of a `KVM_RUN` is over, the watchman ends the
//! `KVM_RUN`, by the kind of kick that the stream has chosen. The watchman kicks only *once*, because a lost kick is a
//! finding. It kicks only after the run has begun, which it sees in `kvm_run.flags`, because `KVM_RUN` clears the
//! flags.
//!
//! # Time
//! Time limits are in the thread's own CPU time, because other processes may keep the thread from running. Only time in
//! user mode counts, because a kernel that is short of memory may do other work in the thread's name. A sleeping thread
//! uses no CPU time. So there is also a limit in wall time, which is so long that a busy machine cannot explain it.

use kvm_bindings::kvm_run;
use std::collections::VecDeque;
use std::mem::offset_of;
use std::panic;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// The CPU time that a `KVM_RUN` may still take after its kick, if the kick is noticed at once.
const KICKED_CPU: Duration = Duration::from_millis(100);
/// The CPU time that a `KVM_RUN` may still take after a kick. This limit is for a kick that another thread must notice,
/// because that thread may have to wait for a CPU.
const POLLED_CPU: Duration = Duration::from_secs(1);
/// The CPU time that any other call may take.
const CALL_CPU: Duration = Duration::from_secs(2);
/// The time after which a call counts as hanging, however busy the machine is.
const HANGS: Duration = Duration::from_secs(60);
/// The time between two checks of the lanes by the watchman.
const TICK: Duration = Duration::from_micros(500);
/// The number of last steps of each lane that the report of a finding lists.
const REMEMBERED: usize = 24;
/// The value that a lane stores in `kvm_run.flags` before a run. `KVM_RUN` overwrites the value when the run begins.
const NOT_BEGUN: u16 = 0xffff;

/// The kind of kick that ends a `KVM_RUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// A signal. Its handler announces the signal to slat.
    Signal,
    /// `immediate_exit`, and then a signal. Some programs do both to be sure.
    ExitAndSignal,
    /// Only `immediate_exit`. It ends a run only if the process has not promised that its handlers announce signals.
    Exit,
}

impl Kick {
    /// Returns the CPU time that the run may take after the kick.
    fn limit(self) -> Duration {
        match self {
            Kick::Signal | Kick::ExitAndSignal => KICKED_CPU,
            Kick::Exit => POLLED_CPU,
        }
    }
}

/// A step of a lane (a thread of the stream): one call that the watchman supervises.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The name of the step that a lane is in.
    pub what: &'static str,
    /// The step's object and its argument, for the report.
    pub detail: [u64; 2],
}

/// The maximum time of a `KVM_RUN`, and the kind of kick by which the watchman ends the run after this time.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// The address of the vCPU's `kvm_run`. It is mapped until the run has returned.
    pub page: usize,
    /// The time for which the guest may run.
    pub length: Duration,
    /// The kind of kick that ends the run after that time.
    pub kick: Kick,
    /// CPU time that the run may take after the kick, in addition to the limit for its kind.
    pub extra: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    step: Step,
    began: Instant,
    cpu: Duration,
    slice: Option<Slice>,
    kicked: Option<(Instant, Duration)>,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    id: libc::pthread_t,
    clock: libc::clockid_t,
}

/// One thread of a stream.
#[derive(Debug, Default)]
pub struct Lane {
    thread: Mutex<Option<Thread>>,
    work: Mutex<Option<Work>>,
    done: Mutex<VecDeque<(Step, String)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running stream.
#[derive(Debug)]
pub struct Stream {
    name: &'static str,
    bytes: Vec<u8>,
    lanes: Vec<Lane>,
}

/// The stream of this process. There is at most one at a time.
static CURRENT: Mutex<Option<Arc<Stream>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static FOUND: AtomicBool = AtomicBool::new(false);

/// Returns the number of the signal that kicks vCPUs.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 7
}

fn backtrace_signal() -> i32 {
    libc::SIGRTMIN() + 8
}

extern "C" fn on_kick(_signal: i32) {
    slat_kvm::signal_arrived();
}

extern "C" fn on_backtrace(_signal: i32) {
    // The backtrace is not async-signal-safe, but the process is about to end.
    block_signals();
    say(&std::backtrace::Backtrace::force_capture().to_string());
}

/// Blocks all signals of this thread. Otherwise kicks could arrive faster than a backtrace can be written.
fn block_signals() {
    // SAFETY: the signal set is on the stack, and the call changes only the mask of this thread.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

/// Writes to standard error without taking its lock, which a hanging thread may hold.
fn say(text: &str) {
    // SAFETY: the system calls only access live memory.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::write(2, c"\n".as_ptr().cast(), 1);
    }
}

fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (signal, handler) in [
            (kick_signal(), on_kick as extern "C" fn(i32)),
            (backtrace_signal(), on_backtrace),
        ] {
            // SAFETY: the handlers have the signature of a signal handler.
            unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
        }
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            block_signals();
            // A panicking thread may hold any lock except `CURRENT` for a long time.
            let current = lock(&CURRENT).clone();
            if let Some(stream) = current {
                account(&stream, &info.to_string());
            }
            say(&std::backtrace::Backtrace::force_capture().to_string());
            report(info);
            std::process::abort();
        }));
        let watchman = std::thread::Builder::new().name("watchman".into());
        watchman.spawn(watch).expect("a thread");
    });
}

/// Runs `body` with `lanes` lanes under the watchman's supervision. No other stream runs at the same time.
pub fn stream(name: &'static str, bytes: &[u8], lanes: usize, body: impl FnOnce(&Stream)) {
    prepare();
    let _alone = lock(&ONE_AT_A_TIME);
    let lanes = (0..lanes).map(|_| Lane::default()).collect();
    let stream = Arc::new(Stream {
        name,
        bytes: bytes.to_vec(),
        lanes,
    });
    *lock(&CURRENT) = Some(stream.clone());
    CHANGED.notify_one();
    body(&stream);
    *lock(&CURRENT) = None;
}

impl Stream {
    /// Returns the lane with this index.
    pub fn lane(&self, index: usize) -> &Lane {
        &self.lanes[index]
    }
}

impl Lane {
    /// Makes this lane the calling thread's lane.
    pub fn enter(&self) {
        let mut clock = 0;
        // SAFETY: the calls concern only the calling thread.
        let id = unsafe {
            let id = libc::pthread_self();
            libc::pthread_getcpuclockid(id, &mut clock);
            id
        };
        // The lowest two bits of a clock's id choose the kind of time that the clock counts (clock_getcpuclockid(3);
        // linux/posix-timers.h).
        const KINDS: libc::clockid_t = 3;
        const IN_USER_MODE: libc::clockid_t = 1;
        let clock = clock & !KINDS | IN_USER_MODE;
        *lock(&self.thread) = Some(Thread { id, clock });
    }

    /// Ends the calling thread's use of the lane. Call before the thread ends.
    pub fn leave(&self) {
        *lock(&self.thread) = None;
    }

    /// Does `work`, which must end within the time limits of a call.
    pub fn call<R: std::fmt::Debug>(&self, step: Step, work: impl FnOnce() -> R) -> R {
        self.supervised(step, None, work)
    }

    /// Does `work`, which is one `KVM_RUN`. The watchman ends the `KVM_RUN` after its slice of time.
    pub fn run<R: std::fmt::Debug>(&self, step: Step, slice: Slice, work: impl FnOnce() -> R) -> R {
        // SAFETY: the page is mapped until the run has returned, as [`Slice::page`] requires.
        unsafe { flags(slice.page).write_volatile(NOT_BEGUN) };
        let result = self.supervised(step, Some(slice), work);
        // SAFETY: the page is mapped until the run has returned, as [`Slice::page`] requires.
        unsafe { immediate_exit(slice.page).write_volatile(0) };
        result
    }

    fn supervised<R: std::fmt::Debug>(
        &self,
        step: Step,
        slice: Option<Slice>,
        work: impl FnOnce() -> R,
    ) -> R {
        let cpu = lock(&self.thread).map_or(Duration::ZERO, |thread| thread.cpu());
        let began = Instant::now();
        *lock(&self.work) = Some(Work {
            step,
            began,
            cpu,
            slice,
            kicked: None,
        });
        let result = work();
        *lock(&self.work) = None;
        let mut done = lock(&self.done);
        if done.len() == REMEMBERED {
            done.pop_front();
        }
        let mut said = format!("{result:?}");
        said.truncate(60);
        done.push_back((step, said));
        result
    }

    /// Checks the lane, and kicks its run if the slice is over. The watchman calls this function. An error is a
    /// finding.
    fn look(&self, now: Instant) -> Result<(), String> {
        // While these locks are held, the thread cannot end, its work cannot end, and the page stays mapped.
        let thread = lock(&self.thread);
        let mut work = lock(&self.work);
        let (Some(thread), Some(work)) = (thread.as_ref(), work.as_mut()) else {
            return Ok(());
        };
        let Some(slice) = work.slice else {
            return thread.check(work.began, work.cpu, now, CALL_CPU);
        };
        match work.kicked {
            Some((at, cpu)) => thread.check(at, cpu, now, slice.kick.limit() + slice.extra),
            // SAFETY: the page stays mapped as long as the work exists.
            None if unsafe { flags(slice.page).read_volatile() } == NOT_BEGUN => {
                thread.check(work.began, work.cpu, now, CALL_CPU)
            }
            None if now.saturating_duration_since(work.began) >= slice.length => {
                work.kicked = Some((now, thread.cpu()));
                thread.kick(slice);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn flags(page: usize) -> *mut u16 {
    (page + offset_of!(kvm_run, flags)) as *mut u16
}

fn immediate_exit(page: usize) -> *mut u8 {
    (page + offset_of!(kvm_run, immediate_exit)) as *mut u8
}

impl Thread {
    fn cpu(&self) -> Duration {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the call fills in a struct. The clock belongs to a live thread.
        unsafe { libc::clock_gettime(self.clock, &mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    fn kick(&self, slice: Slice) {
        if slice.kick != Kick::Signal {
            // SAFETY: the page stays mapped as long as the work exists.
            unsafe { immediate_exit(slice.page).write_volatile(1) };
        }
        if slice.kick != Kick::Exit {
            // SAFETY: the thread exists, because the lane is locked.
            unsafe { libc::pthread_kill(self.id, kick_signal()) };
        }
    }

    fn check(
        &self,
        since: Instant,
        cpu: Duration,
        now: Instant,
        limit: Duration,
    ) -> Result<(), String> {
        let used = self.cpu().saturating_sub(cpu);
        let waited = now.saturating_duration_since(since);
        if used < limit && waited < HANGS {
            return Ok(());
        }
        // SAFETY: the thread exists, because the lane is locked.
        unsafe { libc::pthread_kill(self.id, backtrace_signal()) };
        Err(format!(
            "does not end: {waited:?}, {used:?} of them on a CPU"
        ))
    }
}

fn watch() {
    let mut current = lock(&CURRENT);
    let mut found = None;
    loop {
        if FOUND.load(Ordering::SeqCst) && found.get_or_insert_with(Instant::now).elapsed() > HANGS
        {
            // The thread that reports the finding hangs, so it cannot finish the report.
            std::process::abort();
        }
        let Some(stream) = current.clone() else {
            current = CHANGED
                .wait(current)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(current);
        let now = Instant::now();
        for (index, lane) in stream.lanes.iter().enumerate() {
            if let Err(what) = lane.look(now) {
                // Wait, so that the hanging thread has time to write its backtrace.
                std::thread::sleep(Duration::from_secs(2));
                account(&stream, &format!("lane {index} {what}"));
                std::process::abort();
            }
        }
        std::thread::sleep(TICK);
        current = lock(&CURRENT);
    }
}

/// Returns the path of the file in which the bytes of a stream with a finding are stored.
fn kept(stream: &Stream) -> PathBuf {
    std::env::temp_dir().join(format!("slat-{}-{}", stream.name, std::process::id()))
}

/// Prints the finding and the last steps of every lane. Only the first finding is printed, because more findings may
/// follow while the process ends.
fn account(stream: &Stream, what: &str) {
    if FOUND.swap(true, Ordering::SeqCst) {
        return;
    }
    let path = kept(stream);
    let written = std::fs::write(&path, &stream.bytes);
    let mut text = format!(
        "{}: {what}\ninput: {} ({written:?})\n",
        stream.name,
        path.display()
    );
    for (index, lane) in stream.lanes.iter().enumerate() {
        text += &format!("lane {index}:\n");
        let done = lane.done.try_lock();
        for (step, result) in done.iter().flat_map(|done| done.iter()) {
            text += &format!("  {} {:x?} = {result}\n", step.what, step.detail);
        }
        if let Ok(Some(work)) = lane.work.try_lock().as_deref() {
            let (step, since) = (work.step, work.began.elapsed());
            let kicked = work.kicked.map(|(at, _)| at.elapsed());
            text += &format!(
                "  now: {} {:x?} since {since:?}, kicked {kicked:?} ago, {:?}\n",
                step.what, step.detail, work.slice
            );
        }
    }
    say(&text);
}
