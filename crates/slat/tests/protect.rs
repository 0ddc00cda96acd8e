//! Tests hierarchical write protection: the start of dirty logging, the first writes after it, a harvest of the log,
//! and the end of dirty logging, each on every format; and the same protection by a snapshot. The results are the same on all formats. The costs differ
//! between formats whose walkers obey write-protected tables and the others.

#[macro_use]
mod common;
#[path = "common/queued.rs"]
mod queued;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use slat::format::Entry;
use slat::{
    Access::{self, *},
    Format, Gfn, Gpa, Level, MmuKind, Region, Setting, SlotFlags, Stats, Stop, Vcpu, Vm,
};
use slat_model::{Event, HostMemory, SimPlatform};

use queued::Queued;

const MIB2: u64 = 512;
const GIB1: u64 = 1 << 18;
/// Pages in different tables.
const PAGES: [u64; 4] = [0, 5 * MIB2 + 7, 300 * MIB2, GIB1 - 1];
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

on_every_format! {
    the_begin_of_a_log_reads_no_table_below_those_that_it_protects,
    the_first_write_to_each_page_is_noted_and_no_other_page,
    a_page_that_is_read_before_it_is_written_is_noted,
    what_reaches_out_of_the_slot_is_not_protected_from_above,
    a_harvest_protects_a_table_that_was_written_to_throughout,
    the_end_of_a_log_gives_back_what_was_protected_from_above,
    the_end_of_a_log_stops_when_the_slot_logs_again,
    the_end_of_a_log_leaves_what_a_snapshot_protects,
    the_policy_can_change_while_tables_are_protected,
}

struct World<F: Format> {
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: Vcpu<SimPlatform, F>,
    slot: Range<u64>,
}

impl<F: Format> World<F> {
    /// Makes a slot with small pages. The guest has written the pages `written`.
    fn new(slot: Range<u64>, written: impl IntoIterator<Item = u64>) -> Self {
        let platform = SimPlatform::at_level(slot.end, Level::PAGE);
        let vm = Vm::new(platform, common::config()).unwrap();
        vm.platform().watch(&vm, 1);
        let vcpu = vm.create_vcpu().unwrap();
        let mut world = World { vm, vcpu, slot };
        world.policy("prefetch", "off");
        world.set(SlotFlags::default());
        for gfn in written {
            world.access(gfn, Write);
        }
        world
    }

    fn region(&self, flags: SlotFlags) -> Region {
        let Range { start, end } = self.slot;
        let hva = HostMemory::hva(start);
        Region::new(0, Gpa(start << 12), (end - start) << 12, hva).with_flags(flags)
    }

    fn set(&self, flags: SlotFlags) {
        let region = self.region(flags);
        self.vm.set_memory_region(0, &region).unwrap();
        self.check();
    }

    fn policy(&self, name: &str, value: &str) {
        self.vm.set_policy(Setting::parse(name, value).unwrap());
    }

    fn access(&mut self, gfn: u64, access: Access) {
        let mut entered = self.vcpu.enter(0);
        while entered.translate(Gpa(gfn << 12), access) == Err(Stop::Retry) {
            entered.quiesce();
        }
    }

    fn during(&mut self, act: impl FnOnce(&mut Self)) -> Stats {
        let before = self.vm.stats();
        act(self);
        self.vm.stats().since(&before)
    }

    /// Returns the pages that are marked in the log.
    fn harvest(&self) -> Vec<u64> {
        let mut bitmap = vec![0u64; self.vm.dirty_log_words(0, 0).unwrap()];
        self.vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
        self.check();
        let is_set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 != 0;
        let pages = (0..self.slot.end - self.slot.start).filter(is_set);
        pages.map(|page| page + self.slot.start).collect()
    }

    fn check(&self) {
        assert_eq!(self.vm.platform().tlb.stale(), None);
        self.vm.platform().check();
        self.vm.audit().unwrap();
    }

