//! Tests exits by the Rust API.

use crate::common::*;
use kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV;
use slat_kvm::{SyncReg, VcpuExit, VmFd};
use std::time::Duration;

#[test]
fn ports_devices_and_halt_come_out_and_go_on() {
    // mov dx,0x10; in al,dx; out dx,al; mov [0x8000],al; mov al,[0x8001]; out dx,al; hlt
    let code = [
        0xba, 0x10, 0, 0xec, 0xee, 0xa2, 0x00, 0x80, 0xa0, 0x01, 0x80, 0xee, 0xf4,
    ];
    let mut guest = Guest::new(&code);
    let vcpu = &mut guest.vcpu;
    let VcpuExit::IoIn(0x10, data) = vcpu.run().unwrap() else {
        panic!()
    };
    data[0] = 7;
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [7])));
    assert!(matches!(
        vcpu.run().unwrap(),
        VcpuExit::MmioWrite(DEVICE, [7])
    ));
    let VcpuExit::MmioRead(address, data) = vcpu.run().unwrap() else {
        panic!()
    };
    assert_eq!((address, data.len()), (DEVICE + 1, 1));
    data[0] = 9;
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x10, [9])));
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(vcpu.get_regs().unwrap().rip, CODE + code.len() as u64);
}

#[test]
fn a_port_access_shows_the_instruction_until_it_is_completed() {
    // in al,0x10; hlt
    let mut guest = Guest::new(&[0xe4, 0x10, 0xf4]);
    let VcpuExit::IoIn(_, data) = guest.vcpu.run().unwrap() else {
        panic!()
    };
    data[0] = 5;
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE);
    // A run with immediate_exit completes the access and returns.
    guest.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!((regs.rip, regs.rax & 0xff), (CODE + 2, 5));
}

#[test]
fn a_triple_fault_is_a_shutdown() {
    // lidt [0x1010] with a limit of 0; ud2
    let mut guest = Guest::new(&[0x0f, 0x01, 0x1e, 0x10, 0x10, 0x0f, 0x0b]);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Shutdown));
}

#[test]
fn registers_come_and_go_through_the_shared_page() {
    // inc ax; hlt
    let mut guest = Guest::new(&[0x40, 0xf4]);
    let vcpu = &mut guest.vcpu;
    vcpu.set_sync_valid_reg(SyncReg::Register);
    vcpu.sync_regs_mut().regs = vcpu.get_regs().unwrap();
    vcpu.sync_regs_mut().regs.rax = 41;
    vcpu.set_sync_dirty_reg(SyncReg::Register);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(vcpu.sync_regs().regs.rax, 42);
    vcpu.get_kvm_run().kvm_valid_regs = 1 << 40;
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn an_interrupt_of_the_client_waits_for_its_window() {
    // The guest executes nop; sti; nop; hlt. Its handler for vector 0x20 executes out 0x11,al; iret.
    let mut guest = Guest::new(&[0x90, 0xfb, 0x90, 0xf4]);
    guest.memory.write(0x20 * 4, &[0x00, 0x20, 0, 0]);
    guest.memory.write(0x2000, &[0xe6, 0x11, 0xcf]);
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rsp = 0x2800;
    guest.vcpu.set_regs(&regs).unwrap();
    guest.vcpu.get_kvm_run().request_interrupt_window = 1;
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::IrqWindowOpen));
    assert_eq!(guest.vcpu.get_kvm_run().ready_for_interrupt_injection, 1);
    guest.vcpu.interrupt(0x20).unwrap();
    guest.vcpu.get_kvm_run().request_interrupt_window = 0;
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::IoOut(0x11, _)
    ));
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(guest.vcpu.interrupt(256).unwrap_err().errno(), libc::EINVAL);
}

/// Creates a guest with an APIC that executes hlt; out 0x10,al. Its handler of NMIs does nothing.
fn halting_guest() -> Guest {
    let guest = Guest::with(&[0xf4, 0xe6, 0x10], |vm| vm.create_irq_chip().unwrap());
    // iret
    guest.memory.write(2 * 4, &[0x00, 0x20, 0, 0]);
    guest.memory.write(0x2000, &[0xcf]);
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rsp = 0x2800;
    guest.vcpu.set_regs(&regs).unwrap();
    guest
}

/// Waits until the guest's vCPU has halted, and then sends it an NMI. Sends it as an MSI, because any thread may send
/// an MSI.
fn send_nmi_later(vm: &VmFd) {
    std::thread::sleep(Duration::from_millis(50));
    let msi = kvm_bindings::kvm_msi {
        address_lo: 0xfee0_0000,
        data: 4 << 8,
        ..Default::default()
    };
    assert_eq!(vm.signal_msi(msi).unwrap(), 1);
}

