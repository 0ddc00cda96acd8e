//! Faults in a whole VM, concurrent with operations that unmap their pages.

use std::sync::Arc;
use std::vec::Vec;

use super::{
    LOGGED, Machine, PLAIN, SmallVcpu, SmallVm, get, hvas, model, on_cpu, set_slot, spawn, touch,
    vm,
};
use crate::Stop;
use crate::addr::{Access::*, Gfn, Gpa, Level, PAGE_SHIFT, PAGE_SIZE, Pfn};
use crate::format::Format;
use crate::slots::{Change, MemoryAttributes, Region};
use crate::sync::atomic::{AtomicU64, Ordering::*};
use crate::sync::quiesce::Attention;
use crate::vm::Vm;
use crate::{Prefetch, Setting};

/// Runs `guest` on a vCPU concurrently with `host`. After both have ended, runs `after`, and then the audit.
pub(super) fn with_cpu(
    preemptions: usize,
    prepare: fn() -> Arc<SmallVm>,
    guest: fn(&mut SmallVcpu),
    host: fn(&Arc<SmallVm>),
    after: fn(&Arc<SmallVm>),
) {
    model(preemptions, move || {
        let vm = prepare();
        let cpus = vm.clone();
        let thread = spawn(move || on_cpu(&cpus, guest));
        host(&vm);
        thread.join().unwrap();
        after(&vm);
        vm.audit().unwrap();
    });
}

/// Uses page `gfn` like a guest, and checks the attention word in between, like a software CPU.
pub(super) fn run_guest(vcpu: &mut SmallVcpu, gfn: u64) {
    let mut remembered = get(vcpu, gfn, Read);
    for _ in 0..2 {
        if let Some(translation) = &remembered {
            vcpu.vm().platform().page(translation).alive.used();
        }
        if vcpu.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            vcpu.quiesce();
            remembered = None;
        }
        if remembered.is_none() {
            remembered = get(vcpu, gfn, Read);
        }
    }
}

/// Replaces the host page of backing page `page` by `new`. Afterwards only the host may use the old page.
pub(super) fn replace_page<F: Format>(vm: &Vm<Machine, F>, page: u64, new: u64) {
    let invalidation = vm.invalidate(hvas(page..page + 1));
    let machine = vm.platform();
    for page in 0..Machine::PAGES {
        let now = machine.mapped.lock().unwrap()[page as usize].pfn;
        machine.remap(page, now.0);
    }
    machine.remap(page, new);
    machine.pages[page as usize].alive.owned();
    drop(invalidation);
}

const ONE_PAGE: fn() -> Arc<SmallVm> = || vm(Level::PAGE, 1, PLAIN);
const TWO_PAGES: fn() -> Arc<SmallVm> = || vm(Level::PAGE, 2, PLAIN);
const HUGE_PAGE: fn() -> Arc<SmallVm> = || vm(Level::MEGA, 2, PLAIN);
const MAPPED: fn() -> Arc<SmallVm> = || {
    let vm = vm(Level::PAGE, 1, PLAIN);
    touch(&vm, 0, Read);
    vm
};

#[test]
fn nothing_stale_is_installed_during_an_invalidation() {
    with_cpu(
        3,
        ONE_PAGE,
        |vcpu| run_guest(vcpu, 0),
        |vm| replace_page(vm, 0, 4),
        |vm| assert_eq!(touch(vm, 0, Read), Some(Pfn(4))),
    );
}

#[test]
fn nothing_stale_is_used_after_an_invalidation() {
    with_cpu(
        3,
        MAPPED,
        |vcpu| run_guest(vcpu, 0),
        |vm| replace_page(vm, 0, 4),
        |vm| assert_eq!(touch(vm, 0, Read), Some(Pfn(4))),
    );
}

#[test]
fn no_huge_leaf_reaches_into_a_page_that_is_invalidated() {
    with_cpu(
        2,
        HUGE_PAGE,
        |vcpu| run_guest(vcpu, 0),
        |vm| replace_page(vm, 1, 4),
        |vm| {
            assert_eq!(touch(vm, 1, Read), Some(Pfn(4)));
            assert_eq!(touch(vm, 0, Read), Some(Pfn(0)));
        },
    );
}

