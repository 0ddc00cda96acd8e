//! Promotion in the background ([`Vm::promote`](crate::Vm::promote)), concurrent with other operations on the table
//! that a promotion replaces by a huge leaf: faults, dirty logging that starts or stops, slot changes, invalidations,
//! and another promotion.

use std::sync::Arc;

use super::dirty::{Copy, GET, write_twice};
use super::faults::{replace_page, run_guest, with_cpu};
use super::{LOGGED, PLAIN, SmallVm, get, model, on_cpu, set_slot, spawn, touch, vm};
use crate::addr::{Access::*, Level, Pfn};
use crate::{Promotion, Setting, Switch};

/// Makes a VM whose slot has two pages, of one huge host page. Small leaves map the first `mapped` of these pages,
/// although a huge leaf could map both.
fn small_leaves(mapped: u64) -> Arc<SmallVm> {
    let vm = vm(Level::MEGA, 2, PLAIN);
    vm.set_policy(Setting::HugePages(Switch::Off));
    (0..mapped).for_each(|gfn| _ = touch(&vm, gfn, Write));
    vm.set_policy(Setting::HugePages(Switch::On));
    vm
}

const ONE: fn() -> Arc<SmallVm> = || small_leaves(1);
const BOTH: fn() -> Arc<SmallVm> = || small_leaves(2);

fn promote(vm: &Arc<SmallVm>) {
    vm.promote(&mut Promotion::default(), 2);
}

/// Promotes again, and checks that one huge leaf maps both pages: whichever thread was first, no state must remain that
/// prevents a promotion.
fn is_huge(vm: &Arc<SmallVm>) {
    promote(vm);
    assert_eq!((vm.stats().pages_4k, vm.stats().pages_2m), (0, 1));
    for gfn in [0, 1] {
        assert_eq!(touch(vm, gfn, Write), Some(Pfn(gfn)));
    }
}

/// Runs a promotion concurrently with `host`. After both have ended, runs `after`, and then the audit.
fn beside(
    prepare: fn() -> Arc<SmallVm>,
    host: fn(&Arc<SmallVm>),
    after: impl Fn(&Arc<SmallVm>) + Send + Sync + 'static,
) {
    model(2, move || {
        let vm = prepare();
        let promoted = vm.clone();
        let thread = spawn(move || promote(&promoted));
        host(&vm);
        thread.join().unwrap();
        after(&vm);
        vm.audit().unwrap();
    });
}

#[test]
fn a_table_becomes_a_huge_leaf_while_a_cpu_uses_it() {
    with_cpu(2, BOTH, |vcpu| run_guest(vcpu, 0), promote, is_huge);
}

/// The fault installs its leaf in the table that is being replaced, or finds the huge leaf.
#[test]
fn a_fault_maps_the_other_page_of_the_table_that_becomes_a_huge_leaf() {
    with_cpu(2, ONE, |vcpu| _ = get(vcpu, 1, Read), promote, is_huge);
    with_cpu(2, ONE, |vcpu| _ = get(vcpu, 1, Write), promote, is_huge);
}

/// A huge leaf that is installed after dirty logging has started would hide writes from the log.
#[test]
fn no_write_is_lost_when_logging_begins() {
    beside(
        BOTH,
        |vm| {
            set_slot(vm, 0, 2, LOGGED);
            // The client copies all memory once, and later the pages in the log.
            let mut copy = Copy::default();
            copy.update(vm, true);
            on_cpu(vm, write_twice);
            copy.update(vm, GET(vm));
            assert_eq!(copy.0, 2, "a write is in no dirty log");
        },
        |vm| {
            set_slot(vm, 0, 2, PLAIN);
            is_huge(vm);
        },
    );
}

/// When a slot's dirty logging ends, the engine replaces the slot's table of small leaves by a huge leaf, as the
/// promotion does at the same time.
#[test]
fn a_log_ends_beside_a_promotion() {
    beside(
        || {
            let vm = vm(Level::MEGA, 2, LOGGED);
            touch(&vm, 0, Write);
            vm
        },
        |vm| set_slot(vm, 0, 2, PLAIN),
        is_huge,
    );
}

#[test]
fn nothing_of_a_slot_is_used_after_its_deletion() {
    beside(
        BOTH,
        |vm| {
            set_slot(vm, 0, 0, PLAIN);
            let pages = &vm.platform().pages;
            pages[..2].iter().for_each(|page| page.alive.owned());
        },
        |vm| assert_eq!([0, 1].map(|gfn| touch(vm, gfn, Read)), [None; 2]),
    );
}

/// The slot still contains the frames of the table, but other memory backs them.
#[test]
fn a_slot_that_moves_over_itself_leaves_no_old_page() {
    beside(
        BOTH,
        |vm| set_slot(vm, 1, 2, PLAIN),
        |vm| {
            let pages = [0, 1, 2].map(|gfn| touch(vm, gfn, Read));
            assert_eq!(pages, [None, Some(Pfn(0)), Some(Pfn(1))]);
        },
    );
}

#[test]
fn no_huge_leaf_reaches_into_a_page_that_is_invalidated() {
    beside(
        BOTH,
        |vm| replace_page(vm, 1, 4),
        |vm| {
            let pages = [0, 1].map(|gfn| touch(vm, gfn, Read));
            assert_eq!(pages, [Some(Pfn(0)), Some(Pfn(4))]);
        },
    );
}

#[test]
fn two_promotions_replace_one_table() {
    beside(BOTH, promote, is_huge);
}