#[test]
fn a_halted_vcpu_with_an_apic_sleeps_until_an_nmi() {
    let mut guest = halting_guest();
    std::thread::scope(|scope| {
        let vm = &guest.vm;
        scope.spawn(move || send_nmi_later(vm));
        assert!(matches!(
            guest.vcpu.run().unwrap(),
            VcpuExit::IoOut(0x10, _)
        ));
    });
}

#[test]
fn an_nmi_that_is_blocked_ends_no_halt() {
    let mut guest = halting_guest();
    let mut events = guest.vcpu.get_vcpu_events().unwrap();
    events.nmi.masked = 1;
    guest.vcpu.set_vcpu_events(&events).unwrap();
    // SAFETY: the call takes no pointer.
    let this = unsafe { libc::pthread_self() } as usize;
    std::thread::scope(|scope| {
        let vm = &guest.vm;
        scope.spawn(move || {
            send_nmi_later(vm);
            std::thread::sleep(Duration::from_millis(50));
            slat_kvm::interrupt_thread(this);
        });
        let stopped = guest.vcpu.run().map(|exit| format!("{exit:?}"));
        assert_eq!(stopped.unwrap_err().errno(), libc::EINTR);
    });
    let mut events = guest.vcpu.get_vcpu_events().unwrap();
    assert_eq!(events.nmi.pending, 1);
    events.nmi.masked = 0;
    guest.vcpu.set_vcpu_events(&events).unwrap();
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::IoOut(0x10, _)
    ));
}

#[test]
fn memory_taken_away_under_a_running_guest_is_efault() {
    for announced in [true, false] {
        let Guest {
            mut vcpu,
            memory,
            vm: _vm,
            ..
        } = Guest::new(READ_DATA_FOREVER);
        std::thread::scope(|scope| {
            let memory = &memory;
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                let range = memory.range(DATA);
                if announced {
                    slat_kvm::notify::around(range.clone(), || {
                        memory.take_away(DATA);
                        slat_host::mappings::changed(range);
                    });
                } else {
                    memory.take_away(DATA);
                }
            });
            assert_eq!(
                vcpu.run().unwrap_err().errno(),
                libc::EFAULT,
                "announced: {announced}"
            );
            assert_eq!(vcpu.run().unwrap_err().errno(), libc::EFAULT, "again");
        });
    }
}

#[test]
fn a_slot_taken_away_under_a_running_guest_makes_its_reads_mmio() {
    let Guest {
        mut vcpu,
        memory,
        vm,
        ..
    } = Guest::new(READ_DATA_FOREVER);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            set_slot(&vm, &memory, 0, 0);
            set_slot(&vm, &memory, 1, 0x3000);
        });
        // Between the two calls there is no memory for the code either. An exit for an instruction fetch from there
        // is an internal error, which this loop ignores. The loop ends when the page at DATA is a device.
        loop {
            match vcpu.run() {
                Ok(VcpuExit::MmioRead(DATA, _)) => break,
                Ok(VcpuExit::InternalError) => {}
                other => panic!("{other:?}"),
            }
        }
    });
}

/// The guest's interrupt table is at an address without memory. slat cannot exit to a device while it delivers an
/// exception.
#[test]
fn an_exception_whose_delivery_needs_a_device_is_an_internal_error() {
    // ud2
    let mut guest = Guest::new(&[0x0f, 0x0b]);
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.idt.base = DEVICE;
    guest.vcpu.set_sregs(&sregs).unwrap();
    // The next run delivers the exception again.
    for _ in 0..2 {
        let exit = guest.vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::InternalError), "{exit:?}");
        // SAFETY: the exit has filled in this part of the union.
        let internal = unsafe { guest.vcpu.get_kvm_run().__bindgen_anon_1.internal };
        assert_eq!(internal.suberror, KVM_INTERNAL_ERROR_DELIVERY_EV);
        assert_eq!(internal.ndata, 5);
        // The event is valid, and is exception 6.
        assert_eq!(internal.data[0], 1 << 31 | 3 << 8 | 6);
        assert_eq!(internal.data[3], DEVICE + 6 * 4);
    }
    sregs.idt.base = 0;
    guest.vcpu.set_sregs(&sregs).unwrap();
    // hlt
    guest
        .memory
        .write(6 * 4, &(CODE as u32 + 0x100).to_le_bytes());
    guest.memory.write(CODE + 0x100, &[0xf4]);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
}
