//! Tests clones of VMs together with each other mechanism.

use std::sync::Arc;

use crate::access::touch;
use crate::world::*;
use slat::format::{Entry, Leaf, Npt, Stage2, Stage2Kib16, Sv48x4};
use slat::{
    Access::*, Config, DirtyLogError, Ept, Format, Gfn, Level, MmuKind, Prefetch, Region, Setting,
    Vm,
};
use slat_model::{Event, HostChange, HostMemory, SimPlatform};

fn fork<F: Format>(parent: &Arc<TestVm<F>>) -> Arc<TestVm<F>> {
    Arc::new(Vm::fork_from(parent).unwrap())
}

/// Checks that parent and child map all frames in the same way.
fn maps_alike<F: Format>(parent: &TestVm<F>, child: &TestVm<F>) {
    for gfn in (0..FRAMES).map(Gfn) {
        assert_eq!(child.lookup(0, gfn), parent.lookup(0, gfn), "{gfn:?}");
    }
    child.audit().unwrap();
}

/// The parent has huge leaves, and tables of small leaves. The child gets each leaf at the same level.
#[test]
fn a_clone_has_leaves_of_each_level_where_its_parent_has_them() {
    fn of<F: Format>() {
        let mut world = World::<F>::shared(Level::MEGA, NONE);
        let small = [0, 2 * MIB2];
        for start in small {
            world.replace(start..start + MIB2, remap(Level::PAGE));
        }
        for gfn in [0, 7, MIB2, 2 * MIB2, 3 * MIB2, 4 * MIB2] {
            world.page(gfn, Write);
        }
        let child = fork(&world.vm);
        let stats = child.stats();
        assert_eq!((stats.pages_4k, stats.pages_2m), (3, 3));
        maps_alike(&world.vm, &child);
    }
    of::<Ept>();
    of::<Stage2<48>>();
}

#[test]
fn a_clone_is_made_of_tables_of_16k() {
    type Large = Stage2Kib16<48>;
    let huge = Large::GRANULE.pages(Level::MEGA);
    let platform = SimPlatform::with_granule(Large::GRANULE, 2 * huge);
    platform.host.change(&(0..huge), remap(Level::MEGA));
    let vm = Vm::<_, Large>::new(platform, Config::default()).unwrap();
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    let size = 2 * huge * Large::GRANULE.bytes();
    let region = Region::new(0, slat::Gpa(0), size, HostMemory::BASE);
    vm.set_memory_region(0, &region).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gfn in [3, huge, 2 * huge - 1] {
        vcpu.hardware_fault(Large::GRANULE.gpa(Gfn(gfn)), Write)
            .unwrap();
    }
    let child = fork(&vm);
    let stats = child.stats();
    assert_eq!((stats.pages_4k, stats.pages_2m), (2, 1));
    for gfn in [0, huge - 1, huge, huge + 1, 2 * huge - 1].map(Gfn) {
        assert_eq!(child.lookup(0, gfn), vm.lookup(0, gfn), "{gfn:?}");
    }
    child.audit().unwrap();
}

#[test]
fn a_clone_logs_as_its_parent_does() {
    for (manual, initially_set) in [(false, false), (true, false), (true, true)] {
        let mut world = World::<Ept>::empty(Level::PAGE);
        world.vm.set_manual_dirty_log(manual, initially_set);
        world.set(LOGGED);
        world.page(3, Write);
        let child = fork(&world.vm);
        let mut vcpu = child.create_vcpu().unwrap();
        let all = match initially_set {
            true => Vec::from_iter(0..FRAMES),
            false => Vec::new(),
        };
        assert_eq!(log_of(&child, 0), all, "its log begins anew");
        child.mark_dirty(0, Gfn(5)..Gfn(6)).unwrap();
        let named = log_of(&child, 0);
        assert!(named.contains(&5));
        // Unless protection is manual, the first get of the log has cleared the log.
        let again = if manual { named } else { Vec::new() };
        assert_eq!(log_of(&child, 0), again);
        assert_eq!(touch(&mut vcpu, 4, Read).unwrap().level, Level::PAGE);
    }
}

#[test]
fn a_clone_of_a_vm_with_rings_has_no_bitmaps() {
    let mut world = World::<Ept>::empty(Level::PAGE);
    world.vm.use_dirty_rings();
    let ring = slat_model::RingClient::new().ring();
    world.vcpu.set_dirty_ring(ring).unwrap();
    world.set(LOGGED);
    world.page(3, Write);
    let child = fork(&world.vm);
    let mut bitmap = vec![0; FRAMES as usize / 64];
    let of_parent = world.vm.get_dirty_log(0, 0, &mut bitmap);
    assert!(
        matches!(of_parent, Err(DirtyLogError::Rings)),
        "{of_parent:?}"
    );
    assert_eq!(child.get_dirty_log(0, 0, &mut bitmap), of_parent);
}

