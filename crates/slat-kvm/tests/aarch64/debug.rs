//! `KVM_SET_GUEST_DEBUG`: the client debugs a guest.

use super::guests::{CODE, DEVICE, Guest, PC, X0, code, get, set, system};
use kvm_bindings::*;
use slat_kvm::{Cap, Kvm, VcpuExit, VcpuFd};
use std::arch::global_asm;

/// The syndromes of BRK, software step, a breakpoint and a watchpoint.
const BRK: u32 = 0xf200_0000;
const STEP: u32 = 0xca00_0022;
const STEPPED: u32 = STEP | 1 << 24;
const BREAKPOINT: u32 = 0xc200_0022;
const WATCHPOINT: u32 = 0xd200_0022;
/// A breakpoint's control, which is enabled for EL1; a watchpoint's, of 4 bytes and stores.
const AT_EL1: u64 = 1 | 1 << 1 | 0xf << 5;
const STORES: u64 = AT_EL1 | 2 << 3;

global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_debugged
slat_test_debugged:
    mov x1, #0x09000000
    ldr w2, [x1]
    str w2, [x1, #4]
    nop
    adr x3, slat_test_debugged
    str w2, [x3, #0x100]
    brk #7
    movz x0, #0x8400, lsl #16
    add x0, x0, #8
    hvc #0
    .globl slat_test_debugged_end
slat_test_debugged_end:
    .popsection
    "
);

fn guest() -> Guest {
    Guest::new(code!(slat_test_debugged, slat_test_debugged_end))
}

fn debug(vcpu: &VcpuFd, control: u32, arch: kvm_guest_debug_arch) {
    vcpu.set_guest_debug(&kvm_guest_debug {
        control,
        pad: 0,
        arch,
    })
    .unwrap();
}

/// Runs until a debug exit. Returns the syndrome, the address, and how many bytes of code are before the program
/// counter.
fn debugged(vcpu: &mut VcpuFd) -> (u32, u64, u64) {
    let exit = match vcpu.run() {
        Ok(VcpuExit::Debug(exit)) => exit,
        other => panic!("{other:?}"),
    };
    assert_eq!(exit.hsr_high, 0);
    (exit.hsr, exit.far, get(vcpu, PC) - CODE)
}

fn complete_access(vcpu: &mut VcpuFd) {
    match vcpu.run() {
        Ok(VcpuExit::MmioRead(DEVICE, data)) => data.copy_from_slice(&[5, 0, 0, 0]),
        Ok(VcpuExit::MmioWrite(address, [5, 0, 0, 0])) => assert_eq!(address, DEVICE + 4),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_instruction_of_a_stepped_guest_exits() {
    let guest = guest();
    let mut vcpu = guest.vcpu(0, 0);
    let none = kvm_guest_debug_arch::default();
    debug(&vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, none);
    assert_eq!(debugged(&mut vcpu), (STEPPED, 0, 4));
    // The client completes an access; then its step ends.
    complete_access(&mut vcpu);
    assert_eq!(debugged(&mut vcpu), (STEP, 0, 8));
    complete_access(&mut vcpu);
    assert_eq!(debugged(&mut vcpu), (STEP, 0, 12));
    for pc in [16, 20, 24] {
        assert_eq!(debugged(&mut vcpu), (STEPPED, 0, pc));
    }
    // The exit comes before BRK is executed.
    assert_eq!(debugged(&mut vcpu), (BRK | 7, 0, 24));
    set(&vcpu, PC, CODE + 28);
    debug(&vcpu, KVM_GUESTDBG_ENABLE, none);
    assert!(matches!(
        vcpu.run(),
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _))
    ));
    assert_eq!(get(&vcpu, X0 | (2 * 2)), 5);
}

#[test]
fn breakpoints_and_watchpoints_of_the_client_exit() {
    let guest = guest();
    let mut vcpu = guest.vcpu(0, 0);
    // The guest's own debug registers keep their values.
    let value_of_0 = system(2, 0, 0, 0, 4);
    set(&vcpu, value_of_0, 0x1000);
    let mut arch = kvm_guest_debug_arch::default();
    (arch.dbg_bvr[2], arch.dbg_bcr[2]) = (CODE + 12, AT_EL1);
    (arch.dbg_wvr[3], arch.dbg_wcr[3]) = (CODE + 0x100, STORES);
    debug(&vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW, arch);
    complete_access(&mut vcpu);
    complete_access(&mut vcpu);
    assert_eq!(debugged(&mut vcpu), (BREAKPOINT, 0, 12));
    arch.dbg_bcr[2] = 0;
    debug(&vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW, arch);
    let write = WATCHPOINT | 1 << 6;
    assert_eq!(debugged(&mut vcpu), (write, CODE + 0x100, 20));
    assert_eq!(guest.memory.load(0x100), 0);
    assert_eq!(get(&vcpu, value_of_0), 0x1000);
    // Without KVM_GUESTDBG_USE_HW the registers of the request have no meaning.
    debug(&vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP, arch);
    assert_eq!(debugged(&mut vcpu), (BRK | 7, 0, 24));
    assert_eq!(guest.memory.load(0x100), 5);
}

#[test]
fn a_reset_keeps_the_debugger_and_the_client_can_switch_it_off() {
    let guest = guest();
    let mut vcpu = guest.vcpu(0, 0);
    let none = kvm_guest_debug_arch::default();
    debug(&vcpu, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, none);
    assert_eq!(debugged(&mut vcpu), (STEPPED, 0, 4));
    let mut init = kvm_vcpu_init::default();
    guest.vm.get_preferred_target(&mut init).unwrap();
    init.features[0] = 1 << KVM_ARM_VCPU_PSCI_0_2;
    vcpu.vcpu_init(&init).unwrap();
    set(&vcpu, PC, CODE + 12);
    assert_eq!(debugged(&mut vcpu), (STEPPED, 0, 16));
    // Without a debugger EL1 takes BRK: its vector is at the end of the code.
    debug(&vcpu, 0, none);
    set(&vcpu, system(3, 0, 12, 0, 0), CODE + 0x1000);
    guest.memory.write(0x1200, &0xd400_0002u32.to_le_bytes());
    set(&vcpu, X0, 0x8400_0008);
    set(&vcpu, PC, CODE + 24);
    assert!(matches!(
        vcpu.run(),
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _))
    ));
    assert_eq!(get(&vcpu, system(3, 0, 5, 2, 0)), u64::from(BRK | 7));
}

#[test]
fn controls_of_other_architectures_are_refused() {
    let kvm = Kvm::new().unwrap();
    assert_eq!(kvm.check_extension_int(Cap::SetGuestDebug), 1);
    assert_eq!(kvm.check_extension_int(Cap::DebugHwBps), 6);
    assert_eq!(kvm.check_extension_int(Cap::DebugHwWps), 4);
    let known = KVM_GUESTDBG_ENABLE
        | KVM_GUESTDBG_SINGLESTEP
        | KVM_GUESTDBG_USE_SW_BP
        | KVM_GUESTDBG_USE_HW;
    let controls = kvm.check_extension_raw(KVM_CAP_SET_GUEST_DEBUG2.into());
    assert_eq!(controls, known as i32);
    let vcpu = guest().vcpu(0, 0);
    for bit in (0..32).map(|bit| 1 << bit) {
        let asked = kvm_guest_debug {
            control: bit,
            ..Default::default()
        };
        let result = vcpu.set_guest_debug(&asked).map_err(|error| error.errno());
        let expected = match known & bit {
            0 => Err(libc::EINVAL),
            _ => Ok(()),
        };
        assert_eq!(result, expected, "{bit:#x}");
    }
}
