//! Tests coalesced I/O, and KVM_PRE_FAULT_MEMORY.

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{IoEventAddress, NoDatamatch, VcpuExit};
use vmm_sys_util::eventfd::EventFd;

#[test]
fn writes_to_a_zone_wait_in_the_ring() {
    // mov dx,0x10; 1: mov [0x8000],al; out dx,al; inc al; jmp 1b
    let code = [
        0xba, 0x10, 0, 0xa2, 0x00, 0x80, 0xee, 0xfe, 0xc0, 0xeb, 0xf8,
    ];
    let mut guest = Guest::new(&code);
    let (mmio, pio) = (IoEventAddress::Mmio(DEVICE), IoEventAddress::Pio(0x10));
    guest.vm.register_coalesced_mmio(mmio, 4).unwrap();
    guest.vm.register_coalesced_mmio(pio, 1).unwrap();
    guest.vcpu.map_coalesced_mmio_ring().unwrap();
    // The ring has 170 entries, one of which stays free. So it holds 85 rounds of two writes, minus one write.
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, [84])), "{exit:?}");
    for turn in 0..169u64 {
        let entry = guest.vcpu.coalesced_mmio_read().unwrap().unwrap();
        // SAFETY: both fields of the union are integers of one size.
        let port = unsafe { entry.__bindgen_anon_1.pio };
        let found = (entry.phys_addr, entry.len, port, entry.data[0]);
        let address = if turn % 2 == 0 { DEVICE } else { 0x10 };
        assert_eq!(found, (address, 1, (turn % 2) as u32, (turn / 2) as u8));
    }
    assert!(guest.vcpu.coalesced_mmio_read().unwrap().is_none());
    guest.vm.unregister_coalesced_mmio(mmio, 4).unwrap();
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::MmioWrite(DEVICE, [85])));
    guest.vm.unregister_coalesced_mmio(pio, 1).unwrap();
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, [85])));
}

#[test]
fn all_vcpus_have_the_same_ring() {
    // mov [0x8000],al; hlt
    let mut guest = Guest::new(&[0xa2, 0x00, 0x80, 0xf4]);
    let mut other = guest.vm.create_vcpu(1).unwrap();
    let zone = IoEventAddress::Mmio(DEVICE);
    guest.vm.register_coalesced_mmio(zone, 1).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    // The ring is in the third page of the vCPU's mapping, and its field `last` is at offset 4.
    let run: *const kvm_run = other.get_kvm_run();
    // SAFETY: the address is within the vCPU's mapping of three pages.
    let last = unsafe { run.cast::<u8>().add(2 * 4096 + 4).cast::<u32>().read() };
    assert_eq!(last, 1);
    other.map_coalesced_mmio_ring().unwrap();
    assert!(other.coalesced_mmio_read().unwrap().is_some());
}

#[test]
fn a_zone_is_of_memory_or_of_ports() {
    let vm = create(&Object::system(), KVM_CREATE_VM, 0).0;
    let mut zone = kvm_coalesced_mmio_zone::default();
    zone.__bindgen_anon_1.pio = 2;
    for request in [KVM_REGISTER_COALESCED_MMIO, KVM_UNREGISTER_COALESCED_MMIO] {
        let refused = vm.ioctl(request, &raw const zone as u64).unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL);
        assert_eq!(vm.ioctl(request, 8).unwrap_err().errno(), libc::EFAULT);
    }
}

