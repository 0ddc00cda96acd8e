//! NX huge pages come back: a thread that lets every VM take away a share of the tables that execution has split, period by
//! period. It is started by the first need, and never in a forked child unless that makes VMs of its own.

use crate::background::{self, Background};
use crate::notify;
use crate::parameters::number;
use crate::process::PerProcess;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

#[derive(Default)]
struct Recovery {
    /// Raised when a parameter changes: the period begins again.
    changes: Mutex<u64>,
    changed: Condvar,
}

static RECOVERY: PerProcess<Recovery> = PerProcess::new();

/// The time between two recoveries, if there are any. With a period of 0 the ratio decides: everything within an hour, as
/// with KVM.
fn period() -> Option<Duration> {
    let ratio = number("nx_huge_pages_recovery_ratio");
    if number("nx_huge_pages") == 0 || ratio == 0 {
        return None;
    }
    const HOUR: u64 = 60 * 60;
    Some(match number("nx_huge_pages_recovery_period_ms") {
        0 => Duration::from_millis(HOUR * 1000 / ratio.min(HOUR)),
        period => Duration::from_millis(period),
    })
}

/// Starts the thread if there is none.
pub(crate) fn start() {
    RECOVERY.get_or_start(|recovery| {
        background::start(recovery);
    });
}

/// A VM was made: somebody has to look after it.
pub(crate) fn begin() {
    if period().is_some() {
        start();
    }
}

/// A parameter has changed.
pub(crate) fn reconsider() {
    begin();
    if let Some(recovery) = RECOVERY.peek() {
        *recovery.lock() += 1;
        recovery.changed.notify_one();
    }
}

impl Recovery {
    fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Background for Recovery {
    const NAME: &CStr = c"slat-nx";
    const WITHOUT: &str = "NX huge pages will not come back";

    fn run(&'static self) {
        loop {
            let changes = self.lock();
            let seen = *changes;
            let due = match period() {
                None => {
                    let changed = self.changed.wait_while(changes, |now| *now == seen);
                    drop(changed.unwrap_or_else(PoisonError::into_inner));
                    false
                }
                Some(period) => {
                    let waited =
                        (self.changed).wait_timeout_while(changes, period, |now| *now == seen);
                    let (changes, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                    drop(changes);
                    waited.timed_out()
                }
            };
            if due {
                for vm in notify::live() {
                    vm.recover_nx_huge_pages();
                }
            }
        }
    }
}
