//! A KVM program for 64-bit Arm: its guest reads and writes a device's register and its memory, and switches the machine
//! off. `.ci/arm64` and `.ci/arm64-machine` compile it by rustc alone, linked dynamically and statically, and run it by
//! `slat run`.
//!
//! It makes each call in two ways, if both lead to KVM's: by the C library's functions, and by its own `svc`
//! instruction. It prints a line, or panics.

use std::arch::{asm, global_asm};
use std::ffi::{c_char, c_int, c_ulong, c_void};

unsafe extern "C" {
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn mmap(
        address: *mut c_void,
        len: usize,
        rights: c_int,
        flags: c_int,
        fd: c_int,
        offset: isize,
    ) -> *mut c_void;
}

const O_RDWR: c_int = 2;
const SYS_OPENAT: usize = 56;
const SYS_IOCTL: usize = 29;
const SYS_MMAP: usize = 222;
const PROT_READ_WRITE: c_int = 3;
const MAP_SHARED: c_int = 1;
const AT_FDCWD: isize = -100;

// The requests of include/uapi/linux/kvm.h.
const KVM_GET_API_VERSION: c_ulong = 0xae00;
const KVM_CREATE_VM: c_ulong = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: c_ulong = 0xae04;
const KVM_CREATE_VCPU: c_ulong = 0xae41;
const KVM_RUN: c_ulong = 0xae80;
const KVM_SET_ONE_REG: c_ulong = 0x4010_aeac;
const KVM_ARM_VCPU_INIT: c_ulong = 0x4020_aeae;
const KVM_ARM_PREFERRED_TARGET: c_ulong = 0x8020_aeaf;
const KVM_SET_USER_MEMORY_REGION: c_ulong = 0x4020_ae46;
const KVM_GET_DIRTY_LOG: c_ulong = 0x4010_ae42;
const KVM_MEM_LOG_DIRTY_PAGES: u32 = 1;
const KVM_ARM_VCPU_PSCI_0_2: u32 = 2;
/// The register PC: `KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE`, and its offset in words.
const PC: u64 = 0x6030_0000_0010_0000 | 64;
const KVM_EXIT_MMIO: u32 = 6;
const KVM_EXIT_SYSTEM_EVENT: u32 = 24;
const KVM_SYSTEM_EVENT_SHUTDOWN: u32 = 1;

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

#[repr(C)]
struct Init {
    target: u32,
    features: [u32; 7],
}

#[repr(C)]
struct OneReg {
    id: u64,
    value: *const u64,
}

/// The beginning of `struct kvm_run`, with the exits that this guest has.
#[repr(C)]
#[derive(Clone, Copy)]
struct Run {
    requests: [u8; 8],
    exit_reason: u32,
    state: [u8; 20],
    exit: Exit,
}

#[repr(C)]
#[derive(Clone, Copy)]
union Exit {
    mmio: Mmio,
    system_event: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Mmio {
    address: u64,
    data: [u8; 8],
    len: u32,
    is_write: u8,
}

const MEMORY_AT: u64 = 1 << 30;
const DEVICE: u64 = 0x0900_0000;

// The guest: reads a word of the device, stores the word plus 2 in its memory and in the device, and calls PSCI's SYSTEM_OFF.
global_asm!(
    ".pushsection .rodata",
    ".balign 4",
    "client_guest:",
    "mov x1, #0x09000000",
    "ldr w2, [x1]",
    "add w2, w2, #2",
    "adr x3, client_guest",
    "str w2, [x3, #0x100]",
    "str w2, [x1, #4]",
    "mov w0, #8",
    "movk w0, #0x8400, lsl #16",
    "hvc #0",
    "client_guest_end:",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "client_guest"]
    static GUEST: u8;
    #[link_name = "client_guest_end"]
    static GUEST_END: u8;
}

const SIZE: usize = 2 << 20;
const PAGE: usize = 4096;

#[repr(align(65536))]
struct Memory {
    _bytes: [u8; SIZE],
}

static mut MEMORY: Memory = Memory { _bytes: [0; SIZE] };

/// Makes a system call by an instruction of this program's own.
unsafe fn svc(number: usize, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the caller's promise for the call. A call changes x0 only.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}

/// A way to make calls.
struct Way {
    name: &'static str,
    open: fn() -> c_int,
    ioctl: fn(c_int, c_ulong, *mut c_void) -> c_int,
    /// Maps this many bytes of a descriptor.
    map: fn(c_int, usize) -> *mut c_void,
}

const WAYS: [Way; 2] = [
    Way {
        name: "by name",
        // SAFETY: the path ends with 0.
        open: || unsafe { open(c"/dev/kvm".as_ptr(), O_RDWR) },
        // SAFETY: the argument fits the request.
        ioctl: |fd, request, argument| unsafe { ioctl(fd, request, argument) },
        // SAFETY: a new mapping at an address of the kernel's choice.
        map: |fd, len| unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                PROT_READ_WRITE,
                MAP_SHARED,
                fd,
                0,
            )
        },
    },
    Way {
        name: "by svc",
        // SAFETY: the path ends with 0.
        open: || unsafe {
            let path = c"/dev/kvm".as_ptr() as usize;
            svc(
                SYS_OPENAT,
                [AT_FDCWD as usize, path, O_RDWR as usize, 0, 0, 0],
            ) as c_int
        },
        // SAFETY: the argument fits the request.
        ioctl: |fd, request, argument| unsafe {
            svc(
                SYS_IOCTL,
                [fd as usize, request as usize, argument as usize, 0, 0, 0],
            ) as c_int
        },
        // SAFETY: a new mapping at an address of the kernel's choice.
        map: |fd, len| unsafe {
            svc(
                SYS_MMAP,
                [
                    0,
                    len,
                    PROT_READ_WRITE as usize,
                    MAP_SHARED as usize,
                    fd as usize,
                    0,
                ],
            ) as *mut c_void
        },
    },
];

