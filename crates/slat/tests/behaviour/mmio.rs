//! MMIO: accesses outside memslots and beyond the tables, and writes to read-only memslots.

use crate::machine::{NONE, REMAP_2M, REMAP_4K, set, touch, vm};
use slat::{Access::*, Config, CreateVmError, Ept, Gpa, Level, SlotFlags, Stop, Vm};
use slat_model::SimPlatform;

#[test]
fn mmio_entries_of_an_old_generation_are_not_believed() {
    let (_, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    touch(&mut vcpu, 7, Read).unwrap_err();
    let before = vm.stats();
    // Another slot is created. Frame 7 is still MMIO, but its MMIO entry belongs to an old generation.
    set(&vm, 0, 100..101, 0, NONE);
    touch(&mut vcpu, 7, Read).unwrap_err();
    let did = vm.stats().since(&before);
    assert_eq!((did.slot_lookups, did.mmio_cached), (1, 0));
    // A slot is created at frame 7: the frame is memory at once.
    set(&vm, 1, 7..8, 3, NONE);
    assert!(touch(&mut vcpu, 7, Read).is_ok());
    // When the slot is deleted, frame 7 is MMIO again.
    set(&vm, 1, 7..7, 3, NONE);
    touch(&mut vcpu, 7, Read).unwrap_err();
}

#[test]
fn a_write_to_a_read_only_slot_is_mmio_and_a_read_is_not() {
    let (_, vm) = vm(1024, REMAP_2M);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..1024, 0, SlotFlags::READONLY);
    let read = touch(&mut vcpu, 5, Read).unwrap();
    assert_eq!((read.level, read.write), (Level::MEGA, false));
    assert!(matches!(touch(&mut vcpu, 5, Write), Err(Stop::Mmio { .. })));
    assert!(touch(&mut vcpu, 5, Execute).unwrap().execute);
    vm.audit().unwrap();
}

#[test]
fn beyond_the_tables_everything_is_mmio() {
    let (_, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    let capacity = slat_model::capacity::<Ept>();
    for gfn in [capacity, 1 << 51] {
        let answer = touch(&mut vcpu, gfn, Write);
        assert_eq!(
            answer,
            Err(Stop::Mmio {
                gpa: Gpa(gfn << 12)
            })
        );
    }
    let last = capacity - 1;
    set(&vm, 0, last..last + 1, 0, NONE);
    assert!(touch(&mut vcpu, last, Write).is_ok());
}

#[test]
fn no_slot_is_found_beyond_the_tables_however_many_bits_the_address_has() {
    let (_, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..64, 0, NONE);
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    for gfn in [slat_model::capacity::<Ept>(), 1 << 48, (1 << 52) - 1] {
        let gpa = Gpa(gfn << 12);
        assert_eq!(vcpu.slot_at(gpa), None);
        assert_eq!(
            vcpu.prefault(gpa..Gpa(gpa.0 + 4095)),
            Err(Stop::Mmio { gpa })
        );
    }
    vcpu.leave();
}

/// Whether MMIO is cached depends on the width of physical addresses.
#[test]
fn a_width_that_no_machine_has_is_refused() {
    for (bits, is_one) in [(0, false), (31, false), (32, true), (56, true), (99, false)] {
        let config = Config::default().with_physical_bits(bits);
        let created = Vm::<_, Ept>::new(SimPlatform::new(8), config).map(drop);
        let expected = match is_one {
            true => Ok(()),
            false => Err(CreateVmError::NoSuchWidth(bits)),
        };
        assert_eq!(created, expected);
    }
}