/// The parent must keep the records of its own writes, and the child must not get them.
#[test]
fn a_clone_has_written_nothing_and_its_parent_what_it_has() {
    fn of<F: Format>() {
        let mut world = World::<F>::empty(Level::PAGE);
        world.policy("dirty_log", "dirty-bit");
        world.policy("dirty_log_reads", "off");
        world.set(NONE);
        world.policy("prefetch", "8");
        world.page(3, Write);
        world.page(20, Read);
        let find = |vm: &TestVm<F>, is_it: fn(&Leaf) -> bool| {
            let mut found = Vec::new();
            let all = Gfn(0)..Gfn(FRAMES);
            vm.visit_leaves(0, all, &mut |gfn, _, entry| {
                if matches!(entry, Entry::Leaf(leaf) if is_it(&leaf)) {
                    found.push(gfn.0);
                }
            });
            found
        };
        // If walkers set no dirty bits, the right to write is the only sign that a page may have been written to.
        let may_be_written =
            |leaf: &Leaf| leaf.dirty || !F::SETS_DIRTY && (leaf.write || leaf.may_write);
        let before = find(&world.vm, may_be_written);
        assert!(
            before.contains(&3) && (F::SETS_DIRTY || before.len() > 8),
            "{before:?}"
        );
        let child = fork(&world.vm);
        assert_eq!(find(&world.vm, |leaf| leaf.dirty), before);
        assert_eq!(find(&child, |leaf| leaf.dirty), [0; 0]);
        // If dirty logging by dirty bits starts now, the log contains only later writes.
        let logged = region().with_flags(LOGGED);
        child.set_memory_region(0, &logged).unwrap();
        assert_eq!(log_of(&child, 0), [0; 0]);
    }
    of::<Ept>();
    of::<Npt>();
    of::<Stage2<48>>();
    of::<Stage2<48, true>>();
    of::<Sv48x4>();
}

#[test]
fn a_clone_has_the_private_frames_of_its_parent() {
    let mut world = World::<Ept>::with_private(Level::PAGE);
    world.convert(4..8, true);
    (0..12).for_each(|gfn| _ = world.page(gfn, Write));
    let child = fork(&world.vm);
    maps_alike(&world.vm, &child);
    assert_eq!(child.private_around(Gfn(5)), (true, Gfn(4)..Gfn(8)));
    let mut vcpu = child.create_vcpu().unwrap();
    for (gfn, host) in [(3, 3), (5, PRIVATE + 5), (9, 9)] {
        let found = touch(&mut vcpu, gfn, Read).unwrap();
        assert_eq!(HostMemory::identify(found.host.pfn()).0, host);
    }
    // From now on, a conversion in one VM does not change the other.
    convert(&child, 4..8, false);
    assert_eq!(world.page(5, Read).0, PRIVATE + 5);
    let found = touch(&mut vcpu, 5, Read).unwrap();
    assert_eq!(HostMemory::identify(found.host.pfn()).0, 5);
    child.audit().unwrap();
}

/// The attributes are published, and the leaves of the shared pages are still in the parent's tables.
#[test]
fn a_clone_made_during_a_conversion_has_no_leaf_of_before() {
    fn of<F: Format>() {
        let mut world = World::<F>::with_private(Level::PAGE);
        (0..12).for_each(|gfn| _ = world.page(gfn, Write));
        let (converted, platform) = (world.vm.clone(), world.platform.clone());
        let is_zapping = |event| matches!(event, Event::Entries(_));
        let child = stopped_at(
            &platform,
            move || convert(&converted, 4..8, true),
            is_zapping,
            || fork(&world.vm),
        );
        assert_eq!(child.private_around(Gfn(5)), (true, Gfn(4)..Gfn(8)));
        for gfn in (4..8).map(Gfn) {
            assert_eq!(child.lookup(0, gfn), None, "{gfn:?}");
        }
        maps_alike(&world.vm, &child);
    }
    of::<Ept>();
    of::<Stage2<48>>();
}

#[test]
fn a_clone_waits_for_absent_pages_as_its_parent_does() {
    let mut world = World::<Ept>::empty(Level::MEGA);
    let late = 700..701;
    world.platform.host.change(&late, HostChange::Await);
    world.set(NONE);
    world.page(701, Read);
    let child = fork(&world.vm);
    let mut vcpu = child.create_vcpu().unwrap();
    for access in [Read, Execute] {
        let fault = memory_fault(700, access, false, true);
        assert_eq!(touch(&mut vcpu, 700, access), fault);
        assert_eq!(world.touch(700, access), fault);
    }
    assert_eq!(touch(&mut vcpu, 701, Read).unwrap().level, Level::PAGE);
    child.audit().unwrap();
}

#[test]
fn a_clone_of_a_vm_whose_code_was_split_counts_no_nx_tables() {
    let mut world = World::<Ept>::shared(Level::MEGA, NONE);
    world.policy("nx_huge_pages", "on");
    world.page(3, Execute);
    let child = fork(&world.vm);
    maps_alike(&world.vm, &child);
    assert_eq!(child.stats().nx_lpage_splits, 0);
    let before = child.stats();
    let mut vcpu = child.create_vcpu().unwrap();
    assert!(touch(&mut vcpu, 3, Execute).unwrap().execute);
    assert_eq!(child.stats().since(&before).pf_taken, 0);
    child.audit().unwrap();
}

#[test]
fn a_clone_of_a_vm_with_devices_finds_them() {
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        let mut world = World::<Ept>::with(Level::PAGE, Config::default().with_mmu(mmu));
        world.set(NONE);
        let mmio = world.touch(FRAMES, Write);
        assert!(matches!(mmio, Err(slat::Stop::Mmio { .. })));
        let child = fork(&world.vm);
        let mut vcpu = child.create_vcpu().unwrap();
        (0..2).for_each(|_| assert_eq!(touch(&mut vcpu, FRAMES, Write), mmio));
        assert_eq!(child.stats().mmio_cached, 1);
        // Frames that are MMIO in the parent can be memory in the child.
        let region = Region::new(1, slat::Gpa(FRAMES << 12), 1 << 12, HostMemory::hva(FRAMES));
        child.set_memory_region(0, &region).unwrap();
        assert!(touch(&mut vcpu, FRAMES, Read).is_ok());
        assert_eq!(world.touch(FRAMES, Write), mmio);
        child.audit().unwrap();
    }
}
