//! Writes concurrent with harvests of the dirty log. After each harvest the client copies the pages in the log. After
//! the last harvest, its copy must contain the values that the guest has written last.

use std::sync::Arc;

use super::{
    LOGGED, PLAIN, SmallVcpu, SmallVm, get, hvas, model, on_cpu, set_slot, spawn, touch, vm,
};
use crate::addr::{Access::*, Gfn, Gpa, Hva, Level, PAGE_SIZE};
use crate::sync::atomic::Ordering::*;
use crate::sync::quiesce::Attention;
use crate::vm::{DirtyGfn, DirtyRing, RingSlot};
use crate::{Change, Region};
use crate::{DirtyLogMethod, Setting, Switch};

/// A harvest by the client. Returns whether page 0 is in the log.
pub(super) type Harvest = fn(&SmallVm) -> bool;

pub(super) const GET: Harvest = |vm| {
    let mut bitmap = [0];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    bitmap[0] & 1 != 0
};

const GET_AND_CLEAR: Harvest = |vm| {
    let mut bitmap = [0];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    vm.clear_dirty_log(0, 0, 0, 1, &bitmap).unwrap();
    bitmap[0] & 1 != 0
};

const GET_AND_CLEAR_BOTH: Harvest = |vm| {
    let mut bitmap = [0];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    vm.clear_dirty_log(0, 0, 0, 2, &bitmap).unwrap();
    bitmap[0] & 1 != 0
};

/// Writes 1 and then 2 to page 0. In between checks the attention word, and quiesces if it requests a flush.
pub(super) fn write_twice(vcpu: &mut SmallVcpu) {
    let mut remembered = get(vcpu, 0, Write).unwrap();
    for version in 1..=2 {
        assert!(remembered.write, "it may be used for writing");
        let page = &vcpu.vm().platform().page(&remembered).content;
        page.store(version, Relaxed);
        if version == 1 && vcpu.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            vcpu.quiesce();
            remembered = get(vcpu, 0, Write).unwrap();
        }
    }
}

/// The VMM's copy of page 0.
#[derive(Default)]
pub(super) struct Copy(pub(super) u64);

impl Copy {
    pub(super) fn update(&mut self, vm: &SmallVm, dirty: bool) {
        if dirty {
            self.0 = vm.platform().pages[0].content.load(Relaxed);
        }
    }
}

fn no_write_is_lost(preemptions: usize, prepare: fn() -> Arc<SmallVm>, harvest: Harvest) {
    model(preemptions, move || {
        let vm = prepare();
        let mut copy = Copy::default();
        let cpus = vm.clone();
        let guest = spawn(move || on_cpu(&cpus, write_twice));
        copy.update(&vm, harvest(&vm));
        guest.join().unwrap();
        copy.update(&vm, harvest(&vm));
        assert_eq!(copy.0, 2, "a write is in no dirty log");
        vm.audit().unwrap();
    });
}

/// A VM whose slot logs dirty pages by write protection, and whose page was read.
const PROTECTED: fn() -> Arc<SmallVm> = || {
    let vm = vm(Level::PAGE, 1, LOGGED);
    touch(&vm, 0, Read);
    vm
};

/// A VM whose slot logs dirty pages by write protection, and whose page was written.
const WRITTEN: fn() -> Arc<SmallVm> = || {
    let vm = vm(Level::PAGE, 1, LOGGED);
    touch(&vm, 0, Write);
    vm
};

/// Makes a VM whose slot logs dirty pages by `method`, and whose page was read.
fn by(method: DirtyLogMethod) -> Arc<SmallVm> {
    let vm = vm(Level::PAGE, 0, PLAIN);
    vm.set_policy(Setting::DirtyLog(method));
    set_slot(&vm, 0, 1, LOGGED);
    touch(&vm, 0, Read);
    vm
}

const BY_DIRTY_BIT: fn() -> Arc<SmallVm> = || by(DirtyLogMethod::DirtyBit);

const BY_BUFFER: fn() -> Arc<SmallVm> = || by(DirtyLogMethod::Buffer);

const MANUAL: fn() -> Arc<SmallVm> = || {
    let vm = WRITTEN();
    vm.set_manual_dirty_log(true, false);
    vm
};

#[test]
fn no_write_to_a_protected_page_is_lost_by_a_harvest() {
    no_write_is_lost(3, PROTECTED, GET);
}

#[test]
fn no_write_to_a_page_in_the_log_is_lost_by_a_harvest() {
    no_write_is_lost(3, WRITTEN, GET);
}

#[test]
fn no_write_is_lost_by_a_harvest_of_dirty_bits() {
    no_write_is_lost(3, BY_DIRTY_BIT, GET);
}

