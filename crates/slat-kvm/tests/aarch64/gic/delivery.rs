//! Interrupts that guests take.

use super::*;

#[test]
fn all_vcpus_see_whether_the_gic_has_system_registers() {
    for (model, expected) in [(Some(V3), 1), (Some(V2), 0), (None, 0)] {
        let code = code!(slat_test_gic_field, slat_test_gic_field_end);
        let guest = Guest::new(code);
        let device = model.map(|model| create(&guest.vm, model).unwrap());
        let mut first = guest.vcpu(0, 0);
        let mut second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
        if let (Some(model), Some(device)) = (model, &device) {
            place(model, device);
        }
        std::thread::scope(|scope| {
            let second = scope.spawn(|| acknowledged(&mut second));
            assert_eq!(acknowledged(&mut first), expected, "{model:?}");
            assert_eq!(second.join().unwrap(), expected, "{model:?}");
        });
    }
}

#[test]
fn a_vcpu_sends_sgis_to_itself_and_to_another() {
    // INTID 5 to both vCPUs: ICC_SGI1R_EL1, and GICD_SGIR. GICv2 shows the source, which is vCPU 0.
    for (model, sgi) in [(V3, 5 << 24 | 0b11), (V2, 5 | 0b11 << 16)] {
        let mut gic = Gic::new(model, 2);
        gic.set(0, 22, sgi);
        let [first, second] = &mut gic.vcpus[..] else {
            unreachable!();
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| acknowledged(second));
            assert_eq!(acknowledged(first), 5);
            assert_eq!(second.join().unwrap(), 5);
        });
    }
}

#[test]
fn a_line_wakes_a_waiting_vcpu() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        let mut vcpu = gic.vcpus.pop().unwrap();
        std::thread::scope(|scope| {
            let taken = scope.spawn(move || [acknowledged(&mut vcpu), acknowledged(&mut vcpu)]);
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(100));
                gic.line(33, true);
                gic.line(33, false);
            }
            assert_eq!(taken.join().unwrap(), [33, 33]);
        });
    }
}

#[test]
fn an_acknowledged_interrupt_is_not_taken_again() {
    let code = code!(slat_test_gic_nested, slat_test_gic_nested_end);
    let mut gic = Gic::with_code(V3, 1, code, |_| ());
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
}

#[test]
fn the_virtual_timer_ends_a_wfi() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 24, 1 << 27);
        gic.set(0, 25, 10_000);
        assert_eq!(acknowledged(&mut gic.vcpus[0]), 27);
        let run = gic.vcpus[0].get_kvm_run();
        // SAFETY: the registers are integers.
        assert_eq!(unsafe { run.s.regs.device_irq_level }, 0);
    }
}

#[test]
fn irqfds_are_interrupts() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        let fd = EventFd::new(0).unwrap();
        gic.guest.vm.register_irqfd(&fd, 1).unwrap();
        fd.write(1).unwrap();
        assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    }
}

#[test]
fn resampled_irqfds_learn_of_the_ends_of_their_interrupts() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        // INTID 33 is level-triggered.
        let group = KVM_DEV_ARM_VGIC_GRP_DIST_REGS;
        set_attribute(&gic.device, group, 0xc08, 0).unwrap();
        let (fd, resample) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let vm = &gic.guest.vm;
        vm.register_irqfd_with_resample(&fd, &resample, 1).unwrap();
        fd.write(1).unwrap();
        let vcpu = &mut gic.vcpus[0];
        assert_eq!(acknowledged(vcpu), 33);
        // The guest writes EOI, and waits. The client's device wants the line again.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(resample.read().unwrap(), 1);
                fd.write(1).unwrap();
            });
            assert_eq!(acknowledged(vcpu), 33);
        });
    }
}

