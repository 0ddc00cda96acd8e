//! Recovery of NX huge pages, by a thread of slat. A huge page is split into small pages when the guest executes code
//! in it. Once per period, the thread makes each VM zap a part of the tables of such split pages. slat starts the
//! thread when it is first needed. In a forked child, slat starts it only if the child creates VMs.

use crate::background::{self, Background};
use crate::notify;
use crate::policy::number;
use crate::process::PerProcess;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The condition for which the thread waits.
#[derive(Default)]
pub(crate) struct Recovery {
    /// The number of times that parameters have changed. Each change restarts the period.
    changes: Mutex<u64>,
    pub(crate) changed: Condvar,
}

pub(crate) static RECOVERY: PerProcess<Recovery> = PerProcess::new();

/// Returns the time between two recoveries; `None` if recovery is off. With a period of 0, the ratio determines the
/// time: all pages are recovered within an hour, as in KVM.
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

/// Starts the thread if it does not run.
pub(crate) fn start() {
    RECOVERY.get_or_start(|recovery| {
        background::start(recovery);
    });
}

/// Starts the thread if the parameters enable recovery. Call when a VM is created.
pub(crate) fn begin() {
    if period().is_some() {
        start();
    }
}

impl Recovery {
    /// Locks `changes`, the number of times that parameters have changed.
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Background for Recovery {
    const NAME: &CStr = c"slat-nx";
    const WITHOUT: &str = "NX huge pages will not be recovered";

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
