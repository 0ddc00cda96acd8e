//! Tests which pages a dirty log protects again: exactly those that the client names, wherever they are in the bitmap.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::thread;

use slat::{
    Access, Config, DirtyGfn, DirtyLogError, DirtyRing, Ept, Gfn, Gpa, Level, Region, SlotFlags,
    Stop, Vcpu, Vm, WaitFor,
};
use slat_model::{Event, HostMemory, RingClient, SimPlatform};

/// The first frame is not a multiple of 64, so the words of the bitmap do not match the masks of entries of a table.
const BASE: u64 = 37;
const PAGES: u64 = 300;

fn vm() -> Arc<Vm<SimPlatform, Ept>> {
    let platform = SimPlatform::at_level(PAGES, Level::PAGE);
    Vm::new(platform, Config::default()).unwrap()
}

/// Makes the slot log to the ring of a vCPU. The ring has `entries` entries.
fn with_ring(
    vm: &Arc<Vm<SimPlatform, Ept>>,
    entries: usize,
) -> (Vcpu<SimPlatform, Ept>, Arc<[DirtyGfn]>) {
    let entries: Arc<[DirtyGfn]> = (0..entries).map(|_| DirtyGfn::new()).collect();
    vm.use_dirty_rings();
    log(vm);
    let mut vcpu = vm.create_vcpu().unwrap();
    let ring = DirtyRing::new(entries.clone()).unwrap();
    vcpu.set_dirty_ring(Arc::new(ring)).unwrap();
    (vcpu, entries)
}

fn log(vm: &Vm<SimPlatform, Ept>) {
    let region = Region::new(3, Gpa(BASE << 12), PAGES << 12, HostMemory::hva(0))
        .with_flags(SlotFlags::LOG_DIRTY_PAGES);
    vm.set_memory_region(0, &region).unwrap();
}

fn write(vcpu: &mut Vcpu<SimPlatform, Ept>, pages: impl IntoIterator<Item = u64>) {
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    for page in pages {
        let gpa = Gpa((BASE + page) << 12);
        while vcpu.translate(gpa, Access::Write) == Err(Stop::Retry) {
            vcpu.quiesce();
        }
    }
    vcpu.leave();
}

fn bit(words: &[u64], page: u64) -> bool {
    words[page as usize / 64] >> (page % 64) & 1 != 0
}

#[test]
fn a_clear_protects_the_pages_it_names_and_no_other() {
    let vm = vm();
    vm.set_manual_dirty_log(true, false);
    log(&vm);
    let mut vcpu = vm.create_vcpu().unwrap();
    let some = 0x8000_0000_0001_0000;
    for words in [
        [u64::MAX, u64::MAX, 0, u64::MAX, u64::MAX],
        [some, u64::MAX, u64::MAX, some, u64::MAX],
        [0, some, u64::MAX, 0, some],
        [u64::MAX; 5],
        [0; 5],
    ] {
        write(&mut vcpu, 0..PAGES);
        let mut all = [0; 5];
        vm.get_dirty_log(0, 3, &mut all).unwrap();
        assert!((0..PAGES).all(|page| bit(&all, page)));
        vm.clear_dirty_log(0, 3, 0, PAGES, &words).unwrap();
        vm.audit().unwrap();
        let before = vm.stats().dirty_pages;
        write(&mut vcpu, 0..PAGES);
        let named = (0..PAGES).filter(|page| bit(&words, *page)).count();
        assert_eq!(vm.stats().dirty_pages - before, named as u64);
    }
}

#[test]
fn a_log_that_was_taken_names_the_next_writes_again() {
    let vm = vm();
    log(&vm);
    let mut vcpu = vm.create_vcpu().unwrap();
    for round in 0..4 {
        // Marks whole words, and single pages of other words.
        let written: Vec<u64> = (0..PAGES)
            .filter(|page| page / 64 % 3 != round % 3 || page % 7 == round)
            .collect();
        write(&mut vcpu, written.iter().copied());
        let mut words = [0; 5];
        vm.get_dirty_log(0, 3, &mut words).unwrap();
        let told: Vec<u64> = (0..PAGES).filter(|page| bit(&words, *page)).collect();
        assert_eq!(told, written);
        vm.audit().unwrap();
    }
}

