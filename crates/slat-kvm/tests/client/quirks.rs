//! Tests KVM's quirks, which a client may disable (`KVM_CAP_DISABLE_QUIRKS2`).

use crate::common::{CODE, Guest, enable, start_at_code};
use kvm_bindings::*;
use slat_kvm::{VcpuExit, VmFd};

const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];
const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];
const MONITOR_MWAIT: [u8; 6] = [0x0f, 0x01, 0xc8, 0x0f, 0x01, 0xc9];
/// The address of the handler of #UD, which halts.
const UNDEFINED: u64 = 0x1800;

fn disable(vm: &VmFd, quirks: u32) -> Result<(), i32> {
    enable(vm, KVM_CAP_DISABLE_QUIRKS2, quirks.into())
}

/// Runs `code` and HLT. Returns whether it ended in #UD.
fn is_undefined(guest: &mut Guest, code: &[u8]) -> bool {
    guest
        .memory
        .write(6 * 4, &[0, (UNDEFINED >> 8) as u8, 0, 0]);
    guest.memory.write(UNDEFINED, &[0xf4]);
    guest.memory.write(CODE, code);
    guest.memory.write(CODE + code.len() as u64, &[0xf4]);
    start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    let rip = guest.vcpu.get_regs().unwrap().rip;
    assert!(
        rip == CODE + code.len() as u64 + 1 || rip == UNDEFINED + 1,
        "{rip:#x}"
    );
    rip == UNDEFINED + 1
}

#[test]
fn the_hypercall_of_the_other_vendor_is_patched_or_undefined() {
    let (native, other) = if slat_kvm::cpuid::is_amd() {
        (VMMCALL, VMCALL)
    } else {
        (VMCALL, VMMCALL)
    };
    // mov eax, 1 (KVM_HC_VAPIC_POLL_IRQ)
    let with = |hypercall: [u8; 3]| [&[0x66, 0xb8, 1, 0, 0, 0], &hypercall[..]].concat();
    let instruction = |guest: &Guest| {
        let mut bytes = [0; 3];
        guest.memory.read(CODE + 6, &mut bytes);
        bytes
    };
    for disabled in [false, true] {
        let mut guest = Guest::new(&[]);
        if disabled {
            disable(&guest.vm, KVM_X86_QUIRK_FIX_HYPERCALL_INSN).unwrap();
        }
        assert!(!is_undefined(&mut guest, &with(native)));
        assert_eq!(guest.vcpu.get_regs().unwrap().rax, 0);
        assert_eq!(is_undefined(&mut guest, &with(other)), disabled);
        assert_eq!(instruction(&guest), if disabled { other } else { native });
        assert_eq!(guest.vcpu.get_regs().unwrap().rax, u64::from(disabled));
    }
}

fn set_mwait(guest: &Guest, there: bool) {
    let mut cpuid = guest
        .kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    for entry in cpuid
        .as_mut_slice()
        .iter_mut()
        .filter(|entry| entry.function == 1)
    {
        entry.ecx = entry.ecx & !(1 << 3) | u32::from(there) << 3;
    }
    guest.vcpu.set_cpuid2(&cpuid).unwrap();
}

#[test]
fn mwait_that_does_not_exist_is_a_nop_or_undefined() {
    for (disabled, there) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut guest = Guest::new(&[]);
        set_mwait(&guest, there);
        if disabled {
            disable(&guest.vm, KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS).unwrap();
        }
        let undefined = is_undefined(&mut guest, &MONITOR_MWAIT);
        assert_eq!(undefined, disabled && !there, "{disabled} {there}");
    }
}

/// Once the quirk is disabled, IA32_MISC_ENABLE decides whether the guest has MWAIT.
#[test]
fn misc_enable_switches_mwait() {
    const MISC_ENABLE: u32 = 0x1a0;
    const MWAIT: u64 = 1 << 18;
    let set = |guest: &Guest, data: u64| {
        let entry = kvm_msr_entry {
            index: MISC_ENABLE,
            data,
            ..Default::default()
        };
        guest
            .vcpu
            .set_msrs(&Msrs::from_entries(&[entry]).unwrap())
            .unwrap()
    };
    let shown = |guest: &Guest| {
        let cpuid = guest.vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
        let entry = cpuid.as_slice().iter().find(|entry| entry.function == 1);
        entry.unwrap().ecx & 1 << 3 != 0
    };
    let guest = Guest::new(&[]);
    set_mwait(&guest, false);
    assert_eq!(set(&guest, MWAIT | 1), 1);
    assert!(!shown(&guest), "the quirk: CPUID stays as it is");
    assert_eq!(set(&guest, 1), 1);
    disable(&guest.vm, KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT).unwrap();
    assert_eq!(set(&guest, MWAIT | 1), 1);
    assert!(shown(&guest));
    assert_eq!(set(&guest, 1), 1);
    assert!(!shown(&guest));
}

