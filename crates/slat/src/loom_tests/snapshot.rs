//! Snapshots of a running VM ([`Vm::begin_snapshot`](crate::Vm::begin_snapshot)): each page is given to the platform
//! once, with the content of one moment, before the guest or the host changes it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed as Plainly};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

use super::fork::{run_writing_guest, write};
use super::{LOGGED, Machine, PLAIN, SmallVm, hvas, model, on_cpu, set_slot, spawn, touch, vm};
use crate::addr::{Access::*, Hva, Level, PAGE_SHIFT};
use crate::platform::VmId;
use crate::sync::atomic::Ordering::*;
use crate::vm::Snapshot;
use crate::{Promotion, Setting, SlotFlags, Switch};
use core::ops::Range;

/// The pages that the machine was given for a snapshot, each with its content.
#[derive(Default)]
pub(super) struct Kept {
    pages: Mutex<Vec<(u64, u64)>>,
    /// Whether the snapshot has ended.
    ended: AtomicBool,
}

impl Kept {
    pub(super) fn keep(&self, machine: &Machine, vm: VmId, backing: Range<Hva>) {
        for page in backing.start.0 >> PAGE_SHIFT..backing.end.0 >> PAGE_SHIFT {
            let host = &machine.pages[machine.backs(vm, page).pfn.0 as usize];
            // The host does not change the page meanwhile.
            host.alive.used();
            let content = host.content.load(Relaxed);
            assert!(
                !self.ended.load(Plainly),
                "page {page} is given to no snapshot"
            );
            self.pages.lock().unwrap().push((page, content));
        }
    }

    /// Returns the contents of the first two pages, the only ones, each of which was given once.
    fn words(&self) -> [u64; 2] {
        let mut pages = self.pages.lock().unwrap().clone();
        pages.sort_unstable();
        let numbers: Vec<_> = pages.iter().map(|(page, _)| *page).collect();
        assert_eq!(numbers, [0, 1], "the pages that were given");
        [pages[0].1, pages[1].1]
    }
}

/// Makes a VM with two pages of `level`, of which the guest has written the first.
fn written(level: Level, flags: SlotFlags) -> Arc<SmallVm> {
    let vm = vm(level, 2, flags);
    touch(&vm, 0, Write);
    vm
}

fn begin(vm: &Arc<SmallVm>) -> Snapshot<Machine, super::Small<2>> {
    vm.begin_snapshot().unwrap()
}

/// Checks that the words belong to one moment of a guest that writes 1 to page 0, then 1 to page 1, then 2 to page 0.
fn of_one_moment([cause, effect]: [u64; 2]) {
    assert!(effect == 0 || cause > 0, "an effect without its cause");
    assert!(cause < 2 || effect > 0, "an effect without its cause");
}

/// The guest writes while the snapshot begins, and while another thread gives the platform the pages.
fn beside_a_guest(level: Level, flags: SlotFlags) {
    // With two preemptions this takes many minutes.
    model(1, move || {
        let vm = written(level, flags);
        let cpus = vm.clone();
        let guest = spawn(move || run_writing_guest(&cpus));
        let snapshot = begin(&vm);
        while snapshot.keep_next(1) > 0 {}
        of_one_moment(vm.platform().kept.words());
        guest.join().unwrap();
        of_one_moment(vm.platform().kept.words());
        vm.audit().unwrap();
    });
}

#[test]
fn a_snapshot_has_the_memory_of_one_moment_while_the_guest_writes() {
    beside_a_guest(Level::PAGE, PLAIN);
}

#[test]
fn a_huge_leaf_is_split_before_a_page_is_written() {
    beside_a_guest(Level::MEGA, PLAIN);
}

#[test]
fn a_snapshot_of_a_slot_that_logs_has_the_memory_of_one_moment() {
    beside_a_guest(Level::PAGE, LOGGED);
}

/// The host owns the page from the begin of its invalidation on. It is in the snapshot as it was before or after that.
#[test]
fn a_page_is_given_before_or_after_its_invalidation() {
    model(2, || {
        let vm = written(Level::PAGE, PLAIN);
        let host = vm.clone();
        let invalidation = spawn(move || {
            let guard = host.invalidate(hvas(0..1));
            let page = &host.platform().pages[0];
            page.alive.owned();
            page.content.store(7, Relaxed);
            drop(guard);
        });
        let snapshot = begin(&vm);
        while snapshot.keep_next(2) > 0 {}
        let [first, _] = vm.platform().kept.words();
        assert!(first == 0 || first == 7);
        invalidation.join().unwrap();
        vm.audit().unwrap();
    });
}

/// The host reclaims the memory of a slot that was deleted.
#[test]
fn a_page_is_given_before_its_slot_is_deleted_or_never() {
    model(2, || {
        let vm = written(Level::PAGE, PLAIN);
        let client = vm.clone();
        let deletion = spawn(move || {
            set_slot(&client, 0, 0, PLAIN);
            let pages = &client.platform().pages;
            pages[..2].iter().for_each(|page| page.alive.owned());
        });
        let snapshot = begin(&vm);
        while snapshot.keep_next(2) > 0 {}
        let kept = vm.platform().kept.pages.lock().unwrap().len();
        assert!(kept == 0 || kept == 2);
        deletion.join().unwrap();
        vm.audit().unwrap();
    });
}

/// A promotion, or the end of dirty logging, makes no page writable that was not given.
#[test]
fn no_huge_leaf_is_writable_before_its_pages_are_given() {
    let recoveries: [(fn() -> Arc<SmallVm>, fn(&Arc<SmallVm>)); 2] = [
        (
            || {
                let vm = vm(Level::MEGA, 2, PLAIN);
                vm.set_policy(Setting::HugePages(Switch::Off));
                let _ = [0, 1].map(|gfn| touch(&vm, gfn, Write));
                vm.set_policy(Setting::HugePages(Switch::On));
                vm
            },
            |vm| _ = vm.promote(&mut Promotion::default(), 2),
        ),
        (
            || {
                let vm = vm(Level::MEGA, 2, LOGGED);
                touch(&vm, 0, Write);
                vm
            },
            |vm| set_slot(vm, 0, 2, PLAIN),
        ),
    ];
    for (prepare, recover) in recoveries {
        model(2, move || {
            let vm = prepare();
            let host = vm.clone();
            let other = spawn(move || recover(&host));
            let snapshot = begin(&vm);
            other.join().unwrap();
            vm.audit().unwrap();
            on_cpu(&vm, |vcpu| write(vcpu, 0, 1));
            while snapshot.keep_next(1) > 0 {}
            assert_eq!(vm.platform().kept.words(), [0, 0]);
        });
    }
}

#[test]
fn no_page_is_given_after_the_end_of_a_snapshot() {
    model(2, || {
        let vm = written(Level::PAGE, PLAIN);
        let snapshot = begin(&vm);
        let cpus = vm.clone();
        let guest = spawn(move || on_cpu(&cpus, |vcpu| write(vcpu, 0, 1)));
        drop(snapshot);
        vm.platform().kept.ended.store(true, Plainly);
        guest.join().unwrap();
        for (_, content) in vm.platform().kept.pages.lock().unwrap().iter() {
            assert_eq!(*content, 0);
        }
        vm.audit().unwrap();
    });
}
