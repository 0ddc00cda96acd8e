//! What the engine promises about faults, slots and invalidations, one promise a test, single-threaded.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use slat::{
    Access::{self, *},
    Attention, Config, Ept, Gfn, Gpa, Granule, Hva, Level, MemoryType, Region, RegionError, Rights,
    SlotFlags, Stop, Translation, Vcpu, Vm,
};
use slat::{DirtyLogMethod, DirtyLogReads, Prefetch, Setting, Switch};
use slat_model::{Event, HostChange, HostMemory, PageKind, RingClient, SimPlatform, set_region};

type Machine = SimPlatform;
type TestVm = Vm<Machine, Ept>;

const MIB2: u64 = 512;
const GIB1: u64 = 1 << 18;
const BUSY: u32 = 1 << 8;

const REMAP_4K: HostChange = remap(Level::PAGE);
const REMAP_2M: HostChange = remap(Level::MEGA);
const REMAP_1G: HostChange = remap(Level::GIGA);

const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

fn vm(host_pages: u64, change: HostChange) -> (Arc<Machine>, Arc<TestVm>) {
    let platform = SimPlatform::new(host_pages);
    platform.host.change(&(0..host_pages), change);
    let vm = Vm::new(platform.clone(), Config::default()).unwrap();
    (platform, vm)
}

fn region(slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) -> Region {
    Region::new(
        slot,
        Gpa(gfns.start << 12),
        (gfns.end - gfns.start) << 12,
        HostMemory::hva(host_page),
    )
    .with_flags(flags)
}

const NONE: SlotFlags = SlotFlags(0);

fn set(vm: &TestVm, slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) {
    set_region(vm, 0, &region(slot, gfns, host_page, flags)).unwrap();
}

/// One access by a vCPU that comes in for it, and quiesces as it is asked to.
fn touch(vcpu: &mut Vcpu<Machine, Ept>, gfn: u64, access: Access) -> Result<Translation, Stop> {
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let mut answer = vcpu.translate(Gpa(gfn << 12), access);
    if answer == Err(Stop::Retry) {
        vcpu.quiesce();
        answer = vcpu.translate(Gpa(gfn << 12), access);
    }
    vcpu.leave();
    answer
}

fn level(vcpu: &mut Vcpu<Machine, Ept>, gfn: u64, access: Access) -> u8 {
    touch(vcpu, gfn, access).unwrap().level.0
}

fn log(vm: &TestVm, slot: u32) -> Vec<u64> {
    let mut words = vec![0; vm.dirty_log_words(0, slot).unwrap()];
    vm.get_dirty_log(0, slot, &mut words).unwrap();
    let bit = |page: &u64| words[*page as usize / 64] >> (page % 64) & 1 != 0;
    (0..words.len() as u64 * 64).filter(bit).collect()
}

#[test]
fn leaves_are_as_large_as_slot_alignment_and_host_allow() {
    let (platform, vm) = vm(3 * GIB1, REMAP_1G);
    let mut vcpu = vm.create_vcpu().unwrap();
    // 1 GiB in the middle, smaller pieces at both ends.
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
    // A backing that is not congruent to the guest frames allows no huge leaf.
    set(&vm, 1, 4 * GIB1..4 * GIB1 + 4 * MIB2, 1, NONE);
    assert_eq!(level(&mut vcpu, 4 * GIB1 + MIB2, Read), 1);
    // One that is congruent at 2 MiB only allows 2 MiB, though the host has 1 GiB there.
    set(&vm, 2, 8 * GIB1..9 * GIB1, MIB2, NONE);
    assert_eq!(level(&mut vcpu, 8 * GIB1 + MIB2, Read), 2);
    vm.set_policy(Setting::HugePages(Switch::Off));
    assert_eq!(level(&mut vcpu, 8 * GIB1 + 2 * MIB2, Read), 1);
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn mmio_entries_of_an_old_generation_are_not_believed() {
    let (_, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    touch(&mut vcpu, 7, Read).unwrap_err();
    let before = vm.stats();
    // Another slot: nothing changes at frame 7, but the entry no longer proves that.
    set(&vm, 0, 100..101, 0, NONE);
    touch(&mut vcpu, 7, Read).unwrap_err();
    let did = vm.stats().since(&before);
    assert_eq!((did.slot_lookups, did.mmio_cached), (1, 0));
    // A slot at frame 7 itself: memory at once.
    set(&vm, 1, 7..8, 3, NONE);
    assert!(touch(&mut vcpu, 7, Read).is_ok());
    // And MMIO again when it is gone.
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
fn logging_forces_4k_and_ending_it_brings_the_huge_leaf_back() {
    for eager in [true, false] {
        let (platform, vm) = vm(GIB1, REMAP_2M);
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.set_policy(Setting::EagerPageSplit(eager.into()));
        // So that the log tells what was written, and nothing else.
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
        // The write to a mapped page was fixed in place, with neither flush nor zap.
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
    // From inside of a slot: that slot.
    assert_eq!(vm.memslot_from(0, Gfn(115)).unwrap().slot, 7);
    assert_eq!(vm.memslot_from(0, Gfn(116)).unwrap().slot, 3);
    vm.remove_memory_region(0, 7).unwrap();
    assert_eq!(list(), [(5, 0, 16), (3, 500, 501)]);
    assert_eq!(vm.memslot_from(99, Gfn(0)), None);
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
    // Page 300 is not in the range, but the huge leaf that could be installed for it is.
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
        // It knows the page as it is now; then the page changes, and the invalidation ends.
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
    // The host gives more rights: no invalidation is needed for that.
    let writable = HostChange::Protect { writable: true };
    platform.host.change(&(0..64), writable);
    assert!(touch(&mut vcpu, 9, Write).unwrap().write);
    let did = vm.stats().since(&before);
    assert_eq!((did.pf_fixed, did.remote_tlb_flush, did.zapped), (1, 0, 0));
    assert_eq!(platform.flushes(), 0);
}

/// Beside a long operation, every invalidation would flush everything otherwise.
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
            // The flush of page 7 is owed still.
            if first {
                drop(vm.invalidate(HostMemory::hvas(&(9..10))));
                // Of this page, too: nothing is left to be zapped, but CPUs may still use it.
                drop(vm.invalidate(HostMemory::hvas(&(7..8))));
            }
        }
    });
    drop(vm.invalidate(HostMemory::hvas(&(7..8))));
    platform.clear_hook();
    let flushed = flushed.lock().unwrap();
    assert_eq!(*flushed, [7..8, 9..10, 7..8]);
}

