//! A guest that adds two numbers, run by kvm-ioctls alone.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

const MEMORY: usize = 0x4000;
const CODE: usize = 0x1000;

/// A VM with `code` in its second page, and a vCPU in real mode that begins there.
pub fn guest(code: &[u8]) -> (VmFd, VcpuFd) {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    // SAFETY: a new mapping, which is never unmapped; only the guest uses it.
    unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = libc::mmap(std::ptr::null_mut(), MEMORY, rights, flags, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        let start = memory.cast::<u8>().add(CODE);
        start.copy_from_nonoverlapping(code.as_ptr(), code.len());
        vm.set_user_memory_region(kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: memory as u64,
            ..Default::default()
        })
        .unwrap();
    }
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags, regs.rax, regs.rbx) = (CODE as u64, 2, 2, 3);
    vcpu.set_regs(&regs).unwrap();
    (vm, vcpu)
}

/// Runs the guest to its end. Returns the number that the guest wrote to the port.
pub fn sum() -> u8 {
    // add al,bl; out 0x10,al; hlt
    let (_vm, mut vcpu) = guest(&[0x00, 0xd8, 0xe6, 0x10, 0xf4]);
    let said = match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x10, data) => data[0],
        other => panic!("{other:?}"),
    };
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    said
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_and_three_are_five() {
        assert_eq!(super::sum(), 5);
    }

    #[test]
    fn several_at_once() {
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(super::sum)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), 5);
        }
    }
}
