//! A heap whose allocations fail when a test asks for it.
//!
//! Each thread has its own state, so the test program's other threads are not affected.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

#[derive(Clone, Copy)]
struct Plan {
    /// The number of allocations that succeed before an allocation fails.
    left: u32,
    /// Whether all later allocations fail, too.
    stay: bool,
    failed: bool,
}

thread_local! {
    static PLAN: Cell<Option<Plan>> = const { Cell::new(None) };
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

/// The system's heap with failures, for `#[global_allocator]`. It counts each thread's allocations, and refuses those
/// that [`failing`](Self::failing) selects.
#[derive(Debug)]
pub struct FailingHeap;

impl FailingHeap {
    /// Runs `what`. Of the allocations of this thread in `what`, the first `n` succeed, and the next allocation fails.
    /// If `stay`, all later allocations fail, too. Also returns whether an allocation has failed.
    pub fn failing<R>(n: u32, stay: bool, what: impl FnOnce() -> R) -> (R, bool) {
        PLAN.set(Some(Plan {
            left: n,
            stay,
            failed: false,
        }));
        let answer = what();
        let plan = PLAN.take().expect("set above");
        (answer, plan.failed)
    }

    /// Makes every allocation succeed from now on until [`failing`](Self::failing) returns.
    pub fn recover() {
        PLAN.set(PLAN.get().map(|plan| Plan {
            left: u32::MAX,
            ..plan
        }));
    }

    /// Runs `what`, whose allocations all succeed. For code that [`failing`](Self::failing) runs.
    pub fn spared<R>(what: impl FnOnce() -> R) -> R {
        let plan = PLAN.take();
        let answer = what();
        PLAN.set(plan);
        answer
    }

    /// Returns the number of bytes that `what` allocates on this thread.
    pub fn allocated(what: impl FnOnce()) -> usize {
        ALLOCATED.set(0);
        what();
        ALLOCATED.get()
    }
}

/// Counts an allocation. Returns whether it must fail.
fn fails(bytes: usize) -> bool {
    let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get() + bytes));
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

// SAFETY: every call is passed to the system's allocator. A refused allocation returns null, which an allocator may do.
unsafe impl GlobalAlloc for FailingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: `layout` is valid, as the trait's contract requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: `layout` is valid, as the trait's contract requires.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the block at `pointer` has this layout, as the trait's contract requires.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails(size) {
            return ptr::null_mut();
        }
        // SAFETY: the block at `pointer` has this layout, as the trait's contract requires.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