fn main() {
    for way in WAYS {
        use_kvm(&way);
    }
}

fn use_kvm(way: &Way) {
    let Way {
        name,
        open,
        ioctl,
        map,
    } = way;
    let call = |fd, request, argument: *mut c_void, what: &str| {
        let result = ioctl(fd, request, argument);
        assert!(
            result >= 0,
            "{name}: {what}: {result}, {}",
            std::io::Error::last_os_error()
        );
        result
    };
    let none = std::ptr::null_mut();
    let kvm = open();
    assert!(
        kvm >= 0,
        "{name}: /dev/kvm: {}",
        std::io::Error::last_os_error()
    );
    assert_eq!(call(kvm, KVM_GET_API_VERSION, none, "the version"), 12);
    let vm = call(kvm, KVM_CREATE_VM, none, "the VM");
    let mut region = Region {
        slot: 0,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: MEMORY_AT,
        memory_size: SIZE as u64,
        userspace_addr: &raw mut MEMORY as u64,
    };
    call(
        vm,
        KVM_SET_USER_MEMORY_REGION,
        (&raw mut region).cast(),
        "the memslot",
    );
    let dirty = || {
        let mut bitmap = [u64::MAX; SIZE / PAGE / 64];
        let mut log = Log {
            slot: 0,
            padding: 0,
            bitmap: bitmap.as_mut_ptr(),
        };
        call(
            vm,
            KVM_GET_DIRTY_LOG,
            (&raw mut log).cast(),
            "the dirty log",
        );
        bitmap.iter().map(|word| word.count_ones()).sum::<u32>()
    };
    assert_eq!(dirty(), 0, "{name}: nobody has written");

    let vcpu = call(vm, KVM_CREATE_VCPU, none, "the vCPU");
    let mut init = Init {
        target: 0,
        features: [0; 7],
    };
    call(
        vm,
        KVM_ARM_PREFERRED_TARGET,
        (&raw mut init).cast(),
        "the processor",
    );
    init.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    call(
        vcpu,
        KVM_ARM_VCPU_INIT,
        (&raw mut init).cast(),
        "the vCPU's reset",
    );
    let mut pc = OneReg {
        id: PC,
        value: &MEMORY_AT,
    };
    call(vcpu, KVM_SET_ONE_REG, (&raw mut pc).cast(), "PC");
    // SAFETY: the symbols are the ends of the guest's code, which fits into the memory. No vCPU runs.
    unsafe {
        let len = (&raw const GUEST_END).offset_from(&raw const GUEST) as usize;
        std::ptr::copy_nonoverlapping(&raw const GUEST, (&raw mut MEMORY).cast(), len);
    }

    let len = call(kvm, KVM_GET_VCPU_MMAP_SIZE, none, "the size of kvm_run") as usize;
    let run: *mut Run = map(vcpu, len).cast();
    assert!((run as isize) > 0, "{name}: kvm_run is not mapped");
    // SAFETY: the address of a part of the mapping.
    let data = unsafe { &raw mut (*run).exit.mmio.data };
    // Runs the guest until its next exit.
    let exit = |reason| {
        call(vcpu, KVM_RUN, none, "the run");
        // SAFETY: the vCPU does not run.
        let run = unsafe { run.read_volatile() };
        assert_eq!(run.exit_reason, reason, "{name}");
        run.exit
    };
    // SAFETY: the exit says which part of the union is valid.
    let access = || unsafe { exit(KVM_EXIT_MMIO).mmio };
    let read = access();
    assert_eq!((read.address, read.len, read.is_write), (DEVICE, 4, 0));
    // SAFETY: the vCPU does not run.
    unsafe { data.write_volatile(40u64.to_le_bytes()) };
    let write = access();
    assert_eq!(
        (write.address, write.len, write.is_write),
        (DEVICE + 4, 4, 1)
    );
    let written = u32::from_le_bytes(write.data[..4].try_into().unwrap());
    // SAFETY: the exit says which part of the union is valid.
    let event = unsafe { exit(KVM_EXIT_SYSTEM_EVENT).system_event };
    assert_eq!(event, KVM_SYSTEM_EVENT_SHUTDOWN, "{name}");
    // SAFETY: the memory is a part of the array. No vCPU runs.
    let stored = unsafe {
        (&raw const MEMORY)
            .byte_add(0x100)
            .cast::<u32>()
            .read_volatile()
    };
    assert_eq!(stored, written, "{name}");
    println!(
        "{name}: KVM 12, a VM with {} MiB, a guest that wrote {written} and {} page",
        SIZE >> 20,
        dirty()
    );
}
