//! Events that come at the same time, and events that a state of the vCPU must not swallow.

mod common;

use common::{Guest, start_at_code};
use kvm_bindings::*;
use slat_kvm::{VcpuExit, VcpuFd};

const VECTOR: u8 = 0x20;
/// Where the handler of [`VECTOR`] is.
const HANDLER: u64 = 0x2000;
/// Where the handler of NMIs is.
const NMI_HANDLER: u64 = 0x2100;

fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 1, "MSR {index:#x}");
}

/// A guest with interrupts on, whose handlers write to port 0x11, and of NMIs to port 0x10.
fn guest() -> Guest {
    // 1: nop; jmp 1b
    let guest = Guest::with(&[0x90, 0xeb, 0xfd], |vm| vm.create_irq_chip().unwrap());
    for (vector, handler, port) in [(2, NMI_HANDLER, 0x10), (VECTOR, HANDLER, 0x11)] {
        let entry = &handler.to_le_bytes()[..4];
        guest.memory.write(u64::from(vector) * 4, entry);
        // out port, al; iret
        guest.memory.write(handler, &[0xe6, port, 0xcf]);
    }
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rflags |= 1 << 9;
    guest.vcpu.set_regs(&regs).unwrap();
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.apic_base |= 1 << 10;
    guest.vcpu.set_sregs(&sregs).unwrap();
    set_msr(&guest.vcpu, 0x80f, 0x1ff);
    guest
}

fn port_and_stack(vcpu: &mut VcpuFd) -> (u16, u64) {
    let port = match vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => port,
        other => panic!("{other:?}"),
    };
    (port, vcpu.get_regs().unwrap().rsp)
}

/// The handler of an NMI runs with interrupts off: one that waits does not come before its end.
#[test]
fn an_interrupt_waits_for_the_handler_of_an_nmi() {
    let mut guest = guest();
    let stack = guest.vcpu.get_regs().unwrap().rsp;
    guest.vcpu.nmi().unwrap();
    // To itself.
    set_msr(&guest.vcpu, 0x830, 1 << 18 | u64::from(VECTOR));
    assert_eq!(port_and_stack(&mut guest.vcpu), (0x10, stack - 6));
    assert_eq!(port_and_stack(&mut guest.vcpu), (0x11, stack - 6));
}
