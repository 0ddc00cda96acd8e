//! Tests which memory `Vm::cold_ranges` returns as unused for some passes.

#[path = "common/access.rs"]
mod access;
#[macro_use]
mod common;

use std::ops::Range;
use std::sync::Arc;

use access::touch;
use common::config;
use slat::format::Entry;
use slat::{
    Access::*, ColdMap, Ept, Format, Gfn, Gpa, Level, MemoryAttributes, Prefetch, Region, Setting,
    SlotFlags, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform};

on_every_format! {
    a_page_gets_older_until_it_is_used,
    what_is_not_mapped_is_in_no_range,
    a_huge_leaf_is_one_page_until_it_is_split,
    a_map_may_begin_and_end_anywhere,
}

type TestVm<F = Ept> = Arc<Vm<SimPlatform, F>>;

const MIB2: u64 = 512;

/// Makes a VM with two address spaces and no slots, and a vCPU of the VM.
fn vm<F: Format>(level: Level) -> (TestVm<F>, Vcpu<SimPlatform, F>) {
    let platform = SimPlatform::at_level(16 * MIB2, level);
    let vm = Vm::new(platform, config().with_spaces(2)).unwrap();
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    let vcpu = vm.create_vcpu().unwrap();
    (vm, vcpu)
}

/// Creates, moves or deletes slot `id`. Host page n backs its frame n + `offset`.
fn set<F: Format>(vm: &TestVm<F>, space: usize, id: u32, pages: Range<u64>, offset: u64) {
    let size = (pages.end - pages.start) << 12;
    let gpa = Gpa((pages.start + offset) << 12);
    let region = Region::new(id, gpa, size, HostMemory::hva(pages.start));
    vm.set_memory_region(space, &region).unwrap();
}

fn map(pages: Range<u64>) -> ColdMap {
    ColdMap::new(HostMemory::hvas(&pages)).unwrap()
}

/// Makes a pass. Returns the ranges of host pages that were not used in the last `passes` passes, each with its age.
fn pass<F: Format>(vm: &TestVm<F>, map: &mut ColdMap, passes: u8) -> Vec<(Range<u64>, u8)> {
    let page = |hva: slat::Hva| (hva.0 - HostMemory::BASE.0) >> 12;
    let ranges = vm.cold_ranges(map, passes);
    let ranges = ranges.map(|cold| (page(cold.hvas.start)..page(cold.hvas.end), cold.passes));
    ranges.collect()
}

