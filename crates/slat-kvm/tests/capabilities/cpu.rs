//! Capabilities of the CPU's state.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{Kvm, SyncReg, VcpuExit, abi};

/// Requests single steps by the flags `control`, and executes one step.
fn steps(control: u32) {
    let mut guest = Guest::new(&[0x90, 0xf4]);
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | control,
        ..Default::default()
    };
    guest.vcpu.set_guest_debug(&debug).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Debug(_)));
}

pub const USES: &[Use] = &[
    (KVM_CAP_EXT_CPUID, |_| {
        let guest = Guest::new(SPIN);
        let cpuid = guest
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .unwrap();
        guest.vcpu.set_cpuid2(&cpuid).unwrap();
        let found = guest.vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
        assert_eq!(found.as_slice(), cpuid.as_slice());
    }),
    (KVM_CAP_EXT_EMUL_CPUID, |_| {
        let kvm = Kvm::new().unwrap();
        let emulated = kvm.get_emulated_cpuid(3).unwrap();
        let too_few = kvm.get_emulated_cpuid(2).unwrap_err();
        assert_eq!(too_few.errno(), libc::E2BIG);
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        for leaf in &emulated.as_slice()[1..] {
            let same = |other: &&kvm_cpuid_entry2| {
                (other.function, other.index) == (leaf.function, leaf.index)
            };
            let supported = supported.as_slice().iter().find(same).unwrap();
            assert_ne!(leaf.ecx, 0);
            assert_eq!(leaf.ecx & !supported.ecx, 0);
        }
    }),
    (KVM_CAP_NOP_IO_DELAY, |_| {
        let kvm = Kvm::new().unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let features = cpuid.as_slice().iter().find(|e| e.function == 0x4000_0001);
        assert_ne!(features.unwrap().eax & 1 << 1, 0);
    }),
    (KVM_CAP_VCPU_EVENTS, |_| {
        let guest = Guest::new(SPIN);
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        events.nmi.masked = 1;
        guest.vcpu.set_vcpu_events(&events).unwrap();
        assert_eq!(guest.vcpu.get_vcpu_events().unwrap().nmi.masked, 1);
    }),
    (KVM_CAP_DEBUGREGS, |_| {
        let guest = Guest::new(SPIN);
        let mut regs = guest.vcpu.get_debug_regs().unwrap();
        regs.db[1] = 0x1234;
        guest.vcpu.set_debug_regs(&regs).unwrap();
        assert_eq!(guest.vcpu.get_debug_regs().unwrap().db[1], 0x1234);
    }),
    (KVM_CAP_SET_GUEST_DEBUG, |_| {
        steps(KVM_GUESTDBG_SINGLESTEP);
    }),
    (KVM_CAP_X86_ROBUST_SINGLESTEP, |_| {
        // pushf; pop ax; hlt: the guest reads its own RFLAGS while the client single-steps it.
        let mut guest = Guest::new(&[0x9c, 0x58, 0xf4]);
        let debug = kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
            ..Default::default()
        };
        guest.vcpu.set_guest_debug(&debug).unwrap();
        for _ in 0..2 {
            assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Debug(_)));
        }
        assert_eq!(guest.vcpu.get_regs().unwrap().rax & 0x100, 0);
        assert_eq!(guest.vcpu.get_regs().unwrap().rflags & 0x100, 0);
    }),
    (KVM_CAP_SET_GUEST_DEBUG2, |controls| {
        assert_ne!(controls as u32 & KVM_GUESTDBG_BLOCKIRQ, 0);
        steps(controls as u32 & (KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_BLOCKIRQ));
    }),
    (KVM_CAP_XSAVE, |_| {
        let guest = Guest::new(SPIN);
        let xsave = guest.vcpu.get_xsave().unwrap();
        // SAFETY: the buffer is one that `get_xsave` has returned for this vCPU.
        unsafe { guest.vcpu.set_xsave(&xsave).unwrap() };
    }),
    (KVM_CAP_XSAVE2, |size| {
        let (_, vcpu) = objects();
        let mut area = vec![0u8; size as usize + 1];
        area[size as usize] = 0xaa;
        let address = area.as_mut_ptr() as u64;
        vcpu.ioctl(abi::KVM_GET_XSAVE2, address).unwrap();
        assert_eq!(area[size as usize], 0xaa);
        vcpu.ioctl(abi::KVM_SET_XSAVE, address).unwrap();
    }),
    (KVM_CAP_XCRS, |_| {
        let guest = Guest::new(SPIN);
        let xcrs = guest.vcpu.get_xcrs().unwrap();
        guest.vcpu.set_xcrs(&xcrs).unwrap();
    }),
    (KVM_CAP_SYNC_REGS, |_| {
        let mut guest = Guest::new(&[0xf4]);
        guest.vcpu.set_sync_valid_reg(SyncReg::Register);
        guest.vcpu.run().unwrap();
        assert_eq!(guest.vcpu.sync_regs().regs.rip, CODE + 1);
    }),
    (KVM_CAP_SREGS2, |_| {
        let (_, vcpu) = objects();
        let mut sregs = kvm_sregs2::default();
        let address = &raw mut sregs as u64;
        vcpu.ioctl(abi::KVM_GET_SREGS2, address).unwrap();
        vcpu.ioctl(abi::KVM_SET_SREGS2, address).unwrap();
        assert_ne!(sregs.apic_base, 0);
    }),
    (KVM_CAP_GET_MSR_FEATURES, |_| {
        let kvm = Kvm::new().unwrap();
        let list = kvm.get_msr_feature_index_list().unwrap();
        for index in list.as_slice() {
            let entry = kvm_msr_entry {
                index: *index,
                ..Default::default()
            };
            let mut msrs = Msrs::from_entries(&[entry]).unwrap();
            assert_eq!(kvm.get_msrs(&mut msrs).unwrap(), 1);
        }
    }),
    (KVM_CAP_MSR_PLATFORM_INFO, |_| {
        // mov ecx, 0xce; rdmsr; hlt
        let code = [0x66, 0xb9, 0xce, 0, 0, 0, 0x0f, 0x32, 0xf4];
        let mut guest = halts(&code);
        assert_eq!(guest.vcpu.get_regs().unwrap().rax, 1 << 31);
        assert_eq!(enable(&guest.vm, KVM_CAP_MSR_PLATFORM_INFO, 0), Ok(()));
        guest.memory.write(13 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
    }),
    (KVM_CAP_X86_MSR_FILTER, |_| {
        let (vm, _) = objects();
        let filter = kvm_msr_filter::default();
        let address = &raw const filter as u64;
        vm.ioctl(abi::KVM_X86_SET_MSR_FILTER, address).unwrap();
    }),
    (KVM_CAP_MCE, |banks| {
        let (_, vcpu) = objects();
        let mut supported = 0u64;
        let address = &raw mut supported as u64;
        let system = Object::system();
        (system.ioctl(abi::KVM_X86_GET_MCE_CAP_SUPPORTED, address)).unwrap();
        let mut capabilities = supported | banks as u64;
        let address = &raw mut capabilities as u64;
        vcpu.ioctl(abi::KVM_X86_SETUP_MCE, address).unwrap();
        let error = kvm_x86_mce {
            bank: banks as u8 - 1,
            status: 1 << 63 | 1,
            ..Default::default()
        };
        let address = &raw const error as u64;
        vcpu.ioctl(abi::KVM_X86_SET_MCE, address).unwrap();
        capabilities += 1;
        let address = &raw mut capabilities as u64;
        let refused = vcpu.ioctl(abi::KVM_X86_SETUP_MCE, address);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }),
    (KVM_CAP_SYS_ATTRIBUTES, |_| {
        let mut components = 0u64;
        let mut attribute = kvm_device_attr {
            attr: KVM_X86_XCOMP_GUEST_SUPP.into(),
            addr: &raw mut components as u64,
            ..Default::default()
        };
        let address = &raw mut attribute as u64;
        let system = Object::system();
        system.ioctl(abi::KVM_HAS_DEVICE_ATTR, address).unwrap();
        system.ioctl(abi::KVM_GET_DEVICE_ATTR, address).unwrap();
        assert_eq!(components & 3, 3);
        attribute.attr += 1;
        let address = &raw mut attribute as u64;
        let refused = system.ioctl(abi::KVM_HAS_DEVICE_ATTR, address);
        assert_eq!(refused.unwrap_err().errno(), libc::ENXIO);
    }),
    (KVM_CAP_ONE_REG, |_| {
        const MSR: u64 = KVM_REG_X86 | KVM_REG_SIZE_U64 | 2 << 32;
        const TSC_AUX: u64 = 0xc000_0103;
        let guest = Guest::new(SPIN);
        let value = 7u64.to_le_bytes();
        assert_eq!(guest.vcpu.set_one_reg(MSR | TSC_AUX, &value).unwrap(), 8);
        let mut read = [0; 8];
        assert_eq!(guest.vcpu.get_one_reg(MSR | TSC_AUX, &mut read).unwrap(), 8);
        assert_eq!(read, value);
        // The ids name, in this order: an MSR that does not exist; reserved bits; another size, another architecture
        // and another type; the shadow-stack pointer, which the CPU does not have.
        for id in [
            MSR | 0x1234_5678,
            MSR | 1 << 40 | TSC_AUX,
            MSR | 1 << 48 | TSC_AUX,
            KVM_REG_X86 | 2 << 52 | 2 << 32 | TSC_AUX,
            KVM_REG_SIZE_U64 | 2 << 32 | TSC_AUX,
            KVM_REG_X86 | KVM_REG_SIZE_U64 | TSC_AUX,
            KVM_REG_X86 | KVM_REG_SIZE_U64 | 3 << 32,
        ] {
            let refused = guest.vcpu.get_one_reg(id, &mut read);
            assert_eq!(refused.unwrap_err().errno(), libc::EINVAL, "{id:#x}");
            let refused = guest.vcpu.set_one_reg(id, &value);
            assert_eq!(refused.unwrap_err().errno(), libc::EINVAL, "{id:#x}");
        }
        let (_, vcpu) = objects();
        let mut register = kvm_one_reg {
            id: MSR | TSC_AUX,
            addr: read.as_mut_ptr() as u64,
        };
        (vcpu.ioctl(abi::KVM_SET_ONE_REG, &raw const register as u64)).unwrap();
        read = [0; 8];
        (vcpu.ioctl(abi::KVM_GET_ONE_REG, &raw const register as u64)).unwrap();
        assert_eq!(read, value);
        register.addr = 8;
        let refused = vcpu.ioctl(abi::KVM_GET_ONE_REG, &raw const register as u64);
        assert_eq!(refused.unwrap_err().errno(), libc::EFAULT);
        let mut count = 5u64;
        (vcpu.ioctl(abi::KVM_GET_REG_LIST, &raw mut count as u64)).unwrap();
        assert_eq!(count, 0);
    }),
    (KVM_CAP_X86_GUEST_MODE, |_| {
        let mut guest = halts(&[0xf4]);
        let nested = KVM_RUN_X86_GUEST_MODE as u16;
        assert_eq!(guest.vcpu.get_kvm_run().flags & nested, 0);
    }),
    (KVM_CAP_SMALLER_MAXPHYADDR, |_| {
        // mov al,[0x200000]: the guest's tables map this address to 2^40
        let code = [0xa0, 0x00, 0x00, 0x20, 0x00, 0xf4];
        for (bits, exists) in [(48, true), (36, false)] {
            let mut guest = Guest::new(&code);
            let mut cpuid = (guest.kvm)
                .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
                .unwrap();
            let mut leaves = cpuid.as_mut_slice().iter_mut();
            let widths = leaves.find(|leaf| leaf.function == 0x8000_0008).unwrap();
            widths.eax = widths.eax & !0xff | bits;
            guest.vcpu.set_cpuid2(&cpuid).unwrap();
            // Writes a page-directory pointer, and two entries that map large pages.
            guest.memory.write(0x2000, &0x3001u64.to_le_bytes());
            guest.memory.write(0x3000, &0x83u64.to_le_bytes());
            guest
                .memory
                .write(0x3008, &(1u64 << 40 | 0x83).to_le_bytes());
            let mut sregs = guest.vcpu.get_sregs().unwrap();
            (sregs.cr3, sregs.cr4) = (0x2000, 1 << 5);
            sregs.cr0 |= 1 << 31 | 1;
            (sregs.cs.db, sregs.cs.limit, sregs.cs.g) = (1, u32::MAX, 1);
            (sregs.ds.limit, sregs.ds.g) = (u32::MAX, 1);
            sregs.idt.limit = 0;
            guest.vcpu.set_sregs(&sregs).unwrap();
            let exit = guest.vcpu.run().unwrap();
            match exists {
                true => assert!(matches!(exit, VcpuExit::MmioRead(at, _) if at == 1 << 40)),
                // The address bit is reserved, so there is a page fault. The guest has no handler for it.
                false => assert!(matches!(exit, VcpuExit::Shutdown), "{exit:?}"),
            }
        }
    }),
    (KVM_CAP_NESTED_STATE, |size| {
        let (_, vcpu) = objects();
        let mut state = vec![0u64; size as usize / 8];
        state[0] = 127 << 32;
        let address = state.as_mut_ptr() as u64;
        let refused = vcpu.ioctl(abi::KVM_GET_NESTED_STATE, address);
        assert_eq!(refused.unwrap_err().errno(), libc::E2BIG);
        // The first call has stored the size that the state needs.
        vcpu.ioctl(abi::KVM_GET_NESTED_STATE, address).unwrap();
        vcpu.ioctl(abi::KVM_SET_NESTED_STATE, address).unwrap();
        assert_eq!(
            state[0] >> 32,
            128,
            "without a nested guest the header is all"
        );
        state[0] |= u64::from(KVM_STATE_NESTED_GUEST_MODE);
        let refused = vcpu.ioctl(abi::KVM_SET_NESTED_STATE, address);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }),
    (KVM_CAP_EXCEPTION_PAYLOAD, |_| {
        // The guest's handler of #PF halts.
        let mut guest = Guest::new(SPIN);
        guest.memory.write(14 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
        (events.exception.pending, events.exception.nr) = (1, 14);
        (events.exception_has_payload, events.exception_payload) = (1, 0x1234);
        let refused = guest.vcpu.set_vcpu_events(&events);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
        assert_eq!(enable(&guest.vm, KVM_CAP_EXCEPTION_PAYLOAD, 1), Ok(()));
        guest.vcpu.set_vcpu_events(&events).unwrap();
        assert_eq!(guest.vcpu.get_vcpu_events().unwrap(), events);
        assert_eq!(guest.vcpu.get_sregs().unwrap().cr2, 0);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
        assert_eq!(guest.vcpu.get_sregs().unwrap().cr2, 0x1234);
    }),
    (KVM_CAP_X86_TRIPLE_FAULT_EVENT, |_| {
        let mut guest = Guest::new(&[0xf4]);
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        events.flags |= KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        events.triple_fault.pending = 1;
        let refused = guest.vcpu.set_vcpu_events(&events);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
        assert_eq!(enable(&guest.vm, KVM_CAP_X86_TRIPLE_FAULT_EVENT, 1), Ok(()));
        guest.vcpu.set_vcpu_events(&events).unwrap();
        guest.vcpu.set_kvm_immediate_exit(1);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
        guest.vcpu.set_kvm_immediate_exit(0);
        assert_eq!(guest.vcpu.get_vcpu_events().unwrap(), events);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Shutdown));
        let after = guest.vcpu.get_vcpu_events().unwrap();
        assert_eq!(after.triple_fault.pending, 0);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    }),
];
