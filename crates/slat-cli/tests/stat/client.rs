//! Programs for `slat run`: each ignored test of this module runs in its own process. The programs do not use slat's
//! API.

use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// The number of bytes of guest memory.
const MEMORY: usize = 1 << 20;

/// Prints that the program is ready, and waits for a line from the test.
fn wait() {
    println!("ready");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
}

/// Maps `bytes` of memory, which is never unmapped, and makes it the memslot `slot` at `gpa`.
fn memory(vm: &VmFd, slot: u32, flags: u32, gpa: u64, bytes: usize) -> *mut u8 {
    // SAFETY: a new mapping, which is never unmapped.
    unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        set_memory(vm, slot, flags, gpa, bytes, memory as u64);
        memory.cast()
    }
}

/// Makes the memory at `hva` the memslot `slot`, or deletes the memslot if `bytes` is 0.
///
/// # Safety
/// The memory must stay mapped as long as the memslot exists.
unsafe fn set_memory(vm: &VmFd, slot: u32, flags: u32, gpa: u64, bytes: usize, hva: u64) {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: bytes as u64,
        userspace_addr: hva,
    };
    // SAFETY: the caller promises that the memory stays mapped.
    unsafe { vm.set_user_memory_region(region).unwrap() };
}

/// Creates a VM whose only vCPU runs `code` at address 0 in real mode.
fn machine(kvm: &Kvm, code: &[u8]) -> (VmFd, VcpuFd) {
    let vm = kvm.create_vm().unwrap();
    let start = memory(&vm, 0, 0, 0, MEMORY);
    // SAFETY: the mapping is larger than any `code` here, and the two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), start, code.len()) };
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

/// Guest code that writes a byte to each of 15 pages from 0x1000 on, and halts.
const WRITES: &[u8] = &[
    0xbb, 0x00, 0x10, // mov bx, 0x1000
    0xc6, 0x07, 0x01, // mov byte [bx], 1
    0x81, 0xc3, 0x00, 0x10, // add bx, 0x1000
    0x75, 0xf7, // jnz
    0xf4, // hlt
];

/// Guest code that computes for ever.
const COMPUTES: &[u8] = &[0x40, 0xeb, 0xfd]; // inc ax; jmp

/// Creates a VM, and runs no vCPU.
#[test]
#[ignore = "a client"]
fn runs_nothing() {
    let kvm = Kvm::new().unwrap();
    let _machine = machine(&kvm, COMPUTES);
    wait();
}

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

/// Guest code that counts, and stores the number at 0x3000.
const STORES: &[u8] = &[
    0x40, // inc ax
    0xa3, 0x00, 0x30, // mov [0x3000], ax
    0xeb, 0xfa, // jmp
];

/// The address of the second vCPU's code in [`two_vcpus`], which counts.
const SECOND: u64 = 0x100;

#[test]
#[ignore = "a client"]
fn two_vcpus() {
    let kvm = Kvm::new().unwrap();
    let mut code = STORES.to_vec();
    code.resize(SECOND as usize, 0xf4);
    code.extend(COMPUTES);
    let (vm, mut first) = machine(&kvm, &code);
    let mut second = vm.create_vcpu(1).unwrap();
    second.set_sregs(&first.get_sregs().unwrap()).unwrap();
    let mut regs = first.get_regs().unwrap();
    regs.rip = SECOND;
    second.set_regs(&regs).unwrap();
    std::thread::spawn(move || first.run().map(|_| ()));
    std::thread::spawn(move || second.run().map(|_| ()));
    wait();
}

/// Waits for the test, and then creates a vCPU that counts once and halts.
#[test]
#[ignore = "a client"]
fn adds_a_vcpu() {
    let kvm = Kvm::new().unwrap();
    let mut code = COMPUTES.to_vec();
    code.resize(SECOND as usize, 0xf4);
    code.extend([0x40, 0xf4]); // inc ax; hlt
    let (vm, mut first) = machine(&kvm, &code);
    let sregs = first.get_sregs().unwrap();
    let mut regs = first.get_regs().unwrap();
    std::thread::spawn(move || first.run().map(|_| ()));
    wait();
    let mut second = vm.create_vcpu(1).unwrap();
    second.set_sregs(&sregs).unwrap();
    regs.rip = SECOND;
    second.set_regs(&regs).unwrap();
    run_to_halt(&mut second);
    wait();
}

/// The physical addresses of the linear pages 6 and 7 of [`pages`].
const PAGES: [u32; 2] = [0x8000, 0xa000];

/// 32-bit guest code that copies a byte for ever.
#[rustfmt::skip]
const COPIES: &[u8] = &[
    0xa0, 0x00, 0x60, 0x00, 0x00, // mov al, [0x6000]
    0xa2, 0x00, 0x50, 0x00, 0x00, // mov [0x5000], al
    0xeb, 0xf4, // jmp
];

/// Runs a guest with paging, in which two linear pages have other physical addresses.
#[test]
#[ignore = "a client"]
fn pages() {
    let kvm = Kvm::new().unwrap();
    let (vm, mut vcpu) = machine(&kvm, COPIES);
    let start = memory(&vm, 1, 0, 1 << 20, MEMORY);
    let mut tables = [0u32; 2048];
    tables[0] = (1 << 20) + 0x1000 + 3;
    for page in 0..1024 {
        tables[1024 + page] = (page as u32) << 12 | 3;
    }
    for (page, to) in [6, 7].into_iter().zip(PAGES) {
        tables[1024 + page] = to | 3;
    }
    // SAFETY: the mapping is larger than the tables, and the two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(tables.as_ptr().cast(), start, size_of_val(&tables)) };
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3) = (0x8000_0011, 1 << 20);
    (sregs.cs.limit, sregs.cs.selector, sregs.cs.type_) = (u32::MAX, 8, 11);
    (sregs.cs.db, sregs.cs.g) = (1, 1);
    vcpu.set_sregs(&sregs).unwrap();
    std::thread::spawn(move || vcpu.run().map(|_| ()));
    wait();
}

