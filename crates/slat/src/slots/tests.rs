//! Tests that compare the indexes with a `BTreeMap`, cause each error of the region checks, and check that a change
//! that fails for lack of memory changes nothing.

use std::alloc::{GlobalAlloc, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::string::ToString;
use std::vec::Vec;

use super::*;
use crate::addr::{Gfn, Gpa, Granule, Hva, PAGE_SHIFT};
use core::ops::Range;

const CAPACITY: u64 = 1 << 36;

/// Makes allocations of the calling thread fail, from allocation number `FAIL_IN` on.
struct Failing;

std::thread_local! {
    static FAIL_IN: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Whether this allocation must fail.
fn fails() -> bool {
    let countdown = |cell: &Cell<Option<u32>>| {
        let left = cell.get();
        cell.set(left.map(|n| n.saturating_sub(1)));
        left == Some(0)
    };
    FAIL_IN.try_with(countdown).unwrap_or(false)
}

// SAFETY: all memory is the system allocator's. An allocator may refuse a request, as `Failing` does.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails() {
            return core::ptr::null_mut();
        }
        // SAFETY: `layout` has bytes, as `alloc` asks of its caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `dealloc`'s caller guarantees that `pointer` is from this allocator with `layout`, and all its memory
        // is from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails() {
            return core::ptr::null_mut();
        }
        // SAFETY: `realloc`'s caller guarantees that `pointer` is from this allocator with `layout`, and that `size` is
        // not 0. All memory of this allocator is from `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

use alloc::alloc::Layout;

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// A random number generator: SplitMix64.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

fn region(id: u32, base: u64, pages: u64, backing_page: u64) -> Region {
    let (gpa, size) = (Gpa(base << PAGE_SHIFT), pages << PAGE_SHIFT);
    Region::new(id, gpa, size, Hva(backing_page << PAGE_SHIFT))
}

struct World {
    slots: Slots,
    readers: Readers,
}

impl World {
    fn new() -> Self {
        World {
            slots: Slots::new().unwrap(),
            readers: Readers::new(),
        }
    }

    /// Changes the set like [`crate::Vm::set_memory_region`].
    fn set(&self, region: &Region) -> Result<(), RegionError> {
        let mut change = self.slots.change(|_| unreachable!());
        change.catch_up(&self.readers, |_, _| panic!("nobody is inside"));
        let new = match check(region, Granule::Kib4)
            .and_then(|checked| plan(&change, checked, CAPACITY))
        {
            // In these tests, as in KVM, a region of 0 bytes deletes the existing slot with its id.
            Err(RegionError::Empty(id)) if change.by_id(id).is_some() => None,
            planned => match planned? {
                true => Some(OwnedSlot::new(region, Granule::Kib4, None)),
                false => return Ok(()),
            },
        };
        let id = region.slot;
        Ok(change.replace(&mut [Edit { id, new }], &self.readers)?)
    }

    /// Changes the set like [`crate::Vm::set_memory_regions`].
    fn set_several(&self, changes: &[Change]) -> Result<(), RegionError> {
        let batch = Batch::check(changes, Granule::Kib4)?;
        let mut change = self.slots.change(|_| unreachable!());
        batch.plan(&change, CAPACITY)?;
        change.catch_up(&self.readers, |_, _| panic!("nobody is inside"));
        let edits = changes.iter().map(|change| Edit {
            id: change.slot(),
            new: match change {
                Change::Set(region) => Some(OwnedSlot::new(region, Granule::Kib4, None)),
                Change::Remove(_) => None,
            },
        });
        let mut all = Vec::new();
        all.try_reserve_exact(changes.len())
            .map_err(|_| OutOfMemory)?;
        all.extend(edits);
        Ok(change.replace(&mut all, &self.readers)?)
    }

    fn current(&self) -> &SlotSet {
        // SAFETY: these tests have one thread, and do not use a set after it was changed. The only test that does is in
        // a reader section meanwhile.
        unsafe { self.slots.published() }
    }

