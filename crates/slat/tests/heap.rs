//! Tests how much heap memory changes of slots and attributes allocate. Also tests that nothing has changed, and that
//! the operation can be repeated, if any one of its allocations fails. (`allocation.rs` tests the same for table
//! frames.)

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use slat::format::Stage2;
use slat::{
    Access, Config, CreateVmError, DirtyGfn, DirtyRing, DirtyRingError, Entries, Ept, Format, Gfn,
    Gpa, HostPage, HostRun, Hva, MAX_SLOTS, MemoryAttributes, OutOfMemory, Pfn, Platform, Region,
    Request, ResolveError, SlotFlags, Stale, Stop, TableMeta, Vm, VmId, WaitFor,
};
use slat::{DirtyLogMethod, Setting};
use slat_model::{FailingHeap, HostMemory, SimPlatform, set_region};

#[global_allocator]
static HEAP: FailingHeap = FailingHeap;

/// The simulated machine, which is not under test: its own allocations succeed.
struct Spared(Arc<SimPlatform>);

// SAFETY: tables and host pages come from `SimPlatform`, which keeps the promises of the trait.
unsafe impl Platform for Spared {
    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        FailingHeap::spared(|| self.0.alloc_table(vm))
    }
    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        FailingHeap::spared(|| self.0.alloc_root(vm, tables))
    }
    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        // SAFETY: `frame` is from the simulated machine for `vm` and is freed once, as `free_table` asks of its caller.
        FailingHeap::spared(|| unsafe { self.0.free_table(vm, frame) });
    }
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        FailingHeap::spared(|| self.0.entries(frame))
    }
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        FailingHeap::spared(|| self.0.meta(frame))
    }
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        FailingHeap::spared(|| self.0.resolve(request))
    }
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        FailingHeap::spared(|| self.0.resolve_resident(vm, backing, found));
    }
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        FailingHeap::spared(|| self.0.flush(vm, range, stale));
    }
    const KEEPS_OLD_PAGES: bool = true;

    fn keep(&self, vm: VmId, backing: Range<Hva>) {
        FailingHeap::spared(|| self.0.keep(vm, backing));
    }

    fn wait(&self, _: u32, what: WaitFor) {
        panic!("one thread waits for {what:?}");
    }
}

type TestVm<F> = Vm<Spared, F>;

const PAGES: u64 = 2048;
const ENOMEM: i32 = 12;
const NONE: SlotFlags = SlotFlags(0);
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

fn region(slot: u32, flags: SlotFlags, gfn: u64, pages: u64, page: u64) -> Region {
    Region::new(slot, Gpa(gfn << 12), pages << 12, HostMemory::hva(page)).with_flags(flags)
}

/// The first frame of the slots with private backing.
const PRIVATE_GFN: u64 = 5000;

/// Returns a region of 64 pages with private backing.
fn private_region(slot: u32, gfn: u64) -> Region {
    region(slot, NONE, gfn, 64, 1536).with_private(Some(HostMemory::hva(gfn - PRIVATE_GFN)))
}

/// A change that a client requests. Returns KVM's errno.
type Change<'a, F> = &'a dyn Fn(&TestVm<F>) -> Result<(), i32>;

fn touch<F: Format>(vm: &Arc<TestVm<F>>, gfn: u64) {
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    while vcpu.translate(Gpa(gfn << 12), Access::Write) == Err(Stop::Retry) {
        vcpu.quiesce();
    }
    vcpu.leave();
}