    /// Returns whether `gfn` may be written without a fault. Checks that all ways to look up the frame agree.
    fn is_writable(&self, gfn: u64) -> bool {
        let mapping = self.vm.lookup(0, Gfn(gfn)).unwrap();
        let mut visited = None;
        (self.vm).visit_leaves(0, Gfn(gfn)..Gfn(gfn + 1), &mut |_, _, entry| {
            if let Entry::Leaf(leaf) = entry {
                assert!(leaf.write != leaf.may_write);
                visited = Some(leaf.write);
            }
        });
        assert_eq!(visited, Some(mapping.rights.write));
        mapping.rights.write
    }
}

/// Whether the VM write-protects tables from above.
fn applies<F: Format>() -> bool {
    F::TABLE_WRITE != 0 && common::config().mmu == MmuKind::Tdp
}

fn the_begin_of_a_log_reads_no_table_below_those_that_it_protects<F: Format>() {
    let reached = |policy| {
        let world = World::<F>::new(0..GIB1, PAGES);
        world.policy("hierarchical_protect", policy);
        let tables = Arc::new(AtomicU64::new(0));
        let counted = tables.clone();
        world.vm.platform().set_hook(move |event| {
            if let Event::Entries(_) = event {
                counted.fetch_add(1, SeqCst);
            }
        });
        let region = world.region(LOGGED);
        world.vm.set_memory_region(0, &region).unwrap();
        world.vm.platform().clear_hook();
        world.check();
        assert!(PAGES.iter().all(|gfn| !world.is_writable(*gfn)));
        tables.load(SeqCst)
    };
    let (on, off) = (reached("on"), reached("off"));
    match applies::<F>() {
        true => assert!(on + PAGES.len() as u64 <= off, "{on}, {off}"),
        false => assert_eq!(on, off),
    }
}

fn the_first_write_to_each_page_is_noted_and_no_other_page<F: Format>() {
    let neighbours = PAGES.map(|gfn| gfn ^ 1);
    let mut world = World::<F>::new(0..GIB1, PAGES.into_iter().chain(neighbours));
    world.set(LOGGED);
    for gfn in PAGES {
        let did = world.during(|world| world.access(gfn, Write));
        assert_eq!((did.pf_taken, did.pf_fast), (1, 1));
        let did = world.during(|world| world.access(gfn, Write));
        assert_eq!(did.pf_taken, 0);
        assert!(world.is_writable(gfn) && !world.is_writable(gfn ^ 1));
        world.check();
    }
    assert_eq!(world.harvest(), PAGES);
    for gfn in neighbours {
        world.access(gfn, Write);
    }
    let mut expected = neighbours;
    expected.sort();
    assert_eq!(world.harvest(), expected);
}

/// The vCPU stays in one reader section. It must not keep in its cache the table that the read has found, because that
/// table's leaves allow the write.
fn a_page_that_is_read_before_it_is_written_is_noted<F: Format>() {
    let mut world = World::<F>::new(0..GIB1, PAGES);
    world.set(LOGGED);
    let mut entered = world.vcpu.enter(0);
    for gfn in PAGES {
        for access in [Read, Write] {
            entered.translate(Gpa(gfn << 12), access).unwrap();
        }
    }
    drop(entered);
    assert_eq!(world.harvest(), PAGES);
}

fn what_reaches_out_of_the_slot_is_not_protected_from_above<F: Format>() {
    // The first table has frames of two slots, and the second has only frames of this slot.
    let mut world = World::<F>::new(5..2 * MIB2, [5, MIB2]);
    let other = Region::new(1, Gpa(0), 5 << 12, HostMemory::hva(0));
    world.vm.set_memory_region(0, &other).unwrap();
    world.access(4, Write);
    world.set(LOGGED);
    assert!(world.is_writable(4) && !world.is_writable(5) && !world.is_writable(MIB2));
    world.access(5, Write);
    world.access(MIB2, Write);
    assert_eq!(world.harvest(), [5, MIB2]);
    assert!(world.is_writable(4));
}

