//! Invalidations of host memory, alone and during faults.

use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Barrier, Mutex};

use crate::machine::{BUSY, GIB1, MIB2, NONE, REMAP_2M, REMAP_4K, level, set, touch, vm};
use slat::{Access::*, Attention, Gfn, Gpa, Hva, Level, Prefetch, Setting, Stop};
use slat_model::{Event, HostChange, HostMemory};

#[test]
fn several_gfns_of_one_hva_are_all_zapped() {
    let (platform, vm) = vm(GIB1, REMAP_2M);
    let mut vcpu = vm.create_vcpu().unwrap();
    let aliases = [0, 8 * MIB2, GIB1, 5 * GIB1 + 1];
    for (slot, base) in aliases.into_iter().enumerate() {
        set(&vm, slot as u32, base..base + 2 * MIB2, 0, NONE);
    }
    let pages: Vec<_> = aliases
        .into_iter()
        .map(|base| touch(&mut vcpu, base + MIB2 + 9, Write).unwrap().host)
        .collect();
    assert!(pages.iter().all(|host| *host == pages[0]));
    let range = MIB2 + 9..MIB2 + 10;
    let guard = vm.invalidate(HostMemory::hvas(&range));
    platform.host.change(&range, REMAP_4K);
    drop(guard);
    let now = platform.host.get(range.start).unwrap().pfn.hpa();
    for base in aliases {
        let again = touch(&mut vcpu, base + MIB2 + 9, Read).unwrap();
        assert_eq!((again.host, again.level), (now, Level::PAGE));
    }
    vm.audit().unwrap();
}

#[test]
fn zapped_pages_fault_again_and_others_stay() {
    let (platform, vm) = vm(3 * MIB2, REMAP_4K);
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..MIB2, 0, NONE);
    set(&vm, 1, MIB2..3 * MIB2, MIB2, NONE);
    let pages = [0, MIB2 - 1, MIB2, 2 * MIB2, 3 * MIB2 - 1];
    for page in pages {
        touch(&mut vcpu, page, Write).unwrap();
    }
    vm.zap(0, Gfn(MIB2 - 1)..Gfn(2 * MIB2));
    assert_eq!(vm.stats().pages_4k, 3);
    vm.audit().unwrap();
    let before = vm.stats().pf_fixed;
    for page in pages {
        touch(&mut vcpu, page, Write).unwrap();
    }
    assert_eq!(vm.stats().pf_fixed - before, 2);
    vm.zap(1, Gfn(0)..Gfn(MIB2));
    vm.zap(0, Gfn(0)..Gfn(u64::MAX));
    assert_eq!(vm.stats().pages_4k, 0);
    platform.check();
}

#[test]
fn an_invalidation_takes_pages_that_it_names_in_part() {
    let (_, vm) = vm(16, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..16, 0, NONE);
    (0..16).for_each(|page| _ = touch(&mut vcpu, page, Write).unwrap());
    let (first, last) = (HostMemory::hva(3), HostMemory::hva(5));
    drop(vm.invalidate(Hva(first.0 + 0xfff)..Hva(last.0 + 1)));
    let mut left = Vec::new();
    vm.visit_leaves(0, Gfn(0)..Gfn(16), &mut |gfn, _, _| left.push(gfn.0));
    assert_eq!(
        left,
        [0..3, 6..16].into_iter().flatten().collect::<Vec<_>>()
    );
}

#[test]
fn an_invalidation_of_memory_that_no_slot_uses_disturbs_nobody() {
    let (_, vm) = vm(1024, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..16, 0, NONE);
    touch(&mut vcpu, 3, Write).unwrap();
    let before = vm.stats();
    let guard = vm.invalidate(HostMemory::hvas(&(16..1024)));
    touch(&mut vcpu, 4, Write).unwrap();
    drop(guard);
    vcpu.enter_unguarded(1);
    let flag = vcpu.attention().flag().load(SeqCst);
    assert_eq!(flag & Attention::FLUSH, 0);
    vcpu.leave();
    let did = vm.stats().since(&before);
    assert_eq!(
        (did.zapped, did.remote_tlb_flush, did.pf_retried),
        (0, 0, 0)
    );
}

