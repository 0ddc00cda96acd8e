//! Calls of clients: they create controllers, set attributes, save and restore state.

use super::*;

#[test]
fn the_client_chooses_the_timers_ppis_until_a_vcpu_runs() {
    let mut gic = Gic::new(V3, 1);
    let mut ppi = 20u64;
    let timer = |attr: u32, value: &mut u64| attribute(KVM_ARM_VCPU_TIMER_CTRL, attr.into(), value);
    let change = |vcpu: &VcpuFd, attr, value: &mut u64| {
        vcpu.set_device_attr(&timer(attr, value))
            .map_err(|error| error.errno())
    };
    let vcpu = &gic.vcpus[0];
    vcpu.has_device_attr(&timer(KVM_ARM_VCPU_TIMER_IRQ_PTIMER, &mut ppi))
        .unwrap();
    let virtual_timer = KVM_ARM_VCPU_TIMER_IRQ_VTIMER;
    assert_eq!(change(vcpu, virtual_timer, &mut 15), Err(libc::EINVAL));
    assert_eq!(change(vcpu, 7, &mut ppi), Err(libc::ENXIO));
    change(vcpu, virtual_timer, &mut ppi).unwrap();
    gic.set(0, 24, 1 << 20);
    gic.set(0, 25, 1000);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 20);
    assert_eq!(
        change(&gic.vcpus[0], virtual_timer, &mut ppi),
        Err(libc::EBUSY)
    );
}

#[test]
fn a_client_does_not_drive_the_ppis_of_the_timers() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 24, 1 << 27 | 1 << 20);
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    let ppi = KVM_ARM_IRQ_TYPE_PPI << KVM_ARM_IRQ_TYPE_SHIFT;
    gic.guest.vm.set_irq_line(ppi | 27, true).unwrap();
    gic.guest.vm.set_irq_line(ppi | 20, true).unwrap();
    let group = KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO;
    assert_eq!(get_attribute(&gic.device, group, 0), Ok(1 << 20));
}

#[test]
fn a_client_repairs_timers_with_the_same_ppi() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    let change = |vcpu: &VcpuFd, mut ppi: u64| {
        let virtual_timer = KVM_ARM_VCPU_TIMER_IRQ_VTIMER.into();
        let attribute = attribute(KVM_ARM_VCPU_TIMER_CTRL, virtual_timer, &mut ppi);
        vcpu.set_device_attr(&attribute)
            .map_err(|error| error.errno())
    };
    change(&gic.vcpus[0], 30).unwrap();
    assert_eq!(gic.vcpus[0].run().unwrap_err().errno(), libc::EINVAL);
    change(&gic.vcpus[0], 27).unwrap();
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
}

#[test]
fn a_gicv3_names_vcpus_by_all_fields_of_their_affinity() {
    let vm = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    let device = create(&vm, V3).unwrap();
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init).unwrap();
    let vcpus = [0, 1].map(|id| vm.create_vcpu(id).unwrap());
    for vcpu in &vcpus {
        vcpu.vcpu_init(&init).unwrap();
    }
    // vCPU 1 differs from vCPU 0 in Aff3 only.
    set(&vcpus[1], system(3, 0, 0, 0, 5), 1 << 32 | 1 << 31);
    place(V3, &device);
    let group = KVM_DEV_ARM_VGIC_GRP_REDIST_REGS;
    let number = |affinity: u64| {
        let typer = get_attribute(&device, group, affinity << 32 | 8);
        typer.map(|typer| typer >> 8 & 0xffff)
    };
    assert_eq!(number(0), Ok(0));
    assert_eq!(number(1 << 24), Ok(1));
    assert_eq!(number(1), Err(libc::EINVAL));
}

/// The registers of GICv3 that a client saves for one vCPU, in the order in which it restores them: group and
/// attribute.
fn saved_registers() -> Vec<(u32, u64)> {
    let sysreg = |crn: u64, crm: u64, op2: u64| 3 << 14 | crn << 7 | crm << 3 | op2;
    let redistributor = [0x10080, 0x10100, 0x10200, 0x10300, 0x10c04];
    let distributor = [0x84, 0x104, 0x204, 0x304, 0xc08, 0xc0c, 0];
    let interface = [
        sysreg(12, 12, 5),
        sysreg(12, 12, 4),
        sysreg(4, 6, 0),
        sysreg(12, 12, 3),
        sysreg(12, 9, 0),
        sysreg(12, 12, 7),
    ];
    let priorities = (0..8).map(|n| 0x420 + 4 * n);
    let all = |group, of: Vec<u64>| of.into_iter().map(move |attr| (group, attr));
    all(KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, redistributor.to_vec())
        .chain(all(KVM_DEV_ARM_VGIC_GRP_DIST_REGS, priorities.collect()))
        .chain(all(KVM_DEV_ARM_VGIC_GRP_DIST_REGS, distributor.to_vec()))
        .chain(all(KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, interface.to_vec()))
        .collect()
}

