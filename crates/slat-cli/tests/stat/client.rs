//! Programs for `slat run`: the ignored tests of this module, each in a process of its own. They know nothing of slat.

use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// Bytes of guest memory.
const MEMORY: usize = 1 << 20;

/// Says that it is ready, and waits until the test says something.
fn wait() {
    println!("ready");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
}

/// Creates a VM whose only vCPU runs `code` at address 0 in real mode.
fn machine(kvm: &Kvm, code: &[u8]) -> (VmFd, VcpuFd) {
    let vm = kvm.create_vm().unwrap();
    // SAFETY: a new mapping, which is never unmapped.
    let memory = unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = libc::mmap(std::ptr::null_mut(), MEMORY, rights, flags, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        std::ptr::copy_nonoverlapping(code.as_ptr(), memory.cast(), code.len());
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: memory as u64,
        };
        vm.set_user_memory_region(region).unwrap();
        memory
    };
    assert!(!memory.is_null());
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = 0;
    regs.rflags = 2;
    vcpu.set_regs(&regs).unwrap();
    (vm, vcpu)
}

/// Writes a byte to each of 15 pages from 0x1000 on, and halts.
const WRITES: &[u8] = &[
    0xbb, 0x00, 0x10, // mov bx, 0x1000
    0xc6, 0x07, 0x01, // mov byte [bx], 1
    0x81, 0xc3, 0x00, 0x10, // add bx, 0x1000
    0x75, 0xf7, // jnz
    0xf4, // hlt
];

/// Computes for ever.
const COMPUTES: &[u8] = &[0x40, 0xeb, 0xfd]; // inc ax; jmp

fn run_to_halt(vcpu: &mut VcpuFd) {
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
#[ignore = "a client"]
fn halts() {
    let kvm = Kvm::new().unwrap();
    let (vm, mut vcpu) = machine(&kvm, WRITES);
    run_to_halt(&mut vcpu);
    drop((vm, vcpu));
    let (_vm, mut vcpu) = machine(&kvm, WRITES);
    run_to_halt(&mut vcpu);
    wait();
}

#[test]
#[ignore = "a client"]
fn computes() {
    let kvm = Kvm::new().unwrap();
    let (_vm, mut vcpu) = machine(&kvm, COMPUTES);
    std::thread::spawn(move || vcpu.run().map(|_| ()));
    wait();
}

#[test]
#[ignore = "a client"]
fn many() {
    let kvm = Kvm::new().unwrap();
    let number = std::env::var("SLAT_TEST_VMS").unwrap().parse().unwrap();
    let machines: Vec<_> = (0..number).map(|_| machine(&kvm, WRITES)).collect();
    wait();
    drop(machines);
}

/// Has a child without VMs, and one with two.
#[test]
#[ignore = "a client"]
fn forks() {
    let kvm = Kvm::new().unwrap();
    let _machine = machine(&kvm, WRITES);
    let mut children = Vec::new();
    for vms in [0, 2] {
        // SAFETY: this thread alone goes on in the child.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let kvm = Kvm::new().unwrap();
            let machines: Vec<_> = (0..vms).map(|_| machine(&kvm, WRITES)).collect();
            loop {
                std::thread::sleep(std::time::Duration::from_secs(1));
                assert_eq!(machines.len(), vms);
            }
        }
        children.push(child);
    }
    println!("children {} {}", children[0], children[1]);
    wait();
}

#[test]
#[ignore = "a client"]
fn executes() {
    let kvm = Kvm::new().unwrap();
    let _machine = machine(&kvm, WRITES);
    wait();
    let error = std::process::Command::new("sleep").arg("100").exec();
    panic!("{error}");
}

/// Opens `/dev/kvm`, then forbids what publishing counters needs, then creates a VM.
#[test]
#[ignore = "a client"]
fn is_confined() {
    let kvm = Kvm::new().unwrap();
    let forbidden = [
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_accept4,
        libc::SYS_sendto,
        libc::SYS_recvfrom,
        libc::SYS_rename,
        libc::SYS_close_range,
    ];
    let step = |code: u32, jt, jf, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for (index, number) in forbidden.into_iter().enumerate() {
        let left = (forbidden.len() - index) as u8;
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ, left, 0, number as u32));
    }
    filter.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain numbers, and a live program.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
    let (_vm, mut vcpu) = machine(&kvm, WRITES);
    run_to_halt(&mut vcpu);
    wait();
}
