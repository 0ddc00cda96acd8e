//! A guest's calls of the firmware, and the client's settings for them.

use super::guests::{CODE, Guest, PC, X0, code, get, set};
use kvm_bindings::*;
use slat_kvm::{VcpuExit, VcpuFd};
use std::arch::global_asm;

const PSCI_VERSION: u64 = 0x8400_0000;
const SYSTEM_SUSPEND: u64 = 0xc400_000e;
const SYSTEM_OFF: u64 = 0x8400_0008;
const PSCI_FEATURES: u64 = 0x8400_000a;
const SYSTEM_OFF2: u64 = 0xc400_0015;
const INVALID_PARAMETERS: u64 = -2i64 as u64;
const NOT_SUPPORTED: u64 = -1i64 as u64;

/// Returns the id (KVM_GET_ONE_REG) of the core register X`n`.
fn x(n: u64) -> u64 {
    X0 + 2 * n
}

/// Returns the id (KVM_GET_ONE_REG) of the register of a group of services.
fn services(n: u64) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM_FW_FEAT_BMAP) | n
}

global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_calls
slat_test_calls:
    // Calls the function X0 of the firmware with X1 to X3, and tells the test by a store to a device.
1:  mov x9, #0x09000000
    hvc #0
    str w0, [x9]
    b 1b
    .globl slat_test_calls_end
slat_test_calls_end:
    .globl slat_test_calls_smc
slat_test_calls_smc:
    mov x9, #0x09000000
    smc #0
    str w0, [x9]
    .globl slat_test_calls_smc_end
slat_test_calls_smc_end:
    .popsection
    "
);

fn caller() -> (Guest, VcpuFd) {
    let guest = Guest::new(code!(slat_test_calls, slat_test_calls_end));
    let vcpu = guest.vcpu(0, 0);
    (guest, vcpu)
}

/// Makes the guest call a function of the firmware, and returns X0 to X3.
fn call(vcpu: &mut VcpuFd, function: u64, argument: u64) -> [u64; 4] {
    set(vcpu, x(0), function);
    set(vcpu, x(1), argument);
    match vcpu.run() {
        Ok(VcpuExit::MmioWrite(..)) => [0, 1, 2, 3].map(|n| get(vcpu, x(n))),
        other => panic!("{other:?}"),
    }
}

fn filter(guest: &Guest, base: u64, action: u32) -> Result<(), i32> {
    let filter = kvm_smccc_filter {
        base: base as u32,
        nr_functions: 1,
        action: action as u8,
        pad: [0; 15],
    };
    let attribute = kvm_device_attr {
        group: KVM_ARM_VM_SMCCC_CTRL,
        attr: KVM_ARM_VM_SMCCC_FILTER.into(),
        addr: &raw const filter as u64,
        flags: 0,
    };
    guest.vm.has_device_attr(&attribute).unwrap();
    (guest.vm.set_device_attr(&attribute)).map_err(|error| error.errno())
}