    fn ids_at(&self, gfns: Range<u64>) -> Vec<u32> {
        let mut ids = Vec::new();
        let set = self.current();
        set.in_gfns(&(Gfn(gfns.start)..Gfn(gfns.end)), |slot| {
            ids.push(slot.id());
            true
        });
        ids
    }

    fn ids_backed_by(&self, pages: Range<u64>) -> Vec<u32> {
        let mut ids = Vec::new();
        let hvas = Hva(pages.start << PAGE_SHIFT)..Hva(pages.end << PAGE_SHIFT);
        let set = self.current();
        let mut places = Vec::new();
        set.backed_by(&hvas, Place::FIRST, |slot, _, place| {
            places.push(place);
            ids.push(slot.id());
            true
        });
        assert!(places.is_sorted());
        for (i, place) in places.iter().enumerate().step_by(7) {
            let mut left = Vec::new();
            set.backed_by(&hvas, *place, |_, _, place| {
                left.push(place);
                left.len() < 3
            });
            assert!(places[i..].starts_with(&left) && !left.is_empty());
        }
        ids.sort_unstable();
        ids
    }
}

/// A slot's end, id and backing page, by its first gfn.
type Model = BTreeMap<u64, (u64, u32, u64)>;

fn check_lookups(world: &World, model: &Model, rng: &mut Rng, space: u64) {
    let gfn = rng.below(space);
    let found = world.current().find(Gfn(gfn)).map(|s| s.id());
    let expected = model.range(..=gfn).next_back();
    let expected = expected.filter(|(_, (end, ..))| gfn < *end);
    assert_eq!(found, expected.map(|(_, (_, id, _))| *id), "gfn {gfn}");
    let range = gfn..gfn + 1 + rng.below(100);
    let overlapping = |(base, (end, id, _)): (&u64, &(u64, u32, u64))| {
        (*base < range.end && range.start < *end).then_some(*id)
    };
    let expected: Vec<_> = model.iter().filter_map(overlapping).collect();
    assert_eq!(world.ids_at(range.clone()), expected, "gfns {range:?}");
    let backed = |(base, (end, id, page)): (&u64, &(u64, u32, u64))| {
        (*page < range.end && range.start < page + (end - base)).then_some(*id)
    };
    let mut expected: Vec<_> = model.iter().filter_map(backed).collect();
    expected.sort_unstable();
    assert_eq!(
        world.ids_backed_by(range.clone()),
        expected,
        "backing {range:?}"
    );
}

#[test]
fn the_indexes_hold_what_a_btreemap_holds_through_random_edits() {
    // The number of slots rises and falls, so that leaves are split and merged.
    if cfg!(miri) {
        random_edits(240, 1000, 100, |step| [80, 5][step / 160 % 2]);
    } else {
        random_edits(100_000, 40_000, 4000, |step| [3000, 5][step / 20_000 % 2]);
    }
}

#[test]
fn one_leaf_that_becomes_several_and_one_again_holds_what_a_btreemap_holds() {
    // Of the wanted numbers of slots below, 5, 20 and 0 fit in one leaf (32 slots); 60 and 34 do not.
    let (steps, each) = if cfg!(miri) { (240, 40) } else { (50_000, 200) };
    random_edits(steps, 800, 80, |step| [5, 60, 20, 34, 0][step / each % 5]);
}

