//! Tests the functions as a C program calls them.

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_run, kvm_userspace_memory_region};
use slat_capi::descriptors::{slat_close, slat_dup, slat_ioctl, slat_open, slat_pread};
use slat_capi::memory::{slat_around, slat_mmap, slat_munmap};
use slat_kvm::abi;
use slat_kvm::descriptors::{get, is_ours};
use slat_kvm::ioctl::Object;
use std::ffi::{c_int, c_void};
use std::io::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

const MEMORY: usize = 0x4000;

fn errno() -> i32 {
    Error::last_os_error().raw_os_error().unwrap()
}

/// Makes a request whose argument is a number. The request must succeed.
fn request(fd: c_int, request: u32, argument: usize) -> c_int {
    // SAFETY: the request does not take the argument for an address.
    let value = unsafe { slat_ioctl(fd, request.into(), argument) };
    assert!(value >= 0, "{request:#x}: errno {}", errno());
    value
}

/// A VM with a page of memory from address 0 on, in whose slot writes are logged, and a vCPU.
struct Guest {
    kvm: c_int,
    vm: c_int,
    vcpu: c_int,
    memory: *mut c_void,
}

fn map(size: usize, flags: c_int, fd: c_int) -> *mut c_void {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call makes a new mapping at an address of the kernel's choice.
    let start = unsafe { slat_mmap(null_mut(), size, rights, flags, fd, 0) };
    assert_ne!(start, libc::MAP_FAILED, "errno {}", errno());
    start
}

impl Guest {
    fn new() -> Self {
        let kvm = slat_open();
        assert!(kvm >= 0, "errno {}", errno());
        let vm = request(kvm, abi::KVM_CREATE_VM, 0);
        let vcpu = request(vm, abi::KVM_CREATE_VCPU, 0);
        let memory = map(MEMORY, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: memory as u64,
        };
        request(
            vm,
            abi::KVM_SET_USER_MEMORY_REGION,
            &raw const region as usize,
        );
        Guest {
            kvm,
            vm,
            vcpu,
            memory,
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        for fd in [self.vcpu, self.vm, self.kvm] {
            assert_eq!(slat_close(fd), 0);
        }
        // SAFETY: the guest that used the memory is gone.
        assert_eq!(unsafe { slat_munmap(self.memory, MEMORY) }, 0);
    }
}

#[test]
fn requests_and_errno_are_the_kernels() {
    let guest = Guest::new();
    assert_eq!(request(guest.kvm, abi::KVM_GET_API_VERSION, 0), 12);
    let size = request(guest.kvm, abi::KVM_GET_VCPU_MMAP_SIZE, 0) as usize;
    let run = map(size, libc::MAP_SHARED, guest.vcpu).cast::<kvm_run>();
    // SAFETY: the page belongs to the vCPU, and no thread runs the vCPU.
    unsafe { (*run).immediate_exit = 1 };
    // SAFETY: each request has no argument, does not exist, or has a bad address. Nothing uses the unmapped memory.
    unsafe {
        assert_eq!(slat_ioctl(guest.vcpu, abi::KVM_RUN.into(), 0), -1);
        assert_eq!(errno(), libc::EINTR);
        assert_eq!(slat_ioctl(guest.vm, 0xaeff, 0), -1);
        assert_eq!(errno(), libc::ENOTTY);
        assert_eq!(slat_ioctl(guest.vcpu, abi::KVM_GET_REGS.into(), 8), -1);
        assert_eq!(errno(), libc::EFAULT);
        assert_eq!(slat_munmap(run.cast(), size), 0);
    }
    let shared = libc::MAP_SHARED;
    // SAFETY: the kernel chooses the address. The call fails, because the object has no pages.
    let none = unsafe { slat_mmap(null_mut(), 4096, libc::PROT_READ, shared, guest.vm, 0) };
    assert_eq!((none, errno()), (libc::MAP_FAILED, libc::ENODEV));
}

#[test]
fn an_object_lives_until_its_last_descriptor_is_closed() {
    let kvm = slat_open();
    let vm = request(kvm, abi::KVM_CREATE_VM, 0);
    let other = slat_dup(vm);
    assert_eq!(slat_close(vm), 0);
    assert!(!is_ours(vm));
    let vcpu = request(other, abi::KVM_CREATE_VCPU, 3);
    for fd in [other, vcpu, kvm] {
        assert_eq!(slat_close(fd), 0);
    }
    assert_eq!((slat_close(vcpu), errno()), (-1, libc::EBADF));
}

#[test]
fn other_files_are_the_c_librarys() {
    let mut ends = [0; 2];
    // SAFETY: the array of two is live, FIONREAD writes an int, and the buffer has the bytes that are read.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        assert_eq!(libc::write(ends[1], b"abc".as_ptr().cast(), 3), 3);
        let mut waiting: c_int = 0;
        let address = &raw mut waiting as usize;
        assert_eq!(slat_ioctl(ends[0], libc::FIONREAD, address), 0);
        assert_eq!(waiting, 3);
        let mut byte = 0u8;
        assert_eq!(slat_pread(ends[0], (&raw mut byte).cast(), 1, 0), -1);
        assert_eq!(errno(), libc::ESPIPE);
    }
    let other = slat_dup(ends[0]);
    for fd in [other, ends[0], ends[1]] {
        assert_eq!(slat_close(fd), 0);
    }
}

/// Sets errno, and returns its argument.
extern "C-unwind" fn fail(context: *mut c_void) -> c_int {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::ENOSPC };
    context.addr() as c_int
}

extern "C-unwind" fn panic(_: *mut c_void) -> c_int {
    panic!("on purpose")
}

#[test]
fn a_change_has_its_own_result() {
    let guest = Guest::new();
    let context = std::ptr::without_provenance_mut(7);
    // SAFETY: the functions take any context.
    unsafe {
        assert_eq!(slat_around(guest.memory, MEMORY, fail, context), 7);
        assert_eq!(errno(), libc::ENOSPC);
        assert_eq!(slat_around(guest.memory, usize::MAX, fail, context), -1);
        assert_eq!(errno(), libc::EINVAL);
    }
}

#[test]
fn a_panic_does_not_cross_the_border() {
    let guest = Guest::new();
    // SAFETY: the function takes any context.
    let value = unsafe { slat_around(guest.memory, MEMORY, panic, null_mut()) };
    assert_eq!((value, errno()), (-1, libc::EIO));
    // That panic happened in the client's function, not in a call of the VM, so the VM still works.
    request(guest.vm, abi::KVM_CREATE_VCPU, 1);
    // A panic within a call of the VM ends all later calls.
    let handle = get(guest.vm).unwrap();
    let Object::Vm(vm) = handle.object() else {
        panic!("a VM")
    };
    let within = AssertUnwindSafe(|| vm.dirty_log(0, |_| panic!("on purpose")));
    assert!(catch_unwind(within).is_err());
    for (fd, number) in [
        (guest.vm, abi::KVM_CREATE_IRQCHIP),
        (guest.vcpu, abi::KVM_RUN),
    ] {
        // SAFETY: the request has no argument.
        let value = unsafe { slat_ioctl(fd, number.into(), 0) };
        assert_eq!((value, errno()), (-1, libc::EIO), "{number:#x}");
    }
}
