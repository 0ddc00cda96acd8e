//! Tests wrong calls: each returns KVM's errno, and none crashes.
#![cfg(target_arch = "x86_64")]

mod common;

use common::*;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{Kvm, VcpuExit};

fn errno(object: &Object, request: u32, argument: u64) -> i32 {
    match object.ioctl(request, argument) {
        Ok(answer) => panic!("{answer:?}"),
        Err(error) => error.errno(),
    }
}

#[test]
fn unknown_requests_are_refused_as_by_kvm_on_x86() {
    let system = Object::system();
    let (vm, _) = create(&system, KVM_CREATE_VM, 0);
    let (vcpu, _) = create(&vm, KVM_CREATE_VCPU, 0);
    let objects = [
        (&system, libc::EINVAL),
        (&vm, libc::ENOTTY),
        (&vcpu, libc::EINVAL),
    ];
    for (object, refusal) in objects {
        assert_eq!(errno(object, 0xaeff, 0), refusal);
        assert_eq!(errno(object, 0x5401, 0), refusal);
    }
    assert_eq!(errno(&system, KVM_RUN, 0), libc::EINVAL);
    assert_eq!(errno(&vcpu, KVM_CREATE_VM, 0), libc::EINVAL);
}

#[test]
fn bad_pointers_are_efault() {
    let system = Object::system();
    let (vm, _) = create(&system, KVM_CREATE_VM, 0);
    let (vcpu, _) = create(&vm, KVM_CREATE_VCPU, 0);
    for pointer in [0, 8, 0xdead_0000_0000, u64::MAX - 7] {
        assert_eq!(
            errno(&system, KVM_GET_SUPPORTED_CPUID, pointer),
            libc::EFAULT
        );
        assert_eq!(
            errno(&vm, KVM_SET_USER_MEMORY_REGION, pointer),
            libc::EFAULT
        );
        for request in [
            KVM_GET_REGS,
            KVM_SET_REGS,
            KVM_GET_SREGS,
            KVM_SET_SREGS,
            KVM_GET_MSRS,
            KVM_GET_XSAVE,
        ] {
            assert_eq!(
                errno(&vcpu, request, pointer),
                libc::EFAULT,
                "{:?}",
                name(request)
            );
        }
    }
}

#[test]
fn tables_without_room_are_e2big() {
    let system = Object::system();
    let mut table = [0u32; 2];
    assert_eq!(
        errno(&system, KVM_GET_SUPPORTED_CPUID, table.as_mut_ptr() as u64),
        libc::E2BIG
    );
    assert_eq!(
        errno(&system, KVM_GET_MSR_INDEX_LIST, table.as_mut_ptr() as u64),
        libc::E2BIG
    );
    assert_ne!(table[0], 0, "the count is given in any case");
}

