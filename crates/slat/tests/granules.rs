//! Tables of 16 and 64 KiB: the required alignment, the page that contains an address, and the size of leaves.

use std::sync::Arc;

use slat::format::{Stage2Kib16, Stage2Kib64};
use slat::{
    Access::*, Config, CreateVmError, Ept, Format, Gfn, Gpa, Granule, Hva, Level, Region,
    RegionError, SlotFlags, Vm,
};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

/// A VM whose host memory has the size of two huge leaves and is mapped at `level`. One memslot contains all of it, and
/// begins at the second huge leaf's frames.
struct World<F: Format> {
    vm: Arc<Vm<SimPlatform, F>>,
    region: Region,
    /// The number of pages of a huge leaf.
    huge: u64,
}

fn world<F: Format>(level: Level) -> World<F> {
    let huge = F::GRANULE.pages(Level::MEGA);
    let platform = SimPlatform::with_granule(F::GRANULE, 2 * huge);
    let remap = HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    };
    platform.host.change(&(0..2 * huge), remap);
    let vm = Vm::<_, F>::new(platform, Config::default()).unwrap();
    let gpa = F::GRANULE.gpa(Gfn(huge));
    let size = 2 * huge * F::GRANULE.bytes();
    let region = Region::new(0, gpa, size, HostMemory::BASE);
    vm.set_memory_region(0, &region).unwrap();
    World { vm, region, huge }
}

macro_rules! of_both {
    ($($test:ident,)*) => {$(
        mod $test {
            use super::*;
            #[test]
            fn of_16k() { super::$test::<Stage2Kib16<48>>() }
            #[test]
            fn of_64k() { super::$test::<Stage2Kib64<48>>() }
        }
    )*};
}

of_both! {
    a_platform_with_other_pages_is_refused,
    a_region_consists_of_whole_pages,
    an_address_is_translated_by_the_page_around_it,
    a_huge_leaf_maps_as_many_pages_as_a_table_has_entries,
    a_dirty_log_has_a_bit_for_each_page,
    an_invalidation_zaps_the_pages_that_it_touches,
}

fn a_platform_with_other_pages_is_refused<F: Format>() {
    let small = SimPlatform::new(2048);
    let refused = Vm::<_, F>::new(small, Config::default()).err();
    let (platform, format) = (Granule::Kib4, F::GRANULE);
    assert_eq!(
        refused,
        Some(CreateVmError::OtherGranule { platform, format })
    );
    let large = SimPlatform::with_granule(F::GRANULE, 2048);
    let refused = Vm::<_, Ept>::new(large, Config::default()).err();
    let (platform, format) = (format, platform);
    assert_eq!(
        refused,
        Some(CreateVmError::OtherGranule { platform, format })
    );
}

fn a_region_consists_of_whole_pages<F: Format>() {
    let World { vm, region, .. } = world::<F>(Level::PAGE);
    let part = F::GRANULE.bytes() / 2;
    for odd in [
        region.with_gpa(Gpa(region.gpa.0 + part)),
        region.with_size(region.size - part),
        region.with_backing(Hva(region.backing.0 + part)),
    ] {
        let refused = vm.check_memory_region(0, &odd).unwrap_err();
        assert_eq!(refused, RegionError::Misaligned(odd, F::GRANULE));
        let unit = format!("multiples of {:#x}", F::GRANULE.bytes());
        assert!(refused.to_string().contains(&unit), "{refused}");
    }
}

fn an_address_is_translated_by_the_page_around_it<F: Format>() {
    let World { vm, region, .. } = world::<F>(Level::PAGE);
    let bytes = F::GRANULE.bytes();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    for offset in [0, bytes - 1, bytes, 5 * bytes + 1, region.size - 1] {
        let gpa = Gpa(region.gpa.0 + offset);
        let page = vcpu.translate(gpa, Write).unwrap();
        let host = vm.platform().host.get(offset / bytes).unwrap().pfn;
        assert_eq!((page.host, page.level), (F::GRANULE.hpa(host), Level::PAGE));
        let mapping = vcpu.lookup(F::GRANULE.gfn(gpa)).unwrap();
        assert_eq!(mapping.pfn, host);
        assert_eq!(vcpu.slot_at(gpa), Some(region));
    }
    assert!(vcpu.translate(Gpa(region.gpa.0 - 1), Read).is_err());
    assert!(
        vcpu.translate(Gpa(region.gpa.0 + region.size), Read)
            .is_err()
    );
}

fn a_huge_leaf_maps_as_many_pages_as_a_table_has_entries<F: Format>() {
    let World { vm, region, huge } = world::<F>(Level::MEGA);
    assert_eq!(huge, F::GRANULE.bytes() / 8);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mapped = vcpu
        .enter(0)
        .prefault(region.gpa..Gpa(region.gpa.0 + region.size));
    assert_eq!(mapped, Ok(region.size));
    let page = vcpu
        .enter(0)
        .translate(Gpa(region.gpa.0 + region.size - 1), Read);
    assert_eq!(page.unwrap().level, Level::MEGA);
    let usage = vm.memory_usage();
    assert_eq!((usage.pages_4k, usage.pages_2m), (0, 2));
    assert_eq!(usage.mapped_bytes(), region.size);
    let tables = F::ROOT_TABLES as u64 + u64::from(F::TOP.0) - 2;
    assert!(usage.table_bytes >= tables * F::GRANULE.bytes());
    vm.audit().unwrap();
}

fn a_dirty_log_has_a_bit_for_each_page<F: Format>() {
    let World { vm, region, huge } = world::<F>(Level::MEGA);
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter(0).translate(region.gpa, Write).unwrap();
    let logged = region.with_flags(SlotFlags::LOG_DIRTY_PAGES);
    vm.set_memory_region(0, &logged).unwrap();
    assert_eq!(vm.memory_usage().pages_4k, huge, "split eagerly");
    for page in [0, 63, huge - 1, huge, 2 * huge - 1] {
        let gpa = Gpa(region.gpa.0 + page * F::GRANULE.bytes() + 0x321);
        vcpu.enter(0).translate(gpa, Write).unwrap();
        let mut bitmap = vec![0; vm.dirty_log_words(0, 0).unwrap()];
        assert_eq!(bitmap.len() as u64, 2 * huge / 64);
        vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
        let marked = |page: u64| bitmap[page as usize / 64] >> (page % 64) & 1 != 0;
        assert_eq!((0..2 * huge).filter(|page| marked(*page)).count(), 1);
        assert!(marked(page), "page {page}");
    }
    vm.audit().unwrap();
}

fn an_invalidation_zaps_the_pages_that_it_touches<F: Format>() {
    let World { vm, region, .. } = world::<F>(Level::PAGE);
    let bytes = F::GRANULE.bytes();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..6 {
        let gpa = Gpa(region.gpa.0 + page * bytes);
        vcpu.enter(0).translate(gpa, Read).unwrap();
    }
    // The range consists of the last 4 KiB of page 1, page 2, and the first byte of page 3.
    let (start, end) = (2 * bytes - 0x1000, 3 * bytes + 1);
    let at = |offset| Hva(region.backing.0 + offset);
    drop(vm.invalidate(at(start)..at(end)));
    let first = F::GRANULE.gfn(region.gpa);
    let mapped = [0, 1, 2, 3, 4, 5].map(|page| vm.lookup(0, first.add(page)).is_some());
    assert_eq!(mapped, [true, false, false, false, true, true]);
}
