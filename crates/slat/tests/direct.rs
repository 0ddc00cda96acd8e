//! Behaviour that only the direct MMU has: the number of its tables is limited, and a table that is not linked any more
//! is found and used again.

use std::sync::Arc;

use slat::format::{Npt, Stage2, Sv39x4};
use slat::{
    Access::{self, *},
    Config, CreateVmError, Ept, Gfn, Gpa, Level, MemoryAttributes, MmuKind, Region, Setting,
    SlotFlags, Stop, Translation, Vm,
};
use slat_model::{HostMemory, SimPlatform};

type TestVm = Vm<SimPlatform, Ept>;

const GIB1: u64 = 1 << 18;

/// Makes a VM with the direct MMU, and one slot that all of its host memory backs, mapped at `level`.
fn vm(pages: u64, level: Level) -> Arc<TestVm> {
    let platform = SimPlatform::at_level(pages, level);
    let vm = Vm::new(platform, Config::default().with_mmu(MmuKind::Direct)).unwrap();
    set(&vm, pages, SlotFlags::default());
    vm
}

fn set(vm: &TestVm, pages: u64, flags: SlotFlags) {
    let region = Region::new(0, Gpa(0), pages << 12, HostMemory::hva(0)).with_flags(flags);
    vm.set_memory_region(0, &region).unwrap();
}

fn touch(vm: &Arc<TestVm>, gfn: u64, access: Access) -> Translation {
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    loop {
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => vcpu.quiesce(),
            answer => return answer.unwrap(),
        }
    }
}

/// Returns the number of tables in use without the root.
fn tables(vm: &TestVm) -> u64 {
    let stats = vm.stats();
    stats.mmu_cache_miss - stats.mmu_shadow_zapped
}

#[test]
fn it_has_the_formats_that_kvm_has_it_for_and_refuses_others() {
    let direct = || Config::default().with_mmu(MmuKind::Direct);
    assert!(Vm::<_, Npt>::new(SimPlatform::new(1), direct()).is_ok());
    let refused = |error| matches!(error, Some(CreateVmError::NoSuchMmu { .. }));
    let stage2 = Vm::<_, Stage2<48>>::new(SimPlatform::new(1), direct());
    let sv39x4 = Vm::<_, Sv39x4>::new(SimPlatform::new(1), direct());
    let message = stage2.as_ref().err().map(ToString::to_string);
    assert_eq!(
        message.as_deref(),
        Some("creating a VM: there is no direct MMU for tables of format aarch64; tdp is for all")
    );
    assert!(refused(stage2.err()) && refused(sv39x4.err()));
}

#[test]
fn there_are_no_more_tables_than_the_limit_and_what_was_zapped_faults_back() {
    let pages = 200 * 512;
    let vm = vm(pages, Level::PAGE);
    vm.set_mmu_pages(100);
    for round in 0..2 {
        for gfn in (0..pages).step_by(512) {
            let page = touch(&vm, gfn, Write);
            assert_eq!(page.host.0 >> 12, touch(&vm, gfn, Read).host.0 >> 12);
            assert!(tables(&vm) <= 100, "{} tables", tables(&vm));
        }
        vm.audit().unwrap();
        assert!(vm.stats().mmu_recycled > 100 * (round + 1));
        assert_eq!(vm.stats().pf_fixed, (round + 1) * 200);
    }
    // A lower limit takes effect at once.
    vm.set_mmu_pages(1);
    assert_eq!(tables(&vm), 64);
    vm.audit().unwrap();
    vm.platform().check();
}

