//! Several readers of one VM's dirty logs ([`Vm::log_reader`]): random operations, with a model of what each reader has
//! to be told.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
mod random;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use common::config;
use random::{Setup, run};
use slat::format::{Stage2, Sv48x4};
use slat::{
    Access, Change, DirtyGfn, DirtyLogError, DirtyRing, Epoch, Ept, Format, Gfn, Gpa, Level,
    LogReader, Region, Setting, SlotFlags, Stop, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform};

const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;
const NONE: SlotFlags = SlotFlags(0);

/// The number of guest frames that slots may have.
const FRAMES: u64 = 600;
/// The number of pages of host memory. Frame n is backed by page n, or by page n + `SHIFT` after a move.
const PAGES: u64 = 2 * FRAMES;

type TestVm<F> = Vm<SimPlatform, F>;
type Gfns = BTreeSet<u64>;

fn new_vm<F: Format>(method: &str, level: Level) -> Arc<TestVm<F>> {
    let vm = Vm::new(SimPlatform::at_level(PAGES, level), config()).unwrap();
    vm.set_policy(Setting::parse("dirty_log", method).unwrap());
    vm.set_policy(Setting::parse("dirty_log_reads", "off").unwrap());
    vm
}

/// Returns a slot of the frames `gfns`. `shift`: the distance from a frame to the page that backs it.
fn region(id: u32, gfns: Range<u64>, shift: u64, flags: SlotFlags) -> Region {
    let size = (gfns.end - gfns.start) << 12;
    let backing = HostMemory::hva(gfns.start + shift);
    Region::new(id, Gpa(gfns.start << 12), size, backing).with_flags(flags)
}

fn write<F: Format>(vcpu: &mut Vcpu<SimPlatform, F>, gfns: impl IntoIterator<Item = u64>) {
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    for gfn in gfns {
        while vcpu.translate(Gpa(gfn << 12), Access::Write) == Err(Stop::Retry) {
            vcpu.quiesce();
        }
    }
    vcpu.leave();
}

fn gfns_of<F: Format>(epoch: &Epoch<'_, SimPlatform, F>) -> Gfns {
    let ranges = epoch.dirty_ranges(0, u64::MAX);
    ranges
        .flat_map(|range| range.gfns.start.0..range.gfns.end.0)
        .collect()
}

/// The next epoch of `reader`, committed.
fn next<F: Format>(reader: &mut LogReader<SimPlatform, F>) -> Gfns {
    let epoch = reader.begin();
    let gfns = gfns_of(&epoch);
    assert_eq!(epoch.pages(), gfns.len() as u64);
    epoch.commit();
    gfns
}

fn client_log<F: Format>(vm: &TestVm<F>, id: u32) -> Result<Gfns, DirtyLogError> {
    let mut words = vec![0; vm.dirty_log_words(0, id)?];
    vm.get_dirty_log(0, id, &mut words)?;
    let bits = (0..).zip(&words).flat_map(|(i, word)| {
        (0..64)
            .filter(move |bit| word >> bit & 1 != 0)
            .map(move |bit| i * 64 + bit)
    });
    Ok(bits.collect())
}

fn set(gfns: impl IntoIterator<Item = u64>) -> Gfns {
    gfns.into_iter().collect()
}

on_both_mmus! {
    each_reader_is_told_of_each_write_once,
    a_slot_logs_without_the_clients_flag_as_long_as_there_is_a_reader,
    an_epoch_that_is_not_committed_is_in_the_next_one,
    a_reader_is_told_of_slots_that_come_move_and_are_split,
    the_client_begins_and_ends_while_a_reader_goes_on,
    rings_and_readers_do_not_disturb_each_other,
    a_reader_begins_and_ends_without_memory,
    random_by_write_protection,
    random_by_dirty_bits,
    random_by_buffers,
    random_with_rings,
    random_by_manual_protection,
}

const PLAIN: Setup = Setup {
    method: "write-protect",
    level: Level::PAGE,
    rings: false,
    manual: None,
};

#[test]
fn random_on_stage_2() {
    run::<Stage2<48>>(30, PLAIN.with_level(Level::MEGA));
    run::<Stage2<48, true>>(15, PLAIN.with_method("dirty-bit"));
}

#[test]
fn random_on_sv48x4() {
    run::<Sv48x4>(30, PLAIN.with_level(Level::MEGA));
}

fn random_by_write_protection() {
    run::<Ept>(60, PLAIN);
    run::<Ept>(30, PLAIN.with_level(Level::MEGA));
}

fn random_by_dirty_bits() {
    run::<Ept>(40, PLAIN.with_method("dirty-bit"));
}

fn random_by_buffers() {
    run::<Ept>(40, PLAIN.with_method("buffer"));
}

fn random_with_rings() {
    let rings = true;
    run::<Ept>(40, Setup { rings, ..PLAIN });
}