/// Whenever the test asks, ends KVM_RUN by a signal and prints where the guest is. Continues when the test asks
/// again.
#[test]
#[ignore = "a client"]
fn pauses() {
    extern "C" fn nothing(_: i32) {}
    let kvm = Kvm::new().unwrap();
    let (_vm, mut vcpu) = machine(&kvm, COMPUTES);
    // SAFETY: the handler does nothing.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as usize) };
    let (sender, paused) = std::sync::mpsc::channel();
    let (resume, told) = std::sync::mpsc::channel();
    let (ids, id) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: the call has no arguments.
        ids.send(unsafe { libc::pthread_self() }).unwrap();
        loop {
            assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
            sender.send(vcpu.get_regs().unwrap()).unwrap();
            told.recv().unwrap();
        }
    });
    let id = id.recv().unwrap();
    wait();
    loop {
        // A signal that arrives before KVM_RUN does not end it, so the signal is sent again.
        let regs = loop {
            // SAFETY: the thread of this id does not end.
            unsafe { libc::pthread_kill(id, libc::SIGUSR1) };
            if let Ok(regs) = paused.recv_timeout(std::time::Duration::from_millis(50)) {
                break regs;
            }
        };
        println!("{} {}", regs.rip, regs.rax);
        wait();
        resume.send(()).unwrap();
        wait();
    }
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

