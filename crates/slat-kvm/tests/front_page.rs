//! The program on the front page of kvm-ioctls. Only the crate's name is changed.
#![cfg(target_arch = "x86_64")]

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use slat_kvm::{Kvm, VcpuExit};

#[test]
fn the_front_page_of_kvm_ioctls_runs() {
    let mem_size = 0x4000;
    let guest_addr = 0x1000;
    let asm_code: &[u8] = &[
        0xba, 0xf8, 0x03, // mov $0x3f8, %dx
        0x00, 0xd8, // add %bl, %al
        0x04, b'0', // add $'0', %al
        0xee, // out %al, %dx
        0xec, // in %dx, %al
        0xc6, 0x06, 0x00, 0x80, 0x00, // movl $0, (0x8000): an MMIO write
        0x8a, 0x16, 0x00, 0x80, // movl (0x8000), %dl: an MMIO read
        0xf4, // hlt
    ];
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    // SAFETY: the call makes a new mapping at an address of the kernel's choice.
    let load_addr = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            mem_size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_ANONYMOUS | libc::MAP_SHARED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    }
    .cast::<u8>();
    let slot = 0;
    let mem_region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: guest_addr,
        memory_size: mem_size as u64,
        userspace_addr: load_addr as u64,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
    };
    // SAFETY: the mapping is the guest's alone from now on.
    unsafe { vm.set_user_memory_region(mem_region).unwrap() };
    // SAFETY: the address is within the mapping.
    unsafe { std::ptr::copy_nonoverlapping(asm_code.as_ptr(), load_addr, asm_code.len()) };

    let mut vcpu_fd = vm.create_vcpu(0).unwrap();
    let mut vcpu_sregs = vcpu_fd.get_sregs().unwrap();
    vcpu_sregs.cs.base = 0;
    vcpu_sregs.cs.selector = 0;
    vcpu_fd.set_sregs(&vcpu_sregs).unwrap();
    let mut vcpu_regs = vcpu_fd.get_regs().unwrap();
    vcpu_regs.rip = guest_addr;
    vcpu_regs.rax = 2;
    vcpu_regs.rbx = 3;
    vcpu_regs.rflags = 2;
    vcpu_fd.set_regs(&vcpu_regs).unwrap();

    let mut seen = Vec::new();
    loop {
        match vcpu_fd.run().expect("run failed") {
            VcpuExit::IoIn(addr, data) => seen.push(("in", addr.into(), data[0])),
            VcpuExit::IoOut(addr, data) => seen.push(("out", addr.into(), data[0])),
            VcpuExit::MmioRead(addr, data) => seen.push(("read", addr, data[0])),
            VcpuExit::MmioWrite(addr, data) => seen.push(("write", addr, data[0])),
            VcpuExit::Hlt => {
                // The code snippet dirties 1 page when it is loaded in memory.
                let dirty_pages_bitmap = vm.get_dirty_log(slot, mem_size).unwrap();
                let dirty_pages: u32 = dirty_pages_bitmap
                    .iter()
                    .map(|page| page.count_ones())
                    .sum();
                assert_eq!(dirty_pages, 1);
                break;
            }
            r => panic!("Unexpected exit reason: {r:?}"),
        }
    }
    let places: Vec<_> = seen.iter().map(|(what, at, _)| (*what, *at)).collect();
    let expected = [
        ("out", 0x3f8),
        ("in", 0x3f8),
        ("write", 0x8000),
        ("read", 0x8000),
    ];
    assert_eq!(places, expected);
    assert_eq!((seen[0].2, seen[2].2), (b'5', 0));
}