fn random_by_manual_protection() {
    for initially_set in [false, true] {
        let manual = Some(initially_set);
        run::<Ept>(30, Setup { manual, ..PLAIN });
    }
}

fn each_reader_is_told_of_each_write_once() {
    let vm = new_vm::<Ept>("write-protect", Level::PAGE);
    vm.set_memory_region(0, &region(3, 0..300, 0, LOGGED))
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, [1, 2]);
    let (mut a, mut b) = (vm.log_reader().unwrap(), vm.log_reader().unwrap());
    assert_eq!((next(&mut a), next(&mut b)), (set([]), set([])));
    write(&mut vcpu, [2, 70, 299]);
    assert_eq!(next(&mut a), set([2, 70, 299]));
    write(&mut vcpu, [5, 70]);
    assert_eq!(next(&mut b), set([2, 5, 70, 299]));
    assert_eq!(next(&mut a), set([5, 70]));
    // The client is told of everything since it has set the flag.
    assert!(vm.is_marked_dirty(0, Gfn(299)) && !vm.is_marked_dirty(0, Gfn(3)));
    assert_eq!(client_log(&vm, 3), Ok(set([1, 2, 5, 70, 299])));
    assert_eq!(client_log(&vm, 3), Ok(set([])));
    // The readers are told of the pages that the client harvests, too.
    write(&mut vcpu, [9]);
    assert_eq!(client_log(&vm, 3), Ok(set([9])));
    drop(b);
    assert_eq!(next(&mut a), set([9]));
    vm.audit().unwrap();
}

fn a_slot_logs_without_the_clients_flag_as_long_as_there_is_a_reader() {
    let vm = new_vm::<Ept>("write-protect", Level::MEGA);
    vm.set_memory_region(0, &region(3, 0..512, 0, NONE))
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, [5]);
    assert_eq!(vm.lookup(0, Gfn(5)).unwrap().level, Level::MEGA);
    let mut reader = vm.log_reader().unwrap();
    write(&mut vcpu, [6]);
    assert_eq!(vm.lookup(0, Gfn(6)).unwrap().level, Level::PAGE);
    assert_eq!(client_log(&vm, 3), Err(DirtyLogError::NotLogged(3)));
    assert_eq!(next(&mut reader), set([6]));
    vm.mark_dirty(0, Gfn(8)..Gfn(10)).unwrap();
    assert!(!vm.is_marked_dirty(0, Gfn(8)), "the client has no log");
    assert_eq!(next(&mut reader), set([8, 9]));
    let mut other = vm.log_reader().unwrap();
    drop(reader);
    write(&mut vcpu, [7]);
    assert_eq!(next(&mut other), set([7]));
    drop(other);
    write(&mut vcpu, [7]);
    assert_eq!(vm.lookup(0, Gfn(6)).unwrap().level, Level::MEGA);
    vm.audit().unwrap();
}

fn an_epoch_that_is_not_committed_is_in_the_next_one() {
    let vm = new_vm::<Ept>("write-protect", Level::PAGE);
    vm.set_memory_region(0, &region(0, 0..300, 0, NONE))
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut reader = vm.log_reader().unwrap();
    write(&mut vcpu, [1, 100]);
    let epoch = reader.begin();
    assert_eq!(epoch.number(), 1);
    write(&mut vcpu, [100, 200]);
    assert_eq!(gfns_of(&epoch), set([1, 100]));
    epoch.abort();
    drop(reader.begin());
    let epoch = reader.begin();
    assert_eq!((epoch.number(), gfns_of(&epoch)), (3, set([1, 100, 200])));
    std::mem::forget(epoch);
    write(&mut vcpu, [3]);
    assert_eq!(next(&mut reader), set([1, 3, 100, 200]));
    assert_eq!(next(&mut reader), set([]));
}

