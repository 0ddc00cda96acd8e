//! Dirty logs: when logging has started, which data moves with its slot, and how often the log flushes.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::machine::{MIB2, NONE, REMAP_2M, REMAP_4K, TestVm, level, log, set, touch, vm};
use slat::{Access::*, Setting, SlotFlags, Stop, Switch};
use slat_model::{Event, RingClient};

#[test]
fn a_moved_slot_keeps_its_dirty_log() {
    let (_, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    let logged = SlotFlags::LOG_DIRTY_PAGES;
    set(&vm, 0, 0..8, 0, logged);
    touch(&mut vcpu, 5, Write).unwrap();
    set(&vm, 0, 100..108, 0, logged);
    touch(&mut vcpu, 101, Write).unwrap();
    assert_eq!(log(&vm, 0), [1, 5]);
}

/// A request for the log, or the same slot change once more, returns only after dirty logging has started for all
/// pages.
#[test]
fn a_log_that_others_begin_is_had_when_it_has_begun() {
    const PAGES: u64 = 3 * MIB2;
    type Ask = fn(&TestVm);
    let asks: [Ask; 2] = [
        |vm| {
            vm.get_dirty_log(0, 0, &mut vec![0; PAGES as usize / 64])
                .unwrap()
        },
        |vm| set(vm, 0, 0..PAGES, 0, SlotFlags::LOG_DIRTY_PAGES),
    ];
    for ask in asks {
        let (platform, vm) = vm(PAGES, REMAP_4K);
        // The start of dirty logging has to visit each table, so it takes some time.
        vm.set_policy(Setting::HierarchicalProtect(Switch::Off));
        set(&vm, 0, 0..PAGES, 0, NONE);
        let mut vcpu = vm.create_vcpu().unwrap();
        for gfn in 0..PAGES {
            touch(&mut vcpu, gfn, Write).unwrap();
        }
        let asker = Arc::new(Mutex::new(None));
        platform.set_hook({
            let (vm, asker) = (vm.clone(), asker.clone());
            let beginner = std::thread::current().id();
            let looks = AtomicU64::new(0);
            move |event| {
                if !matches!(event, Event::Entries(_)) || std::thread::current().id() != beginner {
                    return;
                }
                match looks.fetch_add(1, SeqCst) {
                    // Step 20 is in the middle of the slot.
                    20 => {
                        let vm = vm.clone();
                        *asker.lock().unwrap() = Some(std::thread::spawn(move || {
                            ask(&vm);
                            let mut vcpu = vm.create_vcpu().unwrap();
                            while touch(&mut vcpu, PAGES - 1, Write) == Err(Stop::Retry) {}
                        }));
                    }
                    21..60 => std::thread::sleep(Duration::from_millis(1)),
                    _ => {}
                }
            }
        });
        set(&vm, 0, 0..PAGES, 0, SlotFlags::LOG_DIRTY_PAGES);
        platform.clear_hook();
        asker.lock().unwrap().take().unwrap().join().unwrap();
        let mut bitmap = vec![0; PAGES as usize / 64];
        vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
        assert_eq!(bitmap.last().unwrap() >> 63, 1, "the write is in no log");
    }
}

#[test]
fn a_dirty_log_that_cannot_be_had_is_an_error_and_changes_nothing() {
    let (_, vm) = vm(128, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..65, 0, SlotFlags::LOG_DIRTY_PAGES);
    set(&vm, 1, 100..101, 65, NONE);
    touch(&mut vcpu, 64, Write).unwrap();
    let errno = |slot, words: usize| {
        let error = vm.get_dirty_log(0, slot, &mut vec![0; words]).unwrap_err();
        assert!(!error.to_string().is_empty());
        error.errno()
    };
    assert_eq!(errno(0, 1), 14);
    assert_eq!(errno(1, 1), 2);
    assert_eq!(errno(2, 1), 2);
    assert_eq!(log(&vm, 0), [64]);
}

#[test]
fn a_log_that_goes_to_rings_hears_of_pages_that_were_writable_before_it_began() {
    let (_, vm) = vm(1024, REMAP_2M);
    vm.use_dirty_rings();
    // This setting has no effect on rings, which have no bits to set.
    vm.set_manual_dirty_log(true, true);
    let mut client = RingClient::new();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(client.ring()).unwrap();
    set(&vm, 0, 0..1024, 0, NONE);
    touch(&mut vcpu, 5, Write).unwrap();
    set(&vm, 0, 0..1024, 0, SlotFlags::LOG_DIRTY_PAGES);
    touch(&mut vcpu, 5, Write).unwrap();
    assert_eq!(client.collect().map(|entry| entry.page), Some(5));
    drop((vcpu, vm));
}

/// KVM flushes once when dirty logging starts, and once in each KVM_CLEAR_DIRTY_LOG, even if that call splits several
/// chunks.
#[test]
fn a_log_with_manual_protection_asks_for_one_flush_to_begin_and_one_for_each_clear() {
    const PAGES: u64 = 8 * MIB2;
    let (_, vm) = vm(PAGES, REMAP_2M);
    vm.set_policy(Setting::EagerPageSplitChunk(512));
    vm.set_manual_dirty_log(true, false);
    let mut vcpu = vm.create_vcpu().unwrap();
    let requests = |act: &mut dyn FnMut()| {
        let before = vm.stats().remote_tlb_flush_requests;
        act();
        vm.stats().remote_tlb_flush_requests - before
    };
    set(&vm, 0, 0..PAGES, 0, NONE);
    for leaf in 0..8 {
        assert_eq!(level(&mut vcpu, leaf * MIB2, Write), 2);
    }
    let begin = requests(&mut || set(&vm, 0, 0..PAGES, 0, SlotFlags::LOG_DIRTY_PAGES));
    assert_eq!(vm.stats().splits, 8);
    for page in (0..PAGES).step_by(100) {
        touch(&mut vcpu, page, Write).unwrap();
    }
    let mut log = [0; PAGES as usize / 64];
    let get = requests(&mut || vm.get_dirty_log(0, 0, &mut log).unwrap());
    let clear = requests(&mut || vm.clear_dirty_log(0, 0, 0, PAGES, &log).unwrap());
    assert_eq!((begin, get, clear), (1, 0, 1));
    // The flush was done, so writes to the pages are logged again.
    let before = vm.stats().dirty_pages;
    touch(&mut vcpu, 100, Write).unwrap();
    assert_eq!(vm.stats().dirty_pages, before + 1);
    vm.audit().unwrap();
}
