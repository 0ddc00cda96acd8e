//! A KVM program without a vCPU, for 64-bit Arm: it makes a VM with memory. `.ci/arm64` and `.ci/arm64-machine` compile it
//! by rustc alone, linked dynamically and statically, and run it by `slat run`.
//!
//! It makes each call in two ways, if both lead to KVM's: by the C library's functions, and by its own `svc`
//! instruction. It prints a line, or panics.

use std::arch::asm;
use std::ffi::{c_char, c_int, c_ulong, c_void};

unsafe extern "C" {
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
}

const O_RDWR: c_int = 2;
const SYS_OPENAT: usize = 56;
const SYS_IOCTL: usize = 29;
const AT_FDCWD: isize = -100;

// The requests of include/uapi/linux/kvm.h.
const KVM_GET_API_VERSION: c_ulong = 0xae00;
const KVM_CREATE_VM: c_ulong = 0xae01;
const KVM_CREATE_VCPU: c_ulong = 0xae41;
const KVM_SET_USER_MEMORY_REGION: c_ulong = 0x4020_ae46;
const KVM_GET_DIRTY_LOG: c_ulong = 0x4010_ae42;
const KVM_MEM_LOG_DIRTY_PAGES: u32 = 1;

#[repr(C)]
struct Region {
    slot: u32,
    flags: u32,
    guest_phys_addr: u64,
    memory_size: u64,
    userspace_addr: u64,
}

#[repr(C)]
struct Log {
    slot: u32,
    padding: u32,
    bitmap: *mut u64,
}

const SIZE: usize = 2 << 20;
const PAGE: usize = 4096;

#[repr(align(65536))]
struct Memory {
    _bytes: [u8; SIZE],
}

static mut MEMORY: Memory = Memory { _bytes: [0; SIZE] };

/// Makes a system call by an instruction of this program's own.
unsafe fn svc(number: usize, arguments: [usize; 4]) -> isize {
    let [a, b, c, d] = arguments;
    let result: isize;
    // SAFETY: the caller's promise for the call. A call changes x0 only.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d, options(nostack));
    }
    result
}

/// A way to make calls.
struct Way {
    name: &'static str,
    open: fn() -> c_int,
    ioctl: fn(c_int, c_ulong, *mut c_void) -> c_int,
}

const WAYS: [Way; 2] = [
    Way {
        name: "by name",
        // SAFETY: the path ends with 0.
        open: || unsafe { open(c"/dev/kvm".as_ptr(), O_RDWR) },
        // SAFETY: the argument fits the request.
        ioctl: |fd, request, argument| unsafe { ioctl(fd, request, argument) },
    },
    Way {
        name: "by svc",
        // SAFETY: the path ends with 0.
        open: || unsafe {
            let path = c"/dev/kvm".as_ptr() as usize;
            svc(SYS_OPENAT, [AT_FDCWD as usize, path, O_RDWR as usize, 0]) as c_int
        },
        // SAFETY: the argument fits the request.
        ioctl: |fd, request, argument| unsafe {
            svc(
                SYS_IOCTL,
                [fd as usize, request as usize, argument as usize, 0],
            ) as c_int
        },
    },
];

fn main() {
    for Way { name, open, ioctl } in WAYS {
        let kvm = open();
        assert!(
            kvm >= 0,
            "{name}: /dev/kvm: {}",
            std::io::Error::last_os_error()
        );
        let none = std::ptr::null_mut();
        assert_eq!(ioctl(kvm, KVM_GET_API_VERSION, none), 12, "{name}");
        let vm = ioctl(kvm, KVM_CREATE_VM, none);
        assert!(vm >= 0, "{name}: KVM_CREATE_VM");
        let mut region = Region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: 1 << 30,
            memory_size: SIZE as u64,
            userspace_addr: &raw mut MEMORY as u64,
        };
        let result = ioctl(vm, KVM_SET_USER_MEMORY_REGION, (&raw mut region).cast());
        assert_eq!(result, 0, "{name}: the memslot");
        let mut bitmap = [u64::MAX; SIZE / PAGE / 64];
        let mut log = Log {
            slot: 0,
            padding: 0,
            bitmap: bitmap.as_mut_ptr(),
        };
        assert_eq!(
            ioctl(vm, KVM_GET_DIRTY_LOG, (&raw mut log).cast()),
            0,
            "{name}"
        );
        assert_eq!(bitmap, [0; SIZE / PAGE / 64], "{name}: nobody has written");
        let vcpu = ioctl(vm, KVM_CREATE_VCPU, none);
        println!(
            "{name}: KVM 12, a VM with {} MiB, {}",
            SIZE >> 20,
            match vcpu >= 0 {
                true => "a vCPU",
                false => "no vCPU",
            }
        );
    }
}
