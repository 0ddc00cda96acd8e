//! Tests `KVM_SET_GUEST_DEBUG`.

use crate::common::{CODE, DATA, Guest};
use kvm_bindings::*;
use kvm_ioctls::VcpuExit;
use slat_kvm::VcpuFd;

const DB: u32 = 1;
const BP: u32 = 3;
/// The value of DR6 that names no cause.
const NONE: u64 = 0xffff_0ff0;

fn set(vcpu: &VcpuFd, control: u32, debugreg: [u64; 8]) {
    let debug = kvm_guest_debug {
        control,
        arch: kvm_guest_debug_arch { debugreg },
        ..Default::default()
    };
    vcpu.set_guest_debug(&debug).unwrap();
}

fn debug_exit(vcpu: &mut VcpuFd) -> kvm_debug_exit_arch {
    match vcpu.run().unwrap() {
        VcpuExit::Debug(arch) => arch,
        other => panic!("{other:?}"),
    }
}

#[test]
fn single_steps_are_exits_also_after_a_port_access() {
    // nop; in al,0x10; hlt
    let mut guest = Guest::new(&[0x90, 0xe4, 0x10, 0xf4]);
    let vcpu = &mut guest.vcpu;
    set(vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, [0; 8]);
    let step = |vcpu: &mut VcpuFd, pc| {
        let exit = debug_exit(vcpu);
        assert_eq!(
            (exit.exception, exit.pc, exit.dr6),
            (DB, pc, NONE | 1 << 14)
        );
    };
    step(vcpu, CODE + 1);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoIn(0x10, _)));
    step(vcpu, CODE + 3);
    assert_eq!(vcpu.get_regs().unwrap().rflags & 0x100, 0);
    set(vcpu, 0, [0; 8]);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn breakpoints_and_watchpoints_report_linear_addresses() {
    // int3; nop; mov [DATA],al; hlt, in a segment with a base
    let mut guest = Guest::new(&[0xcc, 0x90, 0xa2, 0x00, 0x30, 0xf4]);
    let vcpu = &mut guest.vcpu;
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (CODE, (CODE >> 4) as u16);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = 0;
    vcpu.set_regs(&regs).unwrap();
    let control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP | KVM_GUESTDBG_USE_HW_BP;
    // DR7 enables two breakpoints: one for an instruction, and one for writes to a byte.
    let dr7 = 0x400 | 2 | 1 << 20 | 8;
    set(vcpu, control, [CODE + 1, DATA, 0, 0, 0, 0, 0, dr7]);
    let exit = debug_exit(vcpu);
    assert_eq!((exit.exception, exit.pc), (BP, CODE));
    regs.rip = 1;
    vcpu.set_regs(&regs).unwrap();
    let exit = debug_exit(vcpu);
    assert_eq!(
        (exit.exception, exit.pc, exit.dr6, exit.dr7),
        (DB, CODE + 1, NONE | 1, dr7)
    );
    regs.rip = 2;
    vcpu.set_regs(&regs).unwrap();
    let exit = debug_exit(vcpu);
    assert_eq!((exit.pc, exit.dr6), (CODE + 5, NONE | 2));
    let own = vcpu.get_debug_regs().unwrap();
    assert_eq!((own.db, own.dr6, own.dr7), ([0; 4], NONE, 0x400));
}

#[test]
fn an_exception_is_injected_once() {
    let mut guest = Guest::new(&[0x90, 0xf4]);
    // The handler of the vector executes hlt.
    guest.memory.write(4 * 3, &0x2800u32.to_le_bytes());
    guest.memory.write(0x2800, &[0xf4]);
    let control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP | KVM_GUESTDBG_INJECT_BP;
    set(&guest.vcpu, control, [0; 8]);
    let again = kvm_guest_debug {
        control,
        ..Default::default()
    };
    let error = guest.vcpu.set_guest_debug(&again).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2801);
}
