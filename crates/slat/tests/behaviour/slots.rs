//! Memslots and address spaces.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

use crate::machine::{MIB2, NONE, REMAP_4K, TestVm, region, set, touch, vm};
use slat::{
    Access::*, Config, DirtyLogMethod, Gfn, Gpa, Granule, RegionError, Setting, SlotFlags, Stop, Vm,
};
use slat_model::{Event, HostMemory, SimPlatform};

#[test]
fn memslots_are_listed_by_their_frames() {
    let (_, vm) = vm(1024, REMAP_4K);
    let list = || {
        let mut slots = Vec::new();
        let mut at = Gfn(0);
        while let Some(slot) = vm.memslot_from(0, at) {
            at = Gpa(slot.gpa.0 + slot.size).gfn();
            slots.push((slot.slot, slot.gpa.gfn().0, at.0));
        }
        slots
    };
    assert_eq!(list(), []);
    set(&vm, 7, 100..116, 0, NONE);
    set(&vm, 3, 500..501, 16, SlotFlags::READONLY);
    set(&vm, 5, 0..16, 32, NONE);
    assert_eq!(list(), [(5, 0, 16), (7, 100, 116), (3, 500, 501)]);
    let slot = vm.memslot_from(0, Gfn(501 - 1)).unwrap();
    assert_eq!(slot, region(3, 500..501, 16, SlotFlags::READONLY));
    // The frame is in the middle of a slot: the result is that slot.
    assert_eq!(vm.memslot_from(0, Gfn(115)).unwrap().slot, 7);
    assert_eq!(vm.memslot_from(0, Gfn(116)).unwrap().slot, 3);
    vm.remove_memory_region(0, 7).unwrap();
    assert_eq!(list(), [(5, 0, 16), (3, 500, 501)]);
    assert_eq!(vm.memslot_from(99, Gfn(0)), None);
}