fn a_reader_is_told_of_slots_that_come_move_and_are_split() {
    let vm = new_vm::<Ept>("write-protect", Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut reader = vm.log_reader().unwrap();
    let first = region(0, 0..100, 0, NONE);
    vm.set_memory_region(0, &first).unwrap();
    assert_eq!(next(&mut reader), set(0..100), "a new slot is dirty");
    write(&mut vcpu, [1, 60]);
    // The slot is split while it is in an epoch; a page is removed, and another memory is at its frame.
    let epoch = reader.begin();
    write(&mut vcpu, [70]);
    let upper = region(1, 50..100, 0, LOGGED);
    let changes = [Change::Set(first.with_size(49 << 12)), Change::Set(upper)];
    vm.set_memory_regions(0, &changes).unwrap();
    vm.set_memory_region(0, &region(2, 49..50, 500, NONE))
        .unwrap();
    assert_eq!(gfns_of(&epoch), set([1, 60]));
    epoch.abort();
    assert_eq!(next(&mut reader), set([1, 49, 60, 70]));
    // A slot moves in an epoch, and its frames get new contents.
    write(&mut vcpu, [51]);
    let epoch = reader.begin();
    vm.set_memory_region(0, &upper.with_gpa(Gpa(200 << 12)))
        .unwrap();
    assert_eq!(gfns_of(&epoch), set([201]));
    let ranges: Vec<_> = epoch.dirty_ranges(0, u64::MAX).collect();
    assert_eq!(
        (ranges[0].slot, ranges[0].backing),
        (1, HostMemory::hva(51))
    );
    epoch.commit();
    assert_eq!(next(&mut reader), set(200..250));
    write(&mut vcpu, [201, 2]);
    vm.remove_memory_region(0, 1).unwrap();
    assert_eq!(next(&mut reader), set([2]));
    vm.audit().unwrap();
}

fn the_client_begins_and_ends_while_a_reader_goes_on() {
    let vm = new_vm::<Ept>("write-protect", Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    let [plain, logged] = [NONE, LOGGED].map(|flags| region(0, 0..100, 0, flags));
    vm.set_memory_region(0, &plain).unwrap();
    let mut reader = vm.log_reader().unwrap();
    write(&mut vcpu, [1, 2]);
    vm.set_memory_region(0, &logged).unwrap();
    write(&mut vcpu, [3]);
    assert!(client_log(&vm, 0).unwrap().contains(&3));
    write(&mut vcpu, [4]);
    vm.set_memory_region(0, &plain).unwrap();
    assert_eq!(next(&mut reader), set([1, 2, 3, 4]));
    vm.set_manual_dirty_log(true, true);
    vm.set_memory_region(0, &logged).unwrap();
    assert_eq!(client_log(&vm, 0), Ok(set(0..100)), "initially set");
    assert_eq!(next(&mut reader), set([]));
    vm.clear_dirty_log(0, 0, 0, 100, &[u64::MAX; 2]).unwrap();
    write(&mut vcpu, [9]);
    assert_eq!(client_log(&vm, 0), Ok(set([9])));
    assert_eq!(next(&mut reader), set([9]));
    assert_eq!(client_log(&vm, 0), Ok(set([9])), "it clears by hand");
    drop(reader);
    assert_eq!(client_log(&vm, 0), Ok(set([9])));
    vm.audit().unwrap();
}

fn rings_and_readers_do_not_disturb_each_other() {
    let vm = new_vm::<Ept>("write-protect", Level::PAGE);
    vm.use_dirty_rings();
    vm.set_memory_region(0, &region(0, 0..100, 0, LOGGED))
        .unwrap();
    vm.set_memory_region(0, &region(1, 100..200, 0, NONE))
        .unwrap();
    let (mut vcpu, ring) = with_ring(&vm);
    write(&mut vcpu, [1, 101]);
    let mut reader = vm.log_reader().unwrap();
    write(&mut vcpu, [1, 2, 102]);
    let entries = |from: usize| -> Vec<_> {
        let found = ring.iter().skip(from).map_while(DirtyGfn::collect);
        found.collect()
    };
    let first = entries(0);
    assert!(first.contains(&(0, 1)) && first.contains(&(0, 2)));
    assert!(
        first.iter().all(|(slot, _)| *slot == 0),
        "slot 1 logs for the reader only"
    );
    vm.reset_dirty_rings();
    assert_eq!(next(&mut reader), set([1, 2, 102]));
    vm.audit().unwrap();
    write(&mut vcpu, [2, 102]);
    assert_eq!(next(&mut reader), set([2, 102]));
    assert_eq!(entries(first.len()), [(0, 2)]);
    assert_eq!(vm.mark_dirty(0, Gfn(7)..Gfn(8)), Err(DirtyLogError::Rings));
    assert_eq!(next(&mut reader), set([7]));
    vm.audit().unwrap();
}

/// Each allocation of frames fails once: either there is no reader, and the VM is as before, or it works.
fn a_reader_begins_and_ends_without_memory() {
    for n in 0.. {
        let vm = new_vm::<Ept>("write-protect", Level::MEGA);
        vm.set_memory_region(0, &region(0, 0..512, 0, NONE))
            .unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        write(&mut vcpu, [5]);
        vm.platform().fail_allocation(n, true);
        let reader = vm.log_reader();
        let failed = vm.platform().stop_failing();
        vm.audit().unwrap();
        if let Ok(mut reader) = reader {
            write(&mut vcpu, [6]);
            assert!(next(&mut reader).contains(&6));
        }
        if !failed {
            break;
        }
    }
}

fn with_ring<F: Format>(vm: &Arc<TestVm<F>>) -> (Vcpu<SimPlatform, F>, Arc<[DirtyGfn]>) {
    let entries: Arc<[DirtyGfn]> = (0..1 << 12).map(|_| DirtyGfn::new()).collect();
    let mut vcpu = vm.create_vcpu().unwrap();
    let ring = DirtyRing::new(entries.clone()).unwrap();
    vcpu.set_dirty_ring(Arc::new(ring)).unwrap();
    (vcpu, entries)
}
