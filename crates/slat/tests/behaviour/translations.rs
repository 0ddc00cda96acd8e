//! The rights of translations, and the effects of requesting them.

use std::sync::atomic::{AtomicBool, Ordering::*};

use crate::machine::{GIB1, MIB2, Machine, NONE, REMAP_2M, REMAP_4K, set, touch, vm};
use slat::{
    Access::*, DirtyLogReads, Ept, Gfn, Gpa, Level, MemoryType, Rights, Setting, SlotFlags, Stop,
    Vcpu,
};
use slat_model::{HostChange, HostMemory, PageKind};

#[test]
fn a_translation_grants_what_was_asked_for_or_is_refused() {
    let (platform, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    let device = HostChange::Remap {
        level: Level::PAGE,
        writable: false,
        kind: PageKind::Device,
    };
    platform.host.change(&(3..4), device);
    set(&vm, 0, 0..64, 0, NONE);
    assert!(touch(&mut vcpu, 3, Read).is_ok());
    for access in [Write, Execute] {
        let answer = touch(&mut vcpu, 3, access);
        assert!(matches!(answer, Err(Stop::BadAddress { .. })), "{answer:?}");
    }
}

#[test]
fn a_second_access_is_no_fault_and_a_wider_one_needs_no_flush() {
    let (platform, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    let readonly = HostChange::Protect { writable: false };
    platform.host.change(&(0..64), readonly);
    set(&vm, 0, 0..64, 0, NONE);
    assert!(!touch(&mut vcpu, 9, Read).unwrap().write);
    let before = vm.stats();
    touch(&mut vcpu, 9, Execute).unwrap();
    assert_eq!(vm.stats().since(&before).pf_taken, 0);
    // The host grants more rights. It need not invalidate for that.
    let writable = HostChange::Protect { writable: true };
    platform.host.change(&(0..64), writable);
    assert!(touch(&mut vcpu, 9, Write).unwrap().write);
    let did = vm.stats().since(&before);
    assert_eq!((did.pf_fixed, did.remote_tlb_flush, did.zapped), (1, 0, 0));
    assert_eq!(platform.flushes(), 0);
}

#[test]
fn a_prefault_keeps_no_more_frames_than_a_fault_needs() {
    const MOST: usize = 4;
    let (platform, vm) = vm(16 * MIB2, REMAP_4K);
    set(&vm, 0, 0..16 * MIB2, 0, NONE);
    let bytes = (16 * MIB2) << 12;
    let prefault = |vcpu: &mut Vcpu<Machine, Ept>| {
        let mapped = vcpu.enter(1).prefault(Gpa(0)..Gpa(bytes));
        assert_eq!(mapped, Ok(bytes));
    };
    prefault(&mut vm.create_vcpu().unwrap());
    let tables = platform.live_frames();
    // All pages are mapped, so this vCPU needs no table.
    let mut vcpu = vm.create_vcpu().unwrap();
    prefault(&mut vcpu);
    assert!(platform.live_frames() <= tables + MOST);
}

/// After a hardware fault returns, no thread waits for the vCPU. Its guest may run, because the platform flushes what
/// the hardware has cached.
#[test]
fn a_hardware_fault_installs_the_leaf_and_leaves_the_vcpu_outside() {
    let (platform, vm) = vm(16, REMAP_4K);
    set(&vm, 0, 0..16, 0, NONE);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.hardware_fault(Gpa(0x3000), Write), Ok(()));
    let hole = Gpa(64 << 12);
    assert_eq!(
        vcpu.hardware_fault(hole, Read),
        Err(Stop::Mmio { gpa: hole })
    );
    let flushes = platform.flushes();
    vm.remove_memory_region(0, 0).unwrap();
    assert_eq!(platform.flushes(), flushes + 1);
    assert_eq!(vm.stats().pf_fixed, 1);
    // The flush was done while the vCPU was outside its section, so the vCPU has nothing to acknowledge.
    assert!(vcpu.hardware_fault(hole, Read).is_err());
    assert_eq!(vcpu.attention().flag().load(SeqCst), 0);
}

#[test]
fn a_look_up_says_what_is_mapped_and_changes_nothing() {
    let (_, vm) = vm(GIB1, REMAP_2M);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..4 * MIB2, 0, SlotFlags::LOG_DIRTY_PAGES);
    vm.set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
    set(&vm, 1, 4 * MIB2..8 * MIB2, 4 * MIB2, SlotFlags::READONLY);
    let look_up = |gfn| {
        let before = vm.stats();
        let found = vm.lookup(0, Gfn(gfn));
        assert_eq!(vm.stats(), before);
        found
    };
    assert_eq!(look_up(0), None);
    let page = touch(&mut vcpu, 0, Read).unwrap();
    let read = look_up(0).unwrap();
    assert_eq!((read.pfn.hpa(), read.level), (page.host, Level::PAGE));
    assert_eq!(read.rights, Rights::READ.with_execute(true));
    assert_eq!(read.memory, MemoryType::WriteBack);
    touch(&mut vcpu, 0, Write).unwrap();
    assert_eq!(look_up(0).unwrap().rights, Rights::ALL);

    // In a huge leaf, the look-up returns the frame of the requested page.
    let page = touch(&mut vcpu, 5 * MIB2 + 3, Read).unwrap();
    let huge = look_up(5 * MIB2 + 4).unwrap();
    assert_eq!(
        (huge.pfn, huge.level),
        (page.host.pfn().add(1), Level::MEGA)
    );
    assert!(!huge.rights.write);
    vcpu.enter_unguarded(1);
    assert_eq!(vcpu.lookup(Gfn(5 * MIB2 + 4)), Some(huge));
    vcpu.leave();

    // The look-up returns nothing for an MMIO entry, for a frame beyond the tables, and for an address space that does
    // not exist.
    assert!(touch(&mut vcpu, 8 * MIB2, Read).is_err());
    assert_eq!(vm.stats().pf_mmio_spte_created, 1);
    for gfn in [8 * MIB2, 1 << 36, u64::MAX] {
        assert_eq!(look_up(gfn), None);
    }
    assert_eq!(vm.lookup(1, Gfn(0)), None);
    vm.remove_memory_region(0, 0).unwrap();
    assert_eq!(look_up(0), None);
}

