//! Layered memory ([`crate::layers`]): VMs that write to the same page at once, and layers whose VMs end at once.
//!
//! A first write is an invalidation with a split in the middle of a fault, so two threads with two preemptions have too
//! many interleavings: two of the models have one preemption.

use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed as Plainly};
use std::sync::{Arc, Mutex, Weak};
use std::vec::Vec;

use super::fork::{run_writing_guest, write};
use super::{PLAIN, Page, SmallVm, hvas, model, on_cpu, spawn, touch, vm};
use crate::addr::{Access, Access::*, Granule, Hva, Level, Pfn};
use crate::layers::{PageFrames, Stack};
use crate::platform::{HostPage, HostRun, Request, ResolveError, VmId};
use crate::sync::atomic::Ordering::*;
use crate::vm::Vm;
use core::ops::Range;

/// The host pages as frames of layers. A page that was freed is not used again.
pub(super) struct Frames {
    pages: Arc<Vec<Page>>,
    next: Plain,
}

impl PageFrames for Frames {
    fn copy(&self, from: Option<Pfn>) -> Option<Pfn> {
        let from = &self.pages[from.expect("the base has all pages").0 as usize];
        from.alive.used();
        let copy = self.next.fetch_add(1, Plainly);
        let content = from.content.load(Relaxed);
        self.pages[copy as usize].content.store(content, Relaxed);
        Some(Pfn(copy))
    }

    fn free(&self, first: Pfn, pages: u64) {
        let frames = first.0..first.0 + pages;
        frames.for_each(|frame| self.pages[frame as usize].alive.owned());
    }
}

/// The memory of one VM. The lock is one that loom models.
struct Memory {
    vm: VmId,
    handle: Mutex<Weak<SmallVm>>,
    stack: loom::sync::Mutex<Stack<Frames>>,
}

/// The VMs that have layered memory. If there are none, the machine's pages are as in the other tests.
#[derive(Default)]
pub(super) struct Layers(Mutex<Vec<Arc<Memory>>>);

impl Layers {
    fn add(&self, vm: VmId, stack: Stack<Frames>) {
        self.0.lock().unwrap().push(Arc::new(Memory {
            vm,
            handle: Mutex::default(),
            stack: loom::sync::Mutex::new(stack),
        }));
    }

    fn of(&self, vm: VmId) -> Option<Arc<Memory>> {
        let all = self.0.lock().unwrap();
        all.iter().find(|memory| memory.vm == vm).cloned()
    }

    /// Drops the memory of a VM that was dropped.
    fn remove(&self, vm: VmId) {
        let mut all = self.0.lock().unwrap();
        let at = all.iter().position(|memory| memory.vm == vm).unwrap();
        let memory = all.swap_remove(at);
        // Loom may run another thread when the stack is dropped.
        drop(all);
        drop(memory);
    }

    pub(super) fn resolve(&self, request: &Request) -> Option<Result<HostPage, ResolveError>> {
        let memory = self.of(request.vm)?;
        loop {
            let mut stack = memory.stack.lock().unwrap();
            let found = stack.find(request.backing).unwrap();
            if found.writable || request.access != Access::Write {
                return Some(Ok(found));
            }
            let copy = stack.copy(request.backing).unwrap();
            drop(stack);
            let vm = memory.handle.lock().unwrap().upgrade();
            let vm = vm.expect("its vCPU asks");
            let guard = vm.invalidate_exact(request.backing..request.backing.add_pages(1));
            memory.stack.lock().unwrap().insert(copy);
            drop(guard);
        }
    }

    pub(super) fn share(&self, parent: VmId, child: VmId) -> bool {
        let parent = self.of(parent);
        let stack = parent.map(|memory| memory.stack.lock().unwrap().share().unwrap());
        let is_layered = stack.is_some();
        stack.into_iter().for_each(|stack| self.add(child, stack));
        is_layered
    }

    pub(super) fn resident(&self, vm: VmId, backing: &Range<Hva>) -> Option<Vec<HostRun>> {
        let memory = self.of(vm)?;
        let (stack, mut at) = (memory.stack.lock().unwrap(), backing.start);
        let mut runs = Vec::new();
        while let Some(run) = stack.resident(at..backing.end) {
            at = run.backing.add_pages(run.pages);
            runs.push(run);
        }
        Some(runs)
    }
}

