//! Ends the process when every thread of the program has ended by itself.
//!
//! A process ends with its last thread. A thread of the program ends alone by `pthread_exit`, by the system call
//! `exit`, or because a seccomp filter kills it (`SECCOMP_RET_KILL_THREAD`). slat's own threads would then keep alive a
//! process in which no thread handles a signal. So one of slat's threads, the watcher, waits until the process's first
//! thread has ended. In most programs this does not happen before the process ends. Meanwhile the watcher sleeps, if
//! the C library that slat uses has created the first thread. After the first thread has ended, another of slat's
//! threads, the observer, checks twice a second whether a thread of the program is left. If none is left, the process
//! ends as the kernel, or the C library, would have ended it without slat: with the first thread's exit status.

use crate::background::{self, Background, leave_descriptors};
use crate::process::{self, PerProcess};
use slat_guard::change_mask;
use slat_process::{calls, wait};
use std::ffi::CStr;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The interval at which a waiting thread checks its condition, if the kernel does not wake it.
const PERIOD: Duration = Duration::from_millis(500);

/// The watcher: the thread that ends the process. This thread shares the program's descriptor table, because it runs
/// the `atexit` handlers, which use the program's descriptors.
#[derive(Debug, Default)]
struct Watcher {
    observer: Observer,
}

/// The observer: the thread that, after the process's first thread has ended, checks whether other threads of the
/// program are left. This thread has a descriptor table of its own, so that the program does not see the descriptors
/// that it opens.
#[derive(Debug)]
struct Observer {
    /// The value that wait(2) would return for the first thread. [`RUNS`] as long as the program has threads;
    /// [`UNKNOWN`] if the value is unknown. Accesses need no memory order, because no other data depends on this value.
    status: AtomicU32,
}

const RUNS: u32 = u32::MAX;
const UNKNOWN: u32 = u32::MAX - 1;

impl Default for Observer {
    fn default() -> Self {
        Observer {
            status: AtomicU32::new(RUNS),
        }
    }
}

static WATCHER: PerProcess<Watcher> = PerProcess::new();

/// Starts the watcher if it does not run. Call before slat starts its first thread of another kind.
pub(crate) fn start() {
    WATCHER.get_or_start(|watcher| {
        background::start(watcher);
    });
}

/// The state of this process, as `/proc/self/stat` shows it.
struct State {
    /// Whether the first thread has ended.
    is_over: bool,
    /// The number of threads. The first thread counts even if it has ended.
    threads: usize,
    /// The value that wait(2) would return for the first thread, if it has ended.
    status: u32,
}

impl State {
    /// Reads the process's state from `file`, which is `/proc/self/stat`. `None`: the read fails, or a field is missing
    /// or is not a number.
    fn read(file: &std::fs::File) -> Option<Self> {
        // These are positions of fields in proc_pid_stat(5), counted from the field after the name.
        const STATE: usize = 0;
        const THREADS: usize = 17;
        const EXIT_CODE: usize = 49;
        let mut text = [0; 1024];
        let len = file.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..len]).ok()?;
        let (_, rest) = text.rsplit_once(')')?;
        let field = |at| rest.split_ascii_whitespace().nth(at);
        Some(State {
            is_over: matches!(field(STATE)?, "Z" | "X"),
            threads: field(THREADS)?.parse().ok()?,
            status: field(EXIT_CODE)?.parse().ok()?,
        })
    }
}

/// Returns the number of the program's threads. `None`: the number is unknown.
pub(crate) fn threads_of_program() -> Option<usize> {
    // The calling thread belongs to the program. If the thread's seccomp filter forbids one of slat's calls, it may
    // also forbid the calls below.
    if calls::is_any_forbidden() {
        return None;
    }
    let state = State::read(&std::fs::File::open("/proc/self/stat").ok()?)?;
    state.threads.checked_sub(background::count())
}

/// Waits until the first thread of the process has ended. Returns at once if the kernel cannot wake this thread at that
/// moment.
fn wait_for_first() {
    // When the first thread ends, the kernel clears the word that holds the thread's id, and wakes one thread that
    // sleeps on that word (set_tid_address(2)). A thread that joins the first thread also sleeps on that word, so this
    // thread wakes all other threads that sleep on the word.
    if let Some(word) = slat_process::first_noted_id() {
        let call = |operation: i32, value: i32| {
            let word = word.as_ptr() as usize;
            let arguments = [word, operation as usize, value as usize, 0, 0, 0];
            // SAFETY: the kernel only reads the word, and the call fails if the word is no longer mapped.
            unsafe { calls::raw(libc::SYS_futex, arguments) }
        };
        if call(libc::FUTEX_WAIT, process::owner()) == 0 {
            call(libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

/// Waits until the program has no thread. Returns the value that wait(2) would return for the first thread; `None` if
/// that value is unknown.
fn observe() -> Option<u32> {
    if !leave_descriptors() {
        return None;
    }
    let file = std::fs::File::open("/proc/self/stat").ok()?;
    loop {
        let state = State::read(&file)?;
        if state.is_over && state.threads <= background::count() + 1 {
            return Some(state.status);
        }
        std::thread::sleep(PERIOD);
    }
}

impl Background for Observer {
    const NAME: &CStr = c"slat-observer";
    const WITHOUT: &str = Watcher::WITHOUT;

    fn run(&'static self) {
        let status = observe().unwrap_or(UNKNOWN);
        self.status.store(status, Ordering::Relaxed);
        wait::wake(&self.status);
    }
}

impl Background for Watcher {
    const NAME: &CStr = c"slat-last";
    const WITHOUT: &str = "a process whose last thread is killed alone will not end";
    /// The stack is large because the program's `atexit` handlers may run on this thread.
    const STACK: usize = 256 << 10;

    fn run(&'static self) {
        wait_for_first();
        if background::start(&self.observer) {
            while self.observer.status.load(Ordering::Relaxed) == RUNS {
                wait::sleep(&self.observer.status, RUNS, None);
            }
        }
    }

    fn has_run(&'static self) {
        let status = self.observer.status.load(Ordering::Relaxed);
        if status == RUNS || status == UNKNOWN {
            return;
        }
        let (signal, code) = (status as i32 & 0x7f, status as i32 >> 8 & 0xff);
        if signal != 0 {
            end_by(signal);
        }
        // Deliver a signal that was still pending when the last thread ended, before the process ends.
        change_mask(libc::SIG_UNBLOCK, u64::MAX);
        match code {
            // The C library also calls `exit(0)` when the last thread ends.
            // SAFETY: no other thread runs code of the program.
            0 => unsafe { libc::exit(0) },
            // SAFETY: no other thread runs code of the program.
            code => unsafe { libc::_exit(code) },
        }
    }
}

/// Ends the process by the default action of `signal`. Returns if that action does not end a process.
fn end_by(signal: i32) {
    // SAFETY: an all-zero `sigaction` is valid, and sets the default action. The signal is sent only to this thread.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        let _ = slat_guard::set_kernels(signal, Some(&default));
        change_mask(libc::SIG_UNBLOCK, 1 << (signal - 1));
        let (process, thread) = slat_process::myself();
        let arguments = [process as usize, thread as usize, signal as usize, 0, 0, 0];
        calls::raw(libc::SYS_tgkill, arguments);
    }
}
