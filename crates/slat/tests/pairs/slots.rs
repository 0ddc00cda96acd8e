//! Tests slots that are replaced, logs that end, and promotions, during faults and invalidations.

use crate::world::*;
use slat::format::{Stage2, Stage2Kib16, Stage2Kib64};
use slat::{
    Access::*, Change, Config, Ept, Format, Gfn, Gpa, Level, MmuKind, Promotion, Region, Stop, Vm,
};
use slat_model::{Event, HostMemory, SimPlatform};

/// A table that has to stay does not stop a promotion: the promotion replaces a later table.
#[test]
fn a_promotion_comes_past_tables_that_have_to_stay() {
    let mut world = World::<Ept>::shared(Level::MEGA, NONE);
    world.replace(0..6 * MIB2, remap(Level::PAGE));
    world.policy("huge_pages", "off");
    for block in 0..8 {
        world.page(block * MIB2 + 7, Write);
    }
    world.policy("huge_pages", "on");
    let mut promotion = Promotion::default();
    let leaves = (0..8).map(|_| world.vm.promote(&mut promotion, 1));
    assert_eq!(leaves.sum::<u64>(), 2);
    for block in 6..8 {
        assert_eq!(world.page(block * MIB2 + 8, Read).1, 2);
    }
    world.check();
}

/// One backing is shifted by 512 pages. That is the size of a huge leaf in tables of 4 KiB, but not in tables of 16
/// or 64 KiB.
#[test]
fn a_huge_leaf_of_16k_and_64k_begins_where_its_host_page_does() {
    fn of<F: Format>() {
        let huge = F::GRANULE.pages(Level::MEGA);
        let platform = SimPlatform::with_granule(F::GRANULE, 4 * huge);
        platform.host.change(&(0..4 * huge), remap(Level::MEGA));
        let vm = Vm::<_, F>::new(platform, Config::default()).unwrap();
        for (id, skew) in [0, Level::MEGA.pages(), huge / 2, huge]
            .into_iter()
            .enumerate()
        {
            let base = 4 * huge * id as u64;
            let (gpa, size) = (F::GRANULE.gpa(Gfn(base)), 2 * huge * F::GRANULE.bytes());
            let backing = F::GRANULE.add_pages(HostMemory::BASE, skew);
            let region = Region::new(id as u32, gpa, size, backing);
            vm.set_memory_region(0, &region).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            for page in [0, 5, huge - 1, huge + 3] {
                let gpa = F::GRANULE.gpa(Gfn(base + page));
                vcpu.hardware_fault(gpa, Write).unwrap();
                let found = vm.lookup(0, Gfn(base + page)).unwrap();
                assert_eq!(HostMemory::identify(found.pfn).0, page + skew, "{skew}");
                let fits = skew % huge == 0;
                let level = if fits { Level::MEGA } else { Level::PAGE };
                assert_eq!(found.level, level, "{skew}");
            }
        }
        vm.audit().unwrap();
    }
    of::<Stage2Kib16<48>>();
    of::<Stage2Kib64<48>>();
}

/// The host's pages change after the host was asked for them, and before the leaf is installed.
#[test]
fn no_recovered_leaf_maps_what_an_invalidation_has_replaced_meanwhile() {
    fn of<F: Format>(end: fn(&World<F>), prepare: fn(&mut World<F>)) {
        let mut world = World::<F>::shared(Level::MEGA, NONE);
        prepare(&mut world);
        world.page(5, Write);
        let (vm, platform) = (world.vm.clone(), world.platform.clone());
        let is_found = |event| matches!(event, Event::Resident(_));
        once_at(&world.platform, is_found, move || {
            // The promotion keeps the table.
            let guard = vm.invalidate(HostMemory::hvas(&(100..101)));
            platform.host.change(&(100..101), remap(Level::PAGE));
            drop(guard);
        });
        end(&world);
        world.platform.clear_hook();
        for gfn in [0, 5, 100] {
            let found = world.touch(gfn, Read).unwrap().host.pfn();
            assert_eq!(found, world.platform.host.get(gfn).unwrap().pfn);
        }
        world.check();
    }
    fn logged<F: Format>(world: &mut World<F>) {
        world.set(LOGGED);
    }
    fn small<F: Format>(world: &mut World<F>) {
        world.policy("huge_pages", "off");
    }
    fn promote<F: Format>(world: &World<F>) {
        world.policy("huge_pages", "on");
        world.vm.promote(&mut Promotion::default(), 4);
    }
    of::<Ept>(|world| world.set(NONE), logged);
    of::<Ept>(promote, small);
    of::<Stage2<48>>(|world| world.set(NONE), logged);
    of::<Stage2<48>>(promote, small);
}