/// The second address space has more tables than the limit allows. The first has fewer than have to be zapped.
#[test]
fn the_limit_is_that_of_all_address_spaces_together() {
    let platform = SimPlatform::new(90 * 512);
    let config = Config::default().with_mmu(MmuKind::Direct).with_spaces(2);
    let vm: Arc<TestVm> = Vm::new(platform, config).unwrap();
    vm.set_mmu_pages(200);
    let mut vcpu = vm.create_vcpu().unwrap();
    for (space, pages) in [(0, 20 * 512), (1, 90 * 512)] {
        let region = Region::new(0, Gpa(0), pages << 12, HostMemory::hva(0));
        vm.set_memory_region(space, &region).unwrap();
        vcpu.use_space(space);
        for gfn in (0..pages).step_by(512) {
            let mut vcpu = vcpu.enter(0);
            while vcpu.translate(Gpa(gfn << 12), Read) == Err(Stop::Retry) {
                vcpu.quiesce();
            }
        }
    }
    assert!(tables(&vm) >= 110);
    vm.set_mmu_pages(64);
    assert_eq!(tables(&vm), 64);
    vm.audit().unwrap();
}

#[test]
fn a_table_that_lost_its_parent_is_found_again() {
    let pages = 300 * 512;
    let vm = vm(pages, Level::PAGE);
    vm.set_mmu_pages(80);
    // The tables of higher levels are the oldest tables, so they are zapped first.
    for gfn in (0..80 * 512).step_by(512) {
        touch(&vm, gfn, Write);
    }
    let before = vm.stats();
    assert!(before.mmu_recycled > 0);
    let last = touch(&vm, 79 * 512, Write);
    assert_eq!(
        (last.level, vm.stats().pf_fixed),
        (Level::PAGE, before.pf_fixed)
    );
    vm.audit().unwrap();
}

/// Recovery finds NX tables by the entries that refer to them. So an NX table is zapped together with the table that
/// contains the last such entry.
#[test]
fn an_nx_table_that_lost_its_parent_is_not_left_over() {
    let vm = vm(GIB1, Level::MEGA);
    let set = |name, value| vm.set_policy(Setting::parse(name, value).unwrap());
    set("nx_huge_pages", "on");
    set("nx_huge_pages_recovery_ratio", "1");
    touch(&vm, 700, Execute);
    assert_eq!(vm.stats().nx_lpage_splits, 1);
    set("huge_pages", "off");
    (0..63).for_each(|i| _ = touch(&vm, (100 + i) * 512, Read));
    // The two tables above the NX table are older, so they are recycled first.
    vm.set_mmu_pages(64);
    assert_eq!(vm.stats().mmu_recycled, 2);
    let splits = vm.stats().nx_lpage_splits;
    assert_eq!(vm.recover_nx_huge_pages(), splits);
    assert_eq!(vm.stats().nx_lpage_splits, 0);
    vm.audit().unwrap();
}

/// When a table is recycled, the dirty bits of its leaves are noted in the log.
#[test]
fn a_log_of_dirty_bits_misses_no_page_of_a_recycled_table() {
    let pages = 100 * 512;
    let vm = vm(pages, Level::PAGE);
    vm.set_policy(Setting::parse("dirty_log", "dirty-bit").unwrap());
    vm.set_mmu_pages(64);
    set(&vm, pages, SlotFlags::LOG_DIRTY_PAGES);
    (0..pages)
        .step_by(512)
        .for_each(|gfn| _ = touch(&vm, gfn, Write));
    assert!(vm.stats().mmu_recycled > 30);
    let mut log = vec![0u64; vm.dirty_log_words(0, 0).unwrap()];
    vm.get_dirty_log(0, 0, &mut log).unwrap();
    let marked = |gfn: u64| log[gfn as usize / 64] >> (gfn % 64) & 1 == 1;
    let missed: Vec<_> = (0..pages)
        .step_by(512)
        .filter(|gfn| !marked(*gfn))
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
    vm.audit().unwrap();
}

