//! Tests accesses of clients and guests to model-specific registers, and KVM_TRANSLATE.

use crate::common::{CODE, DATA, Guest, RawGuest, start_at_code};
use kvm_bindings::*;
use slat_kvm::VcpuExit;

const FEATURE_CONTROL: u32 = 0x3a;
const TSC_DEADLINE: u32 = 0x6e0;

fn entry(index: u32, data: u64) -> Msrs {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    Msrs::from_entries(&[entry]).unwrap()
}

fn read(guest: &Guest, index: u32) -> Option<u64> {
    let mut msrs = entry(index, 0);
    let read = guest.vcpu.get_msrs(&mut msrs).unwrap();
    (read == 1).then(|| msrs.as_slice()[0].data)
}

fn write(guest: &Guest, index: u32, value: u64) -> bool {
    guest.vcpu.set_msrs(&entry(index, value)).unwrap() == 1
}

/// A client can read all MSRs of the list, and write their values back.
#[test]
fn what_is_saved_can_be_read_and_written_back() {
    for irqchip in [false, true] {
        let guest = Guest::with(&[], |vm| {
            if irqchip {
                vm.create_irq_chip().unwrap();
            }
        });
        for index in guest.kvm.get_msr_index_list().unwrap().as_slice() {
            let value = read(&guest, *index);
            let value = value.unwrap_or_else(|| panic!("MSR {index:#x} cannot be read"));
            assert!(write(&guest, *index, value), "MSR {index:#x} = {value:#x}");
        }
        assert_eq!(read(&guest, TSC_DEADLINE), Some(0));
        assert!(write(&guest, TSC_DEADLINE, 12345));
        assert_eq!(read(&guest, TSC_DEADLINE), Some(0), "not in its mode");
    }
}

/// Returns whether the guest's write to an MSR raises #GP.
fn guest_write_faults(guest: &mut Guest, index: u32, value: u32) -> bool {
    let [i, v] = [index, value].map(u32::to_le_bytes);
    // mov ecx, index; mov eax, value; xor edx, edx; wrmsr; hlt
    let code = [
        &[0x66, 0xb9][..],
        &i,
        &[0x66, 0xb8],
        &v,
        &[0x66, 0x31, 0xd2, 0x0f, 0x30, 0xf4],
    ]
    .concat();
    guest.memory.write(CODE, &code);
    // The guest's handler of #GP halts.
    guest.memory.write(13 * 4, &DATA.to_le_bytes()[..4]);
    guest.memory.write(DATA, &[0xf4]);
    start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    guest.vcpu.get_regs().unwrap().rip == DATA + 1
}

#[test]
fn a_guest_locks_feature_control_once() {
    let mut guest = Guest::new(&[]);
    assert!(
        guest_write_faults(&mut guest, FEATURE_CONTROL, 5),
        "there is no VMX"
    );
    assert!(!guest_write_faults(&mut guest, FEATURE_CONTROL, 0));
    assert!(!guest_write_faults(&mut guest, FEATURE_CONTROL, 1));
    assert_eq!(read(&guest, FEATURE_CONTROL), Some(1));
    assert!(guest_write_faults(&mut guest, FEATURE_CONTROL, 1));
    assert!(guest_write_faults(&mut guest, FEATURE_CONTROL, 0));
    assert!(write(&guest, FEATURE_CONTROL, 0), "the client may always");
    assert!(!write(&guest, FEATURE_CONTROL, 1 << 3));
    assert!(!guest_write_faults(&mut guest, FEATURE_CONTROL, 1));
}

/// Without paging, an address translates to itself.
#[test]
fn an_address_is_translated_whole() {
    let guest = Guest::new(&[]);
    for address in [0, 0x1234, 1 << 32 | 0x1234, u64::MAX - 1] {
        let found = guest.vcpu.translate_gva(address).unwrap();
        assert_eq!((found.valid, found.physical_address), (1, address));
    }
    let found = guest.vcpu.translate_gva(u64::MAX).unwrap();
    assert_eq!((found.valid, found.physical_address), (0, u64::MAX));
}

