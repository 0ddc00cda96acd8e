//! Notifies all live VMs of the process of changes of the host's mappings, like KVM's MMU notifiers.
//!
//! A thread that changes mappings makes the change in [`around`]: the VMs drop their translations of the range before
//! the change. They create new translations of the range only after the change.

use crate::engine::EngineVm;
use crate::process::{PerProcess, live_vms};
use slat::Hva;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLock, Weak};

type Registry = RwLock<Vec<Weak<EngineVm>>>;

/// The VMs that are notified in this process. A forked child begins with no VMs, because the parent's VMs do not live
/// in the child.
static VMS: PerProcess<Registry> = PerProcess::new();

fn change(change: impl FnOnce(&mut Vec<Weak<EngineVm>>)) {
    let mut vms = (VMS.get().write()).unwrap_or_else(|poisoned| poisoned.into_inner());
    change(&mut vms);
    live_vms().store(vms.len(), Ordering::SeqCst);
}

/// Whether a VM is live in this process. slat calls this function at every change of the program's memory. So it costs
/// only one load.
#[doc(hidden)]
#[inline]
pub fn is_anyone_listening() -> bool {
    live_vms().load(Ordering::Relaxed) != 0
}

/// Registers a VM, so that it is notified from now on.
pub(crate) fn register(vm: &Arc<EngineVm>) {
    change(|vms| {
        if vms.is_empty() {
            slat_host::mappings::begin();
        }
        vms.push(Arc::downgrade(vm));
    });
}

/// Ends the notification of a VM.
pub(crate) fn unregister(vm: &Arc<EngineVm>) {
    change(|vms| {
        vms.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(vm)));
        if vms.is_empty() {
            slat_host::mappings::end();
        }
    });
}

/// Returns the live VMs.
#[doc(hidden)]
pub fn live() -> Vec<Arc<EngineVm>> {
    match VMS.peek() {
        Some(registry) if is_anyone_listening() => {
            let vms = registry
                .read()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            vms.iter().filter_map(Weak::upgrade).collect()
        }
        _ => Vec::new(),
    }
}

/// Runs `change`, which changes the host's mappings in `range`. Every VM drops its translations of the range before the
/// change. After this function has returned, no vCPU uses an old translation.
///
/// Waits until every running vCPU has reached the end of a block of guest code. So the caller must not hold a lock that
/// a running vCPU may wait for.
pub fn around<R>(range: Range<usize>, change: impl FnOnce() -> R) -> R {
    around_all(&[range], change)
}

/// Runs `change` like [`around`], but `change` may change the host's mappings in all of `ranges`.
pub fn around_all<R>(ranges: &[Range<usize>], change: impl FnOnce() -> R) -> R {
    let vms = live();
    if vms.is_empty() {
        return change();
    }
    let invalidations: Vec<_> = {
        let _section = crate::thread::Section::enter();
        let ranges = ranges.iter().filter(|range| !range.is_empty());
        let pairs = ranges.flat_map(|range| {
            vms.iter()
                .map(move |vm| (vm, Hva(range.start as u64)..Hva(range.end as u64)))
        });
        pairs.map(|(vm, range)| vm.invalidate(range)).collect()
    };
    let result = change();
    let _section = crate::thread::Section::enter();
    drop(invalidations);
    result
}
