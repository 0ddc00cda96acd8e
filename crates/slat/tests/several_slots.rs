//! Several memslots that change atomically: the frames that stay mapped, the frames that are zapped, and the refused
//! changes.

#[path = "common/access.rs"]
mod access;
#[macro_use]
mod common;

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use common::config;
use slat::{
    Access::{self, *},
    Change, Ept, Format, Gfn, Gpa, Level, MAX_SLOTS, MemoryType, Region, RegionError, Rights,
    Setting, SlotFlags, Stats, Stop, Vm, WaitFor,
};
use slat::{DirtyLogMethod, Prefetch, Switch};
use slat_model::{Event, HostMemory, SimPlatform};

on_every_format! {
    a_hole_of_2_mib_in_4_gib_zaps_2_mib,
    a_slot_that_is_cut_in_the_middle_of_a_huge_leaf_loses_none_of_its_pages,
    two_slots_that_are_exchanged_are_zapped_and_no_other,
    frames_that_lose_a_right_are_zapped,
}

type TestVm<F> = Vm<SimPlatform, F>;

const GIB1: u64 = 1 << 18;
const MIB2: u64 = 512;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

fn vm<F: Format>(pages: u64, level: Level) -> Arc<TestVm<F>> {
    let vm = Vm::new(SimPlatform::at_level(pages, level), config()).unwrap();
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    vm.platform().watch(&vm, 1);
    vm
}

/// Returns a region for slot `id` at `gfns`. Host page n backs frame n.
fn region(id: u32, gfns: Range<u64>) -> Region {
    let backing = HostMemory::hva(gfns.start);
    Region::new(
        id,
        Gpa(gfns.start << 12),
        (gfns.end - gfns.start) << 12,
        backing,
    )
}

fn set(id: u32, gfns: Range<u64>) -> Change {
    Change::Set(region(id, gfns))
}

/// Makes one access by a new vCPU.
fn touch<F: Format>(vm: &Arc<TestVm<F>>, gfn: u64, access: Access) -> Result<Level, Stop> {
    let mut vcpu = vm.create_vcpu().unwrap();
    access::touch(&mut vcpu, gfn, access).map(|translation| translation.level)
}

/// Makes `changes`. Returns the counts from while they were made.
fn change<F: Format>(vm: &Arc<TestVm<F>>, changes: &[Change]) -> Stats {
    let before = vm.stats();
    vm.set_memory_regions(0, changes).unwrap();
    let did = vm.stats().since(&before);
    vm.audit().unwrap();
    let gone = vm.platform().tlb.stale();
    assert_eq!(gone, None);
    vm.platform().check();
    did
}

fn end<F: Format>(vm: &Arc<TestVm<F>>) {
    vm.platform().tlb.forget();
}

fn faults<F: Format>(vm: &Arc<TestVm<F>>) -> u64 {
    vm.stats().pf_taken
}

fn a_hole_of_2_mib_in_4_gib_zaps_2_mib<F: Format>() {
    let vm = vm::<F>(4 * GIB1, Level::GIGA);
    vm.set_memory_region(0, &region(0, 0..4 * GIB1)).unwrap();
    for gib in 0..4 {
        assert_eq!(touch(&vm, gib * GIB1 + 7, Write), Ok(Level::GIGA));
    }
    let hole = GIB1 + 3 * MIB2..GIB1 + 4 * MIB2;
    let did = change(&vm, &[set(0, 0..hole.start), set(5, hole.end..4 * GIB1)]);
    assert_eq!((did.zapped, did.splits), (1, 1));
    let stats = vm.stats();
    assert_eq!(
        [stats.pages_4k, stats.pages_2m, stats.pages_1g],
        [0, 511, 3]
    );
    let before = faults(&vm);
    for gfn in [
        0,
        GIB1,
        hole.start - 1,
        hole.end,
        2 * GIB1 - 1,
        2 * GIB1,
        4 * GIB1 - 1,
    ] {
        touch(&vm, gfn, Write).unwrap();
    }
    assert_eq!(faults(&vm), before);
    for gfn in [hole.start, hole.end - 1] {
        let gpa = Gpa(gfn << 12);
        assert_eq!(touch(&vm, gfn, Read), Err(Stop::Mmio { gpa }));
        assert_eq!(vm.lookup(0, Gfn(gfn)), None);
    }
    // This change reverts the first one. It zaps nothing, and one page takes a fault.
    let did = change(&vm, &[set(0, 0..4 * GIB1), Change::Remove(5)]);
    assert_eq!((did.zapped, did.splits), (0, 0));
    let before = faults(&vm);
    touch(&vm, hole.start - 1, Write).unwrap();
    assert_eq!(faults(&vm), before);
    assert_eq!(touch(&vm, hole.start, Write), Ok(Level::GIGA));
    end(&vm);
}