#[test]
fn a_reset_protects_the_collected_pages_in_whatever_order_they_were_written() {
    const ENTRIES: usize = 1024;
    let vm = vm();
    let (mut vcpu, entries) = with_ring(&vm, ENTRIES);
    let mut next = 0;
    // Collects `times` entries, and returns their pages.
    let mut collect = |times: u64| -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        for _ in 0..times {
            let (slot, page) = entries[next % ENTRIES].collect().unwrap();
            assert_eq!(slot, 3);
            pages.insert(page);
            next += 1;
        }
        pages
    };
    let orders: [Vec<u64>; 4] = [
        (0..PAGES).collect(),
        (0..PAGES).rev().step_by(3).collect(),
        (0..PAGES / 2).map(|page| page * 77 % PAGES).collect(),
        vec![64, 0, 63, 1, 299, 62, 128, 127, 2],
    ];
    for order in orders {
        // All pages are in the ring. The client collects those that were written first.
        write(&mut vcpu, order.iter().copied().chain(0..PAGES));
        let some = order.len() as u64;
        assert_eq!(collect(some), order.iter().copied().collect());
        assert_eq!(vm.reset_dirty_rings(), some);
        vm.audit().unwrap();
        // Writes to exactly these pages are logged again.
        let before = vm.stats().dirty_pages;
        write(&mut vcpu, 0..PAGES);
        assert_eq!(vm.stats().dirty_pages - before, some);
        collect(PAGES);
        assert_eq!(vm.reset_dirty_rings(), PAGES);
    }
}

/// The memory of a ring, which sets `freed` when it is dropped.
struct Memory {
    entries: Vec<DirtyGfn>,
    freed: Arc<AtomicBool>,
}

impl AsRef<[DirtyGfn]> for Memory {
    fn as_ref(&self) -> &[DirtyGfn] {
        &self.entries
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.freed.store(true, SeqCst);
    }
}

fn watched_ring() -> (Arc<DirtyRing>, Arc<AtomicBool>) {
    let freed = Arc::new(AtomicBool::new(false));
    let memory = Memory {
        entries: (0..128).map(|_| DirtyGfn::new()).collect(),
        freed: freed.clone(),
    };
    (Arc::new(DirtyRing::new(memory).unwrap()), freed)
}

#[test]
fn a_ring_leaves_with_its_vcpu_and_its_memory_with_it() {
    let vm = vm();
    vm.use_dirty_rings();
    log(&vm);
    let mut vcpu = vm.create_vcpu().unwrap();
    let (first, first_freed) = watched_ring();
    vcpu.set_dirty_ring(first).unwrap();
    write(&mut vcpu, 0..3);
    // The vCPU gets another ring. The client keeps no share of the memory of the first.
    let (second, second_freed) = watched_ring();
    vcpu.set_dirty_ring(second.clone()).unwrap();
    assert!(first_freed.load(SeqCst));
    // Writes to the pages in the first ring are logged again.
    let before = vm.stats().dirty_pages;
    write(&mut vcpu, 0..5);
    assert_eq!(vm.stats().dirty_pages - before, 5);
    drop(second);
    assert!(!second_freed.load(SeqCst), "its vCPU has it");
    drop(vcpu);
    assert!(second_freed.load(SeqCst));
    assert_eq!(vm.reset_dirty_rings(), 0);
    vm.audit().unwrap();
}

#[test]
fn pages_in_the_ring_of_a_vcpu_that_is_gone_are_noted_by_the_next_that_writes_them() {
    let vm = vm();
    vm.use_dirty_rings();
    log(&vm);
    let client = RingClient::new();
    let mut gone = vm.create_vcpu().unwrap();
    gone.set_dirty_ring(client.ring()).unwrap();
    write(&mut gone, 0..9);
    let mut client = client;
    for page in 0..4 {
        assert_eq!(client.collect().unwrap().page, page);
    }
    drop(gone);
    // The client can still collect the entries that it has not collected.
    for page in 4..9 {
        assert_eq!(client.collect().unwrap().page, page);
    }
    let mut other = RingClient::new();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(other.ring()).unwrap();
    write(&mut vcpu, 0..9);
    let noted: Vec<u64> = std::iter::from_fn(|| other.collect())
        .map(|page| page.page)
        .collect();
    assert_eq!(noted, (0..9).collect::<Vec<_>>());
    assert_eq!(vm.reset_dirty_rings(), 9);
}