#[test]
fn vcpu_ids_have_limits() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    assert_eq!(vm.create_vcpu(4096).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(vm.create_vcpu(1 << 40).unwrap_err().errno(), libc::EINVAL);
    let _vcpu = vm.create_vcpu(4095).unwrap();
    assert_eq!(vm.create_vcpu(4095).unwrap_err().errno(), libc::EEXIST);
    assert_eq!(vm.create_irq_chip().unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn slots_are_checked_as_kvm_checks_them() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let memory = Memory::new(0x4000);
    let good = kvm_userspace_memory_region {
        slot: 1,
        flags: 0,
        guest_phys_addr: 0x10_0000,
        memory_size: 0x4000,
        userspace_addr: memory.start as u64,
    };
    let set = |change: fn(&mut kvm_userspace_memory_region)| {
        let mut region = good;
        change(&mut region);
        // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
        unsafe { vm.set_user_memory_region(region) }.map_err(|error| error.errno())
    };
    let refused: [fn(&mut kvm_userspace_memory_region); 8] = [
        |region| region.flags = 1 << 9,
        |region| region.guest_phys_addr += 1,
        |region| region.memory_size -= 1,
        |region| region.userspace_addr += 1,
        |region| region.userspace_addr = 1 << 63,
        |region| region.slot = 32764 + 3,
        |region| region.slot = 2 << 16,
        |region| region.guest_phys_addr = u64::MAX - 0xfff,
    ];
    for (number, change) in refused.into_iter().enumerate() {
        assert_eq!(set(change), Err(libc::EINVAL), "case {number}");
    }
    set(|_| {}).unwrap();
    assert_eq!(set(|region| region.slot = 2), Err(libc::EEXIST));
    assert_eq!(
        set(|region| region.memory_size = 0x2000),
        Err(libc::EINVAL),
        "a slot is not resized"
    );
    set(|region| region.memory_size = 0).unwrap();
    assert_eq!(
        set(|region| region.memory_size = 0),
        Err(libc::EINVAL),
        "nothing to delete"
    );
    assert_eq!(vm.get_dirty_log(1, 0).unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn written_pages_are_in_the_dirty_log_once() {
    // mov [0x3000],al; hlt
    let mut guest = Guest::new(WRITE_AND_HALT);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: guest.memory.start as u64,
    };
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { guest.vm.set_user_memory_region(region).unwrap() };
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    // A fetch mapped the page of the code, which KVM logs, too.
    assert_eq!(
        guest.vm.get_dirty_log(0, MEMORY).unwrap(),
        [1 << 3 | 1 << 1]
    );
    assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [0]);
    start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(guest.vm.get_dirty_log(0, MEMORY).unwrap(), [1 << 3]);
}

#[test]
fn objects_live_as_long_as_they_are_needed() {
    let Guest {
        mut vcpu,
        vm,
        kvm,
        memory,
    } = Guest::new(&[0xf4]);
    drop(kvm);
    drop(vm);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    drop(vcpu);
    drop(memory);
}

#[test]
fn a_forked_child_gets_eio() {
    let mut guest = Guest::new(&[0xf4]);
    // SAFETY: the child only makes calls that return at once, and exits.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let refused = |errno: Option<i32>| errno == Some(libc::EIO);
            let all = refused(guest.vcpu.run().err().map(|e| e.errno()))
                && refused(guest.vcpu.get_regs().err().map(|e| e.errno()))
                && refused(guest.vm.create_vcpu(1).err().map(|e| e.errno()));
            libc::_exit(i32::from(!all));
        }
        let mut status = -1;
        libc::waitpid(child, &mut status, 0);
        status
    };
    assert_eq!(status, 0);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn msrs_stop_at_the_first_that_does_not_exist() {
    let guest = Guest::new(&[0xf4]);
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let mut msrs =
        Msrs::from_entries(&[entry(0x174, 0x10), entry(0xdead_beef, 0), entry(0x175, 0)]).unwrap();
    assert_eq!(guest.vcpu.set_msrs(&msrs).unwrap(), 1);
    assert_eq!(guest.vcpu.get_msrs(&mut msrs).unwrap(), 1);
    assert_eq!(msrs.as_slice()[0].data, 0x10);
    let list = guest.kvm.get_msr_index_list().unwrap();
    let entries: Vec<_> = list
        .as_slice()
        .iter()
        .map(|&index| entry(index, 0))
        .collect();
    let mut all = Msrs::from_entries(&entries).unwrap();
    // Uses a VM with an interrupt controller: without one, the MSR of the TSC deadline does not exist.
    let with_apic = Guest::with(&[0xf4], |vm| vm.create_irq_chip().unwrap());
    assert_eq!(with_apic.vcpu.get_msrs(&mut all).unwrap(), entries.len());
}

/// Tests the log with `SLAT_LOG=1`. slat reads this variable once in a process, so the test runs itself again in a
/// process of its own.
#[test]
fn the_log_says_why_there_is_no_vcpu() {
    if std::env::var_os("SLAT_LOG").is_some() {
        let (vm, _) = create(&Object::system(), KVM_CREATE_VM, 0);
        let _vcpu = create(&vm, KVM_CREATE_VCPU, 0);
        assert_eq!(errno(&vm, KVM_CREATE_VCPU, 0), libc::EEXIST);
        assert_eq!(errno(&vm, KVM_CREATE_VCPU, 4096), libc::EINVAL);
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "the_log_says_why_there_is_no_vcpu",
            "--nocapture",
        ])
        .env("SLAT_LOG", "1")
        .output()
        .unwrap();
    let said = String::from_utf8(child.stderr).unwrap();
    assert!(child.status.success(), "{said}");
    for why in [
        "creating vCPU 0: the VM has one with this id",
        "creating vCPU 4096: ids are below 4096",
    ] {
        assert!(said.contains(why), "{said}");
    }
}