fn a_slot_that_is_cut_in_the_middle_of_a_huge_leaf_loses_none_of_its_pages<F: Format>() {
    let vm = vm::<F>(2 * GIB1, Level::GIGA);
    vm.set_memory_region(0, &region(0, 0..2 * GIB1)).unwrap();
    for gfn in [1, GIB1] {
        touch(&vm, gfn, Execute).unwrap();
    }
    let cut = 5 * MIB2 + 17;
    let did = change(&vm, &[set(0, 0..cut), set(1, cut..2 * GIB1)]);
    // The leaf of 1 GiB was split into pieces of 2 MiB, and one of these into pieces of 4 KiB.
    assert_eq!((did.zapped, did.splits), (0, 2));
    let stats = vm.stats();
    assert_eq!(
        [stats.pages_4k, stats.pages_2m, stats.pages_1g],
        [512, 511, 1]
    );
    let before = faults(&vm);
    for gfn in [0, cut - 1, cut, GIB1 - 1, GIB1] {
        touch(&vm, gfn, Read).unwrap();
    }
    assert_eq!(faults(&vm), before);
    // The slot becomes shorter at both ends. The remaining frames stay mapped.
    let did = change(&vm, &[Change::Remove(0), set(1, cut + 1..GIB1 + MIB2)]);
    assert_eq!(did.splits, 1, "at the end");
    let before = faults(&vm);
    for gfn in [cut + 1, GIB1 - 1, GIB1 + MIB2 - 1] {
        touch(&vm, gfn, Read).unwrap();
    }
    assert_eq!(faults(&vm), before);
    assert!(matches!(touch(&vm, cut, Read), Err(Stop::Mmio { .. })));
    assert!(matches!(
        touch(&vm, GIB1 + MIB2, Read),
        Err(Stop::Mmio { .. })
    ));
    end(&vm);
}

fn two_slots_that_are_exchanged_are_zapped_and_no_other<F: Format>() {
    let vm = vm::<F>(4 * MIB2, Level::PAGE);
    for id in 0..4 {
        let gfns = u64::from(id) * MIB2..(u64::from(id) + 1) * MIB2;
        vm.set_memory_region(0, &region(id, gfns.clone())).unwrap();
        for gfn in gfns.step_by(100) {
            touch(&vm, gfn, Write).unwrap();
        }
    }
    let at = |id: u32, place: u64| {
        let here = region(id, u64::from(id) * MIB2..(u64::from(id) + 1) * MIB2);
        Change::Set(here.with_gpa(Gpa((place * MIB2) << 12)))
    };
    let did = change(&vm, &[at(1, 2), at(2, 1)]);
    assert_eq!((did.zapped, did.slot_changes), (12, 2));
    for (gfn, page) in [
        (0, 0),
        (MIB2, 2 * MIB2),
        (2 * MIB2, MIB2),
        (3 * MIB2, 3 * MIB2),
    ] {
        touch(&vm, gfn, Read).unwrap();
        let pfn = vm.lookup(0, Gfn(gfn)).unwrap().pfn;
        assert_eq!(HostMemory::identify(pfn).0, page);
    }
    // Requests that describe the existing slots change nothing.
    let generation = vm.stats().slot_changes;
    let did = change(&vm, &[at(1, 2), at(2, 1)]);
    assert_eq!((did.zapped, vm.stats().slot_changes), (0, generation));
    assert_eq!(change(&vm, &[]).slot_changes, 0);
    end(&vm);
}