#[test]
fn a_fault_waits_while_any_page_of_its_leaf_is_invalidated() {
    let (platform, vm) = vm(1024, REMAP_2M);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..1024, 0, NONE);
    let page = 7..8;
    let guard = vm.invalidate(HostMemory::hvas(&page));
    // Page 300 is not in the range, but the fault could install a huge leaf that contains the range.
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    vcpu.attention().raise(BUSY);
    assert_eq!(vcpu.translate(Gpa(300 << 12), Write), Err(Stop::Retry));
    assert!(vcpu.translate(Gpa(600 << 12), Write).is_ok());
    vcpu.attention().take(BUSY);
    vcpu.leave();
    platform.host.change(&page, REMAP_4K);
    drop(guard);
    assert_eq!(level(&mut vcpu, 300, Write), 1);
    let host = platform.host.get(7).unwrap().pfn.hpa();
    assert_eq!(touch(&mut vcpu, 7, Read).unwrap().host, host);
    vm.audit().unwrap();
}

#[test]
fn a_page_resolved_during_an_invalidation_is_not_installed_after_it() {
    let (platform, vm) = vm(64, REMAP_4K);
    set(&vm, 0, 0..64, 0, NONE);
    let page = 7..8;
    let (reached, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let guard = vm.invalidate(HostMemory::hvas(&page));
    platform.set_hook({
        let (reached, go_on) = (reached.clone(), go_on.clone());
        let once = AtomicBool::new(true);
        move |event| {
            if matches!(event, Event::Resolved(_)) && once.swap(false, SeqCst) {
                reached.wait();
                go_on.wait();
            }
        }
    });
    std::thread::scope(|scope| {
        let mut vcpu = vm.create_vcpu().unwrap();
        let fault = scope.spawn(move || touch(&mut vcpu, 7, Write).unwrap().host);
        // The fault has resolved the old page. Now the page changes, and the invalidation ends.
        reached.wait();
        platform.host.change(&page, REMAP_4K);
        drop(guard);
        go_on.wait();
        let now = platform.host.get(7).unwrap().pfn.hpa();
        assert_eq!(fault.join().unwrap(), now);
    });
    platform.clear_hook();
    vm.audit().unwrap();
}

#[test]
fn a_hole_during_an_invalidation_is_no_bad_address_yet() {
    let (platform, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..64, 0, NONE);
    let page = 7..8;
    let guard = vm.invalidate(HostMemory::hvas(&page));
    platform.host.change(&page, HostChange::Punch);
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    vcpu.attention().raise(BUSY);
    assert_eq!(vcpu.translate(Gpa(7 << 12), Read), Err(Stop::Retry));
    vcpu.attention().take(BUSY);
    vcpu.leave();
    drop(guard);
    let hva = HostMemory::hva(7);
    match touch(&mut vcpu, 7, Read) {
        Err(Stop::BadAddress { gpa, hva: at, .. }) => assert_eq!((gpa, at), (Gpa(7 << 12), hva)),
        other => panic!("{other:?}"),
    }
}

/// During a long operation, an invalidation flushes only its own range, and not the range of the operation.
#[test]
fn an_invalidation_flushes_its_own_pages_whoever_owes_a_flush_of_others() {
    let (platform, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..64, 0, NONE);
    for gfn in [7, 9] {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    let flushed = Arc::new(Mutex::new(Vec::new()));
    platform.set_hook({
        let (flushed, vm) = (flushed.clone(), vm.clone());
        move |event| {
            let Event::Flush(start, end) = event else {
                return;
            };
            let first = {
                let mut flushed = flushed.lock().unwrap();
                flushed.push(start.0..end.0);
                flushed.len() == 1
            };
            // Page 7 was zapped, and its flush is still pending.
            if first {
                drop(vm.invalidate(HostMemory::hvas(&(9..10))));
                // This invalidation zaps nothing, but has to flush page 7, because CPUs may still use it.
                drop(vm.invalidate(HostMemory::hvas(&(7..8))));
            }
        }
    });
    drop(vm.invalidate(HostMemory::hvas(&(7..8))));
    platform.clear_hook();
    let flushed = flushed.lock().unwrap();
    assert_eq!(*flushed, [7..8, 9..10, 7..8]);
}
