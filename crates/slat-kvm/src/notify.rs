//! All live VMs of the process, as listeners to changes of the host's mappings: KVM's MMU notifiers.
//!
//! Whoever changes mappings runs the change inside [`around`]: the VMs drop their translations of the range before, and
//! take new ones only after it.

use crate::engine::EngineVm;
use slat::Hva;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, Weak};

type Registry = RwLock<Vec<Weak<EngineVm>>>;

/// Null until the first VM of this process.
static VMS: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());
/// VMs that live: the common case of none costs one load.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// In a forked child: no VM of the parent is a listener here, and the registry's lock may be held for ever.
pub(crate) fn forget_after_fork() {
    VMS.store(std::ptr::null_mut(), Ordering::Release);
    LIVE.store(0, Ordering::Release);
}

fn registry() -> &'static Registry {
    let current = VMS.load(Ordering::Acquire);
    // SAFETY: once published, a registry is never freed.
    if let Some(registry) = unsafe { current.as_ref() } {
        return registry;
    }
    let new = Box::into_raw(Box::new(Registry::default()));
    match VMS.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: published above and never freed.
        Ok(_) => unsafe { &*new },
        // SAFETY: `new` was not published; the winner's is never freed.
        Err(winner) => unsafe {
            drop(Box::from_raw(new));
            &*winner
        },
    }
}

/// Makes a VM a listener.
pub(crate) fn register(vm: &Arc<EngineVm>) {
    let mut vms = registry()
        .write()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    vms.push(Arc::downgrade(vm));
    LIVE.store(vms.len(), Ordering::SeqCst);
}

/// Ends it.
pub(crate) fn unregister(vm: &Arc<EngineVm>) {
    let mut vms = registry()
        .write()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    vms.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(vm)));
    LIVE.store(vms.len(), Ordering::SeqCst);
}

/// The VMs that live now.
pub fn live() -> Vec<Arc<EngineVm>> {
    if LIVE.load(Ordering::SeqCst) == 0 {
        return Vec::new();
    }
    let vms = registry()
        .read()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    vms.iter().filter_map(Weak::upgrade).collect()
}

/// Runs `change`, which changes the host's mappings in `range`: every VM drops its translations of the range before, and no
/// vCPU uses an old one after this has returned.
///
/// Waits for vCPUs that are running to pass a block boundary, so the caller must not hold what they need.
pub fn around<R>(range: Range<usize>, change: impl FnOnce() -> R) -> R {
    around_all(&[range], change)
}

/// [`around`] for several ranges at once.
pub fn around_all<R>(ranges: &[Range<usize>], change: impl FnOnce() -> R) -> R {
    if LIVE.load(Ordering::SeqCst) == 0 {
        return change();
    }
    let vms = live();
    let invalidations: Vec<_> = {
        let _inside = crate::thread::Inside::enter();
        let ranges = ranges.iter().filter(|range| !range.is_empty());
        let pairs = ranges.flat_map(|range| {
            vms.iter()
                .map(move |vm| (vm, Hva(range.start as u64)..Hva(range.end as u64)))
        });
        pairs.map(|(vm, range)| vm.invalidate(range)).collect()
    };
    let result = change();
    let _inside = crate::thread::Inside::enter();
    drop(invalidations);
    result
}