/// Makes `steps` random changes to slots with ids below `ids`, in `space` pages. Keeps the number of slots near
/// `wanted(step)`.
fn random_edits(steps: usize, space: u64, ids: u64, wanted: impl Fn(usize) -> usize) {
    let mut rng = Rng(1);
    let world = World::new();
    let mut model = Model::new();
    let mut by_id: BTreeMap<u32, u64> = BTreeMap::new();
    for step in 0..steps {
        let wanted = wanted(step);
        let id = rng.below(ids) as u32;
        let old = by_id.get(&id).copied();
        let delete = old.is_some() && (model.len() > wanted || rng.below(3) == 0);
        if !delete && wanted == 0 {
            continue;
        }
        if delete {
            world.set(&region(id, 0, 0, 0)).unwrap();
            model.remove(&old.unwrap());
            by_id.remove(&id);
        } else {
            let base = rng.below(space);
            let (pages, page) = match old {
                Some(old) => {
                    let (end, _, page) = model[&old];
                    (end - old, page)
                }
                None => (1 + rng.below(12), rng.below(space / 4)),
            };
            let free = model.range(..base + pages).next_back();
            let free = free.filter(|(other, (end, ..))| *end > base && Some(**other) != old);
            // Look at the two slots below `base`: the upper one may be the slot that is changed, and then the lower one
            // may overlap.
            let below = model.range(..base).rev().take(2);
            let clash = below.filter(|(other, (end, ..))| *end > base && Some(**other) != old);
            let above = model
                .range(base..base + pages)
                .filter(|(other, _)| Some(**other) != old);
            let overlaps = free.is_some() || clash.count() + above.count() > 0;
            let answer = world.set(&region(id, base, pages, page));
            assert_eq!(answer.is_err(), overlaps && old != Some(base), "{answer:?}");
            if answer.is_ok() {
                if let Some(old) = old {
                    model.remove(&old);
                }
                model.insert(base, (base + pages, id, page));
                by_id.insert(id, base);
            }
        }
        if step % 16 == 0 {
            check_lookups(&world, &model, &mut rng, space);
        }
    }
    let change = world.slots.change(|_| unreachable!());
    assert_eq!(change.len(), model.len());
    let pages: u64 = model.iter().map(|(base, (end, ..))| end - base).sum();
    assert_eq!(change.pages(), pages);
}

#[test]
fn private_backings_are_told_apart_however_many_slots_there_are() {
    let world = World::new();
    let new = |id: u32| Region {
        private: id
            .is_multiple_of(5)
            .then_some(Hva((10_000 + u64::from(id)) << PAGE_SHIFT)),
        ..region(id, u64::from(id) * 4, 1, 1000 - u64::from(id))
    };
    for _ in 0..2 {
        for ids in 1..40 {
            world.set(&new(ids - 1)).unwrap();
            if cfg!(miri) && ids % 19 != 1 {
                continue;
            }
            let backed = |page: u64| world.ids_backed_by(page..page + 1);
            for id in 0..40 {
                let there: &[u32] = if id < ids { &[id] } else { &[] };
                assert_eq!(backed(1000 - u64::from(id)), there);
                let private = if id.is_multiple_of(5) { there } else { &[] };
                assert_eq!(backed(10_000 + u64::from(id)), private);
            }
            let taken = Region {
                private: new(0).private,
                ..region(40, 400, 1, 0)
            };
            let by = world.set(&taken).unwrap_err();
            assert!(
                matches!(by, RegionError::PrivateTaken { by: 0, .. }),
                "{by}"
            );
        }
        for id in 0..39 {
            world.set(&region(id, 0, 0, 0)).unwrap();
            assert_eq!(
                world.ids_backed_by(0..20_000).first(),
                (id < 38).then_some(&(id + 1))
            );
        }
    }
}

#[test]
fn slots_are_found_however_they_lie() {
    /// Makes one slot of one page at each of `pages`. Compares every search with `pages`.
    fn finds_all(pages: &[u64]) {
        let world = World::new();
        for (id, page) in (0..).zip(pages) {
            world.set(&region(id, *page, 1, 0)).unwrap();
        }
        let around = |page: &u64| page.saturating_sub(2)..page + 3;
        for page in pages.iter().flat_map(around).chain([u64::MAX >> 12]) {
            let found = world.current().find(Gfn(page)).map(|s| s.base().0);
            assert_eq!(found, pages.contains(&page).then_some(page));
        }
    }
    let less = if cfg!(miri) { 100 } else { 1 };
    let regular: Vec<u64> = (0..5000 / less).map(|i| 100 + i * 3).collect();
    finds_all(&regular);
    let crowd = 200 / less.min(8);
    let crowded: Vec<u64> = (0..crowd).chain((1 << 34)..(1 << 34) + crowd).collect();
    finds_all(&crowded);
    let spread: Vec<u64> = (0..36).map(|i| 1 << i).collect();
    finds_all(&spread);
    let scattered = (0..1000 / less).map(|i| i * 0x9e37_79b1 % CAPACITY);
    let mut scattered: Vec<u64> = scattered.collect();
    finds_all(&scattered);
    scattered.reverse();
    finds_all(&scattered);
}

