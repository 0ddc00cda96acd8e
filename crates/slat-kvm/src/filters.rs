//! Seccomp filters of the client, and Landlock: slat's preparations before a thread restricts itself.
//!
//! Usually slat starts a thread when it first needs the thread. But before the client installs a filter, slat starts
//! all its threads, so that the filter does not apply to them. One of these threads then makes the system calls that
//! the filter forbids to the client's threads ([`slat_process::calls`]). `docs/seccomp.md` lists the calls that a
//! filter for a vCPU's thread has to allow. Landlock removes the right to open files from a thread and from the threads
//! that it starts later. So the same thread of slat also opens slat's files.

use crate::background;
use crate::compiler;
use crate::irqfd;
use crate::process::PerProcess;
use crate::{last_thread, messages, profile, publish, recovery, steal_time, ticker, trace};
use slat_process::calls::{forbid_opening, is_any_forbidden};
use slat_process::{filter, helper};

/// The type of [`USED`], which has a value once this process has used KVM.
#[derive(Debug, Default)]
struct Used;

static USED: PerProcess<Used> = PerProcess::new();

/// Starts slat's threads if the process uses KVM. Call before a thread of this process installs a seccomp filter.
pub fn prepare() {
    if USED.peek().is_some() {
        start_threads();
    }
}

/// Whether slat has started threads in this process.
#[doc(hidden)]
pub fn has_threads() -> bool {
    background::count() > 0
}

/// Whether the program has at most one thread. If so, a filter for all threads of the process
/// (`SECCOMP_FILTER_FLAG_TSYNC`) can be installed on this thread alone. Then the filter does not apply to slat's
/// threads.
#[doc(hidden)]
pub fn is_one_thread() -> bool {
    last_thread::threads_of_program().is_some_and(|threads| threads <= 1)
}

/// Starts the thread that opens slat's files. Call before a thread restricts itself by Landlock. This thread is needed
/// even if the process has not used KVM yet, because the client may open `/dev/kvm` later.
#[doc(hidden)]
pub fn before_landlock() {
    last_thread::start();
    helper::start(background::start);
    forbid_opening();
}

/// Finds out which system calls a filter forbids. Call before the filter is installed, after [`prepare`]. Or call after
/// the filter is installed, before the thread calls slat. If the filter of a thread was not announced, slat makes all
/// its system calls on that thread itself, even forbidden ones.
///
/// If the filter is for vCPU threads, prints the calls that the filter should allow but does not.
pub fn announce(program: &[libc::sock_filter]) {
    let missing = filter::announce(program);
    for call in missing {
        messages::say(format_args!(
            "a seccomp filter allows KVM_RUN and forbids {}, which KVM_RUN needs: see docs/seccomp.md",
            call.name
        ));
    }
}

/// Records that this process uses KVM. Call when the process opens `/dev/kvm`, or creates a VM.
pub(crate) fn kvm_is_used() {
    if USED.peek().is_none() {
        USED.get();
        trace::begin();
        if is_any_forbidden() {
            start_threads();
        }
    }
}

fn start_threads() {
    last_thread::start();
    helper::start(background::start);
    profile::start();
    ticker::start();
    compiler::prepare();
    irqfd::start();
    recovery::start();
    publish::start();
    steal_time::prepare();
}

impl background::Background for helper::Helper {
    const NAME: &std::ffi::CStr = c"slat-helper";
    const WITHOUT: &str = "seccomp filters have to allow all of slat's system calls";

    fn run(&'static self) {
        self.serve()
    }
}
