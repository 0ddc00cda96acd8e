//! A guest in real mode, small enough to be written in bytes.
#![allow(dead_code)]

pub mod hypervisors;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_X86_SW_PROTECTED_VM, Msrs, kvm_cpuid_entry2, kvm_enable_cap,
    kvm_msr_entry, kvm_userspace_memory_region,
};
use slat::Shared;
use slat_kvm::StatsFd;
use slat_kvm::abi::{KVM_CREATE_VCPU, KVM_CREATE_VM, KVM_SET_USER_MEMORY_REGION};
use slat_kvm::ioctl::{Answer, Object};
use slat_kvm::vcpu::VcpuObject;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::os::fd::OwnedFd;

/// The address of the code.
pub const CODE: u64 = 0x1000;
/// A page that the test uses for data.
pub const DATA: u64 = 0x3000;
/// The number of bytes of guest memory, which begins at address 0.
pub const MEMORY: usize = 0x4000;
/// An address without memory that fits into 16 bits.
pub const DEVICE: u64 = 0x8000;

/// Anonymous memory, mapped until this is dropped.
pub struct Memory {
    pub start: *mut u8,
    pub len: usize,
}

// SAFETY: any thread may access and unmap the memory.
unsafe impl Send for Memory {}
// SAFETY: the methods access the memory only by raw pointers, so concurrent accesses make no conflicting references.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(len: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the call makes a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        Memory {
            start: start.cast(),
            len,
        }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        assert!(at as usize + bytes.len() <= self.len);
        // SAFETY: the address is within the mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at as usize), bytes.len())
        }
    }

    pub fn read(&self, at: u64, bytes: &mut [u8]) {
        assert!(at as usize + bytes.len() <= self.len);
        // SAFETY: the address is within the mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start.add(at as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            )
        }
    }

    /// Unmaps the page at `at`, but reserves its addresses.
    pub fn take_away(&self, at: u64) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the call replaces a page of this mapping, to which there is no reference.
        let answer = unsafe {
            libc::mmap(
                self.start.add(at as usize).cast(),
                4096,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        assert_ne!(answer, libc::MAP_FAILED);
    }

    pub fn range(&self, at: u64) -> std::ops::Range<usize> {
        let start = self.start as usize + at as usize;
        start..start + 4096
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and the guests that used it are dropped.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Returns the resident bytes of this process.
pub fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = pages.split(' ').nth(1).unwrap();
    pages.parse::<usize>().unwrap() * 4096
}

/// The size of a huge page in bytes.
pub const HUGE: usize = 2 << 20;

/// Returns a statistic of a VM or vCPU.
pub fn statistic(stats: &StatsFd, name: &str) -> u64 {
    let values = stats.values().unwrap();
    values.iter().find(|(known, _)| *known == name).unwrap().1[0]
}

/// Returns 2 MiB that the host backs with a huge page. `None`: the host does not use huge pages.
pub fn huge_memory(memory: &Memory) -> Option<*mut u8> {
    let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    if mode.contains("[never]") {
        return None;
    }
    let start = (memory.start as usize).next_multiple_of(HUGE) as *mut u8;
    // SAFETY: the advice is for a part of `memory`, and does not change its contents.
    let advised = unsafe { libc::madvise(start.cast(), HUGE, libc::MADV_HUGEPAGE) };
    assert_eq!(advised, 0);
    let range = start as usize..start as usize + HUGE;
    slat_host::mappings::advised(range, slat_host::mappings::HugePages::Wanted);
    Some(start)
}

/// A VM with one vCPU that is about to execute `code` in real mode.
pub struct Guest {
    pub vcpu: VcpuFd,
    pub vm: VmFd,
    pub kvm: Kvm,
    pub memory: Memory,
}

impl Guest {
    pub fn new(code: &[u8]) -> Self {
        Self::with(code, |_| {})
    }

    pub fn with(code: &[u8], prepare: impl FnOnce(&VmFd)) -> Self {
        Self::of_type(0, code, prepare)
    }

    pub fn of_type(vm_type: u32, code: &[u8], prepare: impl FnOnce(&VmFd)) -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm_with_type(vm_type.into()).unwrap();
        prepare(&vm);
        let memory = Memory::new(MEMORY);
        memory.write(CODE, code);
        set_slot(&vm, &memory, 0, MEMORY as u64);
        let vcpu = vm.create_vcpu(0).unwrap();
        tell_features(&vcpu);
        start_at_code(&vcpu);
        Guest {
            vcpu,
            vm,
            kvm,
            memory,
        }
    }
}

/// Makes a request that creates an object. Returns the object and its descriptor.
pub fn create(object: &Object, request: u32, argument: u64) -> (Object, OwnedFd) {
    match object.ioctl(request, argument) {
        Ok(Answer::Created(object, fd)) => (object, fd),
        other => panic!("{other:?}"),
    }
}

/// Enables a capability of a VM. Returns the errno of a refusal.
pub fn enable(vm: &VmFd, cap: u32, arg: u64) -> Result<(), i32> {
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = arg;
    vm.enable_cap(&enable).map_err(|error| error.errno())
}

/// Creates a VM.
pub fn vm() -> VmFd {
    Kvm::new().unwrap().create_vm().unwrap()
}

/// Creates a VM whose memory can be private.
pub fn protected() -> VmFd {
    let kvm = Kvm::new().unwrap();
    kvm.create_vm_with_type(KVM_X86_SW_PROTECTED_VM.into())
        .unwrap()
}