/// Creates slots in ascending order, so that they fill one leaf after another. Then deletes the slots of the last leaf,
/// or also the last slot of the full leaf before it. The remaining slots must still be found.
#[test]
fn the_last_slots_can_go_when_all_before_them_are_in_full_leaves() {
    let slots = 2 * index::LEAF as u64 + 1;
    for deleted in [1, index::LEAF as u64 + 1] {
        let world = World::new();
        for id in 0..slots {
            world.set(&region(id as u32, 2 * id, 1, id)).unwrap();
        }
        for id in slots - deleted..slots {
            world.set(&region(id as u32, 0, 0, 0)).unwrap();
        }
        for id in 0..slots - deleted {
            let found = world.current().find(Gfn(2 * id)).map(|slot| slot.id());
            assert_eq!(found, Some(id as u32), "{deleted} deleted");
        }
    }
}

#[test]
fn every_id_can_be_used_at_once_in_any_order() {
    let world = World::new();
    let n = MAX_SLOTS as u64;
    // 9973 and 32764 have no common factor, so `order` contains every id once.
    let order = || (0..n).map(|i| (i * 9973 % n) as u32);
    for id in order() {
        world
            .set(&region(id, id as u64 * 3, 2, id as u64 / 2))
            .unwrap();
    }
    assert_eq!(
        world.slots.change(|_| unreachable!()).len(),
        MAX_SLOTS as usize
    );
    for id in 0..n {
        let find = |gfn| world.current().find(Gfn(gfn)).map(|s| u64::from(s.id()));
        assert_eq!(find(id * 3 + 1), Some(id));
        assert_eq!(find(id * 3 + 2), None);
    }
    assert_eq!(world.ids_backed_by(7..8), [12, 13, 14, 15]);
    for id in order() {
        world.set(&region(id, 0, 0, 0)).unwrap();
    }
    assert_eq!(world.ids_at(0..CAPACITY), []);
    assert_eq!(world.ids_backed_by(0..CAPACITY), []);
}

#[test]
fn a_reader_keeps_the_set_it_came_in_with_until_the_change_after_the_next() {
    let world = World::new();
    let reader = world.readers.register().unwrap();
    reader.enter(&world.readers, 7);
    let old = world.current();
    // This first change need not wait: the reader uses the other set.
    world.set(&region(1, 10, 5, 0)).unwrap();
    let is_whole = |set: &SlotSet| {
        assert!(set.find(Gfn(12)).is_none());
        assert_eq!(set.generation, 0);
    };
    is_whole(old);
    // Use a pointer, not a reference: the closure below exists while `catch_up` changes the set, and must not have a
    // reference to the set then.
    let old = &raw const *old;
    assert_eq!(world.current().generation, 1);
    // The next change must be made in the set that the reader still uses.
    let mut change = world.slots.change(|_| unreachable!());
    let mut waits = 0;
    change.catch_up(&world.readers, |_, token| {
        assert_eq!(token, 7);
        // SAFETY: the reader is in its section until it quiesces below.
        is_whole(unsafe { &*old });
        waits += 1;
        if waits == 3 {
            let asked = reader.attention().flag().load(SeqCst);
            assert_ne!(asked & crate::sync::quiesce::Attention::FLUSH, 0);
            reader.quiesce(&world.readers);
        }
    });
    assert_eq!(waits, 3);
    drop(change);
    // The reader sees the current set, and no change waits for this reader again.
    assert!(world.current().find(Gfn(12)).is_some());
    world.set(&region(2, 30, 5, 0)).unwrap();
    reader.leave();
}

