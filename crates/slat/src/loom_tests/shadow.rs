//! The MMU of shadow pages: faults, which install leaves under the MMU's lock, concurrent with walks without this lock,
//! and with operations through the reverse map.

use std::sync::Arc;

use super::faults::{replace_page, run_guest, with_cpu};
use super::{LOGGED, PLAIN, SmallVm, get, on_cpu, set_slot, touch, vm_with};
use crate::MmuKind;
use crate::addr::{Access::*, Level, Pfn};
use crate::slots::SlotFlags;

fn vm(level: Level, pages: u64, flags: SlotFlags) -> Arc<SmallVm> {
    vm_with(MmuKind::Direct, level, pages, flags)
}

const ONE_PAGE: fn() -> Arc<SmallVm> = || vm(Level::PAGE, 1, PLAIN);
const HUGE_PAGE: fn() -> Arc<SmallVm> = || vm(Level::MEGA, 2, PLAIN);
const MAPPED: fn() -> Arc<SmallVm> = || {
    let vm = ONE_PAGE();
    touch(&vm, 0, Read);
    vm
};
const MAPPED_HUGE: fn() -> Arc<SmallVm> = || {
    let vm = HUGE_PAGE();
    touch(&vm, 0, Write);
    set_slot(&vm, 0, 2, LOGGED);
    vm
};

/// Zaps the oldest shadow page, like a fault that finds too many shadow pages.
fn recycle(vm: &Arc<SmallVm>) {
    vm.recycle(&vm.spaces[0], 1);
}

#[test]
fn nothing_stale_is_installed_beside_an_invalidation_through_the_reverse_map() {
    with_cpu(
        3,
        ONE_PAGE,
        |vcpu| run_guest(vcpu, 0),
        |vm| replace_page(vm, 0, 4),
        |vm| assert_eq!(touch(vm, 0, Read), Some(Pfn(4))),
    );
}

#[test]
fn an_invalidation_finds_what_is_mapped_by_the_reverse_map() {
    with_cpu(
        3,
        MAPPED,
        |vcpu| run_guest(vcpu, 0),
        |vm| replace_page(vm, 0, 4),
        |vm| assert_eq!(touch(vm, 0, Read), Some(Pfn(4))),
    );
}

#[test]
fn a_huge_leaf_that_is_being_split_is_found_by_the_reverse_map() {
    with_cpu(
        2,
        MAPPED_HUGE,
        |vcpu| _ = get(vcpu, 0, Write),
        |vm| replace_page(vm, 1, 4),
        |vm| {
            assert_eq!(touch(vm, 1, Read), Some(Pfn(4)));
            assert_eq!(touch(vm, 0, Read), Some(Pfn(0)));
        },
    );
}

/// The walk takes no lock. So a table that it may have reached must not be freed before the CPU has passed a quiescent
/// point.
#[test]
fn a_table_is_recycled_beside_a_walk() {
    with_cpu(
        3,
        MAPPED,
        |vcpu| run_guest(vcpu, 0),
        recycle,
        |vm| {
            assert_eq!(touch(vm, 0, Read), Some(Pfn(0)));
            // The two frames are the root and one table.
            assert_eq!(vm.platform().live_frames(), 2);
        },
    );
}

#[test]
fn a_table_is_recycled_beside_a_fault_that_installs_in_it() {
    with_cpu(
        2,
        || {
            let vm = vm(Level::PAGE, 2, PLAIN);
            touch(&vm, 1, Read);
            vm
        },
        |vcpu| run_guest(vcpu, 0),
        recycle,
        |vm| assert_eq!(touch(vm, 1, Read), Some(Pfn(1))),
    );
}

#[test]
fn two_faults_make_one_table() {
    with_cpu(
        3,
        || vm(Level::PAGE, 2, PLAIN),
        |vcpu| _ = get(vcpu, 0, Read),
        |vm| _ = on_cpu(vm, |vcpu| get(vcpu, 1, Read)),
        |vm| assert_eq!(vm.stats().mmu_cache_miss, 1),
    );
}

#[test]
fn a_slot_is_deleted_beside_a_fault() {
    with_cpu(
        2,
        ONE_PAGE,
        |vcpu| run_guest(vcpu, 0),
        |vm| set_slot(vm, 0, 0, PLAIN),
        |vm| assert_eq!(touch(vm, 0, Read), None),
    );
}