#[test]
fn a_fault_installs_nothing_of_a_slot_that_is_deleted_meanwhile() {
    let mut world = World::<Ept>::shared(Level::PAGE, NONE);
    let vm = world.vm.clone();
    let is_resolved = |event| matches!(event, Event::Resolved(_));
    once_at(&world.platform, is_resolved, move || {
        vm.remove_memory_region(0, 0).unwrap();
    });
    let gpa = Gpa(7 << 12);
    assert_eq!(world.touch(7, Write), Err(Stop::Mmio { gpa }));
    world.platform.clear_hook();
    world.assert_unmapped(0..FRAMES);
    world.check();
}

/// The thread that deletes the slot has published the new set, and has not zapped the slot's leaves yet.
#[test]
fn an_invalidation_waits_for_the_leaves_of_a_slot_that_is_deleted() {
    let mut world = World::<Ept>::shared(Level::PAGE, NONE);
    world.page(7, Write);
    let (vm, platform) = (world.vm.clone(), world.platform.clone());
    stopped_at(
        &platform,
        move || vm.remove_memory_region(0, 0).unwrap(),
        |event| matches!(event, Event::Entries(_)),
        || {
            let guard = world.vm.invalidate(HostMemory::hvas(&(0..FRAMES)));
            world.assert_unmapped(0..FRAMES);
            drop(guard);
        },
    );
    world.check();
}

/// The thread that deletes the slot has zapped the slot's leaves, and has not flushed yet.
#[test]
fn one_change_or_several_flush_what_was_where_their_slots_come() {
    for several in [false, true] {
        let mut world = World::<Ept>::shared(Level::PAGE, NONE);
        world.platform.watch(&world.vm, 1);
        world.page(7, Write);
        world.page(9, Read);
        let (vm, platform) = (world.vm.clone(), world.platform.clone());
        stopped_at(
            &platform,
            move || vm.remove_memory_region(0, 0).unwrap(),
            |event| matches!(event, Event::Flush(..)),
            || {
                let (gpa, size) = (Gpa(0), FRAMES << 12);
                let region = Region::new(1, gpa, size, HostMemory::hva(FRAMES));
                match several {
                    false => world.vm.set_memory_region(0, &region).unwrap(),
                    true => (world.vm)
                        .set_memory_regions(0, &[Change::Set(region)])
                        .unwrap(),
                }
                world.platform.tlb.check_gone(0, &(0..FRAMES)).unwrap();
            },
        );
        world.platform.tlb.forget();
        world.check();
    }
}

/// After a step, an invalidation continues with the slot after the last one that it has visited. The slot that replaces
/// that slot is before it in the order of backing.
#[test]
fn an_invalidation_misses_no_leaf_of_a_slot_that_takes_the_place_of_another() {
    let mut world = World::<Ept>::empty(Level::PAGE);
    let mut high = region();
    high.slot = 2;
    world.vm.set_memory_region(0, &high).unwrap();
    world.policy("prefetch", "512");
    (0..FRAMES)
        .step_by(100)
        .for_each(|gfn| _ = world.page(gfn, Write));
    // The invalidation flushes, so the change need not begin by waiting for readers.
    drop(world.vm.invalidate(HostMemory::hvas(&(0..1))));
    let changes = [Change::Remove(2), Change::Set(region())];
    let (vm, platform) = (world.vm.clone(), world.platform.clone());
    stopped_between_steps(
        &platform,
        move || {
            let guard = vm.invalidate(HostMemory::hvas(&(1..FRAMES - 1)));
            assert_unmapped(&vm, 1..FRAMES - 1);
            drop(guard);
        },
        || world.vm.set_memory_regions(0, &changes).unwrap(),
    );
    world.check();
}