/// Makes a VM. Slot 0 does not log, slot 1 does; a part of each is mapped. The 400 slots after them need several leaves
/// of the indexes. The last slot has private backing, a part of which is mapped.
fn vm<F: Format>(platform: &Arc<SimPlatform>) -> Arc<TestVm<F>> {
    let vm = Vm::new(Arc::new(Spared(platform.clone())), Config::default()).unwrap();
    vm.set_memory_region(0, &region(0, NONE, 0, 1024, 0))
        .unwrap();
    vm.set_memory_region(0, &region(1, LOGGED, 1024, 512, 1024))
        .unwrap();
    for slot in 2..402u32 {
        let gfn = 4096 + u64::from(slot) * 2;
        vm.set_memory_region(0, &region(slot, NONE, gfn, 1, u64::from(slot)))
            .unwrap();
    }
    vm.set_memory_region(0, &private_region(402, PRIVATE_GFN))
        .unwrap();
    convert(&vm, PRIVATE_GFN + 8..PRIVATE_GFN + 16, true).unwrap();
    let mapped = [3, 600, 1024 + 7, PRIVATE_GFN + 5, PRIVATE_GFN + 9];
    mapped.iter().for_each(|gfn| touch(&vm, *gfn));
    vm
}

fn convert<F: Format>(vm: &TestVm<F>, gfns: Range<u64>, private: bool) -> Result<(), i32> {
    let attributes = match private {
        true => MemoryAttributes::PRIVATE,
        false => MemoryAttributes::NONE,
    };
    vm.set_memory_attributes(Gfn(gfns.start)..Gfn(gfns.end), attributes)
        .map_err(|error| error.errno())
}

/// Everything that a client can find out about slots and tables without changing them.
#[derive(Debug, PartialEq)]
struct Seen {
    slots: Vec<Option<Region>>,
    logs: Vec<Option<usize>>,
    leaves: [u64; 3],
    changes: u64,
    zapped: u64,
}

fn see<F: Format>(vm: &Arc<TestVm<F>>) -> Seen {
    vm.audit().unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(1);
    let slots = (0..6000).map(|gfn| vcpu.slot_at(Gpa(gfn << 12)));
    let slots = slots.collect();
    vcpu.leave();
    let stats = vm.stats();
    Seen {
        slots,
        logs: (0..500)
            .map(|slot| vm.dirty_log_words(0, slot).ok())
            .collect(),
        leaves: [stats.pages_4k, stats.pages_2m, stats.pages_1g],
        changes: stats.slot_changes,
        zapped: stats.zapped,
    }
}

/// Makes each allocation of `change` fail, alone and together with all later ones, and then repeats `change`. Checks
/// that `change` makes at least `allocations` allocations.
fn fail_everywhere<F: Format>(what: &str, allocations: u32, change: Change<'_, F>) {
    let host = || SimPlatform::new(PAGES);
    let done = {
        let vm = vm::<F>(&host());
        change(&vm).unwrap();
        see(&vm)
    };
    for stay in [false, true] {
        let mut refused = 0;
        for n in 0.. {
            let platform = host();
            let vm = vm::<F>(&platform);
            let before = see(&vm);
            let (answer, failed) = FailingHeap::failing(n, stay, || change(&vm));
            if let Err(error) = answer {
                assert!(failed);
                assert_eq!(error, ENOMEM);
                assert_eq!(see(&vm), before, "allocation {n} of {what}");
                refused += 1;
                change(&vm).unwrap();
            }
            let after = see(&vm);
            assert_eq!(
                (after.slots, after.logs),
                (done.slots.clone(), done.logs.clone())
            );
            drop(vm);
            platform.check();
            assert_eq!(platform.live_frames(), 0);
            if !failed {
                break;
            }
        }
        assert!(refused >= allocations, "{refused} allocations of {what}");
    }
}

fn every_change<F: Format>() {
    // The numbers of allocations that a slot needs in addition to existing leaves of the indexes. (`slots::tests` has
    // the splits of leaves.)
    const PLACE: u32 = 1;
    const LOG: u32 = 2;
    let changes = [
        ("create", PLACE, region(500, NONE, 2048, 64, 1600)),
        (
            "create, logging",
            PLACE + LOG,
            region(500, LOGGED, 2048, 64, 1600),
        ),
        ("move", 0, region(0, NONE, 2048, 1024, 0)),
        (
            "move, and begin to log",
            LOG,
            region(0, LOGGED, 2048, 1024, 0),
        ),
        ("move a log", 0, region(1, LOGGED, 2048, 512, 1024)),
        ("begin to log", LOG, region(0, LOGGED, 0, 1024, 0)),
        ("end to log", 0, region(1, NONE, 1024, 512, 1024)),
        ("delete", 0, region(0, NONE, 0, 0, 0)),
        ("delete a log", 0, region(1, NONE, 0, 0, 0)),
        ("delete one of many", 0, region(200, NONE, 0, 0, 0)),
        (
            "create, private",
            PLACE,
            private_region(500, PRIVATE_GFN + 64),
        ),
        ("delete, private", 0, region(402, NONE, 0, 0, 0)),
    ];
    for (what, allocations, change) in changes {
        fail_everywhere::<F>(what, allocations, &|vm| {
            set_region(vm, 0, &change).map_err(|error| error.errno())
        });
    }
}

