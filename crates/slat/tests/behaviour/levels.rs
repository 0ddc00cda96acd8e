//! Sizes of leaves: their limits, and the operations that make leaves smaller or larger.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::machine::{GIB1, MIB2, NONE, REMAP_1G, REMAP_2M, level, log, set, touch, vm};
use slat::{Access::*, DirtyLogMethod, DirtyLogReads, Setting, SlotFlags, Switch};

#[test]
fn leaves_are_as_large_as_slot_alignment_and_host_allow() {
    let (platform, vm) = vm(3 * GIB1, REMAP_1G);
    let mut vcpu = vm.create_vcpu().unwrap();
    // The slot contains a whole aligned GiB in its middle. At both ends only smaller leaves fit.
    set(
        &vm,
        0,
        GIB1 - MIB2 - 3..2 * GIB1 + MIB2 + 1,
        GIB1 - MIB2 - 3,
        NONE,
    );
    assert_eq!(level(&mut vcpu, GIB1 + 12345, Read), 3);
    assert_eq!(level(&mut vcpu, GIB1 - 1, Read), 2);
    assert_eq!(level(&mut vcpu, GIB1 - MIB2 - 1, Read), 1);
    assert_eq!(level(&mut vcpu, 2 * GIB1, Write), 2);
    assert_eq!(level(&mut vcpu, 2 * GIB1 + MIB2, Execute), 1);
    // If the backing is not congruent to the guest frames, no huge leaf is possible.
    set(&vm, 1, 4 * GIB1..4 * GIB1 + 4 * MIB2, 1, NONE);
    assert_eq!(level(&mut vcpu, 4 * GIB1 + MIB2, Read), 1);
    // If the backing is congruent only modulo 2 MiB, leaves have 2 MiB, though the host maps 1 GiB there.
    set(&vm, 2, 8 * GIB1..9 * GIB1, MIB2, NONE);
    assert_eq!(level(&mut vcpu, 8 * GIB1 + MIB2, Read), 2);
    vm.set_policy(Setting::HugePages(Switch::Off));
    assert_eq!(level(&mut vcpu, 8 * GIB1 + 2 * MIB2, Read), 1);
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn logging_forces_4k_and_ending_it_brings_the_huge_leaf_back() {
    for eager in [true, false] {
        let (platform, vm) = vm(GIB1, REMAP_2M);
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.set_policy(Setting::EagerPageSplit(eager.into()));
        // With this setting, only writes are logged.
        vm.set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
        set(&vm, 0, 0..4 * MIB2, 0, NONE);
        assert_eq!(level(&mut vcpu, 3, Write), 2);
        assert_eq!(level(&mut vcpu, MIB2, Write), 2);
        set(&vm, 0, 0..4 * MIB2, 0, SlotFlags::LOG_DIRTY_PAGES);
        let before = vm.stats();
        assert_eq!(vm.stats().pages_2m, if eager { 0 } else { 2 });
        let read = touch(&mut vcpu, 3, Read).unwrap();
        assert!(!read.write, "a clean page was writable");
        assert_eq!(level(&mut vcpu, 3, Write), 1);
        assert_eq!(level(&mut vcpu, 2 * MIB2 + 1, Write), 1);
        assert_eq!(level(&mut vcpu, 2 * MIB2 + 2, Read), 1);
        // The write fault fixed the leaf of the mapped page in place, without a flush or a zap.
        let did = vm.stats().since(&before);
        assert_eq!((did.pf_fast, did.remote_tlb_flush, did.zapped), (1, 0, 0));
        assert_eq!(did.splits, if eager { 0 } else { 1 });
        assert_eq!(log(&vm, 0), [3, 2 * MIB2 + 1]);
        assert_eq!(log(&vm, 0), []);
        assert!(!touch(&mut vcpu, 3, Read).unwrap().write);
        assert_eq!(level(&mut vcpu, 3, Write), 1);
        assert_eq!(log(&vm, 0), [3]);
        vm.audit().unwrap();
        set(&vm, 0, 0..4 * MIB2, 0, NONE);
        assert_eq!(level(&mut vcpu, 3, Read), 2);
        assert_eq!(level(&mut vcpu, 2 * MIB2 + 1, Write), 2);
        assert_eq!(vm.stats().pages_4k, 0);
        vm.audit().unwrap();
        platform.check();
    }
}

/// At each step of a read fault that maps 2 MiB, another vCPU executes from the same huge page.
#[test]
fn a_huge_page_does_not_replace_the_table_that_nx_has_just_made() {
    for step in 0.. {
        let (platform, vm) = vm(MIB2, REMAP_2M);
        vm.set_policy(Setting::NxHugePages(Switch::On));
        set(&vm, 0, 0..MIB2, 0, NONE);
        let executing = Arc::new(Mutex::new(None));
        let steps = AtomicU64::new(0);
        platform.set_hook({
            let (vm, executing) = (vm.clone(), executing.clone());
            move |_| {
                if steps.fetch_add(1, SeqCst) == step {
                    let mut vcpu = vm.create_vcpu().unwrap();
                    let executor = std::thread::spawn(move || {
                        touch(&mut vcpu, 5, Execute).unwrap();
                    });
                    // At some steps of the reader, the other vCPU has to wait for it. So the reader waits for the other
                    // vCPU only for a limited time.
                    let limit = Instant::now() + Duration::from_millis(20);
                    while !executor.is_finished() && Instant::now() < limit {
                        std::thread::yield_now();
                    }
                    *executing.lock().unwrap() = Some(executor);
                }
            }
        });
        let mut vcpu = vm.create_vcpu().unwrap();
        touch(&mut vcpu, 9, Read).unwrap();
        let Some(executor) = executing.lock().unwrap().take() else {
            assert!(step > 8, "a fault has steps");
            platform.clear_hook();
            break;
        };
        executor.join().unwrap();
        platform.clear_hook();
        let before = vm.stats();
        touch(&mut vcpu, 5, Execute).unwrap();
        let did = vm.stats().since(&before);
        assert_eq!(did.pf_taken, 0, "executed at step {step}");
        assert_eq!(vm.stats().nx_lpage_splits, 1);
    }
}

#[test]
fn a_write_through_a_huge_leaf_survives_that_its_neighbours_are_cleared() {
    let (_, vm) = vm(1024, REMAP_2M);
    let mut vcpu = vm.create_vcpu().unwrap();
    vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
    vm.set_policy(Setting::EagerPageSplit(Switch::Off));
    vm.set_manual_dirty_log(true, false);
    set(&vm, 0, 0..1024, 0, NONE);
    touch(&mut vcpu, 9, Write).unwrap();
    set(&vm, 0, 0..1024, 0, SlotFlags::LOG_DIRTY_PAGES);
    assert_eq!(level(&mut vcpu, 9, Write), 2);
    assert!(log(&vm, 0).contains(&9));
    vm.clear_dirty_log(0, 0, 0, 64, &[u64::MAX]).unwrap();
    touch(&mut vcpu, 9, Write).unwrap();
    vm.clear_dirty_log(0, 0, 64, 64, &[u64::MAX]).unwrap();
    assert!(log(&vm, 0).contains(&9), "the write is lost");
    // The page is in the cleared range, but its bit is not set in the bitmap.
    vm.clear_dirty_log(0, 0, 0, 64, &[1 << 9]).unwrap();
    touch(&mut vcpu, 9, Write).unwrap();
    let around = 1 << 3 | 1 << 20;
    vm.clear_dirty_log(0, 0, 0, 64, &[around]).unwrap();
    assert!(log(&vm, 0).contains(&9), "the write is lost");
}
