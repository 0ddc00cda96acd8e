//! The registers that say what a guest's processor has: a client hides features from its guest.

use super::guests::{Guest, code, get, set, system};
use super::vm::vm_object;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::{VcpuExit, VcpuFd};
use std::arch::global_asm;

global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_identify
slat_test_identify:
    mov x9, #0x09000000
    mrs x0, id_aa64isar0_el1
    str x0, [x9]
    mrs x0, ctr_el0
    str x0, [x9]
    mrs x0, mpidr_el1
    str x0, [x9]
    mrs x0, clidr_el1
    str x0, [x9]
    .globl slat_test_identify_end
slat_test_identify_end:
    .globl slat_test_implementation
slat_test_implementation:
    mov x9, #0x09000000
    mrs x0, midr_el1
    str x0, [x9]
    mrs x0, revidr_el1
    str x0, [x9]
    mrs x0, aidr_el1
    str x0, [x9]
    .globl slat_test_implementation_end
slat_test_implementation_end:
    .popsection
    "
);

fn set_fails(vcpu: &VcpuFd, id: u64, value: u64, errno: i32) {
    let refused = vcpu.set_one_reg(id, &value.to_le_bytes()).unwrap_err();
    assert_eq!(refused.errno(), errno, "{id:#x} {value:#x}");
}

#[test]
fn a_client_hides_features_before_the_first_run() {
    let guest = Guest::new(code!(slat_test_identify, slat_test_identify_end));
    let mut vcpu = guest.vcpu(0, 0);
    let isar0 = system(3, 0, 0, 6, 0);
    let (ctr, mpidr, clidr) = (
        system(3, 3, 0, 0, 1),
        system(3, 0, 0, 0, 5),
        system(3, 1, 0, 0, 1),
    );
    // CRC32 is 1.
    let before = get(&vcpu, isar0);
    set_fails(&vcpu, isar0, before + (1 << 16), libc::EINVAL);
    let wanted = [
        (isar0, before - (1 << 16)),
        (ctr, get(&vcpu, ctr) - 1),
        (mpidr, get(&vcpu, mpidr) + 1),
        (clidr, 4),
    ];
    for (id, value) in wanted {
        set(&vcpu, id, value);
    }
    for (id, value) in wanted {
        match vcpu.run() {
            Ok(VcpuExit::MmioWrite(_, data)) => assert_eq!(data, value.to_le_bytes(), "{id:#x}"),
            other => panic!("{other:?}"),
        }
    }
    set_fails(&vcpu, isar0, before, libc::EBUSY);
    // A reset keeps them, and a vCPU that comes later has those of the VM.
    let mut init = kvm_vcpu_init::default();
    guest.vm.get_preferred_target(&mut init).unwrap();
    init.features[0] = 1 << KVM_ARM_VCPU_PSCI_0_2;
    vcpu.vcpu_init(&init).unwrap();
    for (id, value) in wanted {
        assert_eq!(get(&vcpu, id), value, "{id:#x}");
    }
    assert_eq!(get(&guest.vcpu(1, 0), isar0), before - (1 << 16));
}

#[test]
fn the_vm_says_which_fields_can_change() {
    let mut masks = [0u64; KVM_ARM_FEATURE_ID_RANGE_SIZE as usize];
    let mut range = reg_mask_range {
        addr: masks.as_mut_ptr() as u64,
        range: KVM_ARM_FEATURE_ID_RANGE,
        reserved: [0; 13],
    };
    let vm = vm_object();
    let ask =
        |range: &reg_mask_range| vm.ioctl(KVM_ARM_GET_REG_WRITABLE_MASKS, &raw const *range as u64);
    assert!(ask(&range).is_ok());
    // ID_AA64ISAR0, CLIDR, and CTR.
    assert_eq!(masks[6 * 8], !0xf);
    assert_eq!(masks[64 + 1], u64::MAX);
    assert_eq!(masks[128 + 1], 0x300f_000f);
    range.reserved[0] = 1;
    assert!(ask(&range).is_err());
}

/// A client saves and restores registers that the guest does not have.
#[test]
fn registers_without_a_meaning_are_kept() {
    let guest = Guest::new(&[]);
    let vcpu = guest.vcpu(0, 0);
    let mut list = RegList::new(500).unwrap();
    vcpu.get_reg_list(&mut list).unwrap();
    let unique: std::collections::BTreeSet<_> = list.as_slice().iter().collect();
    assert_eq!(unique.len(), list.as_slice().len());
    // DBGWCR15, DISR, DACR32, FPEXC32, and an ID register without a name.
    for id in [
        system(2, 0, 0, 15, 7),
        system(3, 0, 12, 1, 1),
        system(3, 4, 3, 0, 0),
        system(3, 4, 5, 3, 0),
    ] {
        assert!(unique.contains(&id), "{id:#x}");
        set(&vcpu, id, 0x1234);
        assert_eq!(get(&vcpu, id), 0x1234);
    }
    assert!(unique.contains(&system(3, 0, 0, 7, 7)));
    set_fails(&vcpu, system(3, 0, 0, 7, 7), 1, libc::EINVAL);
}

#[test]
fn a_client_names_another_implementation_if_it_has_asked_to() {
    let code = code!(slat_test_implementation, slat_test_implementation_end);
    let registers = [
        (system(3, 0, 0, 0, 0), 0x410f_d0c0),
        (system(3, 0, 0, 0, 6), 0x1_2345_6789),
        (system(3, 1, 0, 0, 7), 7),
    ];
    let guest = Guest::new(code);
    let vcpu = guest.vcpu(0, 0);
    for (id, value) in registers {
        set_fails(&vcpu, id, value, libc::EINVAL);
        set(&vcpu, id, get(&vcpu, id));
    }
    let enable = |guest: &Guest| {
        guest.vm.enable_cap(&kvm_enable_cap {
            cap: KVM_CAP_ARM_WRITABLE_IMP_ID_REGS,
            ..Default::default()
        })
    };
    assert_eq!(
        enable(&guest).unwrap_err().errno(),
        libc::EINVAL,
        "too late"
    );
    let guest = Guest::new(code);
    enable(&guest).unwrap();
    let mut vcpu = guest.vcpu(0, 0);
    set_fails(&vcpu, registers[0].0, 1 << 32, libc::EINVAL);
    for (id, value) in registers {
        set(&vcpu, id, value);
    }
    for (id, value) in registers {
        match vcpu.run() {
            Ok(VcpuExit::MmioWrite(_, data)) => assert_eq!(data, value.to_le_bytes(), "{id:#x}"),
            other => panic!("{other:?}"),
        }
        set_fails(&vcpu, id, value + 1, libc::EBUSY);
    }
}