/// Makes the platform know a VM with layered memory.
fn known(vm: SmallVm) -> Arc<SmallVm> {
    let vm = Arc::new(vm);
    let memory = vm.platform().layers.of(vm.id()).unwrap();
    *memory.handle.lock().unwrap() = Arc::downgrade(&vm);
    vm
}

/// Makes a VM whose two pages are one page of level 2 of a base that other VMs may have, too.
fn base() -> Arc<SmallVm> {
    let vm = vm(Level::MEGA, 2, PLAIN);
    let frames = Arc::new(Frames {
        pages: vm.platform().pages.clone(),
        next: Plain::new(2),
    });
    let mut stack = Stack::new(frames, Granule::Kib4, hvas(0..2));
    stack.put(Hva(0), Pfn(0), 2).unwrap();
    vm.platform().layers.add(vm.id(), stack);
    let vm = known(Arc::into_inner(vm).unwrap());
    touch(&vm, 0, Read);
    vm
}

fn fork(vm: &Arc<SmallVm>) -> Arc<SmallVm> {
    known(Vm::fork_from(vm).unwrap())
}

fn end(vm: Arc<SmallVm>) {
    let (id, machine) = (vm.id(), vm.platform().clone());
    drop(Arc::into_inner(vm).unwrap());
    machine.layers.remove(id);
}

/// Returns the words of a VM's two pages.
fn words(vm: &SmallVm) -> [u64; 2] {
    let memory = vm.platform().layers.of(vm.id()).unwrap();
    let stack = memory.stack.lock().unwrap();
    [0, 1].map(|page| {
        let frame = stack.find(hvas(page..page + 1).start).unwrap().pfn;
        vm.platform().pages[frame.0 as usize].content.load(Relaxed)
    })
}

#[test]
fn two_vms_that_write_to_the_same_page_of_a_base_have_a_copy_each() {
    model(2, || {
        let template = base();
        let (first, second) = (fork(&template), fork(&template));
        let cpus = first.clone();
        let other = spawn(move || on_cpu(&cpus, |vcpu| write(vcpu, 0, 1)));
        on_cpu(&second, |vcpu| write(vcpu, 0, 2));
        other.join().unwrap();
        assert_eq!(
            [&first, &second, &template].map(|vm| words(vm)),
            [[1, 0], [2, 0], [0, 0]]
        );
        for vm in [&first, &second] {
            assert_eq!(
                touch(vm, 1, Read),
                Some(Pfn(1)),
                "the other page is the base's"
            );
            vm.audit().unwrap();
        }
    });
}

#[test]
fn two_vcpus_that_write_to_the_same_page_write_to_the_same_copy() {
    model(1, || {
        let template = base();
        let vm = fork(&template);
        let cpus = vm.clone();
        let other = spawn(move || on_cpu(&cpus, |vcpu| write(vcpu, 0, 1)));
        on_cpu(&vm, |vcpu| write(vcpu, 0, 2));
        other.join().unwrap();
        let [word, _] = words(&vm);
        assert!(word == 1 || word == 2, "a write was lost: {word}");
        assert_eq!(words(&template), [0, 0]);
        let own = touch(&vm, 0, Read).unwrap();
        assert_eq!(
            vm.platform().pages[own.0 as usize].content.load(Relaxed),
            word
        );
        vm.audit().unwrap();
    });
}

#[test]
fn a_clone_of_layered_memory_has_the_memory_of_one_moment() {
    model(1, || {
        let template = base();
        let vm = fork(&template);
        let cpus = vm.clone();
        let guest = spawn(move || run_writing_guest(&cpus));
        let clone = fork(&vm);
        let [cause, effect] = words(&clone);
        assert!(effect == 0 || cause > 0, "an effect without its cause");
        assert!(cause < 2 || effect > 0, "an effect without its cause");
        guest.join().unwrap();
        assert_eq!((words(&clone), words(&vm)), ([cause, effect], [2, 1]));
        vm.audit().unwrap();
        clone.audit().unwrap();
    });
}

/// Both clones of a base that has ended itself read a page, and end: the one that ends last frees the base, after the
/// other one's read.
#[test]
fn a_base_is_freed_after_the_last_use_by_any_vm() {
    model(2, || {
        let template = base();
        let (first, second) = (fork(&template), fork(&template));
        end(template);
        let reader = |vm: Arc<SmallVm>| {
            assert_eq!(touch(&vm, 0, Read), Some(Pfn(0)));
            end(vm);
        };
        let other = spawn(move || reader(first));
        reader(second);
        other.join().unwrap();
    });
}