/// A flush waits for a look-up, so that tables are not freed while the look-up reads them. Two threads look up at the
/// same time, so one of them uses the brief section and the other uses a reader for operations.
#[test]
fn look_ups_go_on_while_tables_are_freed() {
    let (platform, vm) = vm(GIB1, REMAP_4K);
    let done = AtomicBool::new(false);
    let found = [const { AtomicBool::new(false) }; 2];
    std::thread::scope(|scope| {
        for found in &found {
            scope.spawn(|| {
                let mut n = 0;
                while !done.load(SeqCst) {
                    n += 1;
                    let gfn = n % (2 * MIB2);
                    if let Some(mapping) = vm.lookup(0, Gfn(gfn)) {
                        found.store(true, SeqCst);
                        assert_eq!(HostMemory::identify(mapping.pfn).0, gfn);
                    }
                }
            });
        }
        let mut vcpu = vm.create_vcpu().unwrap();
        // On a busy machine a thread may start late.
        let all_found = || found.iter().all(|found| found.load(SeqCst));
        let mut rounds = 0;
        while rounds < 50 || !all_found() {
            rounds += 1;
            set(&vm, 0, 0..2 * MIB2, 0, NONE);
            for gfn in 0..2 * MIB2 {
                touch(&mut vcpu, gfn, Read).unwrap();
            }
            vm.remove_memory_region(0, 0).unwrap();
        }
        done.store(true, SeqCst);
    });
    vm.audit().unwrap();
    platform.check();
}
