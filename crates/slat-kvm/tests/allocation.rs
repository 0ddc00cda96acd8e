//! Where memory runs out: the n-th allocation of a vCPU's creation and of its runs fails, for every n.

mod common;
mod long_mode;

use long_mode::{Machine, answer};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Fails allocations of a thread.
struct Failing;

#[derive(Clone, Copy)]
struct Plan {
    /// Allocations until one fails.
    left: u32,
    /// All that follow fail, too.
    stay: bool,
    failed: bool,
}

thread_local! {
    static PLAN: Cell<Option<Plan>> = const { Cell::new(None) };
}

/// Whether this allocation is to fail.
fn fails() -> bool {
    let decide = |cell: &Cell<Option<Plan>>| {
        let Some(mut plan) = cell.get() else {
            return false;
        };
        let fails = plan.left == 0 && (plan.stay || !plan.failed);
        plan.left = plan.left.saturating_sub(1);
        plan.failed |= fails;
        cell.set(Some(plan));
        fails
    };
    PLAN.try_with(decide).unwrap_or(false)
}

// SAFETY: all is the system allocator's, apart from refusals, which it may make, too.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static HEAP: Failing = Failing;

/// Does `work` while the allocation after `left` others fails, and with `stay` all that follow. Returns whether one did.
fn failing<T>(left: u32, stay: bool, work: impl FnOnce() -> T) -> (T, bool) {
    PLAN.set(Some(Plan {
        left,
        stay,
        failed: false,
    }));
    let result = work();
    let failed = PLAN.take().is_some_and(|plan| plan.failed);
    (result, failed)
}

#[test]
fn a_vcpu_without_heap_memory_is_not_made_and_can_be_made_again() {
    // The decoder's tables are built once in a process, with all their memory.
    drop(Machine::new().vm.create_vcpu(0).unwrap());
    for stay in [false, true] {
        for n in 0.. {
            let machine = Machine::new();
            let (vcpu, failed) = failing(n, stay, || machine.vm.create_vcpu(0));
            let mut vcpu = match vcpu {
                Ok(vcpu) => vcpu,
                Err(error) => {
                    assert!(failed);
                    assert_eq!(error.errno(), libc::ENOMEM, "allocation {n}");
                    machine.vm.create_vcpu(0).unwrap()
                }
            };
            machine.start(&vcpu);
            while answer(vcpu.run().unwrap()) {}
            machine.check_end(&vcpu);
            if !failed {
                assert!(n > 5, "{n} allocations");
                break;
            }
        }
    }
}

#[test]
fn a_run_without_heap_memory_goes_on_or_is_enomem_and_can_be_repeated() {
    let mut refused = 0;
    for stay in [false, true] {
        for n in 0.. {
            let machine = Machine::new();
            let mut vcpu = machine.vm.create_vcpu(0).unwrap();
            machine.start(&vcpu);
            let ((), failed) = failing(n, stay, || {
                loop {
                    match vcpu.run() {
                        Ok(exit) => {
                            if !answer(exit) {
                                return;
                            }
                        }
                        Err(error) => {
                            assert_eq!(error.errno(), libc::ENOMEM, "allocation {n}");
                            refused += 1;
                            PLAN.set(PLAN.get().map(|plan| Plan {
                                left: u32::MAX,
                                ..plan
                            }));
                        }
                    }
                }
            });
            machine.check_end(&vcpu);
            if !failed {
                break;
            }
        }
    }
    assert!(refused > 0, "no run needed memory for second-level tables");
}
