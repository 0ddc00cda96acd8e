//! Several memslots change atomically during another operation. A frame that stays mapped is never missing, a removed
//! page is not used any more, and no write is lost.

use std::sync::Arc;

use slat::{Access::*, Change, DirtyLogMethod, Format, Level, Setting, Stop};

use crate::harness::{Act, CUT, LOGGED, NONE, Prepare, SLOT_PAGES, World, remap};
use crate::interleave::interleave;

impl<F: Format> World<F> {
    fn part(&self, id: u32, pages: std::ops::Range<u64>) -> Change {
        let base = self.gfns().start;
        let region = Self::region(id, base + pages.start..base + pages.end, pages.start);
        Change::Set(region.with_flags(self.slot_flags()))
    }

    fn change(&self, changes: &[Change]) {
        self.vm.set_memory_regions(0, changes).unwrap();
    }

    const SPLIT: Act<F> = |w| w.change(&[w.part(0, 0..CUT), w.part(1, CUT..SLOT_PAGES)]);
    const JOIN: Act<F> = |w| w.change(&[w.part(0, 0..SLOT_PAGES), Change::Remove(1)]);
    /// Another slot, with a higher id, replaces the slot at the same frames.
    const HIGHER_ID: Act<F> = |w| w.change(&[Change::Remove(0), w.part(2, 0..SLOT_PAGES)]);
    const LOWER_ID: Act<F> = |w| w.change(&[Change::Remove(2), w.part(0, 0..SLOT_PAGES)]);

    /// Checks that an access to the page finds memory: there is memory at all times.
    fn reach(&self, page: u64) {
        let mut vcpu = self.vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        let mut answer = vcpu.translate(Self::gpa(page), Read);
        while answer == Err(Stop::Retry) {
            vcpu.quiesce();
            answer = vcpu.translate(Self::gpa(page), Read);
        }
        match answer {
            Ok(translation) => self.use_page(Self::at(page), &translation, Read),
            Err(stop) => self.expect(Err(format!("frame {page}: {stop}"))),
        }
        vcpu.leave();
    }

    fn split_in_two(level: Level, flags: slat::SlotFlags) -> Arc<Self> {
        let world = Self::new(level, flags);
        Self::SPLIT(&world);
        world.touch(1, Write);
        world.touch(700, Write);
        world
    }

    /// Makes small leaves in all parts of the slot, so that an operation takes many steps.
    fn scattered(mut id: impl FnMut(&Self)) -> Arc<Self> {
        let world = Self::SMALL();
        id(&world);
        for gfn in [1, 9, 100, 300, 331, 511, 512, 700, 1022] {
            world.touch(gfn, Write);
        }
        world
    }

    pub fn a_fault_and_a_slot_that_becomes_two() {
        let [near, far]: [Act<F>; 2] = [|w| w.reach(CUT - 1), |w| w.reach(CUT)];
        for world in [Self::SMALL, Self::HUGE, Self::MAPPED, Self::LOGGED_WORLD] {
            for fault in [near, far] {
                interleave(world, &[], fault, Self::SPLIT);
                interleave(world, &[(3, Read)], Self::SPLIT, fault);
            }
            interleave(world, &[(2, Read)], Self::SPLIT, Self::WRITE_1);
            interleave(world, &[], Self::WRITE_1, Self::SPLIT);
        }
    }

    pub fn a_fault_and_two_slots_that_become_one() {
        let reach: Act<F> = |w| w.reach(CUT);
        let two: [Prepare<F>; 2] = [
            || Self::split_in_two(Level::MEGA, NONE),
            || Self::split_in_two(Level::MEGA, LOGGED),
        ];
        for world in two {
            interleave(world, &[], reach, Self::JOIN);
            interleave(world, &[(700, Write)], Self::JOIN, reach);
            interleave(world, &[(700, Write)], Self::JOIN, Self::WRITE_1);
        }
    }

    /// The invalidation walks over the slots by backing address. When it continues after a step, it finds other slots.
    pub fn an_invalidation_and_slots_that_take_the_place_of_others() {
        let low: Prepare<F> = || Self::scattered(|_| ());
        let high: Prepare<F> = || Self::scattered(Self::HIGHER_ID);
        let two: Prepare<F> = || Self::split_in_two(Level::PAGE, NONE);
        let all = Self::REMAP_ALL_BUT_ENDS;
        let cases: [(Prepare<F>, Act<F>); 4] = [
            (low, Self::HIGHER_ID),
            (high, Self::LOWER_ID),
            (low, Self::SPLIT),
            (two, Self::JOIN),
        ];
        for (world, change) in cases {
            let held = [(1, Read), (700, Write)];
            interleave(world, &held, all, change);
            interleave(world, &held, change, all);
            interleave(world, &held, change, Self::REMAP_1);
        }
        interleave(Self::MAPPED, &[(1, Write)], Self::SPLIT, Self::REMAP_HUGE);
        interleave(Self::MAPPED, &[(1, Write)], Self::REMAP_HUGE, Self::SPLIT);
    }

    pub fn a_log_taken_while_its_slot_becomes_two_loses_no_write() {
        let dirty_bits: Prepare<F> = || {
            let world = Self::new(Level::PAGE, NONE);
            let method = Setting::DirtyLog(DirtyLogMethod::DirtyBit);
            world.vm.set_policy(method);
            world.flags(LOGGED);
            // The invalidation flushes, so the next change need not wait for readers.
            world.touch(900, Write);
            world.invalidate(900..901, remap(Level::PAGE));
            // The CPU uses the first two pages again, and not the other two.
            for gfn in [2, 700, 5, 801] {
                world.touch(gfn, Write);
            }
            world
        };
        let protected: Prepare<F> = || {
            let world = Self::new(Level::PAGE, LOGGED);
            (0..70)
                .chain(600..640)
                .for_each(|gfn| world.touch(gfn, Write));
            world
        };
        for world in [dirty_bits, protected] {
            let held = [(2, Write), (700, Write)];
            interleave(world, &held, Self::SPLIT, Self::HARVEST);
            interleave(world, &held, Self::HARVEST, Self::SPLIT);
            interleave(world, &held, Self::HIGHER_ID, Self::HARVEST);
            interleave(world, &held, Self::HARVEST, Self::HIGHER_ID);
            let zap: Act<F> = |w| w.vm.zap(0, Self::frames(0..SLOT_PAGES));
            // No CPU writes again to the pages that the zap finds written.
            interleave(world, &[], zap, Self::SPLIT);
            interleave(world, &held, Self::SPLIT, zap);
            interleave(world, &held, Self::SPLIT, Self::REMAP_ALL_BUT_ENDS);
            interleave(world, &held, Self::REMAP_ALL_BUT_ENDS, Self::SPLIT);
        }
        let two: Prepare<F> = || Self::split_in_two(Level::PAGE, LOGGED);
        interleave(two, &[(2, Write), (700, Write)], Self::JOIN, Self::HARVEST);
        interleave(two, &[(2, Write), (700, Write)], Self::HARVEST, Self::JOIN);
    }
}
