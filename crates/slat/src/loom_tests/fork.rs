//! Clones of a running VM: the clone must have the VM's memory as it was at one moment, without later writes of the VM.

use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed as Plainly};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::vec::Vec;

use super::{
    LOGGED, Machine, PLAIN, SmallVcpu, SmallVm, get, hvas, model, on_cpu, spawn, touch, vm,
};
use crate::addr::{Access::*, Level};
use crate::platform::{HostPage, VmId};
use crate::sync::atomic::Ordering::*;
use crate::sync::quiesce::Attention;
use crate::vm::Vm;

/// The pages of a machine that a VM and its clone share. Only the original VM writes. Before it writes to a shared
/// page, the platform gives it a copy of the page, in another host page.
#[derive(Default)]
pub(super) struct Sharing {
    parent: OnceLock<Weak<SmallVm>>,
    /// The id of the clone, and the host pages that back it.
    clone: Mutex<Option<(VmId, Vec<HostPage>)>>,
    /// Bit n is set if backing page n is shared by both VMs.
    shared: Plain,
}

impl Sharing {
    pub(super) fn begin(&self, clone: VmId, originals: Vec<HostPage>) {
        self.shared.store(u64::MAX, Plainly);
        *self.clone.lock().unwrap() = Some((clone, originals));
    }

    /// Returns the host page that backs `page` of the clone. `None`: `vm` is not the clone.
    pub(super) fn of_clone(&self, vm: VmId, page: u64) -> Option<HostPage> {
        let clone = self.clone.lock().unwrap();
        let (_, originals) = clone.as_ref().filter(|(id, _)| *id == vm)?;
        Some(originals[page as usize].with_writable(false))
    }

    pub(super) fn is_shared(&self, page: u64) -> bool {
        self.shared.load(Plainly) >> page & 1 != 0
    }

    /// Gives the original VM its own copy of the shared page `page`.
    pub(super) fn copy(&self, machine: &Machine, page: u64) {
        let vm = self.parent.get().and_then(Weak::upgrade);
        let vm = vm.expect("its vCPU asks");
        let guard = vm.invalidate(hvas(page..page + 1));
        let copy = page + COPIES;
        let content = machine.pages[page as usize].content.load(Relaxed);
        machine.pages[copy as usize].content.store(content, Relaxed);
        machine.remap(page, copy);
        self.shared.fetch_and(!(1 << page), Plainly);
        drop(guard);
    }
}

/// The copy of host page n is host page n + `COPIES`.
const COPIES: u64 = 4;

/// Makes a VM that may be cloned, with two pages. The guest has written the first page.
fn parent(flags: crate::SlotFlags) -> Arc<SmallVm> {
    let vm = vm(Level::PAGE, 2, flags);
    let _ = vm.platform().sharing.parent.set(Arc::downgrade(&vm));
    touch(&vm, 0, Write);
    vm
}

/// Writes `value` to page `page` by a translation that the vCPU may still use, or by a new one.
pub(super) fn write(vcpu: &mut SmallVcpu, page: u64, value: u64) {
    if vcpu.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
        vcpu.quiesce();
    }
    let translation = get(vcpu, page, Write).unwrap();
    assert!(translation.write, "it may be used for writing");
    let host = vcpu.vm().platform().page(&translation);
    host.content.store(value, Relaxed);
}

/// Returns the first two words of the clone's memory.
fn words(vm: &SmallVm) -> [u64; 2] {
    [0, 1].map(|page: usize| vm.platform().pages[page].content.load(Relaxed))
}

/// Runs a guest that writes 1 to page 0, then 1 to page 1, then 2 to page 0.
pub(super) fn run_writing_guest(vm: &Arc<SmallVm>) {
    on_cpu(vm, |vcpu| {
        write(vcpu, 0, 1);
        write(vcpu, 1, 1);
        write(vcpu, 0, 2);
    });
}

#[test]
fn a_clone_has_the_memory_of_one_moment_while_its_parent_writes() {
    model(2, || {
        let vm = parent(PLAIN);
        let cpus = vm.clone();
        let guest = spawn(move || run_writing_guest(&cpus));
        let clone = Arc::new(Vm::fork_from(&vm).unwrap());
        let [cause, effect] = words(&clone);
        assert!(effect == 0 || cause > 0, "an effect without its cause");
        assert!(cause < 2 || effect > 0, "an effect without its cause");
        guest.join().unwrap();
        assert_eq!(words(&clone), [cause, effect], "written after the fork");
        for page in 0..2 {
            let host = touch(&clone, page, Read).unwrap();
            assert_eq!(host.0, page);
        }
        vm.audit().unwrap();
        clone.audit().unwrap();
    });
}

#[test]
fn no_write_is_lost_to_a_harvest_while_a_vm_is_cloned() {
    let harvest = |vm: &SmallVm| {
        let mut bitmap = [0];
        vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
        bitmap[0] & 1 != 0
    };
    model(2, move || {
        let vm = parent(LOGGED);
        let client = vm.clone();
        let first = spawn(move || harvest(&client));
        let clone = Vm::fork_from(&vm).unwrap();
        let times = u32::from(first.join().unwrap()) + u32::from(harvest(&vm));
        assert_eq!(times, 1, "the write is in one harvest");
        assert!(!harvest(&clone), "the clone has written nothing");
        vm.audit().unwrap();
        clone.audit().unwrap();
    });
}