/// Changes several slots at once. The engine copies the requests; allocating the copy, each log and each space in an
/// index may fail.
fn every_change_of_several<F: Format>() {
    use slat::Change::{Remove, Set};
    let two = [
        Set(region(0, NONE, 0, 700, 0)),
        Set(region(500, NONE, 701, 323, 701)),
    ];
    let logging = [
        Set(region(0, LOGGED, 0, 700, 0)),
        Set(region(500, LOGGED, 700, 324, 700)),
    ];
    let log = [
        Set(region(1, LOGGED, 1024, 100, 1024)),
        Set(region(500, LOGGED, 1124, 412, 1124)),
    ];
    let none = [Remove(0), Remove(1), Remove(402)];
    let gfn = |slot: u32| 4096 + u64::from(slot) * 2 + 1;
    let many: Vec<_> = (500..600)
        .map(|slot| Set(region(slot, NONE, gfn(slot - 300), 1, 0)))
        .collect();
    let changes: [(&str, u32, &[slat::Change]); 5] = [
        ("becomes two", 3, &two),
        ("becomes two that log", 6, &logging),
        ("a log becomes two", 6, &log),
        ("deleted", 3, &none),
        ("a hundred between others", 20, &many),
    ];
    for (what, allocations, changes) in changes {
        fail_everywhere::<F>(what, allocations, &|vm| {
            let set = vm.set_memory_regions(0, changes);
            set.map_err(|error| error.errno())
        });
    }
}

#[test]
fn a_change_of_several_slots_without_heap_memory_changes_nothing_and_can_be_repeated() {
    every_change_of_several::<Ept>();
    every_change_of_several::<Stage2<48, true>>();
}

fn every_conversion<F: Format>() {
    let part = PRIVATE_GFN + 4..PRIVATE_GFN + 12;
    for (what, gfns, private) in [
        ("some become private", part.clone(), true),
        ("some become shared", part, false),
        ("some without private backing become private", 0..601, true),
    ] {
        fail_everywhere::<F>(what, 3, &|vm| convert(vm, gfns.clone(), private));
    }
}

#[test]
fn a_slot_change_without_heap_memory_changes_nothing_and_can_be_repeated() {
    every_change::<Ept>();
}

#[test]
fn a_conversion_without_heap_memory_changes_nothing_and_can_be_repeated() {
    every_conversion::<Ept>();
    every_conversion::<Stage2<48, true>>();
}

#[test]
fn the_same_where_leaves_are_broken_before_they_are_made() {
    every_change::<Stage2<48, true>>();
}

/// Returns the bytes that each deletion and each creation allocates, in each of two address spaces that both have
/// `slots` slots. The bytes are in ascending order.
fn bytes_per_change(slots: u32) -> [Vec<usize>; 2] {
    let platform = Arc::new(Spared(SimPlatform::new(PAGES)));
    let config = Config::default().with_spaces(2);
    let vm = Vm::<_, Ept>::new(platform, config).unwrap();
    let at = |slot: u32, pages| {
        let page = u64::from(slot) % PAGES;
        region(slot, NONE, u64::from(slot) * 3, pages, page)
    };
    let set = |space, region| set_region(&vm, space, &region).unwrap();
    // Creates the slots in no particular order: 9973 and the number of slots have no common factor.
    for i in 0..slots {
        set(0, at(i * 9973 % slots, 1));
        set(1, at(i * 9973 % slots, 1));
    }
    [0, 1].map(|space| {
        let bytes_of = |region| FailingHeap::allocated(|| set(space, region));
        let changes = (0..slots).step_by(slots as usize / 16);
        let changes = changes.flat_map(|slot| [at(slot, 0), at(slot, 1)]);
        let mut bytes: Vec<usize> = changes.map(bytes_of).collect();
        bytes.sort_unstable();
        bytes
    })
}