#[test]
fn port_0x7e_is_left_before_or_after_the_exit() {
    for disabled in [false, true] {
        // out 0x7e,al; out 0x7d,al; hlt
        let mut guest = Guest::new(&[0xe6, 0x7e, 0xe6, 0x7d, 0xf4]);
        if disabled {
            disable(&guest.vm, KVM_X86_QUIRK_OUT_7E_INC_RIP).unwrap();
        }
        let expected = [
            (0x7e, if disabled { CODE } else { CODE + 2 }),
            (0x7d, CODE + 2),
        ];
        for (expected, rip) in expected {
            let VcpuExit::IoOut(port, _) = guest.vcpu.run().unwrap() else {
                panic!()
            };
            assert_eq!(port, expected);
            assert_eq!(guest.vcpu.get_regs().unwrap().rip, rip, "port {port:#x}");
        }
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    }
}

#[test]
fn lint0_of_the_bootstrap_processor_takes_external_interrupts_or_none() {
    let lint0 = |vcpu: &slat_kvm::VcpuFd| {
        let state = vcpu.get_lapic().unwrap();
        let bytes = [0x350, 0x351, 0x352, 0x353].map(|at: usize| state.regs[at] as u8);
        u32::from_le_bytes(bytes)
    };
    for (disabled, expected) in [(false, 0x700), (true, 0x1_0000)] {
        let guest = Guest::with(&[], |vm| {
            vm.create_irq_chip().unwrap();
            if disabled {
                disable(vm, KVM_X86_QUIRK_LINT0_REENABLED).unwrap();
            }
        });
        let second = guest.vm.create_vcpu(1).unwrap();
        assert_eq!((lint0(&guest.vcpu), lint0(&second)), (expected, 0x1_0000));
    }
}

#[test]
fn the_page_of_an_apic_in_x2apic_mode_reads_as_ones_or_is_the_clients() {
    for disabled in [false, true] {
        // mov [0x30],eax; mov eax,[0x30]; out 0x10,al
        let code = [0x66, 0xa3, 0x30, 0x00, 0x66, 0xa1, 0x30, 0x00, 0xe6, 0x10];
        let mut guest = Guest::with(&code, |vm| {
            vm.create_irq_chip().unwrap();
            if disabled {
                disable(vm, KVM_X86_QUIRK_LAPIC_MMIO_HOLE).unwrap();
            }
        });
        let mut sregs = guest.vcpu.get_sregs().unwrap();
        sregs.apic_base |= 1 << 10;
        sregs.ds.base = 0xfee0_0000;
        guest.vcpu.set_sregs(&sregs).unwrap();
        if disabled {
            let exit = guest.vcpu.run().unwrap();
            assert!(matches!(exit, VcpuExit::MmioWrite(0xfee0_0030, _)));
            let VcpuExit::MmioRead(0xfee0_0030, data) = guest.vcpu.run().unwrap() else {
                panic!()
            };
            data.fill(0x12);
        }
        assert!(matches!(
            guest.vcpu.run().unwrap(),
            VcpuExit::IoOut(0x10, _)
        ));
        let expected = if disabled { 0x1212_1212 } else { u32::MAX };
        assert_eq!(guest.vcpu.get_regs().unwrap().rax as u32, expected);
    }
}

#[test]
fn a_quirk_that_does_not_exist_cannot_be_disabled() {
    let guest = Guest::new(&[]);
    let known = guest
        .kvm
        .check_extension_raw(KVM_CAP_DISABLE_QUIRKS2.into()) as u32;
    assert_eq!(disable(&guest.vm, known), Ok(()));
    assert_eq!(disable(&guest.vm, 1 << 31), Err(libc::EINVAL));
}
