//! Capabilities of interrupt controllers, irqfds and ioeventfds.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{IoEventAddress, NoDatamatch, VcpuExit, VmFd, abi};
use vmm_sys_util::eventfd::EventFd;

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

/// Code that writes 1 to port 0x30, and halts.
const OUT: &[u8] = &[0xb0, 1, 0xe6, 0x30, 0xf4];

/// Checks that a guest's write signals an eventfd that is registered for the value `value`.
fn signals<T: Into<u64>>(value: T) {
    let mut guest = Guest::new(OUT);
    let event = eventfd();
    let port = IoEventAddress::Pio(0x30);
    guest.vm.register_ioevent(&event, &port, value).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(event.read().unwrap(), 1);
}

pub const USES: &[Use] = &[
    (KVM_CAP_ASYNC_PF, |_| {
        const ENABLE: u32 = 0x4b56_4d02;
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        assert!(set_msr(&guest.vcpu, ENABLE, DATA | 1));
        assert!(!set_msr(&guest.vcpu, ENABLE, DATA | 1 << 4 | 1), "reserved");
        let guest = Guest::new(SPIN);
        assert!(set_msr(&guest.vcpu, ENABLE, DATA | 1), "without local APIC");
    }),
    (KVM_CAP_ASYNC_PF_INT, |_| {
        const VECTOR: u32 = 0x4b56_4d06;
        const ACKNOWLEDGE: u32 = 0x4b56_4d07;
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        assert!(set_msr(&guest.vcpu, VECTOR, 0x20));
        assert!(!set_msr(&guest.vcpu, VECTOR, 0x100));
        assert!(set_msr(&guest.vcpu, ACKNOWLEDGE, 1));
    }),
    (KVM_CAP_IRQCHIP, |_| {
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_IOAPIC,
            ..Default::default()
        };
        pc().get_irqchip(&mut chip).unwrap();
        // SAFETY: GET_IRQCHIP has filled in this part of the union.
        assert_eq!(unsafe { chip.chip.ioapic.base_address }, 0xfec0_0000);
    }),
    (KVM_CAP_X86_SMM, |_| {
        // Writes the handler of an SMI to the second address space: mov al, 2; out 0x31, al; rsm.
        let (mut guest, smram) = (Guest::new(OUT), Memory::new(0x1_0000));
        smram.write(0x8000, &[0xb0, 2, 0xe6, 0x31, 0x0f, 0xaa]);
        let region = kvm_userspace_memory_region {
            slot: 1 << 16,
            guest_phys_addr: 0x3_0000,
            memory_size: smram.len as u64,
            userspace_addr: smram.start as u64,
            ..Default::default()
        };
        // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
        unsafe { guest.vm.set_user_memory_region(region).unwrap() };
        guest.vcpu.smi().unwrap();
        assert!(matches!(
            guest.vcpu.run().unwrap(),
            VcpuExit::IoOut(0x31, [2])
        ));
        assert!(matches!(
            guest.vcpu.run().unwrap(),
            VcpuExit::IoOut(0x30, [1])
        ));
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
        assert_eq!(enable(&vm, KVM_CAP_SPLIT_IRQCHIP, 24), Ok(()));
        assert_eq!(enable(&vm, KVM_CAP_SPLIT_IRQCHIP, 24), Err(libc::EEXIST));
        vm.create_vcpu(0).unwrap().get_lapic().unwrap();
        let missing = vm.get_irqchip(&mut kvm_irqchip::default());
        assert_eq!(missing.unwrap_err().errno(), libc::ENXIO);
    }),
    (KVM_CAP_X2APIC_API, |flags| {
        let vm = vm();
        assert_eq!(enable(&vm, KVM_CAP_X2APIC_API, flags as u64), Ok(()));
        let unknown = flags as u64 + 1;
        assert_eq!(enable(&vm, KVM_CAP_X2APIC_API, unknown), Err(libc::EINVAL));
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
    (KVM_CAP_USER_NMI, |_| {
        // The handler of the NMI, at 0x2000, halts.
        let mut guest = Guest::new(SPIN);
        guest.memory.write(2 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        guest.vcpu.nmi().unwrap();
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
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
    (KVM_CAP_MP_STATE, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let halted = kvm_mp_state {
            mp_state: KVM_MP_STATE_HALTED,
        };
        guest.vcpu.set_mp_state(halted).unwrap();
        assert_eq!(guest.vcpu.get_mp_state().unwrap(), halted);
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
];
