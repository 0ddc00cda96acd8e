//! Guests and helpers that clients use. slat has guests of x86-64 only.
#![cfg(target_arch = "x86_64")]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};

pub const MEMORY: usize = 0x4000;
pub const CODE: usize = 0x1000;
/// `jmp $`
pub const SPIN: &[u8] = &[0xeb, 0xfe];
/// `out 0x10,al; jmp -4`
pub const OUT: &[u8] = &[0xe6, 0x10, 0xeb, 0xfc];

/// Maps new anonymous memory of `len` bytes.
pub fn map(len: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call makes a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

pub fn region(slot: u32, gpa: u64, memory: *mut u8, len: usize) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: gpa,
        memory_size: len as u64,
        userspace_addr: memory as u64,
    }
}

/// Creates a VM with four pages of memory at address 0 and `code` in the second, and a vCPU in
/// real mode at the code.
pub fn guest(code: &[u8]) -> (VmFd, VcpuFd, *mut u8) {
    let memory = map(MEMORY);
    let (vm, vcpu) = guest_in(memory, MEMORY, code);
    (vm, vcpu, memory)
}

/// Like [`guest`], in the `len` bytes at `memory`.
pub fn guest_in(memory: *mut u8, len: usize, code: &[u8]) -> (VmFd, VcpuFd) {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    // SAFETY: the code is inside the mapping, and the guest may write all of the mapping.
    unsafe {
        std::ptr::copy_nonoverlapping(code.as_ptr(), memory.add(CODE), code.len());
        vm.set_user_memory_region(region(0, 0, memory, len))
            .unwrap();
    }
    let vcpu = vm.create_vcpu(0).unwrap();
    start(&vcpu, CODE as u64);
    (vm, vcpu)
}

/// Sets the vCPU to start at `rip`, in real mode.
pub fn start(vcpu: &VcpuFd, rip: u64) {
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags) = (rip, 2);
    vcpu.set_regs(&regs).unwrap();
}

/// Returns a statistic of a VM or vCPU by its name: KVM_GET_STATS_FD, and the layout of KVM's API document.
pub fn statistic(object: &impl AsRawFd, name: &str) -> u64 {
    const KVM_GET_STATS_FD: u64 = 0xaece;
    // SAFETY: the call takes no pointer, and no other code owns the new descriptor.
    let mut file = unsafe {
        let fd = libc::ioctl(object.as_raw_fd(), KVM_GET_STATS_FD, 0);
        assert!(fd >= 0, "KVM_GET_STATS_FD: {}", errno());
        std::fs::File::from_raw_fd(fd)
    };
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().unwrap()) as usize;
    let (name_size, count, descriptors, data) = (word(4), word(8), word(16), word(20));
    let descriptor = (0..count)
        .map(|index| descriptors + index * (16 + name_size))
        .find(|at| {
            let text = &all[at + 16..at + 16 + name_size];
            text.starts_with(name.as_bytes()) && text[name.len()] == 0
        })
        .unwrap_or_else(|| panic!("no statistic {name}"));
    let at = data + word(descriptor + 8);
    u64::from_le_bytes(all[at..at + 8].try_into().unwrap())
}

/// Returns the last call's errno.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}