/// Forks one child without VMs, and one child with two VMs.
#[test]
#[ignore = "a client"]
fn forks() {
    let kvm = Kvm::new().unwrap();
    let _machine = machine(&kvm, WRITES);
    let mut children = Vec::new();
    for vms in [0, 2] {
        // SAFETY: only this thread continues in the child.
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

/// Forbids the system calls that slat needs to publish counters and to write profiles.
fn confine() {
    let forbidden = [
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_accept4,
        libc::SYS_sendto,
        libc::SYS_recvfrom,
        libc::SYS_rename,
        libc::SYS_renameat,
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
    // SAFETY: the arguments are numbers and a pointer to a live filter program.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}

/// Opens `/dev/kvm`, then confines itself, then creates a VM.
#[test]
#[ignore = "a client"]
fn is_confined() {
    let kvm = Kvm::new().unwrap();
    confine();
    let (_vm, mut vcpu) = machine(&kvm, WRITES);
    run_to_halt(&mut vcpu);
    wait();
}

/// Guest code that reads a byte after the end of memory, and continues as [`WRITES`] does.
const READS_A_DEVICE: &[u8] = &[
    0xb8, 0xff, 0xff, // mov ax, 0xffff
    0x8e, 0xd8, // mov ds, ax
    0xa0, 0x10, 0x10, // mov al, [0x1010]: address 0x101000
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
];

/// Creates a VM with 16 mapped leaves, an MMIO entry, and unused memslots. Deletes the first memslot when the test
/// asks for it.
#[test]
#[ignore = "a client"]
fn maps() {
    let kvm = Kvm::new().unwrap();
    let (vm, mut vcpu) = machine(&kvm, &[READS_A_DEVICE, WRITES].concat());
    memory(
        &vm,
        1,
        kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES,
        2 << 20,
        4 << 20,
    );
    memory(&vm, 2, kvm_bindings::KVM_MEM_READONLY, 8 << 20, 1 << 12);
    assert!(matches!(
        vcpu.run().unwrap(),
        VcpuExit::MmioRead(0x10_1000, _)
    ));
    run_to_halt(&mut vcpu);
    wait();
    // SAFETY: deleting a memslot needs no memory.
    unsafe { set_memory(&vm, 0, 0, 0, 0, 0) };
    wait();
}

/// Creates, moves and deletes memslots repeatedly, while a vCPU runs.
#[test]
#[ignore = "a client"]
fn changes_memslots() {
    let kvm = Kvm::new().unwrap();
    let (vm, mut vcpu) = machine(&kvm, COMPUTES);
    let hva = memory(&vm, 1, 0, 16 << 20, 8 << 20) as u64;
    std::thread::spawn(move || vcpu.run().map(|_| ()));
    std::thread::spawn(move || {
        for round in 0u64.. {
            let (slot, gpa) = ((2 + round % 7) as u32, (32 + round % 13) << 20);
            // SAFETY: the memory is never unmapped.
            unsafe {
                set_memory(&vm, slot, 0, gpa, 1 << 20, hva);
                set_memory(&vm, slot, 0, (64 + round % 5) << 20, 1 << 20, hva);
                set_memory(&vm, slot, 0, 0, 0, 0);
            }
        }
    });
    wait();
}

/// Guest code that calls two functions in turns for ever. One function takes three times as long as the other.
#[rustfmt::skip]
const CALLS: [(usize, &[u8]); 3] = [
    (0, &[
        0x31, 0xed, // xor ebp, ebp
        0xbc, 0x00, 0x00, 0x28, 0x00, // mov esp, 0x280000
        0xe8, 0xf4, 0x0f, 0x00, 0x00, // call the function at 0x1000
        0xe8, 0xef, 0x1f, 0x00, 0x00, // call the function at 0x2000
        0xeb, 0xf4, // jmp to the first call
    ]),
    (0x1000, &[
        0x55, 0x89, 0xe5, // push ebp; mov ebp, esp
        0xb9, 0xc0, 0xc6, 0x2d, 0x00, // mov ecx, 3000000
        0x49, 0x75, 0xfd, // dec ecx; jnz
        0x5d, 0xc3, // pop ebp; ret
    ]),
    (0x2000, &[
        0x55, 0x89, 0xe5, // push ebp; mov ebp, esp
        0xb9, 0x40, 0x42, 0x0f, 0x00, // mov ecx, 1000000
        0x49, 0x75, 0xfd, // dec ecx; jnz
        0x5d, 0xc3, // pop ebp; ret
    ]),
];

/// Starts a vCPU that runs [`CALLS`] at 2 MiB in protected mode, because slat compiles no real-mode code.
fn start_calls(kvm: &Kvm) -> VmFd {
    let (vm, vcpu) = machine(kvm, &[]);
    let start = memory(&vm, 1, 0, 2 << 20, MEMORY);
    for (at, code) in CALLS {
        // SAFETY: the mapping is larger than `code` at this offset, and the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), start.add(at), code.len()) };
    }
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 |= 1;
    let flat = |segment: &mut kvm_bindings::kvm_segment, kind| {
        (segment.base, segment.limit, segment.selector) = (0, u32::MAX, 8);
        (segment.type_, segment.s, segment.present) = (kind, 1, 1);
        (segment.db, segment.g, segment.l) = (1, 1, 0);
    };
    flat(&mut sregs.cs, 11);
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        flat(data, 3);
    }
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = 2 << 20;
    vcpu.set_regs(&regs).unwrap();
    let mut vcpu = vcpu;
    std::thread::spawn(move || vcpu.run().map(|_| ()));
    vm
}

#[test]
#[ignore = "a client"]
fn calls_functions() {
    let kvm = Kvm::new().unwrap();
    let _vm = start_calls(&kvm);
    wait();
}

/// Opens `/dev/kvm`, then confines itself, then calls functions.
#[test]
#[ignore = "a client"]
fn calls_functions_confined() {
    let kvm = Kvm::new().unwrap();
    confine();
    let _vm = start_calls(&kvm);
    wait();
}

/// Calls functions in one VM, and forks a child that calls functions in two VMs.
#[test]
#[ignore = "a client"]
fn forks_and_calls_functions() {
    let kvm = Kvm::new().unwrap();
    let _vm = start_calls(&kvm);
    // SAFETY: only this thread continues in the child.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // This ends the child if the test kills its parent. SAFETY: the call has only number arguments.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let kvm = Kvm::new().unwrap();
        let _vms = [start_calls(&kvm), start_calls(&kvm)];
        loop {
            std::thread::park();
        }
    }
    println!("child {child}");
    wait();
    // SAFETY: the call has only number arguments.
    unsafe { libc::kill(child, libc::SIGKILL) };
}