#[test]
fn a_change_takes_place_in_the_nodes_there_are_or_splits_a_path_of_them() {
    // A slot has 32 bytes, and is in two indexes of each of two sets.
    const SETS: usize = 4 * 32 * MAX_SLOTS as usize;
    for bytes in bytes_per_change(16) {
        assert_eq!(bytes.last(), Some(&0));
    }
    for bytes in bytes_per_change(MAX_SLOTS) {
        let (typical, most) = (bytes[bytes.len() / 2], bytes[bytes.len() - 1]);
        assert_eq!(typical, 0);
        assert!(most < SETS / 64, "{most} bytes for a change of 32764 slots");
    }
}

#[test]
fn a_vm_or_a_cpu_without_heap_memory_is_not_made() {
    let config = Config::default().with_spaces(2);
    for n in 0.. {
        let platform = SimPlatform::new(1);
        let shared = Arc::new(Spared(platform.clone()));
        let (vm, failed) =
            FailingHeap::failing(n, false, || Vm::<_, Ept>::unshared(shared, config));
        if !failed {
            assert!(n > 3 && vm.is_ok());
            break;
        }
        assert_eq!(vm.err(), Some(CreateVmError::OutOfMemory));
        assert_eq!(platform.live_frames(), 0);
        platform.check();
    }
    let vm = vm::<Ept>(&SimPlatform::new(PAGES));
    // The readers of dropped CPUs are reused. These CPUs are not dropped, so each needs a new reader.
    let mut vcpus = Vec::with_capacity(8);
    for n in 0.. {
        let (vcpu, failed) = FailingHeap::failing(n, false, || vm.create_vcpu());
        match vcpu {
            Ok(vcpu) => vcpus.push(vcpu),
            Err(OutOfMemory) => assert!(failed),
        }
        if !failed {
            break;
        }
    }
    let entries: Arc<[DirtyGfn]> = (0..128).map(|_| DirtyGfn::new()).collect();
    let (refused, failed) = FailingHeap::failing(0, false, || DirtyRing::new(entries.clone()));
    assert!(matches!(refused, Err(DirtyRingError::OutOfMemory)) && failed);
    let ring = Arc::new(DirtyRing::new(entries).unwrap());
    let mut vcpu = vcpus.pop().unwrap();
    let refused = FailingHeap::failing(0, false, || vcpu.set_dirty_ring(ring.clone()));
    assert_eq!(refused, (Err(OutOfMemory), true));
    vcpu.set_dirty_ring(ring).unwrap();
    vm.audit().unwrap();
    drop((vcpu, vcpus, vm));
}

/// A reader of the dirty logs changes each slot that does not log yet, and needs bitmaps in each log.
#[test]
fn a_reader_of_the_logs_without_heap_memory_is_not_made() {
    let mut refused = 0;
    for n in 0.. {
        let platform = SimPlatform::new(PAGES);
        let vm = Vm::<_, Ept>::new(Arc::new(Spared(platform.clone())), Config::default()).unwrap();
        for (slot, flags) in [(0, NONE), (1, LOGGED), (2, NONE)] {
            let at = u64::from(slot) * 512;
            let region = region(slot, flags, at, 512, at);
            vm.set_memory_region(0, &region).unwrap();
            touch(&vm, at);
        }
        let (first, failed) = FailingHeap::failing(n, false, || vm.log_reader());
        vm.audit().unwrap();
        let logs = |slot| vm.dirty_log_words(0, slot).is_ok();
        assert_eq!([0, 1, 2].map(logs), [false, true, false]);
        refused += u32::from(first.is_err());
        let mut reader = vm.log_reader().unwrap();
        [5, 517, 1029].iter().for_each(|gfn| touch(&vm, *gfn));
        assert_eq!(reader.begin().pages(), 3, "allocation {n}");
        drop((first, reader));
        vm.audit().unwrap();
        drop(vm);
        platform.check();
        if !failed {
            break;
        }
    }
    assert!(refused > 8, "{refused} allocations of a reader");
}