#[test]
fn pending_and_active_interrupts_continue_in_another_vm() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 23, 1 << 1 | 1 << 2);
    gic.line(33, true);
    // The guest has acknowledged one interrupt, which is active, and another one is pending.
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    gic.line(34, true);
    gic.vcpus[0].set_kvm_immediate_exit(1);
    assert_eq!(gic.vcpus[0].run().unwrap_err().errno(), libc::EINTR);
    let registers = saved_registers();
    let saved = registers.iter().map(|(group, attr)| {
        let value = get_attribute(&gic.device, *group, *attr);
        (*group, *attr, value.unwrap())
    });
    let saved: Vec<_> = saved.collect();
    let value = |of| saved.iter().find(|(_, attr, _)| *attr == of).unwrap().2;
    assert_eq!((value(0x204), value(0x304)), (1 << 2, 1 << 1));

    let mut other = Gic::new(V3, 1);
    let mut list = RegList::new(500).unwrap();
    gic.vcpus[0].get_reg_list(&mut list).unwrap();
    for id in list.as_slice() {
        let mut value = [0; 16];
        let len = gic.vcpus[0].get_one_reg(*id, &mut value).unwrap();
        other.vcpus[0].set_one_reg(*id, &value[..len]).unwrap();
    }
    for (group, attr, value) in saved {
        set_attribute(&other.device, group, attr, value).unwrap();
    }
    assert_eq!(acknowledged(&mut other.vcpus[0]), 34);
    assert_eq!(get(&other.vcpus[0], X0), 34);
}

#[test]
fn creating_and_addressing_controllers_fails_as_in_kvm() {
    let kvm = Kvm::new().unwrap();
    assert!(kvm.check_extension(Cap::Irqchip));
    let vm = kvm.create_vm_with_ipa_size(40).unwrap();
    let device = create(&vm, V3).unwrap();
    assert_eq!(create(&vm, V3).unwrap_err(), libc::EEXIST);
    assert_eq!(create(&vm, V2).unwrap_err(), libc::EEXIST);
    assert_eq!(vm.create_irq_chip().unwrap_err().errno(), libc::EEXIST);
    let group = KVM_DEV_ARM_VGIC_GRP_ADDR;
    let distributor = KVM_VGIC_V3_ADDR_TYPE_DIST.into();
    let set = |address| set_attribute(&device, group, distributor, address);
    assert_eq!(set(DISTRIBUTOR + 0x1000), Err(libc::EINVAL));
    assert_eq!(set(1 << 40), Err(libc::E2BIG));
    assert_eq!(set(DISTRIBUTOR), Ok(()));
    assert_eq!(set(DISTRIBUTOR), Err(libc::EEXIST));
    assert_eq!(get_attribute(&device, group, distributor), Ok(DISTRIBUTOR));
    let v2 = KVM_VGIC_V2_ADDR_TYPE_CPU.into();
    assert_eq!(set_attribute(&device, group, v2, 0), Err(libc::ENXIO));
    assert_eq!(set_attribute(&device, 77, 0, 0), Err(libc::ENXIO));
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init).unwrap();
    vcpu.vcpu_init(&init).unwrap();
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::ENXIO);
    let redistributors = KVM_VGIC_V3_ADDR_TYPE_REDIST.into();
    set_attribute(&device, group, redistributors, INTERFACES).unwrap();
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::EBUSY);
    let fd = EventFd::new(0).unwrap();
    assert_eq!(vm.register_irqfd(&fd, 1).unwrap_err().errno(), libc::EAGAIN);
    let spi = KVM_ARM_IRQ_TYPE_SPI << KVM_ARM_IRQ_TYPE_SHIFT;
    let raise = |line| vm.set_irq_line(line, true).unwrap_err().errno();
    assert_eq!(raise(spi | 33), libc::EBUSY);
    let init = KVM_DEV_ARM_VGIC_CTRL_INIT.into();
    set_attribute(&device, KVM_DEV_ARM_VGIC_GRP_CTRL, init, 0).unwrap();
    assert_eq!(vm.create_vcpu(1).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(raise(spi | 31), libc::EINVAL);
    assert_eq!(raise(spi | 1000), libc::EINVAL);
    let ppi = KVM_ARM_IRQ_TYPE_PPI << KVM_ARM_IRQ_TYPE_SHIFT;
    assert_eq!(raise(ppi | 15), libc::EINVAL);
    assert_eq!(raise(ppi | 1 << KVM_ARM_IRQ_VCPU_SHIFT | 20), libc::EINVAL);
    assert_eq!(raise(0), libc::ENXIO, "a processor's line");
}

#[test]
fn a_gicv2_has_eight_vcpus() {
    let vm = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    vm.create_irq_chip().unwrap();
    let vcpus: Vec<_> = (0..8).map(|id| vm.create_vcpu(id).unwrap()).collect();
    assert_eq!(vm.create_vcpu(8).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(vcpus.len(), 8);
    let more = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    let _vcpus: Vec<_> = (0..9).map(|id| more.create_vcpu(id).unwrap()).collect();
    assert_eq!(create(&more, V2).unwrap_err(), libc::E2BIG);
}
