//! A defect, of the engine's or of a callback, ends the VM and nothing else. What works is tried by a C program: `conformance/capi`.

use slat_capi::engine::platform::{slat_page, slat_platform};
use slat_capi::engine::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const PAGE: usize = 4096;
/// Pages of guest memory, whose backing is their host frame.
const MEMORY: u64 = 0x10_0000;

fn layout(count: usize) -> Layout {
    Layout::from_size_align(count * PAGE, count * PAGE).unwrap()
}

extern "C" fn allocate(_: *mut c_void, count: usize) -> u64 {
    // SAFETY: not of size 0.
    let start = unsafe { alloc_zeroed(layout(count)) };
    (start.expose_provenance() / PAGE) as u64
}

/// EPT's roots are of one frame.
unsafe extern "C" fn free(_: *mut c_void, frame: u64) {
    // SAFETY: allocated by `allocate`.
    unsafe {
        dealloc(
            std::ptr::with_exposed_provenance_mut(frame as usize * PAGE),
            layout(1),
        )
    };
}

/// The context says whether it has no address any more.
unsafe extern "C" fn address(context: *mut c_void, frame: u64) -> *mut c_void {
    // SAFETY: the context of the test.
    if unsafe { &*context.cast::<AtomicBool>() }.load(Relaxed) {
        return null_mut();
    }
    std::ptr::with_exposed_provenance_mut(frame as usize * PAGE)
}

unsafe extern "C" fn resolve(_: *mut c_void, backing: u64, _: u32, page: *mut slat_page) -> c_int {
    // SAFETY: a live struct.
    unsafe { (*page).frame = backing / PAGE as u64 };
    0
}

extern "C" fn flush(_: *mut c_void, _: u64, _: u64) {}

extern "C" fn wait(_: *mut c_void, _: u32) {
    std::thread::yield_now();
}

fn create(broken: &AtomicBool) -> *mut slat_vm {
    let platform = slat_platform {
        context: std::ptr::from_ref(broken).cast_mut().cast(),
        allocate: Some(allocate),
        free: Some(free),
        address: Some(address),
        resolve: Some(resolve),
        flush: Some(flush),
        wait: Some(wait),
        drain: None,
    };
    let mut vm = null_mut();
    // SAFETY: live arguments.
    let created = unsafe { slat_vm_create(SLAT_EPT, &platform, &mut vm) };
    assert_eq!(created, 0);
    vm
}

#[test]
fn after_a_panic_every_call_of_the_vm_answers_eio() {
    let broken = AtomicBool::new(false);
    let (vm, other) = (create(&broken), create(&broken));
    let (mut vcpu, mut frame) = (null_mut(), 0);
    // SAFETY: live objects and arguments.
    unsafe {
        assert_eq!(slat_vcpu_create(vm, &mut vcpu), 0);
        assert_eq!(slat_vm_set_region(vm, 0, 0, MEMORY, MEMORY, 0), 0);
        broken.store(true, Relaxed);
        assert_eq!(slat_vcpu_fault(vcpu, 0, SLAT_READ), -libc::EIO);
        broken.store(false, Relaxed);
        assert_eq!(slat_vcpu_fault(vcpu, 0, SLAT_READ), -libc::EIO);
        assert_eq!(slat_vm_root(vm, &mut frame), -libc::EIO);
        assert_eq!(slat_vm_remove_region(vm, 0), -libc::EIO);
        assert_eq!(slat_vm_root(other, &mut frame), 0);
        slat_vcpu_destroy(vcpu);
        slat_vm_destroy(vm);
        slat_vm_destroy(other);
    }
}
