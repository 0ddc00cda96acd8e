//! Capabilities of guest memory and dirty logs.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::caps::KVM_CAP_GUEST_MEMFD_FLAGS;
use slat_kvm::{VcpuExit, VmFd, abi};

pub const USES: &[Use] = &[
    (KVM_CAP_USER_MEMORY, |_| drop(halts(WRITE_AND_HALT))),
    (KVM_CAP_USER_MEMORY2, |_| {
        let (vm, memory) = (vm(), Memory::new(4096));
        let region = kvm_userspace_memory_region2 {
            memory_size: 4096,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        // SAFETY: no guest runs, so nothing accesses the memory.
        unsafe { vm.set_user_memory_region2(region).unwrap() };
    }),
    (KVM_CAP_NR_MEMSLOTS, |slots| {
        let (vm, memory) = (vm(), Memory::new(4096));
        for (slot, wanted) in [(slots as u32 - 1, true), (32767, false)] {
            let region = kvm_userspace_memory_region {
                slot,
                memory_size: 4096,
                userspace_addr: memory.start as u64,
                ..Default::default()
            };
            // SAFETY: no guest runs, so nothing accesses the memory.
            let set = unsafe { vm.set_user_memory_region(region) };
            assert_eq!(set.is_ok(), wanted, "slot {slot}");
        }
    }),
    (KVM_CAP_MULTI_ADDRESS_SPACE, |spaces| {
        let (vm, memory) = (vm(), Memory::new(4096));
        for (space, wanted) in [(spaces as u32 - 1, true), (spaces as u32, false)] {
            let region = kvm_userspace_memory_region {
                slot: space << 16,
                memory_size: 4096,
                userspace_addr: memory.start as u64,
                ..Default::default()
            };
            // SAFETY: no guest runs, so nothing accesses the memory.
            let set = unsafe { vm.set_user_memory_region(region) };
            assert_eq!(set.is_ok(), wanted, "address space {space}");
        }
    }),
    (KVM_CAP_SYNC_MMU, |_| {
        // The guest reads a page, and then the client removes the page's mapping.
        let mut guest = halts(&[0xa0, 0x00, 0x30, 0xf4]);
        let range = guest.memory.range(DATA);
        slat_kvm::notify::around(range, || guest.memory.take_away(DATA));
        start_at_code(&guest.vcpu);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EFAULT);
    }),
    (KVM_CAP_DESTROY_MEMORY_REGION_WORKS, |_| {
        let mut guest = halts(WRITE_AND_HALT);
        set_slot(&guest.vm, &guest.memory, 0, 0);
        start_at_code(&guest.vcpu);
        assert!(!matches!(guest.vcpu.run(), Ok(VcpuExit::Hlt)));
    }),
    (KVM_CAP_JOIN_MEMORY_REGIONS_WORKS, |_| {
        let (vm, memory) = (vm(), Memory::new(8192));
        let set = |slot, size| {
            let region = kvm_userspace_memory_region {
                slot,
                memory_size: size,
                userspace_addr: memory.start as u64,
                ..Default::default()
            };
            // SAFETY: no guest runs, so nothing accesses the memory.
            unsafe { vm.set_user_memory_region(region).unwrap() }
        };
        set(0, 4096);
        set(0, 0);
        set(0, 8192);
    }),
    (KVM_CAP_READONLY_MEM, |_| {
        let mut guest = Guest::new(WRITE_AND_HALT);
        set_slot(&guest.vm, &guest.memory, 0, 0);
        let region = kvm_userspace_memory_region {
            flags: KVM_MEM_READONLY,
            memory_size: MEMORY as u64,
            userspace_addr: guest.memory.start as u64,
            ..Default::default()
        };
        // SAFETY: the slot is read-only, so the guest does not write to the memory.
        unsafe { guest.vm.set_user_memory_region(region).unwrap() };
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::MmioWrite(DATA, _)));
    }),
    (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, |options| {
        assert_eq!(
            enable(&vm(), KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, options as u64),
            Ok(())
        );
    }),
    (KVM_CAP_DIRTY_LOG_RING, rings::<KVM_CAP_DIRTY_LOG_RING>),
    (
        KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
        rings::<KVM_CAP_DIRTY_LOG_RING_ACQ_REL>,
    ),
    (KVM_CAP_MEMORY_FAULT_INFO, |_| {
        let guest = Guest::of_type(KVM_X86_SW_PROTECTED_VM, WRITE_AND_HALT, |_| {});
        make_private(&guest.vm);
        let mut vcpu = guest.vcpu;
        let exit = vcpu.run().unwrap();
        assert!(
            matches!(exit, VcpuExit::MemoryFault { gpa: DATA, .. }),
            "{exit:?}"
        );
    }),
    (KVM_CAP_MEMORY_ATTRIBUTES, |_| make_private(&protected())),
    (KVM_CAP_GUEST_MEMFD, |_| {
        let memory = kvm_create_guest_memfd {
            size: 4096,
            ..Default::default()
        };
        vm().create_guest_memfd(memory).unwrap();
        protected().create_guest_memfd(memory).unwrap();
    }),
    (KVM_CAP_GUEST_MEMFD_FLAGS, |flags| {
        for flag in 0..64 {
            let memory = kvm_create_guest_memfd {
                size: 4096,
                flags: 1 << flag,
                ..Default::default()
            };
            let created = vm().create_guest_memfd(memory).is_ok();
            assert_eq!(created, flags as u64 & 1 << flag != 0, "flag {flag}");
        }
    }),
    (KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, |_| {
        // KVM lets only threads with CAP_SYS_BOOT enable this capability.
        let answer = enable(&vm(), KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, 0);
        assert!([Ok(()), Err(libc::EPERM)].contains(&answer), "{answer:?}");
    }),
    (KVM_CAP_MMU_SHADOW_CACHE_CONTROL, |_| {
        let (vm, _) = objects();
        vm.ioctl(abi::KVM_SET_NR_MMU_PAGES, 64).unwrap();
    }),
    (KVM_CAP_PRE_FAULT_MEMORY, |_| {
        let guest = Guest::new(SPIN);
        let mut range = kvm_pre_fault_memory {
            size: MEMORY as u64,
            ..Default::default()
        };
        guest.vcpu.pre_fault_memory(&mut range).unwrap();
        assert_eq!(range.size, 0);
    }),
    (KVM_CAP_SET_TSS_ADDR, |_| {
        vm().set_tss_address(0xfffb_d000).unwrap();
    }),
    (KVM_CAP_SET_IDENTITY_MAP_ADDR, |_| {
        vm().set_identity_map_address(0xfffb_c000).unwrap();
    }),
];

fn make_private(vm: &VmFd) {
    let private = kvm_memory_attributes {
        address: DATA,
        size: 4096,
        attributes: KVM_MEMORY_ATTRIBUTE_PRIVATE.into(),
        flags: 0,
    };
    vm.set_memory_attributes(private).unwrap();
}

fn rings<const CAP: u32>(size: i32) {
    let vm = vm();
    assert_eq!(enable(&vm, CAP, size as u64), Ok(()));
    vm.create_vcpu(0).unwrap();
    assert_eq!(vm.reset_dirty_rings().unwrap(), 0);
    assert!(enable(&self::vm(), CAP, size as u64 * 2).is_err());
}