/// Firmware and old guests access these MSRs without asking CPUID. Reads and writes do what KVM's do.
#[test]
fn msrs_that_guests_take_for_granted_are_there() {
    let mut guest = Guest::new(&[]);
    for (index, value) in [
        (0x17, 0),
        (0xc1, 0),
        (0xcd, 3),
        (0x198, 4 << 40 | 1000),
        (0x1db, 0),
        (0x606, 0),
        (0xc001_0000, 0),
        (0xc001_001b, 0x2000_0000),
    ] {
        assert_eq!(read(&guest, index), Some(value), "{index:#x}");
    }
    for index in [0x79, 0x186, 0x1fc, 0xc001_0004, 0xc001_001f, 0xc001_0020] {
        assert!(!guest_write_faults(&mut guest, index, 1), "{index:#x}");
    }
    for index in [0x34, 0x9e, 0x345, 0xc001_0058, 0x1234_5678] {
        assert!(guest_write_faults(&mut guest, index, 1), "{index:#x}");
    }
    assert_eq!(read(&guest, 0x1fc), Some(1));
}

/// Tests CPUID faulting, which PLATFORM_INFO offers by bit 31 and MISC_FEATURES_ENABLES enables by bit 0.
#[test]
fn cpuid_faulting_is_there_as_long_as_the_client_offers_it() {
    const PLATFORM_INFO: u32 = 0xce;
    const MISC_FEATURES: u32 = 0x140;
    let mut guest = Guest::new(&[]);
    assert!(!guest_write_faults(&mut guest, MISC_FEATURES, 1));
    assert!(!write(&guest, PLATFORM_INFO, 0), "in use");
    assert!(!guest_write_faults(&mut guest, MISC_FEATURES, 0));
    assert!(write(&guest, PLATFORM_INFO, 0));
    assert!(guest_write_faults(&mut guest, MISC_FEATURES, 1));
}

/// A machine-check error raises #MC in a guest that has enabled machine checks. It shuts down a guest that has not.
#[test]
fn a_machine_check_reaches_the_guest() {
    const CR4_MCE: u64 = 1 << 6;
    for enabled in [true, false] {
        // The handler of #MC writes to a port; the interrupted code would halt.
        let RawGuest { vcpu, memory, .. } = &RawGuest::new(&[0xf4], |_| {});
        memory.write(18 * 4, &DATA.to_le_bytes()[..4]);
        memory.write(DATA, &[0xe6, 0x10]);
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.cr4 |= if enabled { CR4_MCE } else { 0 };
        vcpu.set_sregs(&sregs).unwrap();

        vcpu.setup_mce(1 << 24 | 1 << 8 | 10).unwrap();
        let error = kvm_x86_mce {
            bank: 9,
            // The status bits are those that QEMU injects: valid, uncorrected, enabled, signaled.
            status: 1 << 63 | 1 << 61 | 1 << 60 | 1 << 56 | 0x134,
            addr: 0x1000,
            misc: 0x8c,
            mcg_status: 5,
            ..Default::default()
        };
        vcpu.set_mce(&error).unwrap();
        vcpu.run().unwrap();
        let mut msrs = [0x17a, 0x400 + 37].map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        });
        assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 2);
        let logged = msrs.map(|msr| msr.data);
        match enabled {
            true => {
                assert_eq!(vcpu.get_regs().unwrap().rip, DATA);
                assert_eq!(logged, [5, error.status]);
            }
            false => {
                assert_eq!(vcpu.get_regs().unwrap().rip, CODE, "shut down");
                assert_eq!(logged, [0, 0]);
            }
        }
    }
}

/// A client that writes 0 to the MSR of the wall clock requests no page, so the guest's memory at address 0 does not
/// change.
#[test]
fn a_wall_clock_at_no_address_is_written_nowhere() {
    const WALL_CLOCK: u32 = 0x4b56_4d00;
    let mut guest = Guest::new(&[0xf4]);
    guest.memory.write(0, &[0xaa; 16]);
    let at_zero = |guest: &Guest| {
        let mut bytes = [0; 16];
        guest.memory.read(0, &mut bytes);
        bytes
    };
    assert!(write(&guest, WALL_CLOCK, 0));
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(at_zero(&guest), [0xaa; 16]);
    assert!(write(&guest, WALL_CLOCK, DATA));
    start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    let mut version = [0; 4];
    guest.memory.read(DATA, &mut version);
    assert_eq!(version, 2u32.to_le_bytes());
}