#[test]
fn messages_become_lpis() {
    let mut gic = Gic::new(V3, 1);
    let _its = gic.add_its();
    let message = |flags, address: u64, data| kvm_msi {
        address_lo: address as u32,
        address_hi: (address >> 32) as u32,
        data,
        flags,
        devid: 1,
        ..Default::default()
    };
    let vm = &gic.guest.vm;
    let send = |message| vm.signal_msi(message).map_err(|error| error.errno());
    let valid = KVM_MSI_VALID_DEVID;
    let early = send(message(valid, TRANSLATER, 3));
    assert_eq!(early, Err(libc::EBUSY), "ITS disabled");
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 0, "the guest is ready");
    assert_eq!(send(message(0, TRANSLATER, 3)), Err(libc::EINVAL));
    assert_eq!(send(message(valid, DEVICE, 3)), Err(libc::EINVAL));
    assert_eq!(send(message(valid, TRANSLATER, 4)), Ok(0), "not mapped");
    assert_eq!(send(message(valid, TRANSLATER, 3)), Ok(1));
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
    // The same message by a route.
    let mut route = kvm_irq_routing_entry {
        gsi: 9,
        type_: KVM_IRQ_ROUTING_MSI,
        flags: KVM_MSI_VALID_DEVID,
        ..Default::default()
    };
    route.u.msi.address_lo = TRANSLATER as u32;
    route.u.msi.data = 3;
    route.u.msi.__bindgen_anon_1.devid = 1;
    let routes = KvmIrqRouting::from_entries(&[route]).unwrap();
    vm.set_gsi_routing(&routes).unwrap();
    let fd = EventFd::new(0).unwrap();
    vm.register_irqfd(&fd, 9).unwrap();
    fd.write(1).unwrap();
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
}

#[test]
fn a_dirty_ring_has_the_pages_that_an_its_writes() {
    const DIRTY: u32 = 1;
    let page_size = slat_host::page_size();
    let mut gic = Gic::with(V3, 1, |guest| {
        let mut ring = kvm_enable_cap {
            cap: KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
            ..Default::default()
        };
        ring.args[0] = page_size as u64;
        guest.vm.enable_cap(&ring).unwrap();
        // The memslot has a bitmap. Its next log is in the rings.
        for flags in [0, KVM_MEM_LOG_DIRTY_PAGES] {
            let slot = kvm_userspace_memory_region {
                slot: 0,
                flags,
                guest_phys_addr: CODE,
                memory_size: SIZE as u64,
                userspace_addr: guest.memory.address(),
            };
            // SAFETY: the memory lives as long as the VM.
            unsafe { guest.vm.set_user_memory_region(slot) }.unwrap();
        }
    });
    let _its = gic.add_its();
    // The LPI is pending in the table of vCPU 0. MAPTI takes the bit from the table.
    let pending = 0x5_0000 + 8193 / 8;
    gic.guest.memory.write(pending, &[1 << 1]);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 0, "the guest is ready");
    assert_eq!(gic.guest.memory.load(pending), 0);
    // SAFETY: the call makes a new mapping of the vCPU's descriptor, which has the ring at this offset.
    let ring = unsafe {
        let fd = gic.vcpus[0].as_raw_fd();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let offset = 64 * page_size as i64;
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            page_size,
            rights,
            libc::MAP_SHARED,
            fd,
            offset,
        );
        assert_ne!(mapped, libc::MAP_FAILED);
        std::slice::from_raw_parts(mapped.cast::<kvm_dirty_gfn>(), page_size / 16)
    };
    let page = (pending / page_size) as u64;
    let noted = ring.iter().filter(|entry| entry.flags == DIRTY);
    let noted: Vec<_> = noted.map(|entry| entry.offset).collect();
    assert!(noted.contains(&page), "{noted:x?}");
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
}

#[test]
fn a_vcpu_that_another_one_starts_has_quiet_timers() {
    let guest = Guest::new(code!(slat_test_gic_field, slat_test_gic_field_end));
    let device = create(&guest.vm, V3).unwrap();
    let mut first = guest.vcpu(0, 0);
    let second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    place(V3, &device);
    // The virtual timer of vCPU 1 has expired.
    set(&second, system(3, 3, 14, 3, 1), 1);
    let lines = || get_attribute(&device, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, 1 << 32);
    assert_eq!(lines(), Ok(1 << 27));
    assert_eq!(acknowledged(&mut first), 1);
    assert_eq!(get(&second, X0), 0);
    assert_eq!(lines(), Ok(0));
}