#[test]
fn address_spaces_are_apart() {
    let platform = SimPlatform::new(64);
    let vm: Arc<TestVm> = Vm::new(platform.clone(), Config::default().with_spaces(2)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let smm = region(0, 0..8, 0, NONE);
    vm.set_memory_region(1, &smm).unwrap();
    touch(&mut vcpu, 0, Read).unwrap_err();
    vm.set_memory_region(0, &region(0, 0..8, 8, NONE)).unwrap();
    assert!(touch(&mut vcpu, 0, Read).is_ok());
    assert_ne!(vm.root(0), vm.root(1));
    assert_eq!(vm.root(2), None);
    let nowhere = vm.set_memory_region(2, &smm).unwrap_err();
    assert_eq!(
        (nowhere, nowhere.errno()),
        (RegionError::NoSuchSpace(2), 22)
    );
    vm.audit().unwrap();
}

/// A vCPU's cached tables and slots belong to one address space.
#[test]
fn a_cpu_uses_nothing_of_the_address_space_that_it_has_left() {
    let platform = SimPlatform::new(32);
    let vm: Arc<TestVm> = Vm::new(platform, Config::default().with_spaces(2)).unwrap();
    let first_page = |space| 16 * space as u64;
    for space in 0..2 {
        let region = region(0, 0..16, first_page(space), NONE);
        vm.set_memory_region(space, &region).unwrap();
    }
    let gpa = Gpa(3 << 12);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(1);
    for space in [0, 1, 0, 1] {
        vcpu.use_space(space);
        for _ in 0..3 {
            let found = vcpu.translate(gpa, Read).unwrap();
            let (page, _) = HostMemory::identify(found.host.pfn());
            assert_eq!(page, first_page(space) + 3);
            let backing = vcpu.slot_at(gpa).unwrap().backing;
            assert_eq!(backing, HostMemory::hva(first_page(space)));
        }
    }
}

/// A thread that needs the lock during an operation on a whole slot waits for one step only.
#[test]
fn nobody_waits_for_the_end_of_a_long_operation() {
    const PAGES: u64 = 3 * MIB2;
    type Operation = (&'static str, fn(&TestVm));
    let operations: [Operation; 5] = [
        ("age", |vm| {
            assert!(vm.age(HostMemory::hvas(&(0..PAGES)), true) > 0);
        }),
        ("begin to log", |vm| {
            set(vm, 0, 0..PAGES, 0, SlotFlags::LOG_DIRTY_PAGES);
        }),
        ("get the log", |vm| {
            let mut bitmap = vec![0; PAGES as usize / 64];
            vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
            assert!(bitmap.iter().all(|word| *word == u64::MAX));
        }),
        ("zap", |vm| vm.zap(0, Gfn(0)..Gfn(u64::MAX))),
        ("invalidate", |vm| {
            drop(vm.invalidate(HostMemory::hvas(&(0..PAGES))))
        }),
    ];
    let (platform, vm) = vm(PAGES + 8, REMAP_4K);
    vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
    set(&vm, 0, 0..PAGES, 0, NONE);
    let mut vcpu = vm.create_vcpu().unwrap();
    for (name, operation) in operations {
        for gfn in 0..PAGES {
            touch(&mut vcpu, gfn, Write).unwrap();
        }
        let begun = AtomicBool::new(false);
        let done = Arc::new(AtomicBool::new(false));
        platform.set_hook({
            let (vm, done) = (vm.clone(), done.clone());
            let operator = std::thread::current().id();
            move |event| {
                if !matches!(event, Event::Entries(_)) || std::thread::current().id() != operator {
                    return;
                }
                if !begun.swap(true, SeqCst) {
                    let (vm, done) = (vm.clone(), done.clone());
                    std::thread::spawn(move || {
                        set(&vm, 7, PAGES..PAGES + 8, PAGES, NONE);
                        set(&vm, 7, PAGES..PAGES, PAGES, NONE);
                        done.store(true, SeqCst);
                    });
                } else if !done.load(SeqCst) {
                    // Each step takes so long that the other thread can get the lock between two steps.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        operation(&vm);
        platform.clear_hook();
        assert!(
            done.load(SeqCst),
            "who changes a slot waits for the end of: {name}"
        );
    }
}

/// In KVM, size 0 deletes the slot. Here it is an error, because a client that computes a size of 0 by mistake does not
/// want to delete the slot.
#[test]
fn a_slot_is_deleted_by_its_number_and_not_by_a_size() {
    let (platform, vm) = vm(64, REMAP_4K);
    set(&vm, 3, 0..16, 0, NONE);
    let mut vcpu = vm.create_vcpu().unwrap();
    touch(&mut vcpu, 5, Write).unwrap();
    let empty = region(3, 0..0, 0, NONE);
    let refused = vm.set_memory_region(0, &empty).unwrap_err();
    assert_eq!((refused, refused.errno()), (RegionError::Empty(3), 22));
    assert_eq!(vm.check_memory_region(0, &empty), Err(refused));
    // The same error is returned for a slot that does not exist. KVM's checks of the region itself come first.
    let nowhere = vm.set_memory_region(0, &region(4, 0..0, 0, NONE));
    assert_eq!(nowhere, Err(RegionError::Empty(4)));
    let odd = empty.with_gpa(Gpa(1));
    assert_eq!(
        vm.set_memory_region(0, &odd),
        Err(RegionError::Misaligned(odd, Granule::Kib4))
    );
    assert!(vm.lookup(0, Gfn(5)).is_some());

    for id in [4, 31, 32, u32::MAX] {
        let refused = vm.remove_memory_region(0, id).unwrap_err();
        assert_eq!(
            (refused, refused.errno()),
            (RegionError::NothingToDelete(id), 22)
        );
    }
    let nowhere = vm.remove_memory_region(1, 3);
    assert_eq!(nowhere, Err(RegionError::NoSuchSpace(1)));
    let changes = vm.stats().slot_changes;
    vm.remove_memory_region(0, 3).unwrap();
    assert_eq!(vm.stats().slot_changes, changes + 1);
    assert_eq!(
        touch(&mut vcpu, 5, Read),
        Err(Stop::Mmio { gpa: Gpa(5 << 12) })
    );
    let again = vm.remove_memory_region(0, 3);
    assert_eq!(again, Err(RegionError::NothingToDelete(3)));
    vm.audit().unwrap();
    platform.check();
}
