//! Model-specific registers, as a client and as a guest sees them; and KVM_TRANSLATE.

mod common;

use common::{CODE, DATA, Guest, start_at_code};
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

/// A client saves and restores what the list names: all of it can be read, and written back.
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

/// Whether a guest's write is refused.
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
    // The handler of #GP, which halts.
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

/// Without paging an address is its own translation.
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