/// Whatever is done to a whole slot, somebody who comes in the middle of it waits for one step.
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
                    // So slow that the other one has the time, if he is let in.
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

/// Who asks for the log, or for what there is already, is not answered before the log has begun everywhere.
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
        // The log has to look at each table, so that it takes a while to begin.
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
                    // In the middle of the slot.
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

/// A vCPU executes at every step of a read fault beside it, which has chosen to map 2 MiB or is about to.
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
                    // The reader may be at a step at which the other has to wait for it.
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

/// Tables that it walked lately, and slots that it used, are those of one address space.
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
    // All is mapped: this one needs no table.
    let mut vcpu = vm.create_vcpu().unwrap();
    prefault(&mut vcpu);
    assert!(platform.live_frames() <= tables + MOST);
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

#[test]
fn a_log_that_goes_to_rings_hears_of_pages_that_were_writable_before_it_began() {
    let (_, vm) = vm(1024, REMAP_2M);
    vm.use_dirty_rings();
    // Says nothing to rings, which have no bits to set.
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
    // The page lies between those that are cleared, and is not named.
    vm.clear_dirty_log(0, 0, 0, 64, &[1 << 9]).unwrap();
    touch(&mut vcpu, 9, Write).unwrap();
    let around = 1 << 3 | 1 << 20;
    vm.clear_dirty_log(0, 0, 0, 64, &[around]).unwrap();
    assert!(log(&vm, 0).contains(&9), "the write is lost");
}

#[test]
fn revalidating_tells_a_page_that_is_there_from_one_that_is_gone() {
    let (platform, vm) = vm(64, REMAP_4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&vm, 0, 0..64, 0, NONE);
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let gpa = Gpa(5 << 12);
    assert_eq!(vcpu.revalidate(gpa, HostMemory::hva(5), Write), Ok(()));
    platform.host.change(&(5..6), HostChange::Punch);
    let gone = vcpu.revalidate(gpa, HostMemory::hva(5), Write);
    assert!(matches!(gone, Err(Stop::BadAddress { .. })), "{gone:?}");
    assert!(vcpu.revalidate(gpa, Hva(0), Read).is_err());
    vcpu.leave();
}

/// After it nobody waits for the vCPU: its guest runs, and what the hardware holds is the platform's.
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
    // The flush went by while it was outside: nothing of it is left to be acknowledged.
    assert!(vcpu.hardware_fault(hole, Read).is_err());
    assert_eq!(vcpu.attention().flag().load(SeqCst), 0);
}

/// KVM asks for one remote flush when logging begins, and for one in each KVM_CLEAR_DIRTY_LOG, however many
/// chunks it splits.
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
    // The flush was made, and the pages are noted again.
    let before = vm.stats().dirty_pages;
    touch(&mut vcpu, 100, Write).unwrap();
    assert_eq!(vm.stats().dirty_pages, before + 1);
    vm.audit().unwrap();
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

    // A huge leaf: the frame of the page that was asked for.
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

    // An MMIO entry, a frame beyond the tables, an address space that does not exist.
    assert!(touch(&mut vcpu, 8 * MIB2, Read).is_err());
    assert_eq!(vm.stats().pf_mmio_spte_created, 1);
    for gfn in [8 * MIB2, 1 << 36, u64::MAX] {
        assert_eq!(look_up(gfn), None);
    }
    assert_eq!(vm.lookup(1, Gfn(0)), None);
    vm.remove_memory_region(0, 0).unwrap();
    assert_eq!(look_up(0), None);
}

/// A flush waits for a look-up: the tables that it reads are not freed under it. Two threads at a time look up, so
/// one of them has the reader of an operation.
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
        // On a busy machine a thread may begin late.
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

/// To KVM, size 0 means: delete it. A client that has computed a size of 0 does not mean that.
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
    // Also of a slot that does not exist; but what KVM checks before it looks at the slot comes first.
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
