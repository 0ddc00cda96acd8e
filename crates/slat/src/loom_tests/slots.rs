//! Slot changes concurrent with look-ups.

use std::sync::Arc;
use std::vec::Vec;

use super::{Machine, PLAIN, hvas, model, on_cpu, set_slot, spawn, vm, wait};
use crate::addr::{Gfn, Gpa, Granule, Level, PAGE_SHIFT};
use crate::slots::{Edit, OwnedSlot, Place, Region, RegionError, SlotSet, Slots, check, plan};
use crate::sync::InSection;
use crate::sync::quiesce::Readers;

/// Enough slots for two leaves of the index of memslots.
const SLOTS: u32 = 6;
/// A number of slots that leaves one free place in a leaf of the index.
const FEW: u32 = 3;

struct World {
    slots: Slots,
    readers: Readers,
}

impl World {
    /// Makes slots of one frame each, two frames apart.
    fn new() -> Arc<World> {
        Self::with(SLOTS)
    }

    fn with(slots: u32) -> Arc<World> {
        let world = World {
            slots: Slots::new().unwrap(),
            readers: Readers::new(),
        };
        for slot in 0..slots {
            world.set(slot, slot as u64 * 2, 1);
        }
        Arc::new(world)
    }

    fn current(&self) -> &SlotSet {
        // SAFETY: the caller has entered a reader section, or is the only thread left; loom checks that the section
        // lasts long enough.
        self.slots.current(unsafe { InSection::assume() })
    }

    /// Like [`Self::set`], but for several slots. Each change is a slot's id, base and number of pages.
    fn set_several(&self, changes: &[(u32, u64, u64)]) {
        let mut change = self.slots.change(wait);
        change.catch_up(&self.readers, |round, _| wait(round));
        let edit = |(slot, base, pages): &(u32, u64, u64)| {
            let (gpa, size) = (Gpa(base << PAGE_SHIFT), pages << PAGE_SHIFT);
            let region = Region::new(*slot, gpa, size, hvas(0..1).start);
            let new = (*pages > 0).then(|| OwnedSlot::new(&region, Granule::Kib4, None));
            Edit { id: *slot, new }
        };
        let mut edits: Vec<_> = changes.iter().map(edit).collect();
        change.replace(&mut edits, &self.readers).unwrap();
    }

    /// Changes a slot like a VM that need not flush: so only the next change waits for readers.
    fn set(&self, slot: u32, base: u64, pages: u64) {
        let (gpa, size) = (Gpa(base << PAGE_SHIFT), pages << PAGE_SHIFT);
        let backing = hvas(slot as u64..slot as u64 + 1).start;
        let region = Region::new(slot, gpa, size, backing);
        let mut change = self.slots.change(wait);
        change.catch_up(&self.readers, |round, _| wait(round));
        let new = match check(&region, Granule::Kib4).and_then(|checked| plan(&change, checked, 64))
        {
            Err(RegionError::Empty(_)) => None,
            planned => {
                assert!(planned.unwrap(), "a change is asked for");
                Some(OwnedSlot::new(&region, Granule::Kib4, None))
            }
        };
        let edits = &mut [Edit { id: slot, new }];
        change.replace(edits, &self.readers).unwrap();
    }
}

#[test]
fn a_look_up_sees_the_old_set_or_the_new_one_whole() {
    model(2, || {
        let world = World::new();
        let mine = world.clone();
        let first = SLOTS as u64;
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            let mut before = 0;
            for _ in 0..2 {
                me.enter(&mine.readers, 0);
                let set = mine.current();
                let at = |gfn| {
                    set.find(Gfn(gfn))
                        .map(|slot| (slot.id(), slot.gfns().start.0))
                };
                let found = (at(2), at(3));
                match set.generation - first {
                    0 => assert_eq!(found, (Some((1, 2)), None)),
                    1 => assert_eq!(found, (None, Some((1, 3)))),
                    _ => assert_eq!(found, (None, None)),
                }
                assert_eq!(at(8), Some((4, 8)), "a slot that nobody changes");
                assert!(set.generation >= before);
                before = set.generation;
                me.leave();
            }
        });
        // This second change must be made in the set that the first change has replaced.
        world.set(1, 3, 1);
        world.set(1, 0, 0);
        thread.join().unwrap();
    });
}