/// Creates a VM and a vCPU, as the preload library uses them.
pub fn objects() -> (Object, Object) {
    let vm = create(&Object::system(), KVM_CREATE_VM, 0).0;
    let vcpu = create(&vm, KVM_CREATE_VCPU, 0).0;
    (vm, vcpu)
}

/// Runs `code`, which ends with HLT. Returns the guest.
pub fn halts(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    guest
}

/// Like [`Guest`], but its VM and vCPU are used by raw requests, as the preload library uses them.
pub struct RawGuest {
    pub vcpu: Shared<VcpuObject>,
    pub vm: Object,
    pub memory: Memory,
}

impl RawGuest {
    pub fn new(code: &[u8], prepare: impl FnOnce(&Object)) -> Self {
        let (vm, _) = create(&Object::system(), KVM_CREATE_VM, 0);
        prepare(&vm);
        let memory = Memory::new(MEMORY);
        memory.write(CODE, code);
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        let address = &raw const region as u64;
        vm.ioctl(KVM_SET_USER_MEMORY_REGION, address).unwrap();
        let (Object::Vcpu(vcpu), _) = create(&vm, KVM_CREATE_VCPU, 0) else {
            panic!("no vCPU")
        };
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rsp) = (CODE, 0x2000);
        vcpu.set_regs(&regs).unwrap();
        RawGuest { vcpu, vm, memory }
    }
}

pub fn set_slot(vm: &VmFd, memory: &Memory, slot: u32, size: u64) {
    let region = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: size,
        userspace_addr: memory.start as u64,
    };
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { vm.set_user_memory_region(region).unwrap() };
}

/// Gives the guest all leaves of CPUID that slat supports: without them it has no features.
pub fn tell_features(vcpu: &VcpuFd) {
    let kvm = Kvm::new().unwrap();
    let leaves = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&leaves).unwrap();
}

/// Sets an MSR. Returns whether it takes the value.
pub fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[entry]).unwrap();
    vcpu.set_msrs(&msrs).unwrap() == 1
}

/// Returns the value of an MSR, which exists.
pub fn msr(vcpu: &VcpuFd, index: u32) -> u64 {
    let entry = kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
    msrs.as_slice()[0].data
}

/// Gives the guest a CPUID without leaves: it has no features.
pub fn forget_features(vcpu: &VcpuFd) {
    vcpu.set_cpuid2(&CpuId::new(0).unwrap()).unwrap();
}

/// Returns the leaf of CPUID that offers a local APIC with x2APIC mode.
pub fn x2apic_leaf() -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: 1,
        ecx: 1 << 21,
        edx: 1 << 9,
        ..Default::default()
    }
}

pub fn start_at_code(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.selector) = (0, 0);
    }
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags, regs.rsp) = (CODE, 2, 0x2000);
    vcpu.set_regs(&regs).unwrap();
}

/// Runs a guest that has enabled steal time at [`DATA`] and whose code halts, repeatedly, until slat has written the
/// steal time. slat reads the host's count on another thread, and on a busy machine that thread may run only after
/// some runs of the guest.
pub fn run_until_told_of_steal_time(guest: &mut Guest) {
    let begin = std::time::Instant::now();
    let mut version = [0; 4];
    while version == [0; 4] {
        assert!(begin.elapsed().as_secs() < 20, "the guest is told nothing");
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        guest.memory.read(DATA + 8, &mut version);
    }
}

/// `mov [DATA], al; hlt`
pub const WRITE_AND_HALT: &[u8] = &[0xa2, 0x00, 0x30, 0xf4];
/// `jmp $`
pub const SPIN: &[u8] = &[0xeb, 0xfe];
/// `mov al, [0x3000]; jmp -5`
pub const READ_DATA_FOREVER: &[u8] = &[0xa0, 0x00, 0x30, 0xeb, 0xfb];

/// Opens a userfaultfd for missing pages of a range. `None`: the host does not permit it.
pub fn userfault(range: std::ops::Range<usize>) -> Option<i32> {
    #[repr(C)]
    struct Api {
        api: u64,
        features: u64,
        ioctls: u64,
    }
    #[repr(C)]
    struct Register {
        start: u64,
        len: u64,
        mode: u64,
        ioctls: u64,
    }
    const UFFDIO_API: u64 = 0xc018_aa3f;
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    // SAFETY: the calls get structs of the sizes in their request numbers.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) as i32;
        if fd < 0 {
            return None;
        }
        let mut api = Api {
            api: 0xaa,
            features: 0,
            ioctls: 0,
        };
        assert_eq!(libc::ioctl(fd, UFFDIO_API, &mut api), 0);
        let len = (range.end - range.start) as u64;
        let mut register = Register {
            start: range.start as u64,
            len,
            mode: 1,
            ioctls: 0,
        };
        assert_eq!(libc::ioctl(fd, UFFDIO_REGISTER, &mut register), 0);
        Some(fd)
    }
}

/// Fills the page with `byte`, so that the blocked vCPU continues.
pub fn resolve(fd: i32, page: usize, byte: u8) {
    #[repr(C)]
    struct Copy {
        dst: u64,
        src: u64,
        len: u64,
        mode: u64,
        copy: i64,
    }
    const UFFDIO_COPY: u64 = 0xc028_aa03;
    let source = vec![byte; 4096];
    let mut copy = Copy {
        dst: page as u64,
        src: source.as_ptr() as u64,
        len: 4096,
        mode: 0,
        copy: 0,
    };
    // SAFETY: the call gets a struct of the size in its request number.
    assert_eq!(unsafe { libc::ioctl(fd, UFFDIO_COPY, &mut copy) }, 0);
}
