//! A hypervisor that runs the program in a nested guest by SVM. The nested guest uses the hypervisor's own address
//! space.

use crate::common::set_msr;
use crate::long_mode::Machine;
use kvm_bindings::*;
use slat_kvm::VcpuFd;

const VMCB: u64 = 0x18_0000;
const HOST_SAVE: u64 = 0x18_1000;
const HYPERVISOR: u64 = 0x18_2000;
const EFER_SVME: u64 = 1 << 12;
const VM_HSAVE_PA: u32 = 0xc001_0117;
/// The offset of the guest's registers in the control block.
const SAVE: u64 = 0x400;

/// Makes the vCPU, which is about to run a program, begin with a hypervisor instead. The hypervisor executes VMRUN to
/// enter a nested guest with the vCPU's current registers.
pub fn enter(machine: &Machine, vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    sregs.efer |= EFER_SVME;
    vcpu.set_sregs(&sregs).unwrap();
    assert!(set_msr(vcpu, VM_HSAVE_PA, HOST_SAVE));
    let memory = &machine.memory;
    let put = |at: u64, value: u64| memory.write(VMCB + at, &value.to_le_bytes());
    // Intercepts VMRUN, which is required, and uses ASID 1.
    put(0x10, 1);
    put(0x58, 1);
    let segments = [
        (0, &sregs.es),
        (1, &sregs.cs),
        (2, &sregs.ss),
        (3, &sregs.ds),
    ];
    for (number, segment) in segments {
        put(
            SAVE + 16 * number,
            crate::common::hypervisors::packed(segment),
        );
    }
    let table = |at: u64, table: &kvm_dtable| {
        put(SAVE + at, u64::from(table.limit) << 32);
        put(SAVE + at + 8, table.base);
    };
    table(0x60, &sregs.gdt);
    table(0x80, &sregs.idt);
    for (at, value) in [
        (0xd0, sregs.efer),
        (0x148, sregs.cr4),
        (0x150, sregs.cr3),
        (0x158, sregs.cr0),
        (0x160, 0x400),
        (0x168, 0xffff_0ff0),
        (0x170, regs.rflags),
        (0x178, regs.rip),
        (0x1d8, regs.rsp),
        (0x1f8, regs.rax),
    ] {
        put(SAVE + at, value);
    }
    // vmrun; hlt
    memory.write(HYPERVISOR, b"\x0f\x01\xd8\xf4");
    (regs.rip, regs.rax) = (HYPERVISOR, VMCB);
    vcpu.set_regs(&regs).unwrap();
}