#[test]
fn a_look_up_sees_a_full_leaf_whole() {
    model(2, || {
        let world = World::with(FEW);
        let mine = world.clone();
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            for _ in 0..2 {
                me.enter(&mine.readers, 0);
                let set = mine.current();
                let at = |gfn| set.find(Gfn(gfn)).map(|slot| slot.id());
                let found = [at(0), at(2), at(3), at(6)];
                match set.generation - u64::from(FEW) {
                    0 => assert_eq!(found, [Some(0), Some(1), None, None]),
                    1 => assert_eq!(found, [Some(0), None, Some(1), None]),
                    2 => assert_eq!(found, [Some(0), None, Some(1), Some(FEW)]),
                    _ => assert_eq!(found, [None, None, Some(1), Some(FEW)]),
                }
                me.leave();
            }
        });
        world.set(1, 3, 1);
        world.set(FEW, 6, 1);
        world.set(0, 0, 0);
        thread.join().unwrap();
    });
}

#[test]
fn a_look_up_by_backing_address_sees_a_set_whole() {
    model(2, || {
        let world = World::new();
        let mine = world.clone();
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            me.enter(&mine.readers, 0);
            let mut seen = 0;
            mine.current()
                .backed_by(&hvas(0..Machine::PAGES), Place::FIRST, |slot, _, _| {
                    assert!(slot.gfns().start.0 == slot.id() as u64 * 2);
                    seen += 1;
                    true
                });
            assert!(seen >= SLOTS - 2, "{seen} slots");
            me.leave();
        });
        world.set(1, 0, 0);
        world.set(4, 0, 0);
        thread.join().unwrap();
    });
}

/// In one change, slot 1 is split in two, and slot 2 is deleted. In another change, slot 2 is created
/// again.
#[test]
fn a_look_up_sees_several_slots_change_at_once() {
    model(2, || {
        let world = World::new();
        let mine = world.clone();
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            for _ in 0..2 {
                me.enter(&mine.readers, 0);
                let set = mine.current();
                let found = [2, 3, 4].map(|gfn| set.find(Gfn(gfn)).map(|slot| slot.id()));
                match set.generation - u64::from(SLOTS) {
                    0 => assert_eq!(found, [Some(1), None, Some(2)]),
                    1 => assert_eq!(found, [Some(SLOTS), Some(1), None]),
                    _ => assert_eq!(found, [None, Some(1), Some(2)]),
                }
                me.leave();
            }
        });
        world.set_several(&[(1, 3, 1), (SLOTS, 2, 1), (2, 0, 0)]);
        world.set_several(&[(2, 4, 1), (SLOTS, 0, 0)]);
        thread.join().unwrap();
    });
}

#[test]
fn two_changes_take_turns() {
    model(2, || {
        let world = World::new();
        let mine = world.clone();
        let thread = spawn(move || mine.set(1, 3, 1));
        world.set(4, 0, 0);
        thread.join().unwrap();
        let set = world.current();
        assert_eq!(set.generation, SLOTS as u64 + 2);
        assert_eq!(set.find(Gfn(3)).map(|slot| slot.id()), Some(1));
        assert!(set.find(Gfn(8)).is_none() && set.find(Gfn(2)).is_none());
    });
}

#[test]
fn the_slot_that_a_cpu_used_last_is_alive_when_it_is_used_again() {
    model(2, || {
        let vm = vm(Level::PAGE, 1, PLAIN);
        let cpus = vm.clone();
        let thread = spawn(move || {
            on_cpu(&cpus, |vcpu| {
                for _ in 0..2 {
                    if let (_, Some(slot)) = vcpu.find_slot(Gfn(0)) {
                        assert_eq!(slot.gfns().start, Gfn(0));
                    }
                    vcpu.leave();
                    vcpu.enter_unguarded(1);
                }
            })
        });
        set_slot(&vm, 2, 1, PLAIN);
        set_slot(&vm, 0, 1, PLAIN);
        thread.join().unwrap();
    });
}