/// A snapshot needs a list of the slots' memory, and a record of its pages.
fn a_snapshot_without_heap_memory<F: Format>() {
    let mut refused = 0;
    for n in 0.. {
        let platform = SimPlatform::new(PAGES);
        let vm = vm::<F>(&platform);
        let writable = |gfn| vm.lookup(0, Gfn(gfn)).is_some_and(|page| page.rights.write);
        let before = see(&vm);
        let (first, failed) = FailingHeap::failing(n, false, || vm.begin_snapshot());
        assert_eq!(first.is_err(), failed, "allocation {n}");
        // If it was refused, the pages that were writable still are.
        assert_eq!([3, 600].map(writable), [failed; 2], "allocation {n}");
        assert_eq!(see(&vm), before, "allocation {n}");
        refused += u32::from(failed);
        drop(first);
        let snapshot = vm.begin_snapshot().unwrap();
        let pages = snapshot.pages_left();
        touch(&vm, 3);
        // To give the platform pages takes no heap memory.
        let invalidated = HostMemory::hva(600)..HostMemory::hva(602);
        let invalidate = || drop(vm.invalidate(invalidated));
        assert_eq!(FailingHeap::failing(0, true, invalidate), ((), false));
        vm.remove_memory_region(0, 1).unwrap();
        assert_eq!(snapshot.pages_left(), pages - 1 - 2 - 512);
        while snapshot.keep_next(u64::MAX) > 0 {}
        let kept = platform.take_kept(vm.id());
        let kept = kept.iter().map(|range| (range.end.0 - range.start.0) >> 12);
        assert_eq!(kept.sum::<u64>(), pages);
        drop(snapshot);
        vm.audit().unwrap();
        drop(vm);
        platform.check();
        if !failed {
            break;
        }
    }
    assert!(refused > 4, "{refused} allocations of a snapshot");
}

#[test]
fn a_snapshot_without_heap_memory_is_not_begun() {
    a_snapshot_without_heap_memory::<Ept>();
    a_snapshot_without_heap_memory::<Stage2<48, true>>();
}

/// The slot's dirty bits are noted before the move allocates the memory for the slot's new position.
fn a_move_that_notes_dirty_bits<F: Format>() {
    let platform = SimPlatform::new(PAGES);
    let vm = vm::<F>(&platform);
    vm.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
    let (slot, home, page) = (450, 3000, 1700);
    let at = |gfn| region(slot, LOGGED, gfn, 1, page);
    vm.set_memory_region(0, &at(home)).unwrap();
    let mut refused = 0;
    for i in 0..390 {
        let between = 4096 + 5 + i * 97 % 390 * 2;
        touch(&vm, home);
        let (moved, _) = FailingHeap::failing(0, true, || vm.set_memory_region(0, &at(between)));
        vm.audit().unwrap();
        // Whether the slot has moved or not, the write is in its log.
        let mut words = [0];
        vm.get_dirty_log(0, slot, &mut words).unwrap();
        assert_eq!(words, [1]);
        match moved {
            Ok(()) => vm.set_memory_region(0, &at(home)).unwrap(),
            Err(error) => {
                assert_eq!(error.errno(), ENOMEM);
                refused += 1;
            }
        }
        let other = region(500 + i as u32, NONE, between, 1, page);
        vm.set_memory_region(0, &other).unwrap();
    }
    assert!(refused > 0, "it always found a place");
}

#[test]
fn a_move_without_heap_memory_leaves_nothing_unflushed() {
    a_move_that_notes_dirty_bits::<Ept>();
    a_move_that_notes_dirty_bits::<Stage2<48, true>>();
}
