//! A VM whose guest writes one byte in real mode.
#![allow(dead_code)]

use slat_kvm::{Kvm, VcpuFd, VmFd};
use slat_vm_memory::Memslot;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

pub const PAGE: usize = 4096;
/// The address of the code.
pub const CODE: usize = 0x1000;
/// The address to which the code writes.
pub const DATA: usize = 0x3000;
/// `mov byte [0x3000], 1; hlt`
const GUEST: &[u8] = &[0xc6, 0x06, 0x00, 0x30, 0x01, 0xf4];

pub fn vm() -> Arc<VmFd> {
    Arc::new(Kvm::new().unwrap().create_vm().unwrap())
}

/// Returns the address of page `number`.
pub fn page(number: usize) -> GuestAddress {
    GuestAddress((number * PAGE) as u64)
}

/// Writes the code, and returns a vCPU that is about to run it.
pub fn vcpu(vm: &VmFd, memory: &GuestMemoryMmap<Memslot>) -> VcpuFd {
    memory
        .write_slice(GUEST, GuestAddress(CODE as u64))
        .unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    start(&vcpu);
    vcpu
}

/// Sets the vCPU to the first instruction.
pub fn start(vcpu: &VcpuFd) {
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags) = (CODE as u64, 2);
    vcpu.set_regs(&regs).unwrap();
}

/// Harvests the log of the region at page `first`. Returns the pages, counted from there.
pub fn dirty(memory: &GuestMemoryMmap<Memslot>, first: usize) -> Vec<usize> {
    let region = memory.find_region(page(first)).unwrap();
    let log = Memslot::of(region).dirty_log().unwrap();
    let pages = 0..log.len() * 64;
    pages
        .filter(|page| log[page / 64] >> (page % 64) & 1 != 0)
        .collect()
}