/// A slot moves to a range that overlaps its old one. A fault finds the slot at its new position before its old leaves
/// are zapped.
#[test]
fn a_write_beside_the_move_of_a_slot_that_logs_by_dirty_bits_is_not_lost() {
    let mut world = World::<Ept>::empty(Level::PAGE);
    world.policy("dirty_log", "dirty-bit");
    world.policy("dirty_log_reads", "off");
    let slot_at = |base: u64| {
        let region = Region::new(0, Gpa(base << 12), 64 << 12, HostMemory::hva(0));
        region.with_flags(LOGGED)
    };
    world.vm.set_memory_region(0, &slot_at(0)).unwrap();
    for gfn in [1, 2, 5] {
        world.page(gfn, Write);
    }
    let (moved, vm, platform) = (world.vm.clone(), world.vm.clone(), world.platform.clone());
    stopped_at(
        &platform,
        move || vm.set_memory_region(0, &slot_at(1)).unwrap(),
        move |event| {
            let is_published = || moved.memslot_from(0, Gfn(0)) == Some(slot_at(1));
            matches!(event, Event::Entries(_)) && is_published()
        },
        || assert_eq!(world.page(8, Write).0, 7),
    );
    let mut bitmap = [0];
    world.vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    assert_eq!(bitmap, [1 << 1 | 1 << 2 | 1 << 5 | 1 << 7]);
    world.check();
}

/// A zap that uses the old slot set notes the dirty bits that it finds in the old log. The new slot gets the marks of
/// that log.
#[test]
fn what_a_zap_finds_dirty_in_a_slot_that_is_replaced_is_in_the_new_log() {
    let mut world = World::<Ept>::empty(Level::PAGE);
    world.policy("dirty_log", "dirty-bit");
    world.policy("dirty_log_reads", "off");
    world.set(LOGGED);
    world.page(3, Write);
    // The invalidation flushes, so the change need not begin by waiting for readers.
    world.page(9, Write);
    drop(world.vm.invalidate(HostMemory::hvas(&(9..10))));
    let mut other = region().with_flags(LOGGED);
    other.slot = 1;
    let changes = [Change::Remove(0), Change::Set(other)];
    let (vm, platform) = (world.vm.clone(), world.platform.clone());
    stopped_at(
        &platform,
        move || vm.zap(0, Gfn(0)..Gfn(8)),
        |event| matches!(event, Event::Entries(_)),
        || world.vm.set_memory_regions(0, &changes).unwrap(),
    );
    assert_eq!(log_of(&world.vm, 1), [3, 9]);
    world.check();
}

/// A change splits a huge leaf that crosses an edge of a slot. If there is no memory for the split, the change either
/// fails, or zaps the leaf.
#[test]
fn no_huge_leaf_stays_across_the_edge_of_a_slot_whatever_memory_there_is() {
    fn cut(mmu: MmuKind, failing: u64, is_whole: bool) -> bool {
        let mut world = World::<Ept>::with(Level::MEGA, Config::default().with_mmu(mmu));
        world.set(NONE);
        assert_eq!(world.page(7, Write).1, 2);
        let lower = region().with_size(300 << 12);
        let rest = (FRAMES - 300) << 12;
        let upper = Region::new(1, Gpa(300 << 12), rest, HostMemory::hva(300));
        let both = [Change::Set(lower), Change::Set(upper)];
        let changes = if is_whole { &both[..] } else { &both[..1] };
        world.platform.fail_allocation(failing, true);
        let changed = world.vm.set_memory_regions(0, changes);
        let failed = world.platform.stop_failing();
        world.check();
        match changed {
            Err(_) => assert_eq!(world.page(300, Write), (300, 2)),
            Ok(()) if is_whole => assert_eq!(world.page(300, Write), (300, 1)),
            Ok(()) => {
                let gpa = Gpa(300 << 12);
                assert_eq!(world.touch(300, Read), Err(Stop::Mmio { gpa }));
            }
        }
        let level = if changed.is_ok() { 1 } else { 2 };
        assert_eq!(world.page(299, Write), (299, level));
        world.check();
        failed
    }
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        for is_whole in [false, true] {
            let failures = (0..).take_while(|n| cut(mmu, *n, is_whole)).count();
            assert!(failures > 1, "{mmu:?}: {failures}");
        }
    }
}