#[test]
fn no_write_is_lost_by_a_harvest_of_walkers_buffers() {
    no_write_is_lost(3, BY_BUFFER, GET);
}

/// The second CPU may find the dirty bit already set by the first CPU, which has not yet written the page to its
/// buffer.
#[test]
fn a_write_through_a_dirty_bit_of_another_cpu_is_in_the_next_log() {
    model(3, || {
        let vm = BY_BUFFER();
        let cpus = vm.clone();
        let other = spawn(move || _ = touch(&cpus, 0, Write));
        touch(&vm, 0, Write);
        assert!(GET(&vm), "the write was before the harvest");
        other.join().unwrap();
        vm.audit().unwrap();
    });
}

/// The buffer has one entry, so to write the next page, a CPU must drain the last page to the log.
#[test]
fn no_page_of_a_full_buffer_is_lost_by_a_harvest() {
    model(2, || {
        let vm = vm(Level::PAGE, 0, PLAIN);
        vm.set_policy(Setting::DirtyLog(DirtyLogMethod::Buffer));
        set_slot(&vm, 0, 2, LOGGED);
        let both = |vm: &Arc<SmallVm>, access| [0, 1].map(|gfn| touch(vm, gfn, access));
        both(&vm, Read);
        let cpus = vm.clone();
        let guest = spawn(move || _ = both(&cpus, Write));
        let harvest = || {
            let mut bitmap = [0];
            vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
            bitmap[0]
        };
        let first = harvest();
        guest.join().unwrap();
        assert_eq!(first | harvest(), 3);
        vm.audit().unwrap();
    });
}

#[test]
fn no_write_is_lost_when_the_client_clears_the_log() {
    no_write_is_lost(2, MANUAL, GET_AND_CLEAR);
}

/// A slot with another id replaces the slot. From then on the client gets the log of the new slot.
#[test]
fn no_write_is_lost_when_a_slot_that_logs_is_replaced() {
    for prepare in [PROTECTED, WRITTEN, BY_DIRTY_BIT, BY_BUFFER] {
        model(2, move || {
            let vm = prepare();
            let mut copy = Copy::default();
            let cpus = vm.clone();
            let guest = spawn(move || on_cpu(&cpus, write_twice));
            let region = Region::new(1, Gpa(0), PAGE_SIZE, Hva(0)).with_flags(LOGGED);
            let changes = [Change::Remove(0), Change::Set(region)];
            vm.set_memory_regions(0, &changes).unwrap();
            guest.join().unwrap();
            let mut bitmap = [0];
            vm.get_dirty_log(0, 1, &mut bitmap).unwrap();
            copy.update(&vm, bitmap[0] & 1 != 0);
            assert_eq!(copy.0, 2, "a write is in no dirty log");
            vm.audit().unwrap();
        });
    }
}

#[test]
fn no_write_is_lost_when_logging_begins() {
    no_write_is_lost_after_logging_begins(1, || {
        let vm = vm(Level::PAGE, 1, PLAIN);
        vm.set_policy(Setting::DirtyLog(DirtyLogMethod::WriteProtect));
        touch(&vm, 0, Read);
        vm
    });
}

/// The page walker may set a dirty bit before it sees that dirty logging with walkers' buffers has started.
#[test]
fn no_write_is_lost_when_logging_by_buffers_begins() {
    no_write_is_lost_after_logging_begins(1, || {
        let vm = vm(Level::PAGE, 1, PLAIN);
        vm.set_policy(Setting::DirtyLog(DirtyLogMethod::Buffer));
        touch(&vm, 0, Read);
        vm
    });
}

/// Checks that no write is lost when logging starts while a vCPU writes to page 0 twice. `prepare` makes the VM, whose
/// slot has `pages` pages.
fn no_write_is_lost_after_logging_begins(pages: u64, prepare: fn() -> Arc<SmallVm>) {
    model(2, move || {
        let vm = prepare();
        let mut copy = Copy::default();
        let cpus = vm.clone();
        let guest = spawn(move || on_cpu(&cpus, write_twice));
        set_slot(&vm, 0, pages, LOGGED);
        // The client copies all memory once, and later the pages in the log.
        copy.update(&vm, true);
        guest.join().unwrap();
        copy.update(&vm, GET(&vm));
        assert_eq!(copy.0, 2, "a write is in no dirty log");
        vm.audit().unwrap();
    });
}