#[test]
fn every_wrong_region_is_refused_with_the_errno_of_kvm() {
    const EINVAL: i32 = 22;
    const EEXIST: i32 = 17;
    let world = World::new();
    world.set(&region(1, 100, 10, 1000)).unwrap();
    let refused = |change: &dyn Fn(&mut Region)| {
        let mut wrong = region(2, 200, 10, 1000);
        change(&mut wrong);
        let error = world.set(&wrong).unwrap_err();
        // The message must name the operation, not only a number.
        assert!(error.to_string().contains("memslot"), "{error}");
        (error.errno(), error)
    };
    let misaligned: [&dyn Fn(&mut Region); 3] = [&|r| r.gpa.0 += 1, &|r| r.size += 0x800, &|r| {
        r.backing.0 += 0x10
    }];
    for change in misaligned {
        assert!(matches!(
            refused(change),
            (EINVAL, RegionError::Misaligned(..))
        ));
    }
    let bad_flags = refused(&|r| r.flags = SlotFlags(1 << 2));
    assert_eq!(bad_flags, (EINVAL, RegionError::BadFlags(4)));
    // Flags are checked first, also in a request to delete.
    let bad_flags = refused(&|r| {
        *r = Region {
            slot: 1,
            flags: SlotFlags(8),
            size: 0,
            ..*r
        }
    });
    assert_eq!(bad_flags, (EINVAL, RegionError::BadFlags(8)));
    let high = refused(&|r| r.slot = MAX_SLOTS);
    assert_eq!(high, (EINVAL, RegionError::SlotTooHigh(MAX_SLOTS)));
    let too_high: [&dyn Fn(&mut Region); 4] = [
        &|r| r.gpa.0 = u64::MAX - 0xfff,
        &|r| r.backing.0 = u64::MAX - 0xfff,
        &|r| r.gpa.0 = CAPACITY << PAGE_SHIFT,
        &|r| r.gpa.0 = (CAPACITY - 9) << PAGE_SHIFT,
    ];
    for change in too_high {
        let high = matches!(
            refused(change),
            (
                EINVAL,
                RegionError::TooHigh(_) | RegionError::BeyondTables(_)
            )
        );
        assert!(high);
    }
    let large = refused(&|r| r.size = 1 << (31 + PAGE_SHIFT));
    assert!(matches!(large, (EINVAL, RegionError::TooLarge(_))));
    let nothing = refused(&|r| r.size = 0);
    assert_eq!(nothing, (EINVAL, RegionError::Empty(2)));
    let for_life: [&dyn Fn(&mut Region); 3] =
        [&|r| r.size += 0x1000, &|r| r.backing.0 += 0x1000, &|r| {
            r.flags = SlotFlags::READONLY
        }];
    for change in for_life {
        let resized = refused(&|r| {
            *r = region(1, 100, 10, 1000);
            change(r);
        });
        assert_eq!(resized, (EINVAL, RegionError::Resized(1)));
    }
    for (base, pages) in [(91, 10), (100, 1), (109, 1), (95, 30), (103, 2)] {
        let overlap = refused(&|r| *r = region(2, base, pages, 0));
        assert!(matches!(
            overlap,
            (EEXIST, RegionError::Overlap { with: 1, .. })
        ));
    }
    assert_eq!(RegionError::OutOfMemory.errno(), 12);
    // The refused calls have changed nothing: the ranges on both sides of slot 1 are still free.
    world.set(&region(2, 90, 10, 0)).unwrap();
    world.set(&region(3, 110, 10, 0)).unwrap();
    assert_eq!(world.ids_at(0..CAPACITY), [2, 1, 3]);
    assert_eq!(world.ids_backed_by(0..20), [2, 3]);
}