/// While a slot moves, a CPU may still write to a collected page by a translation from before the move. The reset
/// flushes that translation, so that the next write is logged.
#[test]
fn a_reset_while_the_slot_moves_ends_translations_of_its_old_place() {
    let vm = vm();
    vm.use_dirty_rings();
    log(&vm);
    let mut client = RingClient::new();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(client.ring()).unwrap();
    // The zap flushes. After that the move need not begin by waiting for readers of the old memslots.
    write(&mut vcpu, [200]);
    vm.zap(0, Gfn(BASE + 200)..Gfn(BASE + 201));
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    // The vCPU may use this translation until it quiesces.
    while vcpu.translate(Gpa((BASE + 2) << 12), Access::Write) == Err(Stop::Retry) {
        vcpu.quiesce();
    }
    let (moves, resets) = (AtomicBool::new(false), AtomicBool::new(false));
    let waiting = Arc::new([moves, resets]);
    vm.platform().set_hook({
        let waiting = waiting.clone();
        move |event| {
            if let Event::Wait(WaitFor::Reader(_)) = event {
                let resets = thread::current().name() == Some("reset");
                waiting[usize::from(resets)].store(true, SeqCst);
            }
        }
    });
    let moved = Region::new(3, Gpa(1 << 30), PAGES << 12, HostMemory::hva(0))
        .with_flags(SlotFlags::LOG_DIRTY_PAGES);
    thread::scope(|scope| {
        scope.spawn(|| vm.set_memory_region(0, &moved).unwrap());
        while !waiting[0].load(SeqCst) {
            thread::yield_now();
        }
        let collected = [client.collect(), client.collect()];
        assert_eq!(collected.map(|page| page.unwrap().page), [200, 2]);
        let reset = thread::Builder::new().name("reset".into());
        let reset = reset
            .spawn_scoped(scope, || vm.reset_dirty_rings())
            .unwrap();
        while !waiting[1].load(SeqCst) && !reset.is_finished() {
            thread::yield_now();
        }
        let ended_too_early = reset.is_finished();
        vcpu.quiesce();
        vcpu.leave();
        assert!(!ended_too_early, "the CPU could still write");
        assert_eq!(reset.join().unwrap(), 2);
    });
    vm.platform().clear_hook();
    vm.audit().unwrap();
}

/// Overwrites the field `slot` or `offset` of a ring entry (`struct kvm_dirty_gfn`), as a client can.
fn overwrite(entry: &DirtyGfn, slot: Option<u32>, offset: Option<u64>) {
    let fields = std::ptr::from_ref(entry);
    // SAFETY: the second 4 bytes of the entry are an `AtomicU32`, and the second 8 bytes are an `AtomicU64`.
    let (at_slot, at_offset) = unsafe {
        (
            &*fields.cast::<AtomicU32>().add(1),
            &*fields.cast::<AtomicU64>().add(1),
        )
    };
    slot.into_iter()
        .for_each(|slot| at_slot.store(slot, SeqCst));
    offset
        .into_iter()
        .for_each(|offset| at_offset.store(offset, SeqCst));
}

/// The invalid entry is reset like any other, and so are the entries after it. (KVM: `kvm_reset_dirty_gfn` returns
/// early, and its caller counts the entry.)
#[test]
fn a_ring_entry_that_names_no_slot_keeps_no_other_from_being_reset() {
    // Tests address spaces that do not exist, a slot that does not exist, and an id that no slot can have.
    for slot in [1 << 16 | 3, u32::MAX, 4, 0xffff] {
        let vm = vm();
        let (mut vcpu, entries) = with_ring(&vm, 128);
        write(&mut vcpu, [7, 200]);
        for entry in &entries[..2] {
            entry.collect().unwrap();
        }
        overwrite(&entries[0], Some(slot), None);
        assert_eq!(vm.reset_dirty_rings(), 2, "{slot:#x}");
        let before = vm.stats().dirty_pages;
        write(&mut vcpu, [7, 200]);
        assert_eq!(vm.stats().dirty_pages - before, 1, "page 200 was protected");
        vm.audit().unwrap();
    }
}

