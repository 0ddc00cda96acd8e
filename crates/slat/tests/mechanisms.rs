//! Tests the purpose of each mechanism of the memory system by exact counts: one mechanism a test, each on every
//! format. A test fails if its mechanism is switched off.

#[macro_use]
mod common;

use std::ops::Range;
use std::sync::Arc;

use slat::Setting;
use slat::format::Entry;
use slat::{
    Access::{self, *},
    Format, Gfn, Gpa, Level, MmuKind, Promotion, Region, SlotFlags, Stats, Stop, Translation, Vcpu,
    Vm,
};
use slat_model::{HostChange, HostMemory, PageKind, RingClient, SimPlatform};

const MIB2: u64 = 512;
const GIB1: u64 = 1 << 18;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

on_every_format! {
    a_fault_maps_the_leading_and_the_trailing_pages_of_its_window,
    a_sequence_faults_once_in_each_window,
    what_is_prefetched_was_not_accessed,
    leaves_are_visited_as_they_are,
    nothing_is_prefetched_into_a_log_or_beside_a_huge_leaf,
    a_read_is_logged_and_maps_for_writing_where_kvm_does_so,
    reads_are_noted_in_a_ring_as_far_as_it_has_room,
    an_eager_split_visits_no_entry_of_the_last_level,
    clearing_a_log_splits_what_its_begin_left_huge,
    the_begin_of_a_log_is_flushed_wherever_it_has_protected,
    the_end_of_a_log_brings_huge_leaves_back_in_place,
    huge_leaves_come_back_where_slot_host_and_policies_allow_them,
    tables_whose_reason_has_gone_are_promoted_in_place,
    a_promotion_goes_on_where_the_last_one_ended,
    a_cached_mmio_access_looks_up_no_slot,
    an_execution_fault_splits_every_level_in_place,
    recovery_of_nx_huge_pages_brings_the_huge_leaf_back,
    a_fast_fix_is_a_fix_and_a_prefault_is_no_fault,
}

/// A VM with one vCPU, on host memory mapped at one level.
struct World<F: Format> {
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: Vcpu<SimPlatform, F>,
}

impl<F: Format> World<F> {
    fn new(host_pages: u64, level: Level) -> Self {
        let platform = SimPlatform::at_level(host_pages, level);
        let vm = Vm::new(platform, common::config()).unwrap();
        let vcpu = vm.create_vcpu().unwrap();
        World { vm, vcpu }
    }

