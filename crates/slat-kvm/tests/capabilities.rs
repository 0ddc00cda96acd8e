//! Every capability that slat claims, and a call that uses it. A capability without an entry here fails the test.

mod common;

use common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::{Answer, Object};
use slat_kvm::{IoEventAddress, Kvm, NoDatamatch, SyncReg, VcpuExit, VmFd, abi};
use std::collections::BTreeMap;
use vmm_sys_util::eventfd::EventFd;

/// A capability, and a function that uses it, with the value that KVM_CHECK_EXTENSION returns as argument.
type Use = (u32, fn(i32));

fn enable(vm: &VmFd, cap: u32, arg: u64) -> i32 {
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = arg;
    vm.enable_cap(&enable)
        .map_or_else(|error| error.errno(), |()| 0)
}

fn vm() -> VmFd {
    Kvm::new().unwrap().create_vm().unwrap()
}

/// Creates a VM and a vCPU, as the preload library uses them.
fn objects() -> (Object, Object) {
    let vm = create(&Object::system(), abi::KVM_CREATE_VM, 0).0;
    let vcpu = create(&vm, abi::KVM_CREATE_VCPU, 0).0;
    (vm, vcpu)
}

/// Runs code that ends with HLT.
fn halts(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    guest
}

/// Requests single steps by these controls, and executes one.
fn steps(control: u32) {
    let mut guest = Guest::new(&[0x90, 0xf4]);
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | control,
        ..Default::default()
    };
    guest.vcpu.set_guest_debug(&debug).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Debug(_)));
}

/// Code that enables the guest's clock page at DATA: mov ecx, 0x4b564d01; mov eax, DATA | 1; xor edx, edx; wrmsr; hlt
const USE_CLOCK: &[u8] = &[
    0x66, 0xb9, 0x01, 0x4d, 0x56, 0x4b, 0x66, 0xb8, 0x01, 0x30, 0x00, 0x00, 0x66, 0x31, 0xd2, 0x0f,
    0x30, 0xf4,
];

/// Creates a VM with the controllers of a PC and an 8254.
fn pc() -> VmFd {
    let vm = vm();
    vm.create_irq_chip().unwrap();
    vm.create_pit2(kvm_pit_config::default()).unwrap();
    vm
}

fn eventfd() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).unwrap()
}

/// Writes 1 to port 0x30, and halts.
const OUT: &[u8] = &[0xb0, 1, 0xe6, 0x30, 0xf4];

/// Checks that a guest's write signals an eventfd that is registered for this value.
fn signals<T: Into<u64>>(value: T) {
    let mut guest = Guest::new(OUT);
    let event = eventfd();
    let port = IoEventAddress::Pio(0x30);
    guest.vm.register_ioevent(&event, &port, value).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(event.read().unwrap(), 1);
}