fn a_harvest_protects_a_table_that_was_written_to_throughout<F: Format>() {
    let mut world = World::<F>::new(0..2 * MIB2, []);
    world.set(LOGGED);
    let all: Vec<u64> = (0..MIB2).collect();
    for _ in 0..2 {
        for gfn in &all {
            world.access(*gfn, Write);
        }
        world.access(MIB2 + 3, Write);
        let expected: Vec<u64> = all.iter().copied().chain([MIB2 + 3]).collect();
        assert_eq!(world.harvest(), expected);
        assert!((0..MIB2).all(|gfn| !world.is_writable(gfn)));
    }
    let did = world.during(|world| world.access(9, Write));
    assert_eq!(did.pf_taken, 1);
    assert_eq!(world.harvest(), [9]);
}

fn the_end_of_a_log_gives_back_what_was_protected_from_above<F: Format>() {
    let mut world = World::<F>::new(0..GIB1, PAGES.into_iter().chain([1]));
    world.set(LOGGED);
    world.access(0, Write);
    world.set(SlotFlags::default());
    // When page 0 was written, the push protected page 1 separately.
    for (gfn, pushed) in [(1, true), (0, false)]
        .into_iter()
        .chain(PAGES[1..].iter().map(|gfn| (*gfn, false)))
    {
        let expected = !pushed && (applies::<F>() || gfn == 0);
        assert_eq!(world.is_writable(gfn), expected, "{gfn}");
        let did = world.during(|world| world.access(gfn, Write));
        assert_eq!(did.pf_taken, u64::from(!expected));
    }
    // Dirty logging starts again.
    world.set(LOGGED);
    assert!(PAGES.iter().all(|gfn| !world.is_writable(*gfn)));
    world.access(PAGES[2], Write);
    assert_eq!(world.harvest(), [PAGES[2]]);
}

/// During the first step of the end of dirty logging, another thread waits to make the slot log again. The remaining
/// steps give no right back.
fn the_end_of_a_log_stops_when_the_slot_logs_again<F: Format>() {
    let world = World::<F>::new(0..GIB1, PAGES);
    world.set(LOGGED);
    let region = world.region(LOGGED);
    let vm = world.vm.clone();
    let again = move || vm.set_memory_region(0, &region).unwrap();
    let queued = Queued::at_the_next_table(world.vm.platform(), again);
    let plain = world.region(SlotFlags::default());
    world.vm.set_memory_region(0, &plain).unwrap();
    queued.join();
    assert!(PAGES.iter().all(|gfn| !world.is_writable(*gfn)));
    world.check();
}

/// The end of the snapshot gives the rights back.
fn the_end_of_a_log_leaves_what_a_snapshot_protects<F: Format>() {
    let mut world = World::<F>::new(0..GIB1, PAGES);
    world.set(LOGGED);
    PAGES.iter().for_each(|gfn| world.access(*gfn, Write));
    let snapshot = world.vm.begin_snapshot().unwrap();
    assert_eq!(PAGES.map(|gfn| world.is_writable(gfn)), [false; 4]);
    // Where 1 GiB is protected by one entry, this write protects each 2 MiB instead.
    world.access(PAGES[0], Write);
    world.set(SlotFlags::default());
    let writable = PAGES.map(|gfn| world.is_writable(gfn));
    assert_eq!(writable, [true, false, false, false]);
    drop(snapshot);
    world.check();
    let writable = PAGES.map(|gfn| world.is_writable(gfn));
    assert_eq!(writable[1..], [applies::<F>(); 3]);
}

fn the_policy_can_change_while_tables_are_protected<F: Format>() {
    let mut world = World::<F>::new(0..GIB1, PAGES);
    world.set(LOGGED);
    world.policy("hierarchical_protect", "off");
    for gfn in PAGES {
        world.access(gfn, Write);
    }
    assert_eq!(world.harvest(), PAGES);
    // Dirty logging of another kind starts while tables are still protected for the first log.
    world.policy("hierarchical_protect", "on");
    world.harvest();
    world.set(SlotFlags::default());
    world.policy("dirty_log", "dirty-bit");
    world.set(LOGGED);
    assert_eq!(world.harvest(), []);
    for gfn in PAGES {
        world.access(gfn, Write);
    }
    assert_eq!(world.harvest(), PAGES);
}
