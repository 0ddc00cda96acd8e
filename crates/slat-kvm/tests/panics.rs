//! Tests calls that panic: afterwards the VM refuses all calls, and no thread hangs.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{DATA, Guest, SPIN};
use kvm_bindings::{kvm_clock_data, kvm_userspace_memory_region};
use slat_kvm::ioctl::Object;
use slat_kvm::{Kvm, abi};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// Runs `work` on a thread of its own, and fails if it takes long.
fn in_time<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    (result.recv_timeout(Duration::from_secs(20))).unwrap_or_else(|_| panic!("{what}: no answer"))
}

/// Code that requests the wall clock: `mov ecx, 0x4b564d00; mov eax, DATA; xor edx, edx; wrmsr; hlt`.
const ASK_FOR_WALL_CLOCK: &[u8] = &[
    0x66, 0xb9, 0x00, 0x4d, 0x56, 0x4b, 0x66, 0xb8, 0x00, 0x30, 0x00, 0x00, 0x66, 0x31, 0xd2, 0x0f,
    0x30, 0xf4,
];

/// KVM_SET_CLOCK accepts any number. slat computes modulo 2^64 the wall-clock time at which the VM's clock was zero.
#[test]
fn any_clock_can_be_set() {
    for clock in [i64::MAX as u64, u64::MAX, 1 << 63, 0] {
        let mut guest = Guest::new(ASK_FOR_WALL_CLOCK);
        let data = kvm_clock_data {
            clock,
            ..Default::default()
        };
        guest.vm.set_clock(&data).unwrap();
        let Guest { vm, memory, .. } = in_time("KVM_RUN", move || {
            guest.vcpu.run().unwrap();
            guest
        });
        let mut page = [0; 12];
        memory.read(DATA, &mut page);
        let word = |at: usize| u64::from(u32::from_le_bytes(page[at..at + 4].try_into().unwrap()));
        let now = std::time::SystemTime::now();
        let since_epoch = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        let begin = (since_epoch.as_nanos() as u64).wrapping_sub(clock);
        let late = begin.wrapping_sub(word(4) * 1_000_000_000 + word(8));
        let bits32 = 1_000_000_000u64 << 32;
        // The page contains 32 bits of seconds. The VM's clock has advanced a little since the test set it.
        let off = (late % bits32).min(bits32 - late % bits32);
        assert!(off < 30_000_000_000, "{clock:#x}: {off}");
        in_time("a slot change", move || {
            common::set_slot(&vm, &memory, 0, 0);
        });
    }
}

/// Creates a VM. Returns its object and its descriptor.
fn vm() -> (Object, std::os::fd::OwnedFd) {
    common::create(&Object::system(), abi::KVM_CREATE_VM, 0)
}

fn errno(object: &Object, request: u32, argument: u64) -> Option<i32> {
    object.ioctl(request, argument).err().map(|e| e.errno())
}

#[test]
fn after_a_panic_every_call_of_the_vm_answers_eio() {
    let (vm, _fd) = vm();
    let (vcpu, _vcpu_fd) = common::create(&vm, abi::KVM_CREATE_VCPU, 0);
    let memory = common::Memory::new(0x4000);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0,
        memory_size: 0x4000,
        userspace_addr: memory.start as u64,
    };
    let Object::Vm(inner) = &vm else { panic!() };
    inner.set_user_memory_region(&region).unwrap();
    // The client's own closure panics during the call.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        inner.dirty_log(0, |_| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    let mut words = [0u64; 1024];
    let argument = words.as_mut_ptr() as u64;
    for request in [
        abi::KVM_CHECK_EXTENSION,
        abi::KVM_GET_CLOCK,
        abi::KVM_SET_CLOCK,
        abi::KVM_CREATE_VCPU,
        abi::KVM_CREATE_IRQCHIP,
        abi::KVM_SET_USER_MEMORY_REGION,
        abi::KVM_GET_DIRTY_LOG,
        abi::KVM_GET_STATS_FD,
        0xdead,
    ] {
        assert_eq!(
            errno(&vm, request, argument),
            Some(libc::EIO),
            "{request:#x}"
        );
    }
    for request in [
        abi::KVM_GET_REGS,
        abi::KVM_SET_REGS,
        abi::KVM_NMI,
        abi::KVM_GET_TSC_KHZ,
        abi::KVM_GET_STATS_FD,
        0xdead,
    ] {
        assert_eq!(
            errno(&vcpu, request, argument),
            Some(libc::EIO),
            "{request:#x}"
        );
    }
    assert_eq!(errno(&vcpu, abi::KVM_RUN, 0), Some(libc::EIO));
    // Calls of the Rust API are refused, too, because it uses the same objects.
    assert_eq!(inner.get_clock().unwrap_err().errno(), libc::EIO);
    drop((vcpu, vm));
    // Another VM still works.
    Kvm::new()
        .unwrap()
        .create_vm()
        .unwrap()
        .create_vcpu(0)
        .unwrap();
}

/// After a panic, all vCPUs return from `KVM_RUN`: running vCPUs, and vCPUs that wait in a halt or for their SIPI.
#[test]
fn a_panic_ends_the_runs_of_other_vcpus() {
    let (vm, _fd) = vm();
    let Object::Vm(inner) = &vm else { panic!() };
    inner.create_irqchip().unwrap();
    let memory = common::Memory::new(0x4000);
    memory.write(common::CODE, SPIN);
    // hlt
    memory.write(common::CODE + 0x100, &[0xf4]);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0,
        memory_size: 0x4000,
        userspace_addr: memory.start as u64,
    };
    inner.set_user_memory_region(&region).unwrap();
    let (done, results) = mpsc::channel();
    for id in 0..3u64 {
        let (vcpu, _fd) = inner.create_vcpu(id).unwrap();
        if id < 2 {
            let mut sregs = vcpu.get_sregs().unwrap();
            (sregs.cs.base, sregs.cs.selector) = (0, 0);
            vcpu.set_sregs(&sregs).unwrap();
            let mut regs = vcpu.get_regs().unwrap();
            regs.rip = common::CODE + id * 0x100;
            vcpu.set_regs(&regs).unwrap();
            let mp_state = kvm_bindings::kvm_mp_state { mp_state: 0 };
            vcpu.set_mp_state(mp_state).unwrap();
        }
        let done = done.clone();
        std::thread::spawn(move || done.send((id, vcpu.run().map_err(|e| e.errno()))));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(results.try_recv().is_err(), "a vCPU did not run");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        inner.dirty_log(0, |_| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    for _ in 0..3 {
        let (id, result) = (results.recv_timeout(Duration::from_secs(20))).expect("a vCPU runs on");
        assert_eq!(result, Err(libc::EIO), "vCPU {id}");
    }
}