fn frames_that_lose_a_right_are_zapped<F: Format>() {
    let vm = vm::<F>(2 * MIB2, Level::PAGE);
    vm.set_memory_region(0, &region(0, 0..2 * MIB2)).unwrap();
    for gfn in [1, 2, MIB2 + 1] {
        touch(&vm, gfn, Write).unwrap();
    }
    let data = region(1, MIB2..2 * MIB2);
    for data in [
        data.with_rights(Rights::READ),
        data.with_flags(SlotFlags::READONLY),
        data.with_memory(MemoryType::Device),
    ] {
        let did = change(&vm, &[set(0, 0..MIB2), Change::Set(data)]);
        assert_eq!(did.zapped, 1, "{data:?}");
        touch(&vm, MIB2 + 1, Read).unwrap();
        let did = change(&vm, &[set(0, 0..2 * MIB2), Change::Remove(1)]);
        assert_eq!(did.zapped, 1, "{data:?}");
        touch(&vm, MIB2 + 1, Write).unwrap();
    }
    end(&vm);
}

/// Returns the pages that are marked in the log of slot `id`.
fn log<F: Format>(vm: &Arc<TestVm<F>>, id: u32) -> Vec<u64> {
    let mut words = vec![0u64; vm.dirty_log_words(0, id).unwrap()];
    vm.get_dirty_log(0, id, &mut words).unwrap();
    let pages = 0..words.len() as u64 * 64;
    pages
        .filter(|page| words[*page as usize / 64] >> (page % 64) & 1 != 0)
        .collect()
}

fn logged(id: u32, gfns: Range<u64>) -> Change {
    Change::Set(region(id, gfns).with_flags(LOGGED))
}

#[test]
fn pages_stay_in_the_dirty_log_when_their_slot_becomes_two_and_one_again() {
    for method in [
        DirtyLogMethod::WriteProtect,
        DirtyLogMethod::DirtyBit,
        DirtyLogMethod::Buffer,
    ] {
        let vm = vm::<Ept>(2000, Level::PAGE);
        vm.set_policy(Setting::DirtyLog(method));
        vm.set_memory_region(0, &region(0, 0..2000).with_flags(LOGGED))
            .unwrap();
        let written = [0, 63, 64, 699, 700, 1000, 1999];
        for gfn in written {
            touch(&vm, gfn, Write).unwrap();
        }
        assert_eq!(
            change(&vm, &[logged(0, 0..700), logged(1, 700..2000)]).zapped,
            0
        );
        touch(&vm, 701, Write).unwrap();
        let did = change(
            &vm,
            &[logged(3, 0..2000), Change::Remove(0), Change::Remove(1)],
        );
        assert_eq!(did.zapped, 0);
        assert_eq!(log(&vm, 3), [0, 63, 64, 699, 700, 701, 1000, 1999]);
        assert_eq!(log(&vm, 3), []);
        // Every page is protected again, also in the new slots.
        assert_eq!(
            change(&vm, &[logged(3, 0..700), logged(1, 700..2000)]).zapped,
            0
        );
        for gfn in written {
            touch(&vm, gfn, Write).unwrap();
        }
        assert_eq!(
            (log(&vm, 3), log(&vm, 1)),
            (vec![0, 63, 64, 699], vec![0, 300, 1299])
        );
        // One part of the slot stops logging, and another begins to log.
        change(&vm, &[set(3, 0..700), logged(1, 700..2000)]);
        touch(&vm, 5, Write).unwrap();
        let did = change(&vm, &[logged(3, 0..2000), Change::Remove(1)]);
        assert_eq!(did.zapped, 0);
        assert_eq!(log(&vm, 3), []);
        for gfn in [5, 63, 700] {
            touch(&vm, gfn, Write).unwrap();
        }
        assert_eq!(log(&vm, 3), [5, 63, 700]);
        end(&vm);
    }
}

