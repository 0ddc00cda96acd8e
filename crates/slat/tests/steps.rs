//! Operations that read more entries than one reader section may read. They continue where they stopped, and visit each
//! entry once.

#[path = "common/queued.rs"]
mod queued;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use slat::{
    Access::Write, Change, Config, Format, Gfn, Gpa, Level, MemoryAttributes, Region, SlotFlags,
    Stop, Vm, WaitFor, format::Npt, format::Stage2,
};
use slat::{DirtyLogMethod, Setting};
use slat_model::{Event, HostMemory, SimPlatform, set_region};

use queued::Queued;

/// The number of pages of a slot. It is neither a multiple of the entries that one section may read, nor of the pages
/// of a table.
const PAGES: u64 = 2 * 4096 + 700;
const BASE: u64 = 300;

fn machine(pages: u64) -> Arc<SimPlatform> {
    SimPlatform::at_level(pages, Level::PAGE)
}

fn region(slot: u32, base: u64, flags: SlotFlags) -> Region {
    Region::new(slot, Gpa(base << 12), PAGES << 12, HostMemory::hva(0)).with_flags(flags)
}

fn write<F: Format>(vm: &Arc<Vm<SimPlatform, F>>, base: u64) {
    write_all(vm, base..base + PAGES);
}

fn write_all<F: Format>(vm: &Arc<Vm<SimPlatform, F>>, gfns: Range<u64>) {
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    for gfn in gfns {
        while vcpu.translate(Gpa(gfn << 12), Write) == Err(Stop::Retry) {
            vcpu.quiesce();
        }
    }
    vcpu.leave();
}

fn leaves<F: Format>(vm: &Vm<SimPlatform, F>) -> u64 {
    let mut leaves = 0;
    vm.visit_leaves(0, Gfn(0)..Gfn(1 << 20), &mut |_, _, _| leaves += 1);
    leaves
}