/// Tests that a reset trusts nothing in a ring entry, because the client can write to the ring's memory.
#[test]
fn a_ring_entry_that_names_no_page_of_its_slot_is_reset_and_means_nothing() {
    let vm = vm();
    let (mut vcpu, entries) = with_ring(&vm, 128);
    let wrong = [PAGES, u64::MAX, u64::MAX - 36, u64::MAX - BASE, 1 << 52];
    for (entry, offset) in entries.iter().zip(wrong) {
        write(&mut vcpu, [7]);
        entry.collect().unwrap();
        overwrite(entry, None, Some(offset));
        let before = vm.stats().remote_tlb_flush;
        assert_eq!(vm.reset_dirty_rings(), 1);
        assert_eq!(vm.stats().remote_tlb_flush, before, "nothing was protected");
        vm.zap(0, slat::Gfn(0)..slat::Gfn(1 << 20));
    }
    vm.audit().unwrap();
}

#[test]
fn what_a_device_writes_is_in_the_log_that_is_taken_next() {
    let vm = vm();
    log(&vm);
    // The range includes frames on both sides of the slot.
    vm.mark_dirty(0, Gfn(0)..Gfn(BASE + 2)).unwrap();
    vm.mark_dirty(0, Gfn(BASE + 70)..Gfn(BASE + 75)).unwrap();
    vm.mark_dirty(0, Gfn(BASE + PAGES - 1)..Gfn(u64::MAX))
        .unwrap();
    let mut words = [0; 5];
    vm.get_dirty_log(0, 3, &mut words).unwrap();
    let told: Vec<u64> = (0..PAGES).filter(|page| bit(&words, *page)).collect();
    assert_eq!(told, [0, 1, 70, 71, 72, 73, 74, PAGES - 1]);
    vm.get_dirty_log(0, 3, &mut words).unwrap();
    assert_eq!(words, [0; 5]);
}

#[test]
fn a_look_at_the_log_takes_nothing_from_it() {
    let vm = vm();
    let marked = |page: u64| vm.is_marked_dirty(0, Gfn(BASE + page));
    vm.mark_dirty(0, Gfn(BASE)..Gfn(BASE + 1)).unwrap();
    assert!(!marked(0), "no log");
    log(&vm);
    vm.mark_dirty(0, Gfn(BASE + 70)..Gfn(BASE + 71)).unwrap();
    for _ in 0..2 {
        assert_eq!([marked(69), marked(70), marked(71)], [false, true, false]);
    }
    assert!(!marked(PAGES), "after the slot");
    assert!(!vm.is_marked_dirty(7, Gfn(BASE + 70)), "no address space");
    vm.get_dirty_log(0, 3, &mut [0; 5]).unwrap();
    assert!(!marked(70), "harvested");
}

/// Marks more pages than one reader section marks.
#[test]
fn what_a_device_writes_is_in_the_log_however_much_it_is() {
    const MANY: u64 = (1 << 15) + 100;
    let vm = Vm::<_, Ept>::new(SimPlatform::new(MANY), Config::default()).unwrap();
    let region = Region::new(3, Gpa(0), MANY << 12, HostMemory::hva(0))
        .with_flags(SlotFlags::LOG_DIRTY_PAGES);
    vm.set_memory_region(0, &region).unwrap();
    vm.mark_dirty(0, Gfn(1)..Gfn(MANY)).unwrap();
    let mut words = vec![0; MANY.div_ceil(64) as usize];
    vm.get_dirty_log(0, 3, &mut words).unwrap();
    assert_eq!(
        (0..MANY).find(|page| bit(&words, *page) != (*page > 0)),
        None
    );
}

#[test]
fn a_device_cannot_write_to_rings() {
    let vm = vm();
    vm.use_dirty_rings();
    log(&vm);
    let error = vm.mark_dirty(0, Gfn(BASE)..Gfn(BASE + 1));
    assert_eq!(error, Err(DirtyLogError::Rings));
    vm.mark_dirty(0, Gfn(0)..Gfn(BASE)).unwrap();
    assert!(!vm.is_marked_dirty(0, Gfn(BASE)));
}