#[test]
fn a_filter_denies_calls_and_gives_them_to_the_client() {
    let (guest, mut vcpu) = caller();
    filter(
        &guest,
        PSCI_VERSION,
        kvm_smccc_filter_action_KVM_SMCCC_FILTER_DENY,
    )
    .unwrap();
    assert_eq!(call(&mut vcpu, PSCI_VERSION, 0)[0], NOT_SUPPORTED);
    let late = filter(
        &guest,
        SYSTEM_OFF,
        kvm_smccc_filter_action_KVM_SMCCC_FILTER_DENY,
    );
    assert_eq!(late, Err(libc::EBUSY));

    let codes = [
        (code!(slat_test_calls, slat_test_calls_end), 0),
        (
            code!(slat_test_calls_smc, slat_test_calls_smc_end),
            KVM_HYPERCALL_EXIT_SMC,
        ),
    ];
    for (code, flags) in codes {
        let guest = Guest::new(code);
        let mut vcpu = guest.vcpu(0, 0);
        let forward = kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER;
        filter(&guest, PSCI_VERSION, forward).unwrap();
        set(&vcpu, x(0), PSCI_VERSION);
        let exit = format!("{:?}", vcpu.run());
        let run = vcpu.get_kvm_run();
        assert_eq!(run.exit_reason, KVM_EXIT_HYPERCALL, "{exit}");
        // SAFETY: the exit is a hypercall.
        let hypercall = unsafe { run.__bindgen_anon_1.hypercall };
        assert_eq!(hypercall.nr, PSCI_VERSION);
        // SAFETY: both fields of the union are numbers.
        assert_eq!(unsafe { hypercall.__bindgen_anon_1.flags }, flags.into());
        set(&vcpu, x(0), 77);
        match vcpu.run() {
            Ok(VcpuExit::MmioWrite(_, data)) => assert_eq!(data, [77, 0, 0, 0]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_firmware_has_the_services_that_the_client_leaves() {
    let (_guest, mut vcpu) = caller();
    // The vendor's identity is KVM's, and it has its list and the clock.
    let uid = [0xb66f_b428, 0xe911_c52e, 0x564b_caa9, 0x743a_004d];
    assert_eq!(call(&mut vcpu, 0x8600_ff01, 0), uid);
    assert_eq!(call(&mut vcpu, 0x8600_0000, 0), [3, 0, 0, 0]);
    let before = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let [high, low, ..] = call(&mut vcpu, 0x8600_0001, 0);
    let after = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let clock = u128::from(high << 32 | low);
    assert!((before.as_nanos()..=after.as_nanos()).contains(&clock));
    assert_eq!(call(&mut vcpu, 0x8600_0001, 2)[0], NOT_SUPPORTED);
    // Random numbers, by their version 1.0.
    assert_eq!(call(&mut vcpu, 0x8400_0050, 0)[0], 0x1_0000);
    assert_eq!(call(&mut vcpu, 0x8400_0051, 0xc400_0053)[0], 0);
    assert_eq!(call(&mut vcpu, 0x8400_0051, 0x8600_0001)[0], NOT_SUPPORTED);
    let [result, a, b, c] = call(&mut vcpu, 0xc400_0053, 192);
    assert_eq!(result, 0);
    assert!(a != 0 && b != 0 && c != 0 && a != b);

    let busy = vcpu
        .set_one_reg(services(2), &0u64.to_le_bytes())
        .unwrap_err();
    assert_eq!(busy.errno(), libc::EBUSY);

    let (_guest, mut vcpu) = caller();
    for n in 0..3 {
        let all = get(&vcpu, services(n));
        let unknown = vcpu.set_one_reg(services(n), &(all + 1).to_le_bytes());
        assert_eq!(unknown.unwrap_err().errno(), libc::EINVAL);
        set(&vcpu, services(n), 0);
    }
    for function in [0x8600_ff01, 0x8600_0001, 0x8400_0050, 0xc500_0020] {
        assert_eq!(
            call(&mut vcpu, function, 0)[0],
            NOT_SUPPORTED,
            "{function:#x}"
        );
    }
}

#[test]
fn a_guest_finds_its_stolen_time() {
    const STRUCTURE: u64 = CODE + 0x1000;
    let (guest, mut vcpu) = caller();
    let address = |address: &u64| kvm_device_attr {
        group: KVM_ARM_VCPU_PVTIME_CTRL,
        attr: KVM_ARM_VCPU_PVTIME_IPA.into(),
        addr: &raw const *address as u64,
        flags: 0,
    };
    if vcpu.has_device_attr(&address(&0)).is_err() {
        println!("skipped: the host does not count stolen time");
        return;
    }
    let set_to = |to: u64| {
        vcpu.set_device_attr(&address(&to))
            .map_err(|error| error.errno())
    };
    assert_eq!(set_to(STRUCTURE + 1), Err(libc::EINVAL));
    assert_eq!(set_to(0x1000), Err(libc::EINVAL));
    assert_eq!(set_to(STRUCTURE), Ok(()));
    assert_eq!(set_to(STRUCTURE), Err(libc::EEXIST));
    guest.memory.write(0x1000, &[0xff; 16]);
    // SMCCC_ARCH_FEATURES, PV_TIME_FEATURES, PV_TIME_ST.
    assert_eq!(call(&mut vcpu, 0x8000_0001, 0xc500_0020)[0], 0);
    assert_eq!(call(&mut vcpu, 0xc500_0020, 0xc500_0021)[0], 0);
    assert_eq!(call(&mut vcpu, 0xc500_0020, 0x8600_0001)[0], NOT_SUPPORTED);
    assert_eq!(call(&mut vcpu, 0xc500_0021, 0)[0], STRUCTURE);
    assert_eq!([0x1000, 0x1004].map(|at| guest.memory.load(at)), [0; 2]);
    let stolen = |at| u64::from(guest.memory.load(at)) | u64::from(guest.memory.load(at + 4)) << 32;
    assert!(stolen(0x1008) < 1 << 40, "{:#x}", stolen(0x1008));
}

#[test]
fn a_guest_asks_for_suspension() {
    let (guest, mut vcpu) = caller();
    assert_eq!(call(&mut vcpu, SYSTEM_SUSPEND, CODE)[0], NOT_SUPPORTED);
    let capability = kvm_enable_cap {
        cap: KVM_CAP_ARM_SYSTEM_SUSPEND,
        ..Default::default()
    };
    guest.vm.enable_cap(&capability).unwrap();
    set(&vcpu, x(0), SYSTEM_SUSPEND);
    match vcpu.run() {
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SUSPEND, [])) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(get(&vcpu, x(0)), SYSTEM_SUSPEND);
    // The client suspends the vCPU. An interrupt of the client's wakes it.
    let suspended = kvm_mp_state {
        mp_state: KVM_MP_STATE_SUSPENDED,
    };
    vcpu.set_mp_state(suspended).unwrap();
    assert_eq!(vcpu.get_mp_state().unwrap(), suspended);
    let line = KVM_ARM_IRQ_TYPE_CPU << KVM_ARM_IRQ_TYPE_SHIFT | KVM_ARM_IRQ_CPU_IRQ;
    guest.vm.set_irq_line(line, true).unwrap();
    match vcpu.run() {
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_WAKEUP, [])) => {}
        other => panic!("{other:?}"),
    }
    let runnable = kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    };
    vcpu.set_mp_state(runnable).unwrap();
    assert!(matches!(vcpu.run(), Ok(VcpuExit::MmioWrite(..))));
}