/// A harvest has taken the marks of all pages, and has not yet protected the last page, when another slot replaces its
/// slot. The harvest must not return before that change has protected the page. Otherwise a write of the client after
/// that would be in no log.
#[test]
fn a_harvest_of_a_slot_that_is_replaced_returns_when_the_next_log_has_begun() {
    // The number of pages. It is so large that one step of an operation does not read all their entries.
    const PAGES: u64 = 10 * MIB2;
    const LAST: u64 = PAGES - 1;
    for method in [DirtyLogMethod::WriteProtect, DirtyLogMethod::Buffer] {
        let vm = vm::<Ept>(PAGES, Level::PAGE);
        vm.set_policy(Setting::DirtyLog(method));
        vm.set_policy(Setting::HierarchicalProtect(Switch::Off));
        vm.set_memory_regions(0, &[logged(0, 0..PAGES)]).unwrap();
        for table in 0..10 {
            touch(&vm, table * MIB2 + MIB2 - 1, Write).unwrap();
        }
        vm.mark_dirty(0, Gfn(0)..Gfn(PAGES)).unwrap();

        let turns = Arc::new(Turns::default());
        vm.platform().set_hook({
            let turns = turns.clone();
            move |event| match (thread::current().name(), event) {
                (Some("harvest"), Event::Entries(_)) => {
                    turns.advance(0, 1);
                    turns.wait_for(2);
                }
                // Both threads now wait for the lock of the slots: first the change, then the harvest.
                (Some("change"), Event::Wait(WaitFor::Turn)) if turns.advance(1, 2) => {
                    turns.wait_for(3)
                }
                // The slot has changed. The change waits for the harvest, which now returns or waits.
                (Some("change"), Event::Wait(WaitFor::Turn)) => {
                    turns.advance(3, 4);
                    turns.wait_for(5);
                }
                (Some("harvest"), Event::Wait(WaitFor::Turn)) => {
                    turns.advance(2, 3);
                    turns.advance(4, 5);
                }
                _ => {}
            }
        });
        thread::scope(|scope| {
            let named = |name: &str| thread::Builder::new().name(name.into());
            let client = || {
                assert!(log(&vm, 0).contains(&LAST));
                touch(&vm, LAST, Write).unwrap();
                turns.advance(3, 5);
                turns.advance(4, 5);
            };
            named("harvest").spawn_scoped(scope, client).unwrap();
            turns.wait_for(1);
            let replace = || {
                let changes = [Change::Remove(0), logged(1, 0..PAGES)];
                vm.set_memory_regions(0, &changes).unwrap();
            };
            named("change").spawn_scoped(scope, replace).unwrap();
        });
        assert_eq!(turns.now(), 5);
        vm.platform().clear_hook();
        assert!(
            log(&vm, 1).contains(&LAST),
            "{method}: the write is in no log"
        );
        end(&vm);
    }
}

/// A number that threads raise, and for which they wait.
#[derive(Default)]
struct Turns {
    now: Mutex<u32>,
    raised: Condvar,
}

impl Turns {
    fn now(&self) -> u32 {
        *self.now.lock().unwrap()
    }

    /// Raises the number to `to` if it is `from`. Returns whether it did.
    fn advance(&self, from: u32, to: u32) -> bool {
        let mut now = self.now.lock().unwrap();
        let is_next = *now == from;
        if is_next {
            *now = to;
            self.raised.notify_all();
        }
        is_next
    }

    fn wait_for(&self, number: u32) {
        let now = self.now.lock().unwrap();
        let is_lower = |now: &mut u32| *now < number;
        drop(self.raised.wait_while(now, is_lower).unwrap());
    }
}

#[test]
fn a_part_keeps_its_marks_in_logs_that_begin_with_all_set() {
    let vm = vm::<Ept>(300, Level::PAGE);
    vm.set_manual_dirty_log(true, true);
    vm.set_memory_region(0, &region(0, 0..200).with_flags(LOGGED))
        .unwrap();
    assert_eq!(log(&vm, 0).len(), 200);
    vm.clear_dirty_log(0, 0, 0, 200, &[u64::MAX; 4]).unwrap();
    touch(&vm, 130, Write).unwrap();
    // The last pages are new in the slot, so they begin marked.
    change(&vm, &[logged(0, 0..100), logged(1, 100..210)]);
    assert_eq!(log(&vm, 0), []);
    let expected: Vec<u64> = [30].into_iter().chain(100..110).collect();
    assert_eq!(log(&vm, 1), expected);
    end(&vm);
}