#[test]
fn memory_may_be_mapped_ahead_of_its_use() {
    let guest = Guest::new(&[0xf4]);
    let ask = |gpa, size, flags| {
        let mut range = kvm_pre_fault_memory {
            gpa,
            size,
            flags,
            ..Default::default()
        };
        let answer = guest.vcpu.pre_fault_memory(&mut range);
        (answer.map_err(|error| error.errno()), range.gpa, range.size)
    };
    assert_eq!(ask(0, 0x1000, 1).0, Err(libc::EINVAL));
    assert_eq!(ask(0, 0, 0).0, Err(libc::EINVAL));
    assert_eq!(ask(0x10, 0x1000, 0).0, Err(libc::EINVAL));
    assert_eq!(ask(0, 0x10, 0).0, Err(libc::EINVAL));
    assert_eq!(ask(u64::MAX - 0xfff, 0x1000, 0).0, Err(libc::EINVAL));
    assert_eq!(ask(0x1000, 0x2000, 0), (Ok(()), 0x3000, 0));
    // KVM_PRE_FAULT_MEMORY maps the part that is in a memslot. The next call, for the rest, fails.
    assert_eq!(ask(0x3000, 0x3000, 0), (Ok(()), 0x4000, 0x2000));
    assert_eq!(ask(0x4000, 0x2000, 0), (Err(libc::ENOENT), 0x4000, 0x2000));
    let beyond = 1 << 52;
    assert_eq!(ask(beyond, 0x1000, 0).0, Err(libc::ENOENT));
    let gone = guest.memory.range(DATA);
    slat_kvm::notify::around(gone.clone(), || {
        guest.memory.take_away(DATA);
        slat_host::mappings::changed(gone);
    });
    assert_eq!(ask(DATA, 0x1000, 0).0, Err(libc::EFAULT));
}

#[test]
fn a_range_to_map_is_given_and_given_back_by_pointer() {
    let vm = create(&Object::system(), KVM_CREATE_VM, 0).0;
    let vcpu = create(&vm, KVM_CREATE_VCPU, 0).0;
    let refused = vcpu.ioctl(KVM_PRE_FAULT_MEMORY, 8).unwrap_err();
    assert_eq!(refused.errno(), libc::EFAULT);
    let mut range = kvm_pre_fault_memory {
        size: 4096,
        ..Default::default()
    };
    let refused = vcpu.ioctl(KVM_PRE_FAULT_MEMORY, &raw mut range as u64);
    assert_eq!(refused.unwrap_err().errno(), libc::ENOENT);
}

/// KVM's bus offers an access first to the range with the lower start. If two ranges have the same start, it offers
/// the access first to the shorter range.
#[test]
fn a_zone_and_an_eventfd_at_one_address_have_the_order_of_kvms_bus() {
    // mov [0x8000],al; mov [0x8004],al; hlt
    let mut guest = Guest::new(&[0xa2, 0x00, 0x80, 0xa2, 0x04, 0x80, 0xf4]);
    let events = [(); 2].map(|()| EventFd::new(libc::EFD_NONBLOCK).unwrap());
    for (event, offset) in events.iter().zip([0, 4]) {
        let place = IoEventAddress::Mmio(DEVICE + offset);
        guest
            .vm
            .register_ioevent(event, &place, NoDatamatch)
            .unwrap();
    }
    let zone = IoEventAddress::Mmio(DEVICE);
    guest.vm.register_coalesced_mmio(zone, 8).unwrap();
    guest.vcpu.map_coalesced_mmio_ring().unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(events[0].read().unwrap(), 1);
    assert!(events[1].read().is_err(), "the zone begins before it");
    let entry = guest.vcpu.coalesced_mmio_read().unwrap().unwrap();
    assert_eq!(entry.phys_addr, DEVICE + 4);
    assert!(guest.vcpu.coalesced_mmio_read().unwrap().is_none());
}

/// As on KVM's bus, a controller's range has to contain the whole access.
#[test]
fn an_access_that_exceeds_a_controllers_ports_is_the_clients() {
    // mov dx,0x20; out dx,ax; out dx,eax; mov dx,0x43; out dx,ax; mov dx,0x40; out dx,eax; mov dx,0x61; in ax,dx;
    // inc dx; in al,dx
    let code = [
        0xba, 0x20, 0, 0xef, 0x66, 0xef, 0xba, 0x43, 0, 0xef, 0xba, 0x40, 0, 0x66, 0xef, 0xba,
        0x61, 0, 0xed, 0x42, 0xec,
    ];
    let mut guest = Guest::with(&code, |vm| {
        vm.create_irq_chip().unwrap();
        let flags = KVM_PIT_SPEAKER_DUMMY;
        let config = kvm_pit_config {
            flags,
            ..Default::default()
        };
        vm.create_pit2(config).unwrap();
    });
    let exit = guest.vcpu.run().unwrap();
    assert!(
        matches!(exit, VcpuExit::IoOut(0x20, [_, _, _, _])),
        "{exit:?}"
    );
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x43, [_, _])), "{exit:?}");
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoIn(0x62, [_])), "{exit:?}");
}
