//! A defect of the engine or of a callback ends the VM and nothing else. The C program in `conformance/capi` tests the
//! calls that succeed.

use slat_engine_capi::platform::{slat_page, slat_platform};
use slat_engine_capi::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

const PAGE: usize = 4096;
/// Pages of guest memory, whose backing is their host frame.
const MEMORY: u64 = 0x10_0000;

fn layout(count: usize) -> Layout {
    Layout::from_size_align(count * PAGE, count * PAGE).unwrap()
}

extern "C" fn allocate(_: *mut c_void, count: usize) -> u64 {
    // SAFETY: the layout is not of size 0.
    let start = unsafe { alloc_zeroed(layout(count)) };
    (start.expose_provenance() / PAGE) as u64
}

/// A root of EPT has one frame.
unsafe extern "C" fn free(_: *mut c_void, frame: u64) {
    // SAFETY: `allocate` has allocated this frame with this layout.
    unsafe {
        dealloc(
            std::ptr::with_exposed_provenance_mut(frame as usize * PAGE),
            layout(1),
        )
    };
}

/// Returns no address if `context` says so.
unsafe extern "C" fn address(context: *mut c_void, frame: u64) -> *mut c_void {
    // SAFETY: the context is the test's `AtomicBool`.
    if unsafe { &*context.cast::<AtomicBool>() }.load(Relaxed) {
        return null_mut();
    }
    std::ptr::with_exposed_provenance_mut(frame as usize * PAGE)
}

unsafe extern "C" fn resolve(_: *mut c_void, backing: u64, _: u32, page: *mut slat_page) -> c_int {
    // SAFETY: the struct is live.
    unsafe { (*page).frame = backing / PAGE as u64 };
    0
}

/// Returns a page of the size to which `context` points.
unsafe extern "C" fn resolve_sized(
    context: *mut c_void,
    backing: u64,
    access: u32,
    page: *mut slat_page,
) -> c_int {
    // SAFETY: the context is the test's, and the struct is live.
    unsafe {
        (*page).size = (*context.cast::<AtomicU64>()).load(Relaxed);
        resolve(context, backing, access, page)
    }
}

/// Returns the address of the frame.
extern "C" fn plain_address(_: *mut c_void, frame: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(frame as usize * PAGE)
}

extern "C" fn flush(_: *mut c_void, _: u64, _: u64) {}

extern "C" fn wait(_: *mut c_void, _: u32) {
    std::thread::yield_now();
}

fn platform<T>(context: &T) -> slat_platform {
    slat_platform {
        context: std::ptr::from_ref(context).cast_mut().cast(),
        allocate: Some(allocate),
        free: Some(free),
        address: Some(address),
        resolve: Some(resolve),
        flush: Some(flush),
        wait: Some(wait),
        drain: None,
    }
}

fn create(broken: &AtomicBool) -> *mut slat_vm {
    let platform = platform(broken);
    let mut vm = null_mut();
    // SAFETY: the arguments are live.
    let created = unsafe { slat_vm_create(SLAT_EPT, &platform, &mut vm) };
    assert_eq!(created, 0);
    vm
}

#[test]
fn after_a_panic_every_call_of_the_vm_answers_eio() {
    let broken = AtomicBool::new(false);
    let (vm, other) = (create(&broken), create(&broken));
    let (mut vcpu, mut frame) = (null_mut(), 0);
    // SAFETY: all objects and arguments are live.
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

/// Returns the text of this thread's last refusal.
fn last_error() -> String {
    // SAFETY: the text is valid until the next call.
    let text = unsafe { CStr::from_ptr(message::slat_last_error()) };
    text.to_str().unwrap().to_owned()
}

/// Checks that a call was refused with `errno`, and that the text has `words`.
fn refused(answer: c_int, errno: c_int, words: &str) {
    let text = last_error();
    assert_eq!(answer, -errno, "{text}");
    assert!(text.contains(words), "{text}");
}

#[test]
fn each_refusal_says_what_is_wrong() {
    let broken = AtomicBool::new(false);
    let (mut vm, mut vcpu, mut frame) = (null_mut(), null_mut(), 0);
    let lacks = slat_platform {
        flush: None,
        ..platform(&broken)
    };
    // SAFETY: all arguments and objects are live.
    unsafe {
        let mut create =
            |format, platform: &slat_platform| slat_vm_create(format, platform, &mut vm);
        refused(create(SLAT_EPT, &lacks), libc::EINVAL, "callback flush");
        refused(create(99, &platform(&broken)), libc::EINVAL, "format 99");
        let vm = self::create(&broken);
        assert_eq!(slat_vcpu_create(vm, &mut vcpu), 0);
        refused(
            slat_vm_lookup(vm, 0x5000, &mut frame),
            libc::ENOENT,
            "0x5000",
        );
        refused(slat_vcpu_fault(vcpu, 0x7000, 3), libc::EINVAL, "access 3");
        let change = {
            extern "C-unwind" fn change(_: *mut c_void) -> c_int {
                0
            }
            change
        };
        let invalidated = slat_vm_invalidate(vm, u64::MAX, 2, change, null_mut());
        refused(invalidated, libc::EINVAL, "beyond 64 bits");
        broken.store(true, Relaxed);
        assert_eq!(slat_vm_set_region(vm, 0, 0, MEMORY, MEMORY, 0), 0);
        refused(slat_vcpu_fault(vcpu, 0, SLAT_READ), libc::EIO, "destroy");
        slat_vcpu_destroy(vcpu);
        slat_vm_destroy(vm);
    }
}

#[test]
fn a_page_of_no_size_is_not_mapped() {
    let size = AtomicU64::new(0);
    let platform = slat_platform {
        address: Some(plain_address),
        resolve: Some(resolve_sized),
        ..platform(&size)
    };
    let (mut vm, mut vcpu, mut frame) = (null_mut(), null_mut(), 0);
    // SAFETY: all arguments and objects are live.
    unsafe {
        assert_eq!(slat_vm_create(SLAT_EPT, &platform, &mut vm), 0);
        assert_eq!(slat_vcpu_create(vm, &mut vcpu), 0);
        assert_eq!(slat_vm_set_region(vm, 0, 0, MEMORY, MEMORY, 0), 0);
        for wrong in [0, 3, 2048, 0x1800] {
            size.store(wrong, Relaxed);
            let fault = slat_vcpu_fault(vcpu, 0x3000, SLAT_READ);
            refused(fault, libc::EFAULT, &format!("resolve: {wrong:#x} bytes"));
            assert_eq!(slat_vm_lookup(vm, 0x3000, &mut frame), -libc::ENOENT);
        }
        size.store(4096, Relaxed);
        assert_eq!(slat_vcpu_fault(vcpu, 0x3000, SLAT_READ), 0);
        assert_eq!(slat_vm_lookup(vm, 0x3000, &mut frame), 0);
        assert_eq!(frame, MEMORY / PAGE as u64 + 3);
        slat_vcpu_destroy(vcpu);
        slat_vm_destroy(vm);
    }
}

#[test]
fn nothing_is_destroyed_as_nothing() {
    // SAFETY: NULL is allowed.
    unsafe {
        slat_vcpu_destroy(null_mut());
        slat_vm_destroy(null_mut());
    }
}