const USES: &[Use] = &[
    (KVM_CAP_IRQCHIP, |_| {
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_IOAPIC,
            ..Default::default()
        };
        pc().get_irqchip(&mut chip).unwrap();
        // SAFETY: GET_IRQCHIP has filled in this part of the union.
        assert_eq!(unsafe { chip.chip.ioapic.base_address }, 0xfec0_0000);
    }),
    (KVM_CAP_IRQ_INJECT_STATUS, |_| {
        let (vm, _vcpu) = objects();
        let mut line = kvm_irq_level::default();
        let address = &raw mut line as u64;
        let without = vm.ioctl(abi::KVM_IRQ_LINE_STATUS, address).unwrap_err();
        assert_eq!(without.errno(), libc::ENXIO);
    }),
    (KVM_CAP_IRQ_ROUTING, |routes| {
        let msi = kvm_irq_routing_entry {
            gsi: routes as u32 - 1,
            type_: KVM_IRQ_ROUTING_MSI,
            ..Default::default()
        };
        let table = KvmIrqRouting::from_entries(&[msi]).unwrap();
        pc().set_gsi_routing(&table).unwrap();
    }),
    (KVM_CAP_IRQFD, |_| {
        let (vm, event) = (pc(), eventfd());
        vm.register_irqfd(&event, 4).unwrap();
        vm.unregister_irqfd(&event, 4).unwrap();
    }),
    (KVM_CAP_IRQFD_RESAMPLE, |_| {
        let (vm, event) = (pc(), eventfd());
        vm.register_irqfd_with_resample(&event, &eventfd(), 4)
            .unwrap();
    }),
    (KVM_CAP_IOEVENTFD, |_| signals(1u8)),
    (KVM_CAP_IOEVENTFD_ANY_LENGTH, |_| signals(NoDatamatch)),
    (KVM_CAP_IOEVENTFD_NO_LENGTH, |_| signals(NoDatamatch)),
    (KVM_CAP_PIT, |_| drop(pc())),
    (KVM_CAP_PIT2, |_| {
        pc().get_pit2().unwrap();
    }),
    (KVM_CAP_PIT_STATE2, |_| {
        let vm = pc();
        vm.set_pit2(&vm.get_pit2().unwrap()).unwrap();
    }),
    (KVM_CAP_REINJECT_CONTROL, |_| {
        let control = kvm_reinject_control::default();
        let (vm, _) = create(&Object::system(), abi::KVM_CREATE_VM, 0);
        let reinject = || vm.ioctl(abi::KVM_REINJECT_CONTROL, &raw const control as u64);
        assert_eq!(reinject().unwrap_err().errno(), libc::ENXIO);
        vm.ioctl(abi::KVM_CREATE_IRQCHIP, 0).unwrap();
        vm.ioctl(abi::KVM_CREATE_PIT, 0).unwrap();
        reinject().unwrap();
    }),
    (KVM_CAP_SPLIT_IRQCHIP, |_| {
        let vm = vm();
        assert_eq!(enable(&vm, KVM_CAP_SPLIT_IRQCHIP, 24), 0);
        assert_eq!(enable(&vm, KVM_CAP_SPLIT_IRQCHIP, 24), libc::EEXIST);
        vm.create_vcpu(0).unwrap().get_lapic().unwrap();
        let missing = vm.get_irqchip(&mut kvm_irqchip::default());
        assert_eq!(missing.unwrap_err().errno(), libc::ENXIO);
    }),
    (KVM_CAP_X2APIC_API, |flags| {
        let vm = vm();
        assert_eq!(enable(&vm, KVM_CAP_X2APIC_API, flags as u64), 0);
        let unknown = flags as u64 + 1;
        assert_eq!(enable(&vm, KVM_CAP_X2APIC_API, unknown), libc::EINVAL);
    }),
    (KVM_CAP_SIGNAL_MSI, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let init = kvm_msi {
            address_lo: 0xfee0_0000,
            data: 0x500,
            ..Default::default()
        };
        assert_eq!(guest.vm.signal_msi(init).unwrap(), 1);
    }),
    (KVM_CAP_DEVICE_CTRL, |_| {
        let mut device = kvm_create_device {
            type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
            ..Default::default()
        };
        let attribute = kvm_device_attr {
            group: KVM_DEV_VFIO_FILE,
            attr: KVM_DEV_VFIO_FILE_ADD.into(),
            ..Default::default()
        };
        let device = vm().create_device(&mut device).unwrap();
        device.has_device_attr(&attribute).unwrap();
    }),
    (KVM_CAP_SET_GUEST_DEBUG, |_| {
        steps(KVM_GUESTDBG_SINGLESTEP);
    }),
    (KVM_CAP_SET_GUEST_DEBUG2, |controls| {
        assert_ne!(controls as u32 & KVM_GUESTDBG_BLOCKIRQ, 0);
        steps(controls as u32 & (KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_BLOCKIRQ));
    }),
    (KVM_CAP_HLT, |_| drop(halts(&[0xf4]))),
    (KVM_CAP_USER_MEMORY, |_| drop(halts(WRITE_AND_HALT))),
    (KVM_CAP_SET_TSS_ADDR, |_| {
        vm().set_tss_address(0xfffb_d000).unwrap();
    }),
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
    (KVM_CAP_CLOCKSOURCE, |_| {
        let guest = halts(USE_CLOCK);
        let mut page = [0; 32];
        guest.memory.read(DATA, &mut page);
        assert_ne!(page, [0; 32]);
    }),
    (KVM_CAP_NR_VCPUS, |recommended| {
        let vm = vm();
        for id in 0..recommended as u64 {
            vm.create_vcpu(id).unwrap();
        }
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
            // SAFETY: no guest runs.
            let set = unsafe { vm.set_user_memory_region(region) };
            assert_eq!(set.is_ok(), wanted, "slot {slot}");
        }
    }),
    (KVM_CAP_NOP_IO_DELAY, |_| {
        let kvm = Kvm::new().unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let features = cpuid.as_slice().iter().find(|e| e.function == 0x4000_0001);
        assert_ne!(features.unwrap().eax & 1 << 1, 0);
    }),
    (KVM_CAP_MP_STATE, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let halted = kvm_mp_state {
            mp_state: KVM_MP_STATE_HALTED,
        };
        guest.vcpu.set_mp_state(halted).unwrap();
        assert_eq!(guest.vcpu.get_mp_state().unwrap(), halted);
    }),
    (KVM_CAP_COALESCED_MMIO, |_| {
        coalesces(IoEventAddress::Mmio(DEVICE))
    }),
    (KVM_CAP_SYNC_MMU, |_| {
        // The guest reads a page whose mapping the client replaces.
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
    (KVM_CAP_USER_NMI, |_| {
        // The NMI's handler, at 0x2000, halts.
        let mut guest = Guest::new(SPIN);
        guest.memory.write(2 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        guest.vcpu.nmi().unwrap();
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
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
            // SAFETY: no guest runs.
            unsafe { vm.set_user_memory_region(region).unwrap() }
        };
        set(0, 4096);
        set(0, 0);
        set(0, 8192);
    }),
    (KVM_CAP_ADJUST_CLOCK, |flags| {
        let vm = vm();
        let mut clock = vm.get_clock().unwrap();
        assert_eq!(clock.flags, flags as u32);
        clock.clock += 1 << 50;
        vm.set_clock(&clock).unwrap();
        assert!(vm.get_clock().unwrap().clock >= clock.clock);
    }),
    (KVM_CAP_INTERNAL_ERROR_DATA, |_| {
        // vaddps ymm0, ymm0, ymm0: AVX is not offered.
        let mut guest = Guest::new(&[0xc5, 0xfc, 0x58, 0xc0]);
        guest.memory.write(6 * 4, &[0x00, 0x80, 0, 0]);
        loop {
            match guest.vcpu.run().unwrap() {
                VcpuExit::InternalError => break,
                VcpuExit::MmioRead(..) => {}
                other => panic!("{other:?}"),
            }
        }
        // SAFETY: the part of the union that the exit fills in.
        let internal = unsafe { guest.vcpu.get_kvm_run().__bindgen_anon_1.internal };
        assert_eq!(internal.suberror, KVM_INTERNAL_ERROR_EMULATION);
        assert_ne!(internal.ndata, 0);
    }),
    (KVM_CAP_VCPU_EVENTS, |_| {
        let guest = Guest::new(SPIN);
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        events.nmi.masked = 1;
        guest.vcpu.set_vcpu_events(&events).unwrap();
        assert_eq!(guest.vcpu.get_vcpu_events().unwrap().nmi.masked, 1);
    }),
    (KVM_CAP_SET_IDENTITY_MAP_ADDR, |_| {
        vm().set_identity_map_address(0xfffb_c000).unwrap();
    }),
    (KVM_CAP_DEBUGREGS, |_| {
        let guest = Guest::new(SPIN);
        let mut regs = guest.vcpu.get_debug_regs().unwrap();
        regs.db[1] = 0x1234;
        guest.vcpu.set_debug_regs(&regs).unwrap();
        assert_eq!(guest.vcpu.get_debug_regs().unwrap().db[1], 0x1234);
    }),
    (KVM_CAP_ENABLE_CAP, |_| {
        let (_, vcpu) = objects();
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_ENFORCE_PV_FEATURE_CPUID,
            ..Default::default()
        };
        vcpu.ioctl(abi::KVM_ENABLE_CAP, &raw const cap as u64)
            .unwrap();
        cap.cap = 10_000;
        let refused = vcpu.ioctl(abi::KVM_ENABLE_CAP, &raw const cap as u64);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }),
    (KVM_CAP_ENABLE_CAP_VM, |_| {
        assert_eq!(enable(&vm(), KVM_CAP_MAX_VCPU_ID, 7), 0);
    }),
    (KVM_CAP_XSAVE, |_| {
        let guest = Guest::new(SPIN);
        let xsave = guest.vcpu.get_xsave().unwrap();
        // SAFETY: none is needed.
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
    (KVM_CAP_GET_TSC_KHZ, |_| {
        assert!(Guest::new(SPIN).vcpu.get_tsc_khz().unwrap() > 1000);
    }),
    (KVM_CAP_MAX_VCPUS, |most| {
        let vm = vm();
        let vcpus: Vec<_> = (0..most as u64)
            .map(|id| vm.create_vcpu(id).unwrap())
            .collect();
        assert!(vm.create_vcpu(most as u64).is_err());
        drop(vcpus);
    }),
    (KVM_CAP_MAX_VCPU_ID, |end| {
        let vm = vm();
        vm.create_vcpu(end as u64 - 1).unwrap();
        assert!(vm.create_vcpu(end as u64).is_err());
    }),
    (KVM_CAP_TSC_DEADLINE_TIMER, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let mut lapic = guest.vcpu.get_lapic().unwrap();
        lapic.regs[0x322] = 4;
        guest.vcpu.set_lapic(&lapic).unwrap();
        let deadline = kvm_msr_entry {
            index: 0x6e0,
            data: u64::MAX >> 1,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[deadline]).unwrap();
        assert_eq!(guest.vcpu.set_msrs(&msrs).unwrap(), 1);
        msrs.as_mut_slice()[0].data = 0;
        assert_eq!(guest.vcpu.get_msrs(&mut msrs).unwrap(), 1);
        assert_eq!(msrs.as_slice()[0].data, deadline.data);
    }),
    (KVM_CAP_SYNC_REGS, |_| {
        let mut guest = Guest::new(&[0xf4]);
        guest.vcpu.set_sync_valid_reg(SyncReg::Register);
        guest.vcpu.run().unwrap();
        assert_eq!(guest.vcpu.sync_regs().regs.rip, CODE + 1);
    }),
    (KVM_CAP_KVMCLOCK_CTRL, |_| {
        let guest = halts(USE_CLOCK);
        guest.vcpu.kvmclock_ctrl().unwrap();
        assert!(Guest::new(SPIN).vcpu.kvmclock_ctrl().is_err());
    }),
    (KVM_CAP_READONLY_MEM, |_| {
        let mut guest = Guest::new(&[0xa2, 0x00, 0x30, 0xf4]);
        set_slot(&guest.vm, &guest.memory, 0, 0);
        let region = kvm_userspace_memory_region {
            flags: KVM_MEM_READONLY,
            memory_size: MEMORY as u64,
            userspace_addr: guest.memory.start as u64,
            ..Default::default()
        };
        // SAFETY: the guest may not even write.
        unsafe { guest.vm.set_user_memory_region(region).unwrap() };
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::MmioWrite(DATA, _)));
    }),
    (KVM_CAP_CHECK_EXTENSION_VM, |_| {
        let (vm, _) = objects();
        let Ok(Answer::Value(slots)) =
            vm.ioctl(abi::KVM_CHECK_EXTENSION, KVM_CAP_NR_MEMSLOTS.into())
        else {
            panic!()
        };
        assert!(slots > 0);
    }),
    (KVM_CAP_DISABLE_QUIRKS2, |quirks| {
        assert_eq!(enable(&vm(), KVM_CAP_DISABLE_QUIRKS2, quirks as u64), 0);
    }),
    (KVM_CAP_IMMEDIATE_EXIT, |_| {
        let mut guest = Guest::new(SPIN);
        guest.vcpu.set_kvm_immediate_exit(1);
        assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
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
    (KVM_CAP_SET_BOOT_CPU_ID, |_| {
        let (vm, _) = create(&Object::system(), abi::KVM_CREATE_VM, 0);
        vm.ioctl(abi::KVM_CREATE_IRQCHIP, 0).unwrap();
        vm.ioctl(abi::KVM_SET_BOOT_CPU_ID, 1).unwrap();
        let states = [0, 1].map(|id| {
            let (Object::Vcpu(vcpu), _) = create(&vm, abi::KVM_CREATE_VCPU, id) else {
                panic!()
            };
            vcpu.get_mp_state().unwrap()
        });
        let runnable = states.map(|state| state.mp_state == KVM_MP_STATE_RUNNABLE);
        assert_eq!(runnable, [false, true]);
    }),
    (KVM_CAP_COALESCED_PIO, |_| {
        coalesces(IoEventAddress::Pio(0x10))
    }),
    (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, |options| {
        assert_eq!(
            enable(&vm(), KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, options as u64),
            0
        );
    }),
    (KVM_CAP_ENFORCE_PV_FEATURE_CPUID, |_| {
        let mut guest = Guest::new(USE_CLOCK);
        let cap = |on| {
            let mut cap = kvm_enable_cap {
                cap: KVM_CAP_ENFORCE_PV_FEATURE_CPUID,
                ..Default::default()
            };
            cap.args[0] = on;
            cap
        };
        guest.vcpu.enable_cap(&cap(1)).unwrap();
        // The handler of #GP, which halts.
        guest.memory.write(13 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
        guest.vcpu.enable_cap(&cap(0)).unwrap();
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(
            guest.vcpu.get_regs().unwrap().rip,
            CODE + USE_CLOCK.len() as u64
        );
    }),
    (KVM_CAP_DIRTY_LOG_RING, rings::<KVM_CAP_DIRTY_LOG_RING>),
    (
        KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
        rings::<KVM_CAP_DIRTY_LOG_RING_ACQ_REL>,
    ),
    (KVM_CAP_SREGS2, |_| {
        let (_, vcpu) = objects();
        let mut sregs = kvm_sregs2::default();
        let address = &raw mut sregs as u64;
        vcpu.ioctl(abi::KVM_GET_SREGS2, address).unwrap();
        vcpu.ioctl(abi::KVM_SET_SREGS2, address).unwrap();
        assert_ne!(sregs.apic_base, 0);
    }),
    (KVM_CAP_EXIT_HYPERCALL, |hypercalls| {
        assert_eq!(enable(&vm(), KVM_CAP_EXIT_HYPERCALL, hypercalls as u64), 0);
    }),
    (KVM_CAP_BINARY_STATS_FD, |_| {
        assert!(!vm().get_stats_fd().unwrap().values().unwrap().is_empty());
    }),
    (KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, |_| {
        // KVM allows this to threads with CAP_SYS_BOOT.
        let answer = enable(&vm(), KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, 0);
        assert!([0, libc::EPERM].contains(&answer), "{answer}");
    }),
    (KVM_CAP_MMU_SHADOW_CACHE_CONTROL, |_| {
        let (vm, _) = objects();
        vm.ioctl(abi::KVM_SET_NR_MMU_PAGES, 64).unwrap();
    }),
    (KVM_CAP_USER_MEMORY2, |_| {
        let (vm, memory) = (vm(), Memory::new(4096));
        let region = kvm_userspace_memory_region2 {
            memory_size: 4096,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        // SAFETY: no guest runs.
        unsafe { vm.set_user_memory_region2(region).unwrap() };
    }),
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
        protected().create_guest_memfd(memory).unwrap();
    }),
    (KVM_CAP_VM_TYPES, |types| {
        for vm_type in (0..32).filter(|bit| types >> bit & 1 != 0) {
            Kvm::new().unwrap().create_vm_with_type(vm_type).unwrap();
        }
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
    (KVM_CAP_VAPIC, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let (_, without_apic) = objects();
        let vapic = kvm_vapic_addr { vapic_addr: DATA };
        let address = &raw const vapic as u64;
        let refused = without_apic.ioctl(abi::KVM_SET_VAPIC_ADDR, address);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
        drop(guest);
    }),
    (KVM_CAP_TSC_CONTROL, |_| {
        let (_, vcpu) = objects();
        vcpu.ioctl(abi::KVM_SET_TSC_KHZ, 1_000_000).unwrap();
        let khz = vcpu.ioctl(abi::KVM_GET_TSC_KHZ, 0);
        assert!(matches!(khz, Ok(Answer::Value(1_000_000))));
    }),
    (KVM_CAP_VM_TSC_CONTROL, |_| {
        let (vm, _) = objects();
        vm.ioctl(abi::KVM_SET_TSC_KHZ, 1_000_000).unwrap();
        let (vcpu, _) = create(&vm, abi::KVM_CREATE_VCPU, 1);
        let khz = vcpu.ioctl(abi::KVM_GET_TSC_KHZ, 0);
        assert!(matches!(khz, Ok(Answer::Value(1_000_000))));
    }),
    (KVM_CAP_DISABLE_QUIRKS, |_| {
        assert_eq!(enable(&vm(), KVM_CAP_DISABLE_QUIRKS, u64::MAX), 0);
    }),
    (KVM_CAP_VCPU_ATTRIBUTES, |_| {
        let (_, vcpu) = objects();
        let mut offset = 0u64;
        let mut attribute = kvm_device_attr {
            group: KVM_VCPU_TSC_CTRL,
            attr: KVM_VCPU_TSC_OFFSET.into(),
            addr: &raw mut offset as u64,
            ..Default::default()
        };
        let address = &raw mut attribute as u64;
        for request in [
            abi::KVM_HAS_DEVICE_ATTR,
            abi::KVM_GET_DEVICE_ATTR,
            abi::KVM_SET_DEVICE_ATTR,
        ] {
            vcpu.ioctl(request, address).unwrap();
        }
        assert_ne!(offset, 0);
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
    (KVM_CAP_NESTED_STATE, |size| {
        let (_, vcpu) = objects();
        let mut state = vec![0u64; size as usize / 8];
        state[0] = (size as u64 - 1) << 32;
        let address = state.as_mut_ptr() as u64;
        let refused = vcpu.ioctl(abi::KVM_GET_NESTED_STATE, address);
        assert_eq!(refused.unwrap_err().errno(), libc::E2BIG);
        // The first call has stored the size that the state needs.
        vcpu.ioctl(abi::KVM_GET_NESTED_STATE, address).unwrap();
        vcpu.ioctl(abi::KVM_SET_NESTED_STATE, address).unwrap();
        state[0] |= u64::from(KVM_STATE_NESTED_GUEST_MODE);
        let refused = vcpu.ioctl(abi::KVM_SET_NESTED_STATE, address);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }),
    (KVM_CAP_MSR_PLATFORM_INFO, |_| {
        // mov ecx, 0xce; rdmsr; hlt
        let code = [0x66, 0xb9, 0xce, 0, 0, 0, 0x0f, 0x32, 0xf4];
        let mut guest = halts(&code);
        assert_eq!(guest.vcpu.get_regs().unwrap().rax, 1 << 31);
        assert_eq!(enable(&guest.vm, KVM_CAP_MSR_PLATFORM_INFO, 0), 0);
        guest.memory.write(13 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
    }),
    (KVM_CAP_EXCEPTION_PAYLOAD, |_| {
        // The handler of #PF, which halts.
        let mut guest = Guest::new(SPIN);
        guest.memory.write(14 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
        (events.exception.pending, events.exception.nr) = (1, 14);
        (events.exception_has_payload, events.exception_payload) = (1, 0x1234);
        let refused = guest.vcpu.set_vcpu_events(&events);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
        assert_eq!(enable(&guest.vm, KVM_CAP_EXCEPTION_PAYLOAD, 1), 0);
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
        assert_eq!(enable(&guest.vm, KVM_CAP_X86_TRIPLE_FAULT_EVENT, 1), 0);
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
    (KVM_CAP_EXIT_ON_EMULATION_FAILURE, |_| {
        let vm = vm();
        let errno = enable(&vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 2);
        assert_eq!(errno, libc::EINVAL);
        assert_eq!(enable(&vm, KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1), 0);
    }),
    (KVM_CAP_X86_DISABLE_EXITS, |exits| {
        // sti; hlt: the halt lasts until the interrupt, whose handler writes a byte to a port.
        let mut guest = Guest::new(&[0xfb, 0xf4]);
        let refused = enable(&guest.vm, KVM_CAP_X86_DISABLE_EXITS, 1 << 8);
        assert_eq!(refused, libc::EINVAL);
        let allowed = enable(&guest.vm, KVM_CAP_X86_DISABLE_EXITS, exits as u64);
        assert_eq!(allowed, 0);
        guest.memory.write(0x20 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xe6, 0x10]);
        guest.vcpu.get_kvm_run().request_interrupt_window = 1;
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::IrqWindowOpen), "{exit:?}");
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE + 2);
        guest.vcpu.get_kvm_run().request_interrupt_window = 0;
        guest.vcpu.interrupt(0x20).unwrap();
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
    }),
    (KVM_CAP_X86_USER_SPACE_MSR, |_| {
        // mov ecx, 0x12345678; rdmsr; hlt
        let code = [0x66, 0xb9, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x32, 0xf4];
        let mut guest = Guest::new(&code);
        let reasons = KVM_MSR_EXIT_REASON_UNKNOWN;
        assert_eq!(
            enable(&guest.vm, KVM_CAP_X86_USER_SPACE_MSR, reasons.into()),
            0
        );
        match guest.vcpu.run().unwrap() {
            VcpuExit::X86Rdmsr(read) => {
                assert_eq!((read.index, *read.error), (0x1234_5678, 0));
                assert_eq!(read.reason.bits(), reasons);
                *read.data = 7 << 32 | 8;
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        let regs = guest.vcpu.get_regs().unwrap();
        assert_eq!((regs.rdx, regs.rax), (7, 8));
        let errno = enable(&guest.vm, KVM_CAP_X86_USER_SPACE_MSR, 8);
        assert_eq!(errno, libc::EINVAL);
    }),
    (KVM_CAP_X86_MSR_FILTER, |_| {
        let (vm, _) = objects();
        let filter = kvm_msr_filter::default();
        let address = &raw const filter as u64;
        vm.ioctl(abi::KVM_X86_SET_MSR_FILTER, address).unwrap();
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
];

/// mov [DATA], al; hlt
const WRITE_AND_HALT: &[u8] = &[0xa2, 0x00, 0x30, 0xf4];

fn protected() -> VmFd {
    let kvm = Kvm::new().unwrap();
    kvm.create_vm_with_type(KVM_X86_SW_PROTECTED_VM.into())
        .unwrap()
}

fn make_private(vm: &VmFd) {
    let private = kvm_memory_attributes {
        address: DATA,
        size: 4096,
        attributes: KVM_MEMORY_ATTRIBUTE_PRIVATE.into(),
        flags: 0,
    };
    vm.set_memory_attributes(private).unwrap();
}

fn coalesces(address: IoEventAddress) {
    // mov [0x8000], al; out 0x10, al; hlt
    let mut guest = Guest::new(&[0xa2, 0x00, 0x80, 0xe6, 0x10, 0xf4]);
    guest.vm.register_coalesced_mmio(address, 1).unwrap();
    let exits = std::iter::from_fn(|| match guest.vcpu.run().unwrap() {
        VcpuExit::Hlt => None,
        _ => Some(()),
    });
    assert_eq!(exits.count(), 1, "the other access");
    guest.vcpu.map_coalesced_mmio_ring().unwrap();
    assert!(guest.vcpu.coalesced_mmio_read().unwrap().is_some());
}

fn rings<const CAP: u32>(size: i32) {
    let vm = vm();
    assert_eq!(enable(&vm, CAP, size as u64), 0);
    vm.create_vcpu(0).unwrap();
    assert_eq!(vm.reset_dirty_rings().unwrap(), 0);
    assert_ne!(enable(&self::vm(), CAP, size as u64 * 2), 0);
}

#[test]
fn what_is_claimed_works_and_what_works_is_claimed() {
    let (kvm, protected) = (Kvm::new().unwrap(), protected());
    let uses: BTreeMap<u32, fn(i32)> = USES.iter().copied().collect();
    assert_eq!(uses.len(), USES.len(), "one entry for each");
    let mut without_entry = Vec::new();
    for cap in 0..1000 {
        let of_system = kvm.check_extension_raw(cap.into());
        let claimed = match of_system {
            0 => protected.check_extension_raw(cap.into()),
            value => value,
        };
        match (claimed, uses.get(&cap)) {
            (0, None) => {}
            (0, Some(_)) => panic!("capability {cap} works, and is not claimed"),
            (_, None) => without_entry.push(cap),
            (value, Some(use_it)) => {
                println!("capability {cap}: {value}");
                use_it(value);
            }
        }
    }
    assert!(
        without_entry.is_empty(),
        "claimed, and not used here: {without_entry:?}"
    );
}

/// KVM_CLOCK_REALTIME adds the time that has passed since then, and never subtracts.
#[test]
fn a_clock_goes_on_from_a_moment_of_the_wall_clock() {
    const SECOND: u64 = 1_000_000_000;
    let vm = vm();
    let now = vm.get_clock().unwrap();
    for (back, expected) in [
        (100 * SECOND, 100 * SECOND),
        (0u64.wrapping_sub(100 * SECOND), 0),
    ] {
        let data = kvm_clock_data {
            clock: 1 << 50,
            flags: KVM_CLOCK_REALTIME,
            realtime: now.realtime.wrapping_sub(back),
            ..Default::default()
        };
        vm.set_clock(&data).unwrap();
        let since = vm.get_clock().unwrap().clock - (1 << 50);
        assert!(
            (expected..expected + 30 * SECOND).contains(&since),
            "{back}: {since}"
        );
    }
    let unknown = kvm_clock_data {
        flags: 1 << 5,
        ..Default::default()
    };
    assert_eq!(vm.set_clock(&unknown).unwrap_err().errno(), libc::EINVAL);
}

/// The page of the guest's clock follows KVM_SET_CLOCK.
#[test]
fn a_guest_sees_the_clock_that_was_set() {
    let mut guest = halts(USE_CLOCK);
    let nanoseconds = |guest: &Guest| {
        let mut bytes = [0; 8];
        guest.memory.read(DATA + 16, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    assert!(nanoseconds(&guest) < 1 << 50);
    let data = kvm_clock_data {
        clock: 1 << 50,
        ..Default::default()
    };
    guest.vm.set_clock(&data).unwrap();
    assert!(matches!(guest.vcpu.run(), Ok(_) | Err(_)));
    assert!(nanoseconds(&guest) >= 1 << 50);
}