    fn set(&self, gfns: Range<u64>, flags: SlotFlags) {
        let region = Region::new(
            0,
            Gpa(gfns.start << 12),
            (gfns.end - gfns.start) << 12,
            HostMemory::hva(gfns.start),
        )
        .with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    fn policy(&self, name: &str, value: &str) {
        self.vm.set_policy(Setting::parse(name, value).unwrap());
    }

    /// Makes one access by the vCPU, which enters for it. Repeats the access as often as the vCPU has to quiesce and
    /// retry.
    fn access(&mut self, gfn: u64, access: Access) -> Result<Translation, Stop> {
        self.vcpu.enter_unguarded(1);
        let answer = loop {
            self.vcpu.quiesce();
            match self.vcpu.translate(Gpa(gfn << 12), access) {
                Err(Stop::Retry) => {}
                answer => break answer,
            }
        };
        self.vcpu.leave();
        answer
    }

    fn touch(&mut self, gfn: u64, access: Access) -> Translation {
        self.access(gfn, access).unwrap()
    }

    /// Returns the result of `act`, and the counts from while it ran.
    fn during<R>(&mut self, act: impl FnOnce(&mut Self) -> R) -> (R, Stats) {
        let before = self.vm.stats();
        let answer = act(self);
        (answer, self.vm.stats().since(&before))
    }

    /// Returns those of `gfns` that can be read without a fault.
    fn mapped(&mut self, gfns: Range<u64>) -> Vec<u64> {
        let mut mapped = Vec::new();
        for gfn in gfns {
            let leaves = self.vm.stats().pages_4k;
            self.policy("prefetch", "off");
            let (_, did) = self.during(|world| world.touch(gfn, Read));
            match did.pf_taken {
                0 => mapped.push(gfn),
                _ => assert_eq!(self.vm.stats().pages_4k, leaves + 1),
            }
        }
        mapped
    }
}

fn a_fault_maps_the_leading_and_the_trailing_pages_of_its_window<F: Format>() {
    // The windows are in the middle of a slot, around the beginning and the end of a slot, and at the end of a table.
    for (slot, window) in [(0..64, 16..24), (19..22, 19..22), (0..MIB2, 504..512)] {
        for gfn in window.clone() {
            let mut world = World::<F>::new(1024, Level::PAGE);
            world.policy("prefetch", "8");
            world.set(slot.clone(), SlotFlags::default());
            let (_, did) = world.during(|world| world.touch(gfn, Read));
            let others = window.end - window.start - 1;
            assert_eq!((did.pf_fixed, did.prefetched), (1, others), "at {gfn}");
            assert_eq!(did.pages_4k, others + 1);
            let around =
                window.start.saturating_sub(8).max(slot.start)..(window.end + 8).min(slot.end);
            let mapped = world.mapped(around);
            assert_eq!(mapped, window.clone().collect::<Vec<_>>(), "at {gfn}");
            world.vm.audit().unwrap();
        }
    }
}

fn a_sequence_faults_once_in_each_window<F: Format>() {
    for (prefetch, faults) in [("8", 64), ("64", 8), ("512", 1), ("off", 512)] {
        for backwards in [false, true] {
            let mut world = World::<F>::new(MIB2, Level::PAGE);
            world.set(0..MIB2, SlotFlags::default());
            world.policy("prefetch", prefetch);
            for i in 0..MIB2 {
                world.touch(if backwards { MIB2 - 1 - i } else { i }, Write);
            }
            let stats = world.vm.stats();
            assert_eq!((stats.pf_fixed, stats.prefetched), (faults, MIB2 - faults));
        }
    }
}

fn what_is_prefetched_was_not_accessed<F: Format>() {
    let mut world = World::<F>::new(64, Level::PAGE);
    world.policy("prefetch", "8");
    world.set(0..64, SlotFlags::default());
    world.touch(20, Write);
    let all = HostMemory::hvas(&(0..64));
    assert_eq!(world.vm.stats().prefetched, 7);
    assert_eq!(world.vm.age(all.clone(), false), 1);
    world.touch(21, Read);
    assert_eq!(world.vm.age(all, false), 2);
}

fn leaves_are_visited_as_they_are<F: Format>() {
    let mut world = World::<F>::new(2 * MIB2, Level::MEGA);
    world.set(0..2 * MIB2, SlotFlags::default());
    world.policy("prefetch", "off");
    world.touch(5, Write);
    world.policy("huge_pages", "off");
    world.touch(MIB2 + 7, Read);
    let visited = |gfns: Range<u64>| {
        let mut visited = Vec::new();
        let gfns = Gfn(gfns.start)..Gfn(gfns.end);
        world.vm.visit_leaves(0, gfns, &mut |gfn, level, entry| {
            let Entry::Leaf(leaf) = entry else {
                panic!("{entry:?}")
            };
            visited.push((gfn.0, level, leaf.dirty));
        });
        visited
    };
    let small = (MIB2 + 7, Level::PAGE, false);
    assert_eq!(visited(0..2 * MIB2), [(0, Level::MEGA, true), small]);
    // The walk visits a huge leaf even if the range contains only a part of its frames. It does not visit pages after
    // the range.
    assert_eq!(visited(9..MIB2 + 7), [(0, Level::MEGA, true)]);
    world
        .vm
        .visit_leaves(9, Gfn(0)..Gfn(9), &mut |gfn, _, _| panic!("{gfn:?}"));
}

fn nothing_is_prefetched_into_a_log_or_beside_a_huge_leaf<F: Format>() {
    for (level, flags) in [(Level::PAGE, LOGGED), (Level::MEGA, SlotFlags::default())] {
        let mut world = World::<F>::new(2 * MIB2, level);
        world.policy("prefetch", "8");
        world.set(0..2 * MIB2, flags);
        let (translation, did) = world.during(|world| world.touch(20, Read));
        assert_eq!((translation.level, did.pf_fixed), (level, 1));
        assert_eq!(did.prefetched, 0);
    }
}

/// Whether KVM logs reads on the machine of `F`'s walker: on x86 it does.
fn kvm_logs_reads<F: Format>() -> bool {
    matches!(F::NAME, "ept" | "npt" | "x86-la57")
}

/// Tests the policy `dirty_log_reads`. The pages: one that is read; one that is fetched; one that is read and then
/// written; one that the host does not let the guest write; and one that is not accessed.
fn a_read_is_logged_and_maps_for_writing_where_kvm_does_so<F: Format>() {
    for (policy, logs) in [
        ("auto", kvm_logs_reads::<F>()),
        ("on", true),
        ("off", false),
    ] {
        for means in ["write-protect", "dirty-bit", "buffer"] {
            let mut world = World::<F>::new(64, Level::PAGE);
            world.policy("dirty_log_reads", policy);
            world.policy("dirty_log", means);
            let by_dirty_bit = means != "write-protect" && F::SETS_DIRTY;
            let read_only = HostChange::Remap {
                level: Level::PAGE,
                writable: false,
                kind: PageKind::Ordinary,
            };
            world.vm.platform().host.change(&(4..5), read_only);
            world.set(0..64, LOGGED);
            let (_, did) = world.during(|world| {
                assert_eq!(world.touch(1, Read).write, logs, "{policy}, {means}");
                assert_eq!(world.touch(2, Execute).write, logs);
                world.touch(3, Read);
                world.touch(3, Write);
                assert!(!world.touch(4, Read).write);
            });
            let fast = u64::from(!logs && !by_dirty_bit);
            assert_eq!(
                (did.pf_taken, did.pf_fast),
                (4 + fast, fast),
                "{policy}, {means}"
            );
            let mut log = [0];
            world.vm.get_dirty_log(0, 0, &mut log).unwrap();
            let read = if logs { 1 << 1 | 1 << 2 } else { 0 };
            assert_eq!(log, [read | 1 << 3], "{policy}, {means}");
            // A page that is already mapped can be read without being logged, whatever the policy.
            for gfn in 1..4 {
                world.touch(gfn, Read);
            }
            world.vm.get_dirty_log(0, 0, &mut log).unwrap();
            assert_eq!(log, [0], "{policy}, {means}");
            world.vm.audit().unwrap();
        }
    }
}

fn reads_are_noted_in_a_ring_as_far_as_it_has_room<F: Format>() {
    let mut world = World::<F>::new(256, Level::PAGE);
    let ring = RingClient::new().ring();
    world.vm.use_dirty_rings();
    world.vcpu.set_dirty_ring(ring.clone()).unwrap();
    world.policy("dirty_log_reads", "on");
    world.set(0..256, LOGGED);
    let (_, did) = world.during(|world| {
        for gfn in 0..64 {
            assert!(world.touch(gfn, Read).write);
        }
    });
    assert_eq!(did.dirty_pages, 64);
    assert!(ring.is_soft_full());
    // The guest can still read. A write waits until the client has collected ring entries.
    let (_, did) = world.during(|world| {
        assert!(!world.touch(64, Read).write);
        assert_eq!(world.access(64, Write), Err(Stop::DirtyRingFull));
    });
    assert_eq!(did.dirty_pages, 0);
    world.vm.audit().unwrap();
}

fn an_eager_split_visits_no_entry_of_the_last_level<F: Format>() {
    const LEAVES: u64 = 4;
    let visited = |walk: &str| {
        let mut world = World::<F>::new(LEAVES * MIB2, Level::MEGA);
        world.set(0..LEAVES * MIB2, SlotFlags::default());
        world.policy("split_walk", walk);
        for i in 0..LEAVES {
            assert_eq!(world.touch(i * MIB2, Write).level, Level::MEGA);
        }
        let (_, did) = world.during(|world| world.set(0..LEAVES * MIB2, LOGGED));
        assert_eq!((did.splits, world.vm.stats().pages_2m), (LEAVES, 0));
        world.vm.set_manual_dirty_log(true, false);
        let bitmap = vec![0; (LEAVES * MIB2 / 64) as usize];
        let clear = |world: &mut World<F>| {
            let all = LEAVES * MIB2;
            world.vm.clear_dirty_log(0, 0, 0, all, &bitmap).unwrap();
        };
        let (_, again) = world.during(clear);
        (did.split_entries_visited, again.split_entries_visited)
    };
    // With the direct MMU, the walk sees only leaves.
    let is_direct = common::config().mmu == MmuKind::Direct;
    let above = if is_direct {
        0
    } else {
        u64::from(F::TOP.0) - 2
    };
    let walk = above + LEAVES;
    let split_walk = if is_direct { 0 } else { walk };
    // With break-before-make, leaves are broken first. After the flush, a second walk enters the new tables.
    let walks = if F::BREAK_BEFORE_MAKE { 2 } else { 1 };
    let all = LEAVES * MIB2;
    // A long walk restarts at the root from time to time.
    let (first, again) = visited("full-walk");
    let about = |all: u64| all..all + all / 4;
    assert!(about(walks * walk + all).contains(&first), "{first}");
    assert!(about(split_walk + all).contains(&again), "{again}");
    assert_eq!(visited("skip-last-level"), (walk, split_walk));
    // The second walk does not enter tables that contain no huge leaf any more.
    let (first, again) = visited("default");
    assert!(first <= walk && again < walk, "{first}, {again}");
}

fn clearing_a_log_splits_what_its_begin_left_huge<F: Format>() {
    let mut world = World::<F>::new(2 * MIB2, Level::MEGA);
    world.vm.set_manual_dirty_log(true, true);
    world.set(0..2 * MIB2, SlotFlags::default());
    world.touch(0, Write);
    world.touch(MIB2, Write);
    world.set(0..2 * MIB2, LOGGED);
    assert_eq!(world.vm.stats().pages_2m, 2);
    world.vm.clear_dirty_log(0, 0, 0, 64, &[1]).unwrap();
    let (levels, did) = world.during(|world| [5, MIB2].map(|gfn| world.touch(gfn, Read).level));
    assert_eq!((levels, did.pf_taken), ([Level::PAGE, Level::MEGA], 0));
    world.vm.audit().unwrap();
}

/// With break-before-make, the log's eager split flushes after each chunk. Such a flush does not cover all entries that
/// were protected before.
fn the_begin_of_a_log_is_flushed_wherever_it_has_protected<F: Format>() {
    for eager in ["on", "off"] {
        let mut world = World::<F>::new(4 * MIB2, Level::MEGA);
        world.policy("eager_page_split", eager);
        world.policy("eager_page_split_chunk", "512");
        world.vm.platform().watch(&world.vm, 1);
        world.set(0..4 * MIB2, SlotFlags::default());
        for i in 0..4 {
            assert_eq!(world.touch(i * MIB2, Write).level, Level::MEGA);
        }
        world.set(0..4 * MIB2, LOGGED);
        assert_eq!(
            world.vm.platform().tlb.stale(),
            None,
            "eager_page_split={eager}"
        );
        world.vm.platform().check();
    }
}

/// If tables are shadow pages, they are zapped instead, as in KVM, and later faults install the huge leaves.
fn the_end_of_a_log_brings_huge_leaves_back_in_place<F: Format>() {
    let in_place = common::config().mmu == MmuKind::Tdp;
    for (level, blocks) in [(Level::MEGA, 3), (Level::GIGA, 1)] {
        let size = level.pages();
        let mut world = World::<F>::new(blocks * size, level);
        world.vm.platform().watch(&world.vm, 1);
        world.set(0..blocks * size, SlotFlags::default());
        for block in 0..blocks {
            assert_eq!(world.touch(block * size, Read).level, level);
        }
        world.set(0..blocks * size, LOGGED);
        for page in [0, 5, MIB2 - 1] {
            assert_eq!(world.touch(page, Write).level, Level::PAGE);
        }
        let (_, did) = world.during(|world| world.set(0..blocks * size, SlotFlags::default()));
        assert_eq!(did.collapses, if in_place { blocks } else { 0 });
        assert_eq!(world.vm.platform().tlb.stale(), None);
        let pages = (0..blocks * size).step_by(101);
        let (_, did) = world.during(|world| {
            for page in pages {
                for access in [Read, Write, Execute] {
                    assert_eq!(world.touch(page, access).level, level);
                }
            }
        });
        assert_eq!(did.pf_taken, if in_place { 0 } else { blocks });
        let stats = world.vm.stats();
        let leaves = [stats.pages_4k, stats.pages_2m, stats.pages_1g];
        let mut expected = [0; 3];
        expected[level.0 as usize - 1] = blocks;
        // A shadow page whose parent table was zapped may keep its leaves.
        assert!(leaves == expected || !in_place && leaves >= expected);
        world.vm.audit().unwrap();
        world.vm.platform().check();
    }
}

fn huge_leaves_come_back_where_slot_host_and_policies_allow_them<F: Format>() {
    if common::config().mmu != MmuKind::Tdp {
        return;
    }
    // The regions of 2 MiB that the slot contains: the slot's begin; two whole regions; a region that the host maps in
    // part by small pages; a region whose leaf was split by a fetch.
    const SLOT: Range<u64> = 7..5 * MIB2;
    let world = |policies: &[(&str, &str)]| {
        let mut world = World::<F>::new(5 * MIB2, Level::MEGA);
        let small = HostChange::Remap {
            level: Level::PAGE,
            writable: true,
            kind: PageKind::Ordinary,
        };
        world
            .vm
            .platform()
            .host
            .change(&(3 * MIB2..4 * MIB2), small);
        world.set(SLOT, SlotFlags::default());
        for (name, value) in policies {
            world.policy(name, value);
        }
        for block in 0..4 {
            world.touch(block * MIB2 + 9, Write);
        }
        world.touch(4 * MIB2 + 9, Execute);
        world.set(SLOT, LOGGED);
        world.touch(MIB2 + 9, Write);
        world
    };
    let end = |world: &mut World<F>| {
        let (_, did) = world.during(|world| world.set(SLOT, SlotFlags::default()));
        world.vm.audit().unwrap();
        did.collapses
    };
    let levels = |world: &mut World<F>| {
        let pages = (0..5).map(|block| block * MIB2 + 9);
        pages
            .map(|page| world.touch(page, Read).level.0)
            .collect::<Vec<_>>()
    };
    let mut plain = world(&[]);
    assert_eq!(end(&mut plain), 3);
    assert_eq!(levels(&mut plain), [1, 2, 2, 1, 2]);
    // A table that exists because of NX stays until NX recovery zaps it.
    let mut nx = world(&[("nx_huge_pages", "on")]);
    assert_eq!(end(&mut nx), 2);
    assert_eq!(levels(&mut nx), [1, 2, 2, 1, 1]);
    assert!(!nx.touch(MIB2 + 9, Write).execute);
    assert_eq!(nx.vm.stats().nx_lpage_splits, 1);
    let (page, did) = nx.during(|world| world.touch(4 * MIB2 + 9, Execute));
    assert_eq!((page.execute, did.pf_taken), (true, 0));
    // With huge pages switched off, nothing changes.
    let mut off = world(&[]);
    off.policy("huge_pages", "off");
    assert_eq!(end(&mut off), 0);
    assert_eq!(levels(&mut off), [1; 5]);
    // If the host's pages are read-only, the new leaf is not writable. If the first page is not resident, there is no
    // new leaf.
    let mut gone = world(&[]);
    let pages = MIB2..2 * MIB2;
    let guard = gone.vm.invalidate(HostMemory::hvas(&pages));
    gone.vm.platform().host.change(&pages, HostChange::Punch);
    drop(guard);
    assert_eq!(end(&mut gone), 2);
    let read_only = SlotFlags::READONLY;
    let mut world = World::<F>::new(MIB2, Level::MEGA);
    world.set(0..MIB2, read_only | LOGGED);
    world.touch(9, Read);
    let (_, did) = world.during(|world| world.set(0..MIB2, read_only));
    assert_eq!(did.collapses, 1);
    let (page, did) = world.during(|world| world.touch(10, Read));
    assert_eq!(
        (page.level, page.write, did.pf_taken),
        (Level::MEGA, false, 0)
    );
}

fn tables_whose_reason_has_gone_are_promoted_in_place<F: Format>() {
    let in_place = common::config().mmu == MmuKind::Tdp;
    let mut world = World::<F>::new(4 * MIB2, Level::MEGA);
    let small = HostChange::Remap {
        level: Level::PAGE,
        writable: true,
        kind: PageKind::Ordinary,
    };
    let host = &world.vm.platform().host;
    host.change(&(2 * MIB2..3 * MIB2), small);
    world.vm.platform().watch(&world.vm, 1);
    world.set(0..4 * MIB2, SlotFlags::default());
    world.policy("huge_pages", "off");
    for page in [3, MIB2 + 3, 2 * MIB2 + 3] {
        world.touch(page, Write);
    }
    let promote = |world: &World<F>| world.vm.promote(&mut Promotion::default(), usize::MAX);
    assert_eq!(promote(&world), 0);
    world.policy("huge_pages", "on");
    let (leaves, did) = world.during(|world| promote(world));
    assert_eq!((leaves, did.collapses), (2, if in_place { 2 } else { 0 }));
    assert_eq!(world.vm.platform().tlb.stale(), None);
    let (_, did) = world.during(|world| {
        for page in (0..2 * MIB2).step_by(11) {
            assert_eq!(world.touch(page, Write).level, Level::MEGA);
        }
        assert_eq!(world.touch(2 * MIB2 + 3, Write).level, Level::PAGE);
    });
    assert_eq!(did.pf_taken, if in_place { 0 } else { 2 });
    assert_eq!(promote(&world), 0);
    world.vm.audit().unwrap();
    world.vm.platform().check();
}

fn a_promotion_goes_on_where_the_last_one_ended<F: Format>() {
    let mut world = World::<F>::new(12 * MIB2, Level::MEGA);
    world.policy("huge_pages", "off");
    let set = |world: &World<F>, id, blocks: Range<u64>, flags| {
        let gfns = blocks.start * MIB2..blocks.end * MIB2;
        let (gpa, size) = (Gpa(gfns.start << 12), (gfns.end - gfns.start) << 12);
        let region = Region::new(id, gpa, size, HostMemory::hva(gfns.start));
        world
            .vm
            .set_memory_region(0, &region.with_flags(flags))
            .unwrap();
    };
    set(&world, 5, 0..4, SlotFlags::default());
    set(&world, 1, 4..6, LOGGED);
    set(&world, 3, 6..12, SlotFlags::default());
    for block in 0..12 {
        world.touch(block * MIB2 + 7, Write);
    }
    world.policy("huge_pages", "on");
    let mut promotion = Promotion::default();
    for most in [1, 2, 3] {
        let mut all = Vec::new();
        for _ in 0..100 {
            let before = world.vm.stats().pages_2m;
            all.push(world.vm.promote(&mut promotion, most));
            assert!(
                all.last()
                    .is_some_and(|leaves| *leaves <= most.max(2) as u64)
            );
            assert!(world.vm.stats().pages_2m >= before);
        }
        // All tables except those of the slot that logs are replaced.
        let promoted = all.iter().sum::<u64>();
        assert_eq!(promoted, if most == 1 { 10 } else { 0 }, "{most}: {all:?}");
    }
    set(&world, 1, 4..6, SlotFlags::default());
    assert_eq!(world.touch(4 * MIB2, Read).level, Level::MEGA);
    world.vm.audit().unwrap();
}

fn a_cached_mmio_access_looks_up_no_slot<F: Format>() {
    let mut world = World::<F>::new(64, Level::PAGE);
    world.set(0..4, SlotFlags::default());
    let mmio = |world: &mut World<F>| {
        let (answer, did) = world.during(|world| world.access(7, Write));
        assert_eq!(answer, Err(Stop::Mmio { gpa: Gpa(7 << 12) }));
        let lookups = did.slot_lookups + did.slot_lookups_saved;
        (lookups, did.mmio_cached, did.pf_taken)
    };
    assert_eq!(mmio(&mut world), (1, 0, 1));
    assert_eq!(mmio(&mut world), (0, 1, 0));
    assert_eq!(mmio(&mut world), (0, 1, 0));
    world.policy("mmio_caching", "off");
    assert_eq!(mmio(&mut world), (1, 0, 1));
    world.policy("mmio_caching", "on");
    assert_eq!(mmio(&mut world), (0, 1, 0));
}

/// Makes a VM with one slot of 1 GiB, which one leaf maps, and `nx_huge_pages` on.
fn nx_world<F: Format>() -> World<F> {
    let mut world = World::<F>::new(GIB1, Level::GIGA);
    world.policy("nx_huge_pages", "on");
    world.policy("nx_huge_pages_recovery_ratio", "1");
    world.set(0..GIB1, SlotFlags::default());
    let huge = world.touch(12_345, Write);
    assert_eq!((huge.level, huge.execute), (Level::GIGA, false));
    world
}

fn an_execution_fault_splits_every_level_in_place<F: Format>() {
    let mut world = nx_world::<F>();
    let gfn = 12_345;
    let (page, did) = world.during(|world| world.touch(gfn, Execute));
    assert_eq!((page.level, page.execute), (Level::PAGE, true));
    // One fault splits the leaf from 1 GiB down to 4 KiB, and unmaps nothing. With break-before-make the vCPU has
    // missed the flush of the broken leaf, so the access is repeated by a second fault.
    let faults = if F::BREAK_BEFORE_MAKE { 2 } else { 1 };
    assert_eq!(did.pf_taken, faults);
    assert_eq!((did.splits, did.zapped), (2, 0));
    assert_eq!(did.nx_lpage_splits, 1);
    assert_eq!(
        (world.vm.stats().pages_4k, world.vm.stats().pages_2m),
        (512, 511)
    );
    // The 512 pieces of the last split are executable. All other pieces are huge and not executable.
    let first = gfn & !(MIB2 - 1);
    let (_, did) = world.during(|world| {
        for gfn in first..first + MIB2 {
            let piece = world.touch(gfn, Execute);
            assert_eq!((piece.level, piece.execute), (Level::PAGE, true));
        }
        for gfn in (0..GIB1).step_by(MIB2 as usize).filter(|gfn| *gfn != first) {
            let sibling = world.touch(gfn, Read);
            assert_eq!((sibling.level, sibling.execute), (Level::MEGA, false));
        }
    });
    assert_eq!(did.pf_taken, 0);
    // `nx_lpage_splits` is the number of these tables.
    world.touch(first + MIB2, Execute);
    assert_eq!(world.vm.stats().nx_lpage_splits, 2);
    world.vm.audit().unwrap();
}

fn recovery_of_nx_huge_pages_brings_the_huge_leaf_back<F: Format>() {
    let mut world = nx_world::<F>();
    for i in 0..3 {
        world.touch(i * MIB2, Execute);
    }
    world.policy("nx_huge_pages_recovery_ratio", "2");
    assert_eq!(world.vm.stats().nx_lpage_splits, 3);
    assert_eq!(world.vm.recover_nx_huge_pages(), 2);
    assert_eq!(world.vm.stats().nx_lpage_splits, 1);
    world.policy("nx_huge_pages_recovery_ratio", "1");
    assert_eq!(world.vm.recover_nx_huge_pages(), 1);
    assert_eq!(world.vm.stats().nx_lpage_splits, 0);
    for i in 0..3 {
        let huge = world.touch(i * MIB2, Read);
        assert_eq!((huge.level, huge.execute), (Level::GIGA, false));
    }
    let stats = world.vm.stats();
    assert_eq!((stats.pages_4k, stats.pages_2m, stats.pages_1g), (0, 0, 1));
    world.vm.audit().unwrap();
}

/// Checks that the counters count as KVM's do.
fn a_fast_fix_is_a_fix_and_a_prefault_is_no_fault<F: Format>() {
    let mut world = World::<F>::new(2 * MIB2, Level::PAGE);
    world.policy("prefetch", "off");
    world.set(0..MIB2, SlotFlags::default());
    world.touch(1, Write);
    world.set(0..MIB2, LOGGED);
    let (_, did) = world.during(|world| world.touch(1, Write));
    assert_eq!((did.pf_taken, did.pf_fixed, did.pf_fast), (1, 1, 1));
    assert_eq!((did.pf_spurious, did.pf_emulate), (0, 0));
    // A pre-fault maps a slot that logs page by page, and another slot table by table. It fails where no slot is.
    for flags in [LOGGED, SlotFlags::default()] {
        let (_, did) = world.during(|world| {
            world.set(0..MIB2, flags);
            world.vcpu.enter_unguarded(1);
            world.vcpu.quiesce();
            let range = |gfns: Range<u64>| Gpa(gfns.start << 12)..Gpa(gfns.end << 12);
            assert_eq!(world.vcpu.prefault(range(0..MIB2)), Ok(MIB2 << 12));
            let stop = world.vcpu.prefault(range(MIB2..MIB2 + 1)).unwrap_err();
            assert!(matches!(stop, Stop::Mmio { .. }));
            world.vcpu.leave();
        });
        let counted = (did.pf_taken, did.pf_fixed, did.pf_spurious, did.pf_emulate);
        assert_eq!(counted, (0, 0, 0, 0), "{did:?}");
    }
    let (_, did) = world.during(|world| world.touch(2, Read));
    assert_eq!(did.pf_taken, 0);
}