fn a_page_gets_older_until_it_is_used<F: Format>() {
    let (vm, mut vcpu) = vm::<F>(Level::PAGE);
    set(&vm, 0, 0, 0..64, 0);
    let mut map = map(0..64);
    for gfn in 10..20 {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    assert_eq!(pass(&vm, &mut map, 1), []);
    assert_eq!(pass(&vm, &mut map, 1), [(10..20, 1)]);
    touch(&mut vcpu, 13, Read).unwrap();
    assert_eq!(pass(&vm, &mut map, 2), [(10..13, 2), (14..20, 2)]);
    assert_eq!(pass(&vm, &mut map, 1), [(10..20, 1)]);
    assert_eq!(map.passes(HostMemory::hva(12)), Some(3));
    for _ in 0..100 {
        pass(&vm, &mut map, 0);
    }
    let most = ColdMap::MOST_PASSES;
    assert_eq!(pass(&vm, &mut map, most), [(10..20, most)]);
    vm.audit().unwrap();
}

fn what_is_not_mapped_is_in_no_range<F: Format>() {
    let (vm, mut vcpu) = vm::<F>(Level::PAGE);
    set(&vm, 0, 0, 0..64, 0);
    let mut map = map(0..64);
    assert_eq!(pass(&vm, &mut map, 0), []);
    for gfn in [5, 6, 7] {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    pass(&vm, &mut map, 0);
    drop(vm.invalidate(HostMemory::hvas(&(6..7))));
    assert_eq!(pass(&vm, &mut map, 0), [(5..6, 1), (7..8, 1)]);
    // When the page is mapped again, it counts as used.
    touch(&mut vcpu, 6, Write).unwrap();
    assert_eq!(pass(&vm, &mut map, 0), [(5..8, 0)]);
    assert_eq!(pass(&vm, &mut map, 3), [(5..6, 3), (7..8, 3)]);
    vm.remove_memory_region(0, 0).unwrap();
    assert_eq!(pass(&vm, &mut map, 0), []);
}

fn a_huge_leaf_is_one_page_until_it_is_split<F: Format>() {
    let (vm, mut vcpu) = vm::<F>(Level::MEGA);
    set(&vm, 0, 0, 0..3 * MIB2, 0);
    let mut map = map(0..3 * MIB2);
    touch(&mut vcpu, 0, Write).unwrap();
    touch(&mut vcpu, 2 * MIB2, Write).unwrap();
    assert_eq!(pass(&vm, &mut map, 1), []);
    touch(&mut vcpu, 7, Write).unwrap();
    assert_eq!(pass(&vm, &mut map, 1), [(2 * MIB2..3 * MIB2, 1)]);
    assert_eq!(map.passes(HostMemory::hva(500)), Some(0));
    assert!(vm.cold_ranges(&mut map, 1).all(|cold| cold.huge));

    let logged = Region::new(0, Gpa(0), (3 * MIB2) << 12, HostMemory::hva(0));
    vm.set_memory_region(0, &logged.with_flags(SlotFlags::LOG_DIRTY_PAGES))
        .unwrap();
    touch(&mut vcpu, 2 * MIB2 + 3, Write).unwrap();
    let after = pass(&vm, &mut map, 2);
    // The pieces of a split leaf begin with the leaf's age. From then on each piece has an age of its own.
    let last = 2 * MIB2..3 * MIB2;
    let cold = [
        (0..MIB2, 2),
        (last.start..last.start + 3, 3),
        (last.start + 4..last.end, 3),
    ];
    assert_eq!(after, cold);
    assert!(vm.cold_ranges(&mut map, 1).all(|cold| !cold.huge));
    vm.audit().unwrap();
}

fn a_map_may_begin_and_end_anywhere<F: Format>() {
    let (vm, mut vcpu) = vm::<F>(Level::PAGE);
    // The order of the slots by frame differs from their order by backing, and both use one table.
    set(&vm, 0, 0, 0..100, 300);
    set(&vm, 0, 1, 100..200, 0);
    for gfn in (100..200).chain(300..400) {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    let mut part = map(90..150);
    pass(&vm, &mut part, 0);
    assert_eq!(pass(&vm, &mut part, 0), [(90..150, 1)]);
    // The pass cleared no accessed bit beyond the map.
    assert_eq!(vm.age(HostMemory::hvas(&(0..200)), false), 200 - 60);
    assert_eq!(part.passes(HostMemory::hva(89)), None);
    assert_eq!(part.passes(HostMemory::hva(150)), None);
    assert_eq!(pass(&vm, &mut map(400..500), 0), []);
    assert_eq!(pass(&vm, &mut map(4..4), 0), []);
}

#[test]
fn a_page_was_used_if_one_of_its_slots_was() {
    let (vm, mut vcpu) = vm::<Ept>(Level::PAGE);
    set(&vm, 0, 0, 0..32, 0);
    set(&vm, 0, 1, 16..32, 100);
    set(&vm, 1, 0, 0..8, 0);
    let mut map = map(0..32);
    for gfn in (0..32).chain(116..132) {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    vcpu.use_space(1);
    for gfn in 0..8 {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    assert_eq!(pass(&vm, &mut map, 1), []);
    touch(&mut vcpu, 3, Read).unwrap();
    vcpu.use_space(0);
    touch(&mut vcpu, 120, Read).unwrap();
    assert_eq!(pass(&vm, &mut map, 1), [(0..3, 1), (4..20, 1), (21..32, 1)]);
    // Deleting the slot zaps the page's other leaf. The map keeps the page's age.
    vm.remove_memory_region(0, 1).unwrap();
    assert_eq!(pass(&vm, &mut map, 2), [(0..3, 2), (4..20, 2), (21..32, 2)]);
    assert_eq!(map.passes(HostMemory::hva(20)), Some(1));
}

#[test]
fn a_private_frame_is_found_by_its_private_backing_alone() {
    let (vm, mut vcpu) = vm::<Ept>(Level::PAGE);
    let private = 4 * MIB2;
    let region = Region::new(0, Gpa(0), 64 << 12, HostMemory::hva(0));
    let region = region.with_private(Some(HostMemory::hva(private)));
    vm.set_memory_region(0, &region).unwrap();
    vm.set_memory_attributes(Gfn(20)..Gfn(30), MemoryAttributes::PRIVATE)
        .unwrap();
    for gfn in 0..64 {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    let (mut shared, mut hidden) = (map(0..64), map(private..private + 64));
    assert_eq!(pass(&vm, &mut shared, 0), [(0..20, 0), (30..64, 0)]);
    // The pass over the shared backing leaves the accessed bits of private frames to the map of the private backing.
    assert_eq!(pass(&vm, &mut hidden, 0), [(private + 20..private + 30, 0)]);
    touch(&mut vcpu, 25, Read).unwrap();
    touch(&mut vcpu, 35, Read).unwrap();
    assert_eq!(
        pass(&vm, &mut hidden, 1),
        [
            (private + 20..private + 25, 1),
            (private + 26..private + 30, 1)
        ]
    );
    assert_eq!(
        pass(&vm, &mut shared, 1),
        [(0..20, 1), (30..35, 1), (36..64, 1)]
    );
    assert_eq!(vm.age(HostMemory::hvas(&(0..64)), false), 0);
    touch(&mut vcpu, 25, Read).unwrap();
    assert_eq!(vm.age(HostMemory::hvas(&(0..64)), false), 0);
    assert_eq!(vm.age(HostMemory::hvas(&(private..private + 64)), false), 1);
}

/// Passes run while vCPUs use the pages. No leaf loses its dirty bit.
#[test]
fn passes_beside_vcpus_lose_no_dirty_bit() {
    let (vm, _) = vm::<Ept>(Level::PAGE);
    set(&vm, 0, 0, 0..MIB2, 0);
    let mut map = map(0..MIB2);
    std::thread::scope(|scope| {
        for half in 0..2 {
            let mut vcpu = vm.create_vcpu().unwrap();
            scope.spawn(move || {
                for round in 0..200 {
                    let access = if round == 0 { Write } else { Read };
                    for gfn in half * 256..half * 256 + 256 {
                        touch(&mut vcpu, gfn, access).unwrap();
                    }
                }
            });
        }
        for _ in 0..200 {
            pass(&vm, &mut map, 1);
        }
    });
    let (mut leaves, mut dirty) = (0, 0);
    vm.visit_leaves(0, Gfn(0)..Gfn(MIB2), &mut |_, _, entry| {
        if let Entry::Leaf(leaf) = entry {
            leaves += 1;
            dirty += u64::from(leaf.dirty);
        }
    });
    assert_eq!((leaves, dirty), (MIB2, MIB2));
    vm.audit().unwrap();
}