fn in_log<F: Format>(vm: &Vm<SimPlatform, F>, slot: u32) -> u64 {
    let mut words = vec![0; PAGES.div_ceil(64) as usize];
    vm.get_dirty_log(0, slot, &mut words).unwrap();
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

fn zaps_and_harvests<F: Format>(log: &str) {
    let vm = Vm::<_, F>::new(machine(PAGES), Config::default()).unwrap();
    vm.set_policy(Setting::parse("dirty_log", log).unwrap());
    vm.set_memory_region(0, &region(0, BASE, SlotFlags::LOG_DIRTY_PAGES))
        .unwrap();
    for round in 0..2 {
        write(&vm, BASE);
        assert_eq!(leaves(&vm), PAGES);
        assert_eq!(vm.age(HostMemory::hvas(&(0..PAGES)), round == 0), PAGES);
        assert_eq!(in_log(&vm, 0), PAGES);
        assert_eq!(in_log(&vm, 0), 0);
        write(&vm, BASE);
        vm.zap(0, Gfn(BASE)..Gfn(BASE + PAGES));
        assert_eq!(leaves(&vm), 0);
        assert_eq!(in_log(&vm, 0), PAGES, "every write was noted");
        write(&vm, BASE);
        drop(vm.invalidate(HostMemory::hvas(&(0..PAGES))));
        assert_eq!(leaves(&vm), 0);
        assert_eq!(in_log(&vm, 0), PAGES);
        // When the slot moves, its log moves with it.
        write(&vm, BASE);
        let to = BASE + 1;
        let logged = SlotFlags::LOG_DIRTY_PAGES;
        vm.set_memory_region(0, &region(0, to, logged)).unwrap();
        assert_eq!(leaves(&vm), 0);
        vm.set_memory_region(0, &region(0, BASE, logged)).unwrap();
        assert_eq!(in_log(&vm, 0), PAGES);
        vm.audit().unwrap();
    }
}

#[test]
fn a_slot_of_small_leaves_is_zapped_aged_and_harvested_page_by_page() {
    zaps_and_harvests::<Npt>("dirty-bit");
    zaps_and_harvests::<Npt>("buffer");
    zaps_and_harvests::<Npt>("write-protect");
    zaps_and_harvests::<Stage2<48, true>>("dirty-bit");
    zaps_and_harvests::<Stage2<48, true>>("buffer");
    zaps_and_harvests::<Stage2<48>>("write-protect");
}

/// Several slots share a backing, and one slot has that memory as its private backing.
#[test]
fn an_operation_on_a_backing_comes_to_every_page_of_every_slot() {
    let vm = Vm::<_, Npt>::new(machine(2 * PAGES), Config::default()).unwrap();
    let bases = [7, 10_000, 20_011];
    for (slot, base) in bases.into_iter().enumerate() {
        let shared = region(slot as u32, base, SlotFlags(0));
        vm.set_memory_region(0, &shared).unwrap();
    }
    let private = region(3, 30_000, SlotFlags(0))
        .with_backing(HostMemory::hva(PAGES))
        .with_private(Some(HostMemory::hva(0)));
    vm.set_memory_region(0, &private).unwrap();
    let gfns = Gfn(30_000)..Gfn(30_000 + PAGES);
    vm.set_memory_attributes(gfns, MemoryAttributes::PRIVATE)
        .unwrap();
    bases
        .into_iter()
        .chain([30_000])
        .for_each(|b| write(&vm, b));
    let (all, part) = (HostMemory::hvas(&(0..PAGES)), HostMemory::hvas(&(9..5000)));
    assert_eq!(vm.age(part, true), 4 * 4991);
    assert_eq!(vm.age(all.clone(), true), 4 * (PAGES - 4991));
    assert_eq!(vm.age(all, true), 0);
    drop(vm.invalidate(HostMemory::hvas(&(1..PAGES - 1))));
    assert_eq!(leaves(&vm), 4 * 2);
    vm.audit().unwrap();
}

/// A log is harvested. After the harvest's first step, `first` replaces slot 0, and then `second` is created and the
/// guest writes to it. The log of `second` must contain all these writes after the remaining steps of the harvest, too.
fn a_slot_in_place_of_the_one_whose_log_is_taken(first: Region, second: Region) {
    const QUEUED: u32 = 2;
    const WRITING: u32 = 3;
    const WRITTEN: u32 = 4;
    let platform = machine(PAGES);
    let vm = Vm::<_, Npt>::new(platform.clone(), Config::default()).unwrap();
    vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
    let logged = SlotFlags::LOG_DIRTY_PAGES;
    vm.set_memory_region(0, &region(0, BASE, logged)).unwrap();
    write(&vm, BASE);
    // The number of threads that wait for the lock, from 0 to 2; then the state of the second thread.
    let state = Arc::new(AtomicU32::new(0));
    let wait_until = |state: &AtomicU32, least: u32| {
        while state.load(SeqCst) < least {
            thread::yield_now();
        }
    };
    platform.set_hook({
        let (vm, state, taker) = (vm.clone(), state.clone(), thread::current().id());
        let changes = vm.stats().slot_changes;
        move |event| {
            if thread::current().id() != taker {
                let named =
                    thread::current().name() == Some(["0", "1"][state.load(SeqCst) as usize % 2]);
                if matches!(event, Event::Wait(WaitFor::Turn))
                    && named
                    && state.load(SeqCst) < QUEUED
                {
                    state.fetch_add(1, SeqCst);
                }
                return;
            }
            if !matches!(event, Event::Entries(_)) {
                return;
            }
            if state.load(SeqCst) == 0 {
                for (i, change) in [first, second].into_iter().enumerate() {
                    let (vm, told) = (vm.clone(), state.clone());
                    let run = move || {
                        set_region(&vm, 0, &change).unwrap();
                        if i == 1 {
                            told.store(WRITING, SeqCst);
                            write(&vm, change.gpa.0 >> 12);
                            told.store(WRITTEN, SeqCst);
                        }
                    };
                    thread::Builder::new()
                        .name(i.to_string())
                        .spawn(run)
                        .unwrap();
                    wait_until(&state, i as u32 + 1);
                }
            }
            // The second thread may have to wait for the end of this step before it can write.
            let begin = Instant::now();
            while vm.stats().slot_changes > changes + 1
                && state.load(SeqCst) != WRITTEN
                && (state.load(SeqCst) == WRITING || begin.elapsed() < Duration::from_millis(5))
            {
                thread::yield_now();
            }
        }
    });
    let taken = in_log(&vm, 0);
    assert!(taken > 0, "in its first step");
    wait_until(&state, WRITTEN);
    platform.clear_hook();
    assert_eq!(in_log(&vm, second.slot), PAGES);
    vm.audit().unwrap();
}

#[test]
fn a_log_that_is_taken_is_not_that_of_another_slot() {
    let logged = SlotFlags::LOG_DIRTY_PAGES;
    let again = region(0, BASE, logged);
    let gone = again.with_size(0);
    let far = region(0, 1 << 19, logged);
    a_slot_in_place_of_the_one_whose_log_is_taken(far, region(1, BASE, logged));
    a_slot_in_place_of_the_one_whose_log_is_taken(gone, again);
}

/// A log is harvested. After the harvest's first step, a slot with another log replaces its slot. A page whose mark was
/// taken and that is not protected yet must be marked in the new log when it is written again.
#[test]
fn what_is_taken_from_the_log_of_a_slot_that_is_replaced_is_noted_again() {
    for log in ["write-protect", "dirty-bit", "buffer"] {
        let vm = Vm::<_, Npt>::new(machine(PAGES), Config::default()).unwrap();
        vm.set_policy(Setting::parse("dirty_log", log).unwrap());
        let logged = SlotFlags::LOG_DIRTY_PAGES;
        vm.set_memory_region(0, &region(0, BASE, logged)).unwrap();
        write(&vm, BASE);
        assert_eq!(in_log(&vm, 0), PAGES);
        // One page of the first word is not marked, so the pages of this word are protected at once. The other words
        // are collected, and protected together.
        write_all(&vm, BASE + 1..BASE + PAGES);
        let change = vm.clone();
        let queued = Queued::at_the_next_table(vm.platform(), move || {
            let changes = [Change::Remove(0), Change::Set(region(1, BASE, logged))];
            change.set_memory_regions(0, &changes).unwrap();
        });
        assert!(in_log(&vm, 0) > 0);
        queued.join();
        vm.audit().unwrap();
        write(&vm, BASE);
        assert_eq!(in_log(&vm, 1), PAGES, "{log}");
    }
}

#[test]
fn the_end_of_a_log_takes_no_table_away_where_the_host_has_small_pages() {
    let vm = Vm::<_, Npt>::new(machine(PAGES), Config::default()).unwrap();
    vm.set_memory_region(0, &region(0, BASE, SlotFlags::LOG_DIRTY_PAGES))
        .unwrap();
    write(&vm, BASE);
    vm.set_memory_region(0, &region(0, BASE, SlotFlags(0)))
        .unwrap();
    assert_eq!(leaves(&vm), PAGES);
}
