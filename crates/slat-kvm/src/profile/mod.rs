//! `slat run --profile FILE`: finds out which guest code takes the time.
//!
//! | file | idea |
//! |---|---|
//! | `samples` | the samples that vCPUs have taken and that are not counted yet |
//! | `stacks` | counts stacks, and formats the lines of the file |
//! | `file` | the file of a process |
//!
//! About every millisecond (`PERIOD`) the ticker raises `bits::SAMPLE` in the attention words of the vCPUs that
//! execute. Like any attention bit, this bit makes the CPU leave guest code: at the end of a block, or in compiled code
//! at the end of a region or of a loop iteration. The vCPU stores its stack (`machine::frames`), and continues. Samples
//! do not cover time in which the vCPU does not execute: halts, exits, and the time that the host gives to other
//! threads.
//!
//! A thread counts the samples and writes the file every second (`WRITE_PERIOD`), so that a process that is killed
//! leaves a profile. The same thread also writes the file at the end of the process, because the client's seccomp
//! filters do not apply to this thread.

mod file;
mod samples;
mod stacks;

use crate::background::{self, Background};
use crate::messages;
use crate::process::PerProcess;
use crate::symbols;
use file::ProfileFile;
pub(crate) use samples::Origin;
use samples::Samples;
use slat_process::once::Computed;
use stacks::Stacks;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between two samples of a vCPU. Guest timers do not have this period. So the samples do not always fall on
/// the same phase of a timer.
pub(crate) const PERIOD: Duration = Duration::from_micros(997);
/// The least time between two writes of the file.
const WRITE_PERIOD: Duration = Duration::from_secs(1);
/// Writing may take at most 1/32 of the thread's time.
const WRITE_SHARE: u32 = 32;

#[derive(Default)]
struct Profile {
    inbox: Mutex<Inbox>,
    /// The condition that is signalled when the thread has work.
    called: Condvar,
    /// The condition that is signalled when the file was written for the last time.
    ended: Condvar,
    output: Mutex<Output>,
    /// Whether the thread runs.
    is_served: AtomicBool,
}

#[derive(Default)]
struct Inbox {
    samples: Samples,
    end: End,
}

/// The progress of the last write, at the end of the process.
#[derive(Default, PartialEq, Eq)]
enum End {
    #[default]
    NotYet,
    /// The process ends: the thread has to write the file for the last time.
    Asked,
    Written,
}

#[derive(Default)]
struct Output {
    /// Samples that are being counted. vCPUs push new samples to the inbox meanwhile.
    taken: Samples,
    stacks: Stacks,
    file: ProfileFile,
    /// Whether samples were counted that are not in the file yet.
    has_changed: bool,
    /// The error of the last write. Because of it, samples are missing in the file.
    failure: Option<String>,
}

static PROFILE: PerProcess<Profile> = PerProcess::new();

/// Returns the file that `slat run --profile` names, in `SLAT_PROFILE`.
fn wanted() -> Option<&'static Path> {
    static WANTED: Computed<Option<PathBuf>> = Computed::new();
    let read = || std::env::var_os("SLAT_PROFILE").filter(|path| !path.is_empty());
    WANTED.get_or_init(|| read().map(PathBuf::from)).as_deref()
}

/// Whether the user asked for a profile, so that vCPUs are sampled.
pub(crate) fn is_wanted() -> bool {
    wanted().is_some()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that writes the file, if a profile is wanted. Call before the client installs a seccomp filter.
pub(crate) fn start() {
    if is_wanted() {
        PROFILE.get_or_start(|profile| {
            symbols::of_guests();
            let is_served = background::start(profile);
            profile.is_served.store(is_served, Ordering::Relaxed);
        });
    }
}

/// Adds a sample. `stack` has the linear addresses of the stack, the innermost first.
pub(crate) fn count(origin: Origin, stack: &[u64]) {
    if let Some(profile) = PROFILE.peek() {
        let mut inbox = lock(&profile.inbox);
        inbox.samples.push(origin, stack);
        if inbox.samples.are_many() {
            profile.called.notify_one();
        }
    }
}

/// Makes the thread write the file for the last time, and waits until the file is written. Call at the end of the
/// process.
pub fn end() {
    let Some(profile) = PROFILE.peek() else {
        return;
    };
    if profile.is_served.load(Ordering::Relaxed) {
        let mut inbox = lock(&profile.inbox);
        inbox.end = End::Asked;
        profile.called.notify_one();
        while inbox.end != End::Written {
            inbox = (profile.ended.wait(inbox)).unwrap_or_else(PoisonError::into_inner);
        }
    } else {
        profile.count();
        profile.write();
    }
    // The message is printed here, not by the profile's thread, because that thread does not have the client's standard
    // error.
    if let Some(failure) = &lock(&profile.output).failure {
        messages::say(format_args!("the profile is not complete: {failure}"));
    } else if let Some(path) = wanted()
        && !path.exists()
    {
        let path = path.display();
        messages::say(format_args!(
            "there is no profile {path}: no vCPU was found in guest code"
        ));
    }
}

impl Profile {
    /// Counts the samples that vCPUs have pushed.
    fn count(&self) {
        let mut output = lock(&self.output);
        let Output {
            taken,
            stacks,
            has_changed,
            ..
        } = &mut *output;
        std::mem::swap(taken, &mut lock(&self.inbox).samples);
        *has_changed |= taken.iter().next().is_some();
        stacks.add(taken);
        taken.clear();
    }

    /// Writes the profile file, if there are new samples.
    fn write(&self) {
        let mut output = lock(&self.output);
        if let Some(path) = wanted()
            && output.has_changed
        {
            let text = output.stacks.text(symbols::of_guests());
            output.failure = output.file.write(path, &text).err();
            output.has_changed = output.failure.is_some();
        }
    }
}

impl Background for Profile {
    const NAME: &CStr = c"slat-profile";
    const WITHOUT: &str = "the profile is written at the end only";
    const STACK: usize = 256 << 10;

    fn run(&'static self) {
        background::leave_descriptors();
        let mut due = Instant::now() + WRITE_PERIOD;
        loop {
            let left = due.saturating_duration_since(Instant::now());
            let is_idle = |inbox: &mut Inbox| inbox.end != End::Asked && !inbox.samples.are_many();
            let waited = (self.called).wait_timeout_while(lock(&self.inbox), left, is_idle);
            let (inbox, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            let is_end = inbox.end == End::Asked;
            drop(inbox);
            self.count();
            if is_end || timeout.timed_out() {
                let begin = Instant::now();
                self.write();
                due = Instant::now() + WRITE_PERIOD.max(begin.elapsed() * WRITE_SHARE);
            }
            if is_end {
                lock(&self.inbox).end = End::Written;
                self.ended.notify_all();
            }
        }
    }
}