/// The expected errors are those of `/dev/kvm` of Linux 6.18 for the same calls.
#[test]
fn of_two_things_wrong_with_a_region_the_one_that_kvm_looks_at_first_is_told() {
    let world = World::new();
    let end = CAPACITY;
    world.set(&region(1, end - 1, 1, 1000)).unwrap();
    world.set(&region(5, end - 4, 2, 2000)).unwrap();
    let told = |wrong: Region| world.set(&wrong).unwrap_err();
    let overlap = |wrong: Region| {
        let error = told(wrong);
        assert!(
            matches!(error, RegionError::Overlap { with: 1, .. }),
            "{error}"
        );
    };
    // If a region overlaps another slot and also reaches beyond the tables' addresses, the overlap is reported, for new
    // slots and for moves.
    overlap(region(2, end - 1, 2, 3000));
    overlap(region(2, end - 1, (1 << 31) - 1, 3000));
    overlap(region(5, end - 1, 2, 2000));
    let too_high = |wrong: Region| assert_eq!(told(wrong), RegionError::TooHigh(wrong));
    let beyond = |wrong: Region| assert_eq!(told(wrong), RegionError::BeyondTables(wrong));
    beyond(region(2, end, 1, 3000));
    beyond(region(5, end, 2, 2000));
    // All checks of the region alone come before the check for overlaps and the check for the tables' end.
    let misaligned = Region {
        backing: Hva(3000 << PAGE_SHIFT | 1),
        ..region(2, end - 1, 2, 0)
    };
    assert_eq!(
        told(misaligned),
        RegionError::Misaligned(misaligned, Granule::Kib4)
    );
    let large = region(2, end - 1, 1 << 31, 3000);
    assert_eq!(told(large), RegionError::TooLarge(large));
    let wraps = region(2, (1 << 52) - 1, 2, 3000);
    too_high(wraps);
    // The check for a changed size or backing also comes before these two checks.
    assert_eq!(told(region(5, end - 1, 3, 2000)), RegionError::Resized(5));
    assert_eq!(told(region(5, end - 1, 2, 2001)), RegionError::Resized(5));
    let none = region(7, end - 1, 0, 0);
    assert_eq!(told(none), RegionError::Empty(7));
    // A slot may move to a range that overlaps its old one.
    world.set(&region(5, end - 3, 2, 2000)).unwrap();
    overlap(region(5, end - 2, 2, 2000));
}

#[test]
fn an_id_is_free_again_after_its_slot_was_deleted() {
    let world = World::new();
    world.set(&region(7, 100, 10, 0)).unwrap();
    world.set(&region(7, 0, 0, 0)).unwrap();
    world.set(&region(7, 500, 3, 77)).unwrap();
    assert_eq!(world.ids_at(0..CAPACITY), [7]);
    assert_eq!(world.ids_backed_by(0..20), []);
    assert_eq!(world.ids_backed_by(79..80), [7]);
}

#[test]
fn a_slot_may_move_onto_part_of_itself_but_not_onto_another() {
    let world = World::new();
    world.set(&region(1, 100, 10, 0)).unwrap();
    world.set(&region(2, 120, 10, 0)).unwrap();
    world.set(&region(1, 103, 10, 0)).unwrap();
    let moved = world.current().find(Gfn(112)).unwrap();
    assert_eq!((moved.base(), moved.backing()), (Gfn(103), Hva(0)));
    assert!(world.current().find(Gfn(102)).is_none());
    assert!(world.set(&region(1, 111, 10, 0)).is_err());
    world.set(&region(1, 110, 10, 0)).unwrap();
    let generation = world.current().generation;
    // The same region again changes nothing.
    world.set(&region(1, 110, 10, 0)).unwrap();
    assert_eq!(world.current().generation, generation);
}

