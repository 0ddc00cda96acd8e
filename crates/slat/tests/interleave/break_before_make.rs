//! Operations that replace entries by other entries. With break-before-make, the new entry has to wait for the flush of
//! the old entry; the model of a walker's TLB checks that ([`slat_model::Tlb`]). All other rules are checked on all
//! formats.

use std::sync::Arc;

use slat::{Access::*, Format, Level, MemoryAttributes};
use slat::{Setting, Switch};

use crate::harness::{Act, LOGGED, NONE, Prepare, SLOT_PAGES, World};
use crate::interleave::interleave;

impl<F: Format> World<F> {
    /// Small leaves where huge leaves are possible.
    const SMALL_WHERE_HUGE_FIT: Prepare<F> = || {
        let world = Self::HUGE();
        world.vm.set_policy(Setting::HugePages(Switch::Off));
        world.touch(1, Write);
        world.touch(2, Write);
        world.vm.set_policy(Setting::HugePages(Switch::On));
        world
    };

    /// The guest has executed pages 0..512 with `nx_huge_pages` on, so these have small leaves.
    const EXECUTED: Prepare<F> = || {
        let world = Self::HUGE();
        world.set_policies(&[
            ("nx_huge_pages", "on"),
            ("nx_huge_pages_recovery_ratio", "1"),
        ]);
        world.touch(1, Execute);
        world
    };

    /// Two huge leaves without the right to execute. A fetch zaps the leaf that it finds.
    const ZAPPED_BY_A_FETCH: Prepare<F> = || {
        let world = Self::HUGE();
        world.set_policies(&[("nx_huge_pages", "on"), ("nx_huge_pages_split", "off")]);
        world.touch(1, Write);
        world
    };

    fn set_policies(&self, policies: &[(&str, &str)]) {
        for (name, value) in policies {
            self.vm.set_policy(Setting::parse(name, value).unwrap());
        }
    }

    pub fn the_end_of_logging_and_a_fault() {
        let logged: Prepare<F> = || {
            let world = Self::new(Level::MEGA, LOGGED);
            world.touch(1, Write);
            world.touch(2, Read);
            world
        };
        let end: Act<F> = |w| w.flags(NONE);
        interleave(logged, &[], end, |w| w.touch(1, Read));
        interleave(logged, &[(2, Read)], end, |w| w.touch(300, Write));
        interleave(logged, &[(1, Write)], |w| w.touch(300, Write), end);
    }

    /// Dirty logging ends, so huge leaves replace tables. Meanwhile another operation zaps these pages, or needs small
    /// leaves there.
    pub fn the_end_of_logging_and_what_makes_its_leaves_wrong() {
        let logged: Prepare<F> = || {
            let world = Self::new(Level::MEGA, LOGGED);
            world.touch(1, Write);
            world.touch(700, Read);
            world
        };
        let end: Act<F> = |w| w.flags(NONE);
        let others: [Act<F>; 4] = [
            Self::REMAP_1,
            Self::REMAP_HUGE,
            |w| w.set_policies(&[("nx_huge_pages", "on")]),
            |w| w.vm.zap(0, Self::frames(0..512)),
        ];
        for other in others {
            interleave(logged, &[(1, Write), (700, Read)], end, other);
            interleave(logged, &[(2, Read)], other, end);
        }
    }

    pub fn nx_recovery_and_a_fault() {
        let recover: Act<F> = |w| _ = w.vm.recover_nx_huge_pages();
        interleave(Self::EXECUTED, &[], recover, |w| w.touch(1, Read));
        interleave(Self::EXECUTED, &[(1, Read)], recover, |w| {
            w.touch(9, Execute)
        });
    }

    pub fn a_zap_and_a_fault_that_maps_a_larger_leaf() {
        let zap: Act<F> = |w| w.vm.zap(0, Self::frames(0..SLOT_PAGES));
        interleave(Self::SMALL_WHERE_HUGE_FIT, &[], zap, |w| w.touch(1, Read));
        let zap_one: Act<F> = |w| w.vm.zap(0, Self::frames(1..2));
        interleave(Self::SMALL_WHERE_HUGE_FIT, &[], zap_one, |w| {
            w.touch(2, Read)
        });
    }

    pub fn nx_huge_pages_switched_on_and_an_execution_fault() {
        let switch: Act<F> = |w| w.set_policies(&[("nx_huge_pages", "on")]);
        interleave(Self::MAPPED, &[], switch, |w| w.touch(1, Execute));
        interleave(Self::MAPPED, &[(2, Read)], switch, |w| w.touch(1, Execute));
    }

    pub fn a_fault_that_clears_a_table_and_another_fault() {
        let clear: Act<F> = |w| w.touch(9, Read);
        interleave(Self::SMALL_WHERE_HUGE_FIT, &[], clear, |w| {
            w.touch(10, Write)
        });
        interleave(Self::SMALL_WHERE_HUGE_FIT, &[(2, Write)], clear, clear);
    }

    pub fn an_execution_fault_that_zaps_a_huge_leaf_and_another() {
        let fetch: Act<F> = |w| w.touch(1, Execute);
        interleave(Self::ZAPPED_BY_A_FETCH, &[], fetch, |w| w.touch(2, Execute));
        interleave(Self::ZAPPED_BY_A_FETCH, &[(3, Read)], fetch, fetch);
    }

    /// Makes a slot with shared and private backing, a part of which is mapped.
    pub fn two_backings() -> Arc<Self> {
        let world = Self::new(Level::MEGA, NONE);
        world.delete();
        let region = Self::region(0, 0..SLOT_PAGES, 0).with_private(Some(Self::hva(SLOT_PAGES)));
        world.allow(0..SLOT_PAGES, 0);
        world.vm.set_memory_region(0, &region).unwrap();
        world.settle(0..0, 0..SLOT_PAGES);
        world.touch(1, Write);
        world
    }

    /// A conversion changes the host frames that back the guest frames.
    pub fn a_conversion_and_a_fault() {
        let convert: Act<F> = |w| {
            w.allow(0..512, SLOT_PAGES);
            let frames = Self::frames(0..512);
            let private = MemoryAttributes::PRIVATE;
            w.vm.set_memory_attributes(frames, private).unwrap();
            w.settle(0..0, 0..512);
        };
        interleave(Self::two_backings, &[], convert, |w| w.touch(1, Write));
    }

    pub fn a_slot_that_moves_over_itself_and_a_fault() {
        let small: Prepare<F> = || {
            let world = Self::SMALL();
            world.touch(1, Write);
            world.touch(2, Write);
            world
        };
        interleave(small, &[], Self::SHIFT, |w| w.touch(2, Write));
        interleave(Self::MAPPED, &[], Self::SHIFT, |w| w.touch(2, Write));
    }

    pub fn an_invalidated_page_of_a_huge_leaf_and_a_fault_on_another() {
        // The pages have a huge leaf, and new leaves are small.
        let small_now: Prepare<F> = || {
            let world = Self::MAPPED();
            world.vm.set_policy(Setting::HugePages(Switch::Off));
            world
        };
        interleave(small_now, &[], Self::REMAP_1, |w| w.touch(300, Read));
        interleave(small_now, &[(9, Read)], Self::REMAP_1, |w| {
            w.touch(300, Write)
        });
    }
}