#[test]
fn no_write_is_lost_when_logging_begins_while_initially_set_is_switched() {
    model(2, || {
        let vm = vm(Level::PAGE, 1, PLAIN);
        touch(&vm, 0, Write);
        let mut copy = Copy::default();
        let client = vm.clone();
        let switch = spawn(move || client.set_manual_dirty_log(true, true));
        set_slot(&vm, 0, 1, LOGGED);
        // The client copies all memory once, and later the pages in the log.
        copy.update(&vm, true);
        on_cpu(&vm, write_twice);
        copy.update(&vm, GET(&vm));
        assert_eq!(copy.0, 2, "a write is in no dirty log");
        switch.join().unwrap();
    });
}

#[test]
fn a_huge_leaf_is_split_by_a_write_during_a_harvest() {
    no_write_is_lost(
        2,
        || {
            // With eager splits off, the huge leaf is only write-protected when dirty logging starts.
            let vm = vm(Level::MEGA, 2, PLAIN);
            touch(&vm, 0, Write);
            vm.set_policy(Setting::EagerPageSplit(Switch::Off));
            set_slot(&vm, 0, 2, LOGGED);
            vm
        },
        GET,
    );
}

#[test]
fn a_huge_leaf_is_split_eagerly_during_a_write() {
    no_write_is_lost_after_logging_begins(2, || {
        let vm = vm(Level::MEGA, 2, PLAIN);
        touch(&vm, 1, Read);
        vm
    });
}

/// A VM whose slot has the pages of one table. When dirty logging started, these were write-protected through the entry
/// that refers to the table.
const PROTECTED_FROM_ABOVE: fn() -> Arc<SmallVm> = || {
    let vm = vm(Level::PAGE, 2, PLAIN);
    touch(&vm, 0, Write);
    touch(&vm, 1, Write);
    set_slot(&vm, 0, 2, LOGGED);
    vm
};

/// The VM of [`PROTECTED_FROM_ABOVE`] after a first write to page 0.
const PUSHED: fn() -> Arc<SmallVm> = || {
    let vm = PROTECTED_FROM_ABOVE();
    touch(&vm, 0, Write);
    vm
};

/// The VM of [`PROTECTED_FROM_ABOVE`] after writes to both pages of the table.
const BOTH_WRITTEN: fn() -> Arc<SmallVm> = || {
    let vm = PUSHED();
    touch(&vm, 1, Write);
    vm
};

#[test]
fn no_write_is_lost_by_a_harvest_below_a_protected_table() {
    no_write_is_lost(3, PROTECTED_FROM_ABOVE, GET);
    no_write_is_lost(3, PUSHED, GET);
}

/// The harvest finds both pages marked, so it protects them through the entry that refers to their table, while the
/// guest writes.
#[test]
fn no_write_is_lost_by_a_harvest_that_protects_from_above() {
    no_write_is_lost(3, BOTH_WRITTEN, GET);
    no_write_is_lost(
        2,
        || {
            let vm = BOTH_WRITTEN();
            vm.set_manual_dirty_log(true, false);
            vm
        },
        GET_AND_CLEAR_BOTH,
    );
}

#[test]
fn no_write_is_lost_when_logging_begins_from_above() {
    no_write_is_lost_after_logging_begins(2, || {
        let vm = vm(Level::PAGE, 2, PLAIN);
        touch(&vm, 0, Write);
        vm
    });
}

/// The client has marked a page below the protected entry. So the harvest removes the page's mark and finds the entry
/// protected, while the guest's write pushes the protection down. If the harvest finds the entry protected, the removal
/// of the mark must happen before the push. Otherwise the fault could find its page still marked, and not mark it
/// again.
#[test]
fn no_write_is_lost_by_a_harvest_of_a_page_that_the_client_has_marked() {
    no_write_is_lost(
        3,
        || {
            let vm = PROTECTED_FROM_ABOVE();
            vm.mark_dirty(0, Gfn(0)..Gfn(1)).unwrap();
            vm
        },
        GET,
    );
}

/// A push must give the right back by a compare-exchange. With a plain store, it could store an entry that refers to a
/// table that another thread has just detached.
#[test]
fn a_table_that_is_zapped_while_a_fault_pushes_into_it_is_not_reached_again() {
    let invalidate = |vm: &SmallVm| drop(vm.invalidate(hvas(0..2)));
    let remove = |vm: &SmallVm| set_slot(vm, 0, 0, PLAIN);
    for zap in [invalidate as fn(&SmallVm), remove] {
        model(2, move || {
            let vm = PROTECTED_FROM_ABOVE();
            let cpus = vm.clone();
            let guest = spawn(move || _ = touch(&cpus, 0, Write));
            zap(&vm);
            guest.join().unwrap();
            vm.audit().unwrap();
            for gfn in [0, 1] {
                touch(&vm, gfn, Write);
            }
        });
    }
}