#[test]
fn nothing_stale_is_prefetched_during_an_invalidation() {
    with_cpu(
        2,
        || {
            let vm = TWO_PAGES();
            vm.set_policy(Setting::Prefetch(Prefetch::Window(2)));
            vm
        },
        |vcpu| _ = get(vcpu, 0, Read),
        |vm| replace_page(vm, 1, 4),
        |vm| assert_eq!(touch(vm, 1, Read), Some(Pfn(4))),
    );
}

/// A vCPU uses page 0 through a translation that it has cached, and `other` zaps the page's leaf. An invalidation of
/// the page may then find no leaf, but must nevertheless wait until the vCPU does not use the page any more.
fn an_invalidation_waits_for(other: fn(&SmallVm)) {
    model(2, move || {
        let vm = MAPPED();
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(1);
        vcpu.quiesce();
        let remembered = get(&mut vcpu, 0, Read).unwrap();
        let others = vm.clone();
        let guest = spawn(move || {
            vcpu.vm().platform().page(&remembered).alive.used();
            vcpu.leave();
        });
        let other = spawn(move || other(&others));
        let invalidation = vm.invalidate(hvas(0..1));
        vm.platform().pages[0].alive.owned();
        drop(invalidation);
        guest.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn an_invalidation_that_finds_nothing_mapped_waits_for_the_flush_of_an_earlier_one() {
    an_invalidation_waits_for(|vm| drop(vm.invalidate(hvas(0..1))));
}

#[test]
fn an_invalidation_waits_for_a_slot_that_is_leaving() {
    an_invalidation_waits_for(|vm| set_slot(vm, 0, 0, PLAIN));
}

#[test]
fn an_invalidation_of_memory_without_slot_applies_to_a_slot_that_is_created_there() {
    model(2, || {
        let vm = vm(Level::PAGE, 0, PLAIN);
        let other = vm.clone();
        let thread = spawn(move || {
            set_slot(&other, 0, 1, PLAIN);
            touch(&other, 0, Read)
        });
        replace_page(&vm, 0, 4);
        thread.join().unwrap();
        assert_eq!(touch(&vm, 0, Read), Some(Pfn(4)));
        vm.audit().unwrap();
    });
}

#[test]
fn nothing_of_a_slot_is_used_after_its_deletion() {
    with_cpu(
        3,
        ONE_PAGE,
        |vcpu| run_guest(vcpu, 0),
        |vm| {
            set_slot(vm, 0, 0, PLAIN);
            vm.platform().pages[0].alive.owned();
        },
        |vm| assert_eq!(touch(vm, 0, Read), None),
    );
}

#[test]
fn tables_of_a_deleted_slot_are_freed_after_the_last_walker() {
    with_cpu(
        3,
        || {
            let vm = TWO_PAGES();
            touch(&vm, 0, Read);
            vm
        },
        |vcpu| {
            run_guest(vcpu, 0);
            run_guest(vcpu, 1);
        },
        |vm| set_slot(vm, 0, 0, PLAIN),
        |vm| assert_eq!(touch(vm, 0, Read), None),
    );
}

/// For the second page, the vCPU uses the level 1 table that it has cached when it used the first page.
#[test]
fn nothing_is_used_through_a_cached_table_after_its_slot_is_deleted() {
    with_cpu(
        3,
        || {
            let vm = TWO_PAGES();
            (0..2).for_each(|gfn| _ = touch(&vm, gfn, Read));
            vm
        },
        |vcpu| {
            run_guest(vcpu, 0);
            run_guest(vcpu, 1);
        },
        |vm| {
            set_slot(vm, 0, 0, PLAIN);
            let pages = &vm.platform().pages;
            pages[..2].iter().for_each(|page| page.alive.owned());
        },
        |vm| assert_eq!(touch(vm, 1, Read), None),
    );
}

#[test]
fn a_slot_that_moves_over_itself_leaves_no_old_page() {
    with_cpu(
        2,
        TWO_PAGES,
        |vcpu| _ = get(vcpu, 1, Read),
        |vm| set_slot(vm, 1, 2, PLAIN),
        |vm| {
            assert_eq!(touch(vm, 0, Read), None);
            assert_eq!(touch(vm, 1, Read), Some(Pfn(0)));
            assert_eq!(touch(vm, 2, Read), Some(Pfn(1)));
        },
    );
}

#[test]
fn the_page_of_a_protected_leaf_is_not_reused_while_its_slot_moves() {
    with_cpu(
        2,
        || {
            let vm = vm(Level::PAGE, 2, LOGGED);
            touch(&vm, 1, Read);
            vm
        },
        |vcpu| _ = get(vcpu, 1, Write),
        |vm| set_slot(vm, 1, 2, LOGGED),
        |vm| assert_eq!(touch(vm, 1, Write), Some(Pfn(0))),
    );
}

/// One slot is split into two slots. Every access during the change must find memory.
#[test]
fn a_slot_that_becomes_two_has_its_pages_all_the_time() {
    with_cpu(
        2,
        TWO_PAGES,
        |vcpu| {
            for gfn in [1, 0] {
                assert!(get(vcpu, gfn, Read).is_some(), "frame {gfn} has memory");
            }
        },
        |vm| {
            let part = |id, page: u64| {
                let gpa = Gpa(page << PAGE_SHIFT);
                Change::Set(Region::new(id, gpa, PAGE_SIZE, hvas(page..page + 1).start))
            };
            vm.set_memory_regions(0, &[part(1, 0), part(0, 1)]).unwrap();
        },
        |vm| {
            assert_eq!(touch(vm, 0, Read), Some(Pfn(0)));
            assert_eq!(touch(vm, 1, Read), Some(Pfn(1)));
        },
    );
}

#[test]
fn two_cpus_fault_on_one_page_and_on_two() {
    for gfns in [[0, 0], [0, 1]] {
        model(2, move || {
            let vm = TWO_PAGES();
            let other = vm.clone();
            let thread = spawn(move || touch(&other, gfns[0], Write));
            assert_eq!(touch(&vm, gfns[1], Read), Some(Pfn(gfns[1])));
            assert_eq!(thread.join().unwrap(), Some(Pfn(gfns[0])));
            vm.audit().unwrap();
            assert_eq!(vm.stats().pages_4k, if gfns == [0, 0] { 1 } else { 2 });
        });
    }
}

#[test]
fn a_table_is_replaced_by_a_huge_leaf_while_another_cpu_uses_it() {
    with_cpu(
        2,
        || {
            let vm = TWO_PAGES();
            touch(&vm, 0, Read);
            for page in &mut vm.platform().mapped.lock().unwrap()[..2] {
                page.level = Level::MEGA;
            }
            vm
        },
        |vcpu| {
            run_guest(vcpu, 0);
            get(vcpu, 0, Write);
        },
        |vm| assert_eq!(touch(vm, 1, Read), Some(Pfn(1))),
        |vm| {
            let pages: Vec<_> = (0..2).map(|gfn| touch(vm, gfn, Read)).collect();
            assert_eq!(pages, [Some(Pfn(0)), Some(Pfn(1))]);
        },
    );
}

/// A VM whose slot logs, so that small leaves map it. When logging stops, a huge leaf replaces their table.
fn logged_huge_page() -> Arc<SmallVm> {
    let vm = vm(Level::MEGA, 2, LOGGED);
    touch(&vm, 0, Write);
    vm
}

#[test]
fn a_table_becomes_a_huge_leaf_at_the_end_of_a_log_while_a_cpu_uses_it() {
    with_cpu(
        2,
        logged_huge_page,
        |vcpu| run_guest(vcpu, 0),
        |vm| set_slot(vm, 0, 2, PLAIN),
        |vm| {
            assert_eq!(touch(vm, 0, Write), Some(Pfn(0)));
            assert_eq!((vm.stats().pages_4k, vm.stats().pages_2m), (0, 1));
        },
    );
}

#[test]
fn no_huge_leaf_of_a_log_that_ends_reaches_into_a_page_that_is_invalidated() {
    model(2, || {
        let vm = logged_huge_page();
        let others = vm.clone();
        let thread = spawn(move || set_slot(&others, 0, 2, PLAIN));
        replace_page(&vm, 1, 4);
        thread.join().unwrap();
        assert_eq!(touch(&vm, 1, Read), Some(Pfn(4)));
        assert_eq!(touch(&vm, 0, Read), Some(Pfn(0)));
        vm.audit().unwrap();
    });
}

/// Makes a VM with a slot of two pages, whose private backing is host pages 4 and 5.
fn convertible(level: Level) -> Arc<SmallVm> {
    let vm = vm(level, 0, PLAIN);
    let (backing, private) = (hvas(0..1).start, hvas(4..5).start);
    let region = Region::new(0, Gpa(0), 2 << PAGE_SHIFT, backing).with_private(private);
    vm.set_memory_region(0, &region).unwrap();
    vm
}

/// Makes frame 0 private. Afterwards only the host may use the page that backed it as shared memory.
fn convert(vm: &SmallVm) {
    vm.set_memory_attributes(Gfn(0)..Gfn(1), MemoryAttributes::PRIVATE)
        .unwrap();
    vm.platform().pages[0].alive.owned();
}

#[test]
fn nothing_shared_is_installed_or_used_after_a_conversion() {
    for mapped in [false, true] {
        let prepare: fn() -> Arc<SmallVm> = match mapped {
            false => || convertible(Level::PAGE),
            true => || {
                let vm = convertible(Level::PAGE);
                touch(&vm, 0, Read);
                vm
            },
        };
        with_cpu(
            3,
            prepare,
            |vcpu| run_guest(vcpu, 0),
            |vm| convert(vm),
            |vm| assert_eq!(touch(vm, 0, Read), Some(Pfn(4))),
        );
    }
}

#[test]
fn a_huge_leaf_across_a_boundary_is_split_while_a_cpu_uses_the_rest() {
    with_cpu(
        2,
        || {
            let vm = convertible(Level::MEGA);
            touch(&vm, 1, Write);
            vm
        },
        |vcpu| {
            run_guest(vcpu, 1);
            get(vcpu, 1, Write);
        },
        |vm| convert(vm),
        |vm| {
            assert_eq!(touch(vm, 1, Write), Some(Pfn(1)));
            assert_eq!(touch(vm, 0, Write), Some(Pfn(4)));
        },
    );
}

#[test]
fn the_page_of_a_protected_leaf_is_not_reused_after_a_conversion() {
    with_cpu(
        2,
        || {
            let vm = vm(Level::PAGE, 2, LOGGED);
            touch(&vm, 0, Read);
            vm
        },
        |vcpu| match vcpu.translate(Gpa(0), Write) {
            Ok(_) | Err(Stop::Retry | Stop::MemoryFault { .. }) => {}
            other => panic!("{other:?}"),
        },
        |vm| convert(vm),
        |vm| {
            on_cpu(vm, |vcpu| {
                let stop = vcpu.translate(Gpa(0), Write);
                assert!(matches!(stop, Err(Stop::MemoryFault { .. })), "{stop:?}");
            });
        },
    );
}

#[test]
fn an_mmio_entry_from_before_a_slot_is_ignored() {
    model(3, || {
        let vm = vm(Level::PAGE, 0, PLAIN);
        let created = Arc::new(AtomicU64::new(0));
        let (cpus, seen) = (vm.clone(), created.clone());
        let thread = spawn(move || {
            on_cpu(&cpus, |vcpu| {
                for _ in 0..2 {
                    let created = seen.load(Acquire) == 1;
                    let found = get(vcpu, 0, Read);
                    assert!(found.is_some() || !created, "MMIO where a slot is");
                }
            })
        });
        set_slot(&vm, 0, 1, PLAIN);
        created.store(1, Release);
        thread.join().unwrap();
        assert_eq!(touch(&vm, 0, Read), Some(Pfn(0)));
        vm.audit().unwrap();
    });
}

#[test]
fn mmio_is_reported_where_a_slot_was_deleted() {
    with_cpu(
        2,
        MAPPED,
        |vcpu| _ = get(vcpu, 0, Read),
        |vm| {
            set_slot(vm, 0, 0, PLAIN);
            assert_eq!(touch(vm, 0, Read), None);
        },
        |vm| assert_eq!(touch(vm, 0, Write), None),
    );
}