#[test]
fn when_memory_runs_out_a_change_leaves_everything_as_it_was() {
    let world = World::new();
    let mut failures = 0;
    // Each allocation that the creation of a slot makes fails once. Most slots need none, because existing leaves have
    // space.
    let backing = |place: u64| place % 50 * 3;
    let place = |id: u32| u64::from(id) * 997 % 3000;
    let slots = if cfg!(miri) { 100 } else { 3000 };
    for id in 0..slots {
        let place = place(id as u32);
        let new = region(id as u32, place * 4, 3, backing(place));
        let before = world.current().generation;
        for n in 0.. {
            FAIL_IN.set(Some(n));
            let answer = world.set(&new);
            FAIL_IN.set(None);
            if answer.is_ok() {
                break;
            }
            failures += 1;
            assert_eq!(answer, Err(RegionError::OutOfMemory));
            assert_eq!(world.current().generation, before);
            assert_eq!(world.ids_at(0..CAPACITY).len() as u64, id);
            assert_eq!(world.ids_backed_by(0..1 << 20).len() as u64, id);
            let mut change = world.slots.change(|_| unreachable!());
            change.catch_up(&world.readers, |_, _| unreachable!());
            assert_eq!((change.len() as u64, change.pages()), (id, id * 3));
        }
        assert_eq!(world.ids_at(place * 4..place * 4 + 1), [id as u32]);
    }
    // Each of two indexes in two sets allocates more than one leaf per 32 slots: more than 1 failure per 10 slots.
    assert!(
        failures > slots / 10,
        "{failures} places where memory can run out"
    );
    // Slots that move or are deleted need no allocation.
    let (moves, goes) = (slots as u32 / 4, slots as u32 / 4 + 1);
    FAIL_IN.set(Some(0));
    let moved = world.set(&region(moves, 12_500, 3, backing(place(moves))));
    let deleted = world.set(&region(goes, 0, 0, 0));
    FAIL_IN.set(None);
    assert_eq!((moved, deleted), (Ok(()), Ok(())));
}

#[test]
fn several_slots_change_as_one_or_not_at_all() {
    // Each slot begins near a multiple of this number of pages, and ends before the next multiple.
    const CELL: u64 = 16;
    let (rounds, ids) = if cfg!(miri) { (30, 40) } else { (3000, 1000) };
    let space = 2 * ids * CELL;
    let mut rng = Rng(5);
    let world = World::new();
    // Base, pages and backing page of each slot, by id.
    let mut slots: BTreeMap<u32, (u64, u64, u64)> = BTreeMap::new();
    let (mut failures, mut refused) = (0, 0);
    for round in 0..rounds {
        let mut after = slots.clone();
        let mut changes = BTreeMap::new();
        // Make many changes at once, so that leaves and directories grow by more than one.
        for _ in 0..1 + rng.below([4, 40, 300][round % 3]) {
            let id = rng.below(ids) as u32;
            if slots.contains_key(&id) && rng.below(3) == 0 {
                after.remove(&id);
                changes.insert(id, Change::Remove(id));
                continue;
            }
            let taken = |cell| after.values().any(|(base, ..)| base / CELL == cell);
            let mut cell = rng.below(space / CELL);
            while taken(cell) && rng.below(500) > 0 {
                cell = rng.below(space / CELL);
            }
            let new = (
                cell * CELL + rng.below(4),
                1 + rng.below(12),
                rng.below(space / 4),
            );
            after.insert(id, new);
            changes.insert(id, Change::Set(region(id, new.0, new.1, new.2)));
        }
        let changes: Vec<_> = changes.into_values().collect();
        let mut places: Vec<_> = after.values().collect();
        places.sort_unstable();
        let overlaps = places
            .windows(2)
            .any(|pair| pair[0].0 + pair[0].1 > pair[1].0);
        let generation = world.current().generation;
        for n in 0.. {
            // With many changes there are many allocations: fail only number 0, 1, 4, 9, ….
            FAIL_IN.set(Some(if round % 3 == 0 { n } else { n * n }));
            let answer = world.set_several(&changes);
            FAIL_IN.set(None);
            if answer != Err(RegionError::OutOfMemory) {
                assert_eq!(answer.is_err(), overlaps, "{answer:?}");
                break;
            }
            failures += 1;
            assert_eq!(world.current().generation, generation);
        }
        match overlaps {
            false => slots = after,
            true => refused += 1,
        }
        let by_base = slots
            .iter()
            .map(|(id, (base, pages, page))| (*base, (base + pages, *id, *page)));
        check_lookups(&world, &by_base.collect(), &mut rng, space);
        assert_eq!(world.ids_at(0..CAPACITY).len(), slots.len());
    }
    assert!(
        failures > rounds && refused > 0,
        "{failures} failures, {refused} refused"
    );
}