/// Two vCPUs push the same entry down. After the first has made its page writable, the second push must not protect
/// that page again: a client that then clears only this page would find it protected, and not flush, although a TLB may
/// have it as writable.
#[test]
fn two_faults_push_one_entry_down() {
    model(2, || {
        let vm = PROTECTED_FROM_ABOVE();
        vm.set_manual_dirty_log(true, false);
        let harvest = || {
            let mut bitmap = [0];
            vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
            let first = [bitmap[0] & 1];
            vm.clear_dirty_log(0, 0, 0, 2, &first).unwrap();
            first[0] != 0
        };
        let mut copy = Copy::default();
        let cpus = vm.clone();
        let guest = spawn(move || on_cpu(&cpus, write_twice));
        touch(&vm, 1, Write);
        copy.update(&vm, harvest());
        guest.join().unwrap();
        copy.update(&vm, harvest());
        assert_eq!(copy.0, 2, "a write is in no dirty log");
        vm.audit().unwrap();
    });
}

const SLOT: RingSlot = RingSlot::new(0, 7);

/// Resets one ring entry of `ring`.
fn pop(ring: &DirtyRing) -> Option<(RingSlot, u64)> {
    ring.begin_reset();
    ring.pop_reset(|_| true)
}

/// A dirty ring, with a second owner of its memory.
struct Ring<const LEN: usize> {
    entries: Arc<[DirtyGfn]>,
    ring: Arc<DirtyRing>,
}

impl<const LEN: usize> Ring<LEN> {
    fn new() -> Self {
        let entries: Arc<[DirtyGfn]> = (0..LEN).map(|_| DirtyGfn::new()).collect();
        let ring = DirtyRing::new(entries.clone()).unwrap();
        Ring {
            ring: Arc::new(ring),
            entries,
        }
    }

    fn pop(&self) -> Option<(RingSlot, u64)> {
        pop(&self.ring)
    }
}

#[test]
fn each_ring_entry_is_collected_whole_and_reset_once() {
    model(3, || {
        const PUSHED: u64 = 3;
        let ring = Ring::<2>::new();
        let mine = ring.ring.clone();
        let cpu = spawn(move || {
            for page in 1..=PUSHED {
                while mine.is_soft_full() {
                    loom::thread::yield_now();
                }
                mine.push(SLOT, page);
            }
        });
        for page in 1..=PUSHED {
            let entry = &ring.entries[(page as usize - 1) % 2];
            let collected = loop {
                match entry.collect() {
                    Some(collected) => break collected,
                    None => loom::thread::yield_now(),
                }
            };
            assert_eq!(collected, (7, page));
            assert_eq!(ring.pop(), Some((SLOT, page)));
        }
        cpu.join().unwrap();
        assert_eq!(ring.pop(), None);
        let left = ring.entries.iter().find_map(DirtyGfn::collect);
        assert_eq!(left, None);
    });
}

#[test]
fn a_reset_needs_no_other_synchronisation_with_the_thread_that_collects() {
    model(2, || {
        let ring = Ring::<2>::new();
        ring.ring.push(SLOT, 1);
        ring.entries[0].collect();
        assert_eq!(ring.pop(), Some((SLOT, 1)));
        ring.ring.push(SLOT, 2);
        ring.entries[1].collect();
        let (pushing, resetting) = (ring.ring.clone(), ring.ring.clone());
        let cpu = spawn(move || pushing.push(SLOT, 3));
        let resetter = spawn(move || {
            assert_eq!(pop(&resetting), Some((SLOT, 2)));
            let third = pop(&resetting);
            assert!(third.is_none() || third == Some((SLOT, 3)), "{third:?}");
        });
        ring.entries[0].collect();
        cpu.join().unwrap();
        resetter.join().unwrap();
    });
}

#[test]
fn no_write_is_lost_by_the_reset_of_a_ring() {
    model(2, || {
        let vm = vm(Level::PAGE, 0, PLAIN);
        vm.use_dirty_rings();
        set_slot(&vm, 0, 1, LOGGED);
        touch(&vm, 0, Read);
        let ring = Ring::<4>::new();
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.set_dirty_ring(ring.ring.clone()).unwrap();
        let guest = spawn(move || {
            vcpu.enter_unguarded(1);
            vcpu.quiesce();
            write_twice(&mut vcpu);
            vcpu.leave();
        });
        let mut copy = Copy::default();
        let mut next = 0;
        let mut harvest = || {
            let mut dirty = false;
            while let Some(collected) = ring.entries[next % 4].collect() {
                assert_eq!(collected, (0, 0));
                next += 1;
                dirty = true;
            }
            vm.reset_dirty_rings();
            copy.update(&vm, dirty);
        };
        harvest();
        guest.join().unwrap();
        harvest();
        assert_eq!(copy.0, 2, "a write is in no ring");
    });
}