#[test]
fn what_is_wrong_is_refused_and_changes_nothing() {
    let vm = vm::<Ept>(2000, Level::PAGE);
    let other = region(7, 1500..1600);
    vm.set_memory_region(0, &region(0, 0..1000)).unwrap();
    vm.set_memory_region(0, &other).unwrap();
    touch(&vm, 5, Write).unwrap();
    let private = region(8, 1700..1710).with_private(HostMemory::hva(1900));
    vm.set_memory_region(0, &private).unwrap();
    let half = set(0, 0..500);
    let too_high = region(1, 0..1).with_gpa(Gpa(1 << 48));
    let with_private = |id, gfn| region(id, gfn..gfn + 10).with_private(HostMemory::hva(1905));
    let (overlap, taken) = (region(1, 400..600), with_private(2, 1400));
    let (twice, again) = (
        with_private(3, 1300),
        with_private(4, 1350).with_private(HostMemory::hva(1850)),
    );
    let clash = twice.with_private(HostMemory::hva(1845));
    let refused: [(&[Change], RegionError); 11] = [
        (&[half, Change::Remove(3)], RegionError::NothingToDelete(3)),
        (&[half, Change::Remove(0)], RegionError::NamedTwice(0)),
        (&[half, set(0, 500..600)], RegionError::NamedTwice(0)),
        (
            &[half, Change::Set(overlap)],
            RegionError::Overlap {
                region: overlap,
                with: 0,
            },
        ),
        (
            &[half, set(1, 1400..1501)],
            RegionError::Overlap {
                region: region(1, 1400..1501),
                with: 7,
            },
        ),
        (
            &[half, set(MAX_SLOTS, 0..1)],
            RegionError::SlotTooHigh(MAX_SLOTS),
        ),
        (&[half, set(1, 600..600)], RegionError::Empty(1)),
        (
            &[half, Change::Set(too_high)],
            RegionError::BeyondTables(too_high),
        ),
        (&[half, set(8, 1700..1710)], RegionError::PrivateChanged(8)),
        (
            &[half, Change::Set(taken)],
            RegionError::PrivateTaken {
                region: taken,
                by: 8,
            },
        ),
        (
            &[half, Change::Set(clash), Change::Set(again)],
            RegionError::PrivateTaken {
                region: again,
                by: 3,
            },
        ),
    ];
    let before = vm.stats();
    for (changes, error) in refused {
        assert_eq!(vm.set_memory_regions(0, changes), Err(error));
        let text = error.to_string();
        assert!(text.contains("memslot"), "{text}");
    }
    assert_eq!(
        vm.set_memory_regions(1, &[half]),
        Err(RegionError::NoSuchSpace(1))
    );
    let did = vm.stats().since(&before);
    assert_eq!((did.slot_changes, did.zapped), (0, 0));
    assert!(vm.lookup(0, Gfn(5)).is_some());
    // A new slot may use the frames of a slot that the same call deletes, and its private backing.
    let instead = with_private(2, 1700).with_private(private.private);
    change(
        &vm,
        &[
            Change::Remove(8),
            Change::Set(instead),
            set(0, 1000..1300),
            set(1, 0..1000),
        ],
    );
    assert!(vm.lookup(0, Gfn(5)).is_some());
    end(&vm);
}

#[test]
fn a_ring_names_pages_of_a_part_again() {
    let vm = Vm::<_, Ept>::new(SimPlatform::at_level(100, Level::PAGE), config()).unwrap();
    vm.use_dirty_rings();
    vm.set_memory_region(0, &region(0, 0..100).with_flags(LOGGED))
        .unwrap();
    let mut client = slat_model::RingClient::new();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(client.ring()).unwrap();
    vcpu.hardware_fault(Gpa(60 << 12), Write).unwrap();
    assert_eq!(
        client.collect().map(|page| (page.slot, page.page)),
        Some((0, 60))
    );
    let before = vm.stats();
    vm.set_memory_regions(0, &[logged(0, 0..50), logged(1, 50..100)])
        .unwrap();
    assert_eq!(vm.stats().since(&before).zapped, 0);
    assert!(vm.lookup(0, Gfn(60)).is_some_and(|page| !page.rights.write));
    vcpu.hardware_fault(Gpa(60 << 12), Write).unwrap();
    assert_eq!(
        client.collect().map(|page| (page.slot, page.page)),
        Some((1, 10))
    );
    assert_eq!(vm.reset_dirty_rings(), 2);
    assert!(vm.lookup(0, Gfn(60)).is_some_and(|page| !page.rights.write));
    vm.audit().unwrap();
}