#[test]
fn a_started_vcpu_shows_its_registers_before_it_runs() {
    let (guest, mut vcpu) = caller();
    let second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    set(&vcpu, x(2), CODE + 1);
    set(&vcpu, x(3), 5);
    assert_eq!(call(&mut vcpu, 0xc400_0003, 1)[0], 0);
    assert_eq!([x(0), x(32)].map(|id| get(&second, id)), [5, CODE + 1]);
}

#[test]
fn a_started_vcpu_keeps_its_start_when_the_client_sets_its_state() {
    let (guest, mut vcpu) = caller();
    let second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    set(&vcpu, x(2), CODE + 4);
    set(&vcpu, x(3), 5);
    assert_eq!(call(&mut vcpu, 0xc400_0003, 1)[0], 0);
    let state = second.get_mp_state().unwrap();
    assert_eq!(state.mp_state, KVM_MP_STATE_RUNNABLE);
    second.set_mp_state(state).unwrap();
    assert_eq!([x(0), x(32)].map(|id| get(&second, id)), [5, CODE + 4]);
}

#[test]
fn all_vcpus_have_one_version_of_psci() {
    let (guest, mut vcpu) = caller();
    let second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    let version = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM_FW);
    set(&second, version, 0x1_0000);
    assert_eq!(get(&vcpu, version), 0x1_0000);
    assert_eq!(call(&mut vcpu, PSCI_VERSION, 0)[0], 0x1_0000);
}

#[test]
fn the_client_chooses_the_services_that_it_carries_out_itself() {
    let (_guest, mut vcpu) = caller();
    assert_eq!(get(&vcpu, services(3)), 0);
    let unknown = vcpu.set_one_reg(services(3), &4u64.to_le_bytes());
    assert_eq!(unknown.unwrap_err().errno(), libc::EINVAL);
    set(&vcpu, services(3), 3);
    assert_eq!(call(&mut vcpu, 0x8600_0000, 0), [3, 0, 3, 0]);
    assert_eq!(call(&mut vcpu, 0x8600_0040, 0)[0], NOT_SUPPORTED);
}

#[test]
fn a_guest_switches_itself_off_to_hibernate() {
    let version = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM_FW);
    let (_guest, mut vcpu) = caller();
    assert_eq!(get(&vcpu, version), 0x1_0003);
    assert_eq!(call(&mut vcpu, PSCI_VERSION, 0)[0], 0x1_0003);
    assert_eq!(call(&mut vcpu, PSCI_FEATURES, SYSTEM_OFF2)[0], 1);
    assert_eq!(call(&mut vcpu, SYSTEM_OFF2, 2)[0], INVALID_PARAMETERS);
    for kind in [0, 1] {
        set(&vcpu, PC, CODE);
        set(&vcpu, x(0), SYSTEM_OFF2);
        set(&vcpu, x(1), kind);
        set(&vcpu, x(2), 0);
        match vcpu.run() {
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, [1])) => {}
            other => panic!("{other:?}"),
        }
        let runnable = kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        };
        vcpu.set_mp_state(runnable).unwrap();
    }
    // Older versions do not have the function.
    set(&vcpu, PC, CODE);
    set(&vcpu, version, 0x1_0002);
    assert_eq!(
        call(&mut vcpu, PSCI_FEATURES, SYSTEM_OFF2)[0],
        NOT_SUPPORTED
    );
    assert_eq!(call(&mut vcpu, SYSTEM_OFF2, 1)[0], NOT_SUPPORTED);
}
