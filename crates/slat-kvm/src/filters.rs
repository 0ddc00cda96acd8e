//! Seccomp filters of the client: what has to be there before one is installed.
//!
//! slat's threads are started by the first need, unless the client installs a filter: then all of them are started before, so
//! that they are not bound by it, and one of them makes the system calls that the filter forbids
//! ([`slat_process::calls`]). `docs/seccomp.md` says what a filter for a vCPU's thread has to allow.

use crate::background;
use crate::irq::irqfd;
use crate::process::PerProcess;
use crate::{recovery, report, steal_time, ticker};
use slat_process::calls::is_any_forbidden;
use slat_process::{filter, helper};

/// Made by a process that uses KVM.
#[derive(Debug, Default)]
struct Used;

static USED: PerProcess<Used> = PerProcess::new();

/// Call before a thread of this process installs a seccomp filter. If the process uses KVM, slat's threads are started.
pub fn prepare() {
    if USED.peek().is_some() {
        start_threads();
    }
}

/// Call with the filter before it is installed, after [`prepare`]; or afterwards, before the thread calls slat. A thread whose
/// filter was not announced makes all of slat's system calls itself.
///
/// Says what is missing on standard error, if the filter is one for vCPU threads.
pub fn announce(program: &[libc::sock_filter]) {
    let missing = filter::announce(program);
    for call in missing {
        report::say(format_args!(
            "a seccomp filter allows KVM_RUN and forbids {}, which a vCPU's thread needs in it: see docs/seccomp.md",
            call.name
        ));
    }
}

/// Call when the process opens `/dev/kvm`, or makes a VM.
pub(crate) fn kvm_is_used() {
    if USED.peek().is_none() {
        USED.get();
        if is_any_forbidden() {
            start_threads();
        }
    }
}

fn start_threads() {
    helper::start(background::start);
    ticker::start();
    irqfd::start();
    recovery::start();
    steal_time::prepare();
}

impl background::Background for helper::Helper {
    const NAME: &std::ffi::CStr = c"slat-helper";
    const WITHOUT: &str = "seccomp filters have to allow all that slat does";

    fn run(&'static self) {
        self.serve()
    }
}