/// Makes a VM in which a leaf of 1 GiB maps all memory. An old table with a leaf for page 700 still exists, but no
/// entry refers to the table, because the tables above it were recycled.
fn with_a_table_left_over() -> Arc<TestVm> {
    let vm = vm(GIB1, Level::GIGA);
    let set = |name, value| vm.set_policy(Setting::parse(name, value).unwrap());
    set("huge_pages", "off");
    set("prefetch", "off");
    touch(&vm, 700, Read);
    (0..63).for_each(|i| _ = touch(&vm, (100 + i) * 512, Read));
    assert_eq!(tables(&vm), 66);
    vm.set_mmu_pages(64);
    assert_eq!(vm.stats().mmu_recycled, 2);
    vm.set_mmu_pages(1000);
    set("huge_pages", "on");
    set("eager_page_split", "off");
    assert_eq!(touch(&vm, 5, Write).level, Level::GIGA);
    vm.audit().unwrap();
    assert_eq!(vm.stats().pages_4k, 64);
    vm
}

#[test]
fn a_split_keeps_what_an_old_table_has_and_unmaps_nothing() {
    let vm = with_a_table_left_over();
    set(&vm, GIB1, SlotFlags::LOG_DIRTY_PAGES);
    assert_eq!(touch(&vm, 700, Write).level, Level::PAGE);
    vm.audit().unwrap();
    let faults = vm.stats().pf_taken;
    (0..GIB1)
        .step_by(4096 - 1)
        .for_each(|gfn| _ = touch(&vm, gfn, Read));
    vm.audit().unwrap();
    // Only pages that the old tables do not map take faults.
    assert!(vm.stats().pf_taken - faults < 64);
    vm.platform().check();
}

/// A write through the huge leaf is in the log, although a table with older leaves replaces the huge leaf.
#[test]
fn a_split_hands_the_dirty_bit_to_the_leaves_of_an_old_table() {
    let vm = with_a_table_left_over();
    let policy = |name, value| vm.set_policy(Setting::parse(name, value).unwrap());
    policy("dirty_log", "dirty-bit");
    vm.set_manual_dirty_log(true, false);
    set(&vm, GIB1, SlotFlags::LOG_DIRTY_PAGES);
    assert_eq!(touch(&vm, 700, Write).level, Level::GIGA);
    policy("eager_page_split", "on");
    let mut log = vec![0u64; vm.dirty_log_words(0, 0).unwrap()];
    // `log` has no bit set, so this clears nothing; but it splits the huge leaves.
    vm.clear_dirty_log(0, 0, 0, GIB1, &log).unwrap();
    assert_eq!(vm.stats().pages_1g + vm.stats().pages_2m, 0);
    vm.audit().unwrap();
    vm.get_dirty_log(0, 0, &mut log).unwrap();
    assert_eq!(log[700 / 64] >> (700 % 64) & 1, 1);
}

/// A conversion that has to split a huge leaf allocates the records that the MMU needs for the split.
#[test]
fn a_conversion_splits_whatever_is_allocated_ahead() {
    const FAR: u64 = 1 << 27;
    let vm = vm(4096, Level::MEGA);
    let slot = |id, gfn: u64, pages: u64, backing| {
        let backing = HostMemory::hva(backing);
        vm.set_memory_region(0, &Region::new(id, Gpa(gfn << 12), pages << 12, backing))
            .unwrap();
    };
    vm.remove_memory_region(0, 0).unwrap();
    // The backing is not congruent to the frames, so the leaves are small.
    slot(0, 0, 512, 1);
    slot(1, FAR, 1024, 1024);
    // The first fault allocates records for eight pages; these two faults use five.
    assert_eq!(touch(&vm, 0, Read).level, Level::PAGE);
    assert_eq!(touch(&vm, FAR, Read).level, Level::MEGA);
    let part = Gfn(FAR + 100)..Gfn(FAR + 200);
    vm.set_memory_attributes(part, MemoryAttributes::PRIVATE)
        .unwrap();
    let faults = vm.stats().pf_taken;
    assert_eq!(touch(&vm, FAR + 50, Read).level, Level::PAGE);
    assert_eq!(touch(&vm, FAR + 300, Read).level, Level::PAGE);
    assert_eq!(vm.stats().pf_taken, faults);
    vm.audit().unwrap();
}
