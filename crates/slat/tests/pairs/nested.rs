//! Tests a guest's own tables, in shadow pages, together with each other mechanism.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::guest::{HUGE, Memory, USED, paging};
use crate::world::{FRAMES, LOGGED, MIB2, NONE, PRIVATE, convert, memory_fault, region, remap};
use slat::format::{Npt, X86};
use slat::guest_walk::GuestPaging;
use slat::{
    Access::{self, *},
    Change, Config, Ept, Format, Gfn, Gpa, Level, MmuKind, Prefetch, Promotion, Setting, SlotFlags,
    Stop, Translation, Vcpu, VirtualPage, VirtualStop, Vm, WaitFor,
};
use slat_model::{Event, HostChange, HostMemory, SimPlatform};

/// The frames of the tables, from level 4 to level 1. The level 1 table maps the first 2 MiB.
const TABLES: [u64; 4] = [16, 17, 18, 19];
/// The frames of other tables, which map the same pages.
const OTHERS: [u64; 4] = [1536, 1537, 1538, 1539];
/// The first frame of the data: page i of the first 2 MiB is in frame `DATA + i`.
const DATA: u64 = 2 * MIB2;

type Accessed = Result<VirtualPage, VirtualStop<Infallible>>;

/// A guest with tables of its own: the tables of L2, or those of a guest with the shadow MMU.
struct Guest<F: Format> {
    platform: Arc<SimPlatform>,
    vm: Arc<Vm<SimPlatform, F>>,
    memory: Arc<Memory>,
    cpu: Cpu<F>,
}

struct Cpu<F: Format> {
    vcpu: Vcpu<SimPlatform, F>,
    memory: Arc<Memory>,
    tables: [u64; 4],
}

impl<F: Format> Cpu<F> {
    fn try_virtual(&mut self, address: u64, access: Access) -> Accessed {
        let paging = GuestPaging {
            reserves_table_global: true,
            ..paging(self.tables[0] << 12)
        };
        self.try_in(&paging, address, access)
    }

    fn try_in(&mut self, paging: &GuestPaging, address: u64, access: Access) -> Accessed {
        let mut words = self.memory.words();
        let mut vcpu = self.vcpu.enter(0);
        loop {
            match vcpu.translate_virtual(address, access, paging, &mut words) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                answer => return answer,
            }
        }
    }

    /// Returns the host page to which page `page` is translated.
    fn page(&mut self, page: u64, access: Access) -> u64 {
        let found = self.try_virtual(page << 12, access).unwrap();
        HostMemory::identify(found.host.pfn()).0
    }

    fn physical(&mut self, gfn: u64, access: Access) -> Translation {
        let mut vcpu = self.vcpu.enter(0);
        loop {
            match vcpu.translate(Gpa(gfn << 12), access) {
                Err(Stop::Retry) => vcpu.quiesce(),
                answer => return answer.unwrap(),
            }
        }
    }

    /// Stores an entry like the owner of the tables. Returns whether the store was reported to the engine.
    fn store(&mut self, table: u64, index: u64, entry: u64) -> bool {
        let found = self.physical(table, Write);
        assert!(found.write || found.tracked);
        self.memory.put(table, index, entry);
        if found.tracked {
            let gpa = Gpa((table << 12) + 8 * index);
            let _no_cpu_remembers_any = self.vcpu.enter(0).stored(gpa, 8);
        }
        found.tracked
    }
}

impl<F: Format> Guest<F> {
    fn new(config: Config, level: Level) -> Self {
        let platform = SimPlatform::at_level(2 * FRAMES, level);
        let vm = Vm::new(platform.clone(), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let memory = Arc::new(Memory::new(2 * FRAMES));
        for tables in [TABLES, OTHERS] {
            memory.link(&tables);
            memory.map(tables[3], DATA, USED);
        }
        let cpu = Cpu {
            vcpu: vm.create_vcpu().unwrap(),
            memory: memory.clone(),
            tables: TABLES,
        };
        Guest {
            platform,
            vm,
            memory,
            cpu,
        }
    }

    fn cpu(&self, tables: [u64; 4]) -> Cpu<F> {
        Cpu {
            vcpu: self.vm.create_vcpu().unwrap(),
            memory: self.memory.clone(),
            tables,
        }
    }

    fn set(&self, flags: SlotFlags) {
        let region = region().with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    /// Returns the ranges that are flushed while `work` runs.
    fn flushed(&mut self, work: impl FnOnce(&mut Self)) -> BTreeSet<(u64, u64)> {
        let flushed = Arc::<Mutex<BTreeSet<_>>>::default();
        let noted = flushed.clone();
        self.platform.set_hook(move |event| {
            if let Event::Flush(start, end) = event {
                noted.lock().unwrap().insert((start.0, end.0));
            }
        });
        work(self);
        self.platform.clear_hook();
        let flushed = flushed.lock().unwrap();
        flushed.clone()
    }
}

fn nested(mmu: MmuKind) -> Config {
    Config::default().with_mmu(mmu).with_nested(true)
}

fn shadow() -> Config {
    Config::default().with_mmu(MmuKind::Shadow)
}

/// A TLB tags L2's translations with L2's addresses. So a flush of L1's frames alone does not flush them, and all
/// frames are flushed.
#[test]
fn every_flush_reaches_l2_whatever_unmaps_its_memory() {
    fn of<F: Format>(mmu: MmuKind) {
        type Work<F> = fn(&mut Guest<F>);
        let works: [(&str, SlotFlags, Work<F>); 10] = [
            ("invalidate", NONE, |guest| {
                drop(guest.vm.invalidate(HostMemory::hvas(&(DATA..DATA + 1))));
            }),
            ("zap", NONE, |guest| {
                guest.vm.zap(0, Gfn(DATA)..Gfn(DATA + 1))
            }),
            ("begin a log", NONE, |guest| guest.set(LOGGED)),
            ("harvest", LOGGED, |guest| {
                let mut bitmap = vec![0; FRAMES as usize / 64];
                guest.vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
                assert_ne!(bitmap[DATA as usize / 64] & 1, 0);
            }),
            ("clear", LOGGED, |guest| {
                let first = DATA & !63;
                (guest.vm.clear_dirty_log(0, 0, first, 64, &[1])).unwrap();
            }),
            ("delete", NONE, |guest| {
                guest.vm.remove_memory_region(0, 0).unwrap();
            }),
            ("replace", NONE, |guest| {
                let half = region().with_size((DATA - MIB2) << 12);
                let changes = [Change::Set(half)];
                guest.vm.set_memory_regions(0, &changes).unwrap();
            }),
            ("convert", NONE, |guest| {
                convert(&guest.vm, DATA..DATA + 1, true);
            }),
            ("make read-only", NONE, |guest| {
                let mut read_only = region().with_flags(SlotFlags::READONLY);
                read_only.slot = 1;
                let changes = [Change::Remove(0), Change::Set(read_only)];
                guest.vm.set_memory_regions(0, &changes).unwrap();
            }),
            ("fork", NONE, |guest| {
                drop(Vm::fork_from(&guest.vm).unwrap())
            }),
        ];
        for (name, flags, work) in works {
            let mut guest = Guest::<F>::new(nested(mmu), Level::PAGE);
            guest
                .vm
                .set_policy(Setting::parse("dirty_log", "write-protect").unwrap());
            guest.set(flags);
            assert_eq!(guest.cpu.page(0, Write), DATA);
            let flushed = guest.flushed(work);
            let reaches = |gfn: u64| move |(start, end): &(u64, u64)| (*start..*end).contains(&gfn);
            let both = [0, DATA].map(|gfn| flushed.iter().any(reaches(gfn)));
            assert_eq!(both, [true; 2], "{name}: {flushed:x?}");
            guest.vm.audit().unwrap();
        }
    }
    of::<Ept>(MmuKind::Tdp);
    of::<Ept>(MmuKind::Direct);
    of::<Npt>(MmuKind::Tdp);
}

/// A collapse asks the MMU whether a huge leaf is possible. If tracking of a table begins after that, the huge leaf
/// must not allow L1's stores to the table.
#[test]
fn no_recovered_leaf_hides_the_stores_to_a_table_that_is_tracked_meanwhile() {
    type Work = fn(&Guest<Ept>);
    let end: Work = |guest| guest.set(NONE);
    let promote: Work = |guest| _ = guest.vm.promote(&mut Promotion::default(), 2);
    for (logs, work) in [(true, end), (false, promote)] {
        let mut guest = Guest::<Ept>::new(nested(MmuKind::Tdp), Level::MEGA);
        let huge = |value| Setting::parse("huge_pages", value).unwrap();
        guest.set(if logs { LOGGED } else { NONE });
        guest.vm.set_policy(huge("off"));
        // There are shadow pages, but none of `TABLES` is tracked.
        guest.cpu.tables = OTHERS;
        assert_eq!(guest.cpu.page(0, Read), DATA);
        TABLES
            .iter()
            .for_each(|gfn| _ = guest.cpu.physical(*gfn, Write));
        guest.vm.set_policy(huge("on"));
        let (asked, begun) = (AtomicBool::new(false), AtomicBool::new(false));
        let waits = Arc::new(AtomicBool::new(false));
        let l2 = Mutex::new(Some(guest.cpu(TABLES)));
        let running = Arc::new(Mutex::new(None));
        let (this, started) = (thread::current().id(), running.clone());
        guest.platform.set_hook(move |event| {
            if thread::current().id() != this {
                if matches!(event, Event::Wait(WaitFor::Reader(_))) {
                    waits.store(true, SeqCst);
                }
                return;
            }
            match event {
                Event::Resident(_) => asked.store(true, SeqCst),
                // The walk that installs the leaf begins. It holds no lock here.
                Event::Entries(_) if asked.load(SeqCst) && !begun.swap(true, SeqCst) => {
                    let mut l2 = l2.lock().unwrap().take().unwrap();
                    let run = move || assert_eq!(l2.page(0, Read), DATA);
                    let thread = thread::spawn(run);
                    while !waits.load(SeqCst) && !thread.is_finished() {
                        thread::yield_now();
                    }
                    *started.lock().unwrap() = Some(thread);
                }
                _ => {}
            }
        });
        work(&guest);
        let l2 = running
            .lock()
            .unwrap()
            .take()
            .expect("a table was asked for");
        l2.join().unwrap();
        guest.platform.clear_hook();
        guest.cpu.tables = TABLES;
        assert_eq!(guest.cpu.page(0, Read), DATA);
        assert!(guest.cpu.store(TABLES[2], 0, OTHERS[3] << 12 | USED));
        guest.memory.map(OTHERS[3], 3 * MIB2, USED);
        assert_eq!(guest.cpu.page(1, Read), 3 * MIB2 + 1);
        guest.vm.audit().unwrap();
    }
}

/// With a smaller width of physical addresses, more bits are reserved. A walk with this width must not use the result
/// of a walk with another width.
#[test]
fn a_root_is_of_the_width_of_physical_addresses() {
    const FAR: u64 = 1 << 42;
    let mut guest = Guest::<X86<5>>::new(shadow(), Level::PAGE);
    guest.set(NONE);
    guest.memory.put(TABLES[3], 7, FAR | USED);
    let of = |physical_bits| GuestPaging {
        physical_bits,
        ..paging(TABLES[0] << 12)
    };
    for _ in 0..2 {
        let device = guest.cpu.try_in(&of(46), 7 << 12, Read);
        let mmio = Stop::Mmio { gpa: Gpa(FAR) };
        assert_eq!(device, Err(VirtualStop::Stop(mmio)));
        let reserved = guest.cpu.try_in(&of(40), 7 << 12, Read);
        assert!(
            matches!(reserved, Err(VirtualStop::PageFault { code }) if code & 8 != 0),
            "{reserved:?}"
        );
    }
}

/// Frames of L2's memory become private, or absent.
#[test]
fn private_and_absent_frames_stop_l2_and_come_back() {
    fn of<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::MEGA);
        let late = DATA + 9;
        let change = HostChange::Await;
        guest.platform.host.change(&(late..late + 1), change);
        let both = region().with_private(Some(HostMemory::hva(PRIVATE)));
        guest.vm.set_memory_region(0, &both).unwrap();
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        let absent = memory_fault(late, Read, false, true).map_err(VirtualStop::Stop);
        assert_eq!(guest.cpu.try_virtual(9 << 12, Read), absent);
        convert(&guest.vm, DATA + 4..DATA + 10, true);
        assert_eq!(guest.cpu.page(5, Write), PRIVATE + DATA + 5);
        assert_eq!(guest.cpu.page(9, Write), PRIVATE + late);
        convert(&guest.vm, DATA + 4..DATA + 10, false);
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        assert_eq!(guest.cpu.try_virtual(9 << 12, Read), absent);
        guest
            .platform
            .host
            .change(&(late..late + 1), remap(Level::PAGE));
        assert_eq!(guest.cpu.page(9, Read), late);
        guest.vm.audit().unwrap();
    }
    of::<Ept>(nested(MmuKind::Tdp));
    of::<Npt>(nested(MmuKind::Direct));
    of::<X86<5>>(shadow());
}

/// A clone has no shadow pages. Its guest's tables are shadowed when the guest uses them, and stores to them concern
/// only the clone.
#[test]
fn a_clone_shadows_the_tables_for_itself() {
    fn of<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::PAGE);
        guest.set(NONE);
        assert_eq!(guest.cpu.page(5, Read), DATA + 5);
        let child = Arc::new(Vm::fork_from(&guest.vm).unwrap());
        let mut cpu = Cpu {
            vcpu: child.create_vcpu().unwrap(),
            memory: guest.memory.clone(),
            tables: TABLES,
        };
        assert_eq!(cpu.page(5, Read), DATA + 5);
        child.audit().unwrap();
        guest.vm.audit().unwrap();
    }
    of::<Ept>(nested(MmuKind::Tdp));
    of::<X86<5>>(shadow());
}

/// The guest has huge pages that contain code. NX splits the leaves, and recovery zaps the tables of the splits.
#[test]
fn code_splits_a_huge_page_of_the_guests_and_it_comes_back() {
    fn of<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::MEGA);
        guest.set(NONE);
        for (name, value) in [
            ("nx_huge_pages", "on"),
            ("nx_huge_pages_recovery_ratio", "1"),
        ] {
            guest.vm.set_policy(Setting::parse(name, value).unwrap());
        }
        guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
        let page = MIB2 + 3;
        assert_eq!(guest.cpu.page(page, Write), DATA + 3);
        assert_eq!(guest.cpu.page(page, Execute), DATA + 3);
        let split = guest.vm.stats().nx_lpage_splits;
        assert!(split > 0);
        assert_eq!(guest.vm.recover_nx_huge_pages(), split);
        assert_eq!(guest.cpu.page(page, Execute), DATA + 3);
        guest.vm.audit().unwrap();
    }
    of::<Npt>(nested(MmuKind::Tdp));
    of::<X86<5>>(shadow());
}

/// Two vCPUs. The second is in another address space, as in SMM, and stores to tables that the first address space
/// shadows.
struct TwoSpaces<F: Format> {
    guest: Guest<F>,
    other: Cpu<F>,
}

impl<F: Format> TwoSpaces<F> {
    fn new(config: Config) -> Self {
        let guest = Guest::<F>::new(config.with_spaces(2), Level::PAGE);
        for space in 0..2 {
            guest.vm.set_memory_region(space, &region()).unwrap();
        }
        guest.memory.map(OTHERS[3], 3 * MIB2, USED);
        let mut other = guest.cpu(TABLES);
        other.vcpu.use_space(1);
        let mut two = TwoSpaces { guest, other };
        assert_eq!(two.guest.cpu.page(1, Read), DATA + 1);
        two
    }

    /// Makes the second vCPU store an entry, by which a directory refers to another table of level 1.
    fn store(&mut self) -> bool {
        self.other.store(TABLES[2], 0, OTHERS[3] << 12 | USED)
    }

    /// Checks that the first vCPU uses the other table after it has flushed.
    fn follows(mut self, flush: fn(&mut Cpu<F>)) {
        flush(&mut self.guest.cpu);
        assert_eq!(self.guest.cpu.page(1, Read), 3 * MIB2 + 1);
        self.guest.vm.audit().unwrap();
    }

    /// Both address spaces shadow the tables.
    fn told(flush: fn(&mut Cpu<F>), config: Config) {
        let mut two = Self::new(config);
        assert_eq!(two.other.page(1, Read), DATA + 1);
        assert!(two.store(), "the table is tracked");
        // Both vCPUs use the other table at once.
        assert_eq!(two.other.page(1, Read), 3 * MIB2 + 1);
        assert_eq!(two.guest.cpu.page(1, Read), 3 * MIB2 + 1);
        two.follows(flush);
    }

    /// Only the first vCPU's address space shadows the tables, so the second vCPU's store is not noticed.
    fn untold(flush: fn(&mut Cpu<F>), config: Config) {
        let mut two = Self::new(config);
        flush(&mut two.guest.cpu);
        two.store();
        two.follows(flush);
    }

    /// The second vCPU has left the other address space when the first vCPU flushes.
    fn left(flush: fn(&mut Cpu<F>), config: Config) {
        let mut two = Self::new(config);
        flush(&mut two.guest.cpu);
        two.store();
        two.other.vcpu.use_space(0);
        two.follows(flush);
    }

    /// The second vCPU was dropped before the first vCPU flushes.
    fn gone(flush: fn(&mut Cpu<F>), config: Config) {
        let mut two = Self::new(config);
        two.store();
        two.other = two.guest.cpu(TABLES);
        two.follows(flush);
    }
}

fn flush<F: Format>(cpu: &mut Cpu<F>) {
    let mut words = cpu.memory.words();
    cpu.vcpu.enter(0).flush_guest(&mut words);
}

/// INVLPG drops a processor's cached entries of directories, for all addresses.
fn invlpg<F: Format>(cpu: &mut Cpu<F>) {
    let paging = GuestPaging {
        reserves_table_global: true,
        ..paging(cpu.tables[0] << 12)
    };
    let mut words = cpu.memory.words();
    let _no_cpu_remembers_any = cpu.vcpu.enter(0).invlpg(7 << 12, &paging, &mut words);
}

macro_rules! of_two_spaces {
    ($($name:ident: $of:ident,)*) => {$(
        #[test]
        fn $name() {
            for flush in [flush, invlpg] {
                TwoSpaces::<X86<5>>::$of(flush, shadow());
            }
            for flush in [flush, invlpg] {
                TwoSpaces::<Ept>::$of(flush, nested(MmuKind::Tdp));
            }
        }
    )*};
}

of_two_spaces! {
    a_store_in_smm_to_tables_of_both_address_spaces_is_told_to_both: told,
    a_store_in_smm_to_tables_of_the_other_address_space_is_followed: untold,
    what_was_stored_in_smm_is_followed_after_it: left,
    what_a_vcpu_has_stored_in_smm_is_followed_when_it_is_gone: gone,
}

/// Runs a test, a function that is generic over the format, with each MMU that shadows a guest's tables.
macro_rules! on_each_shadow {
    ($($test:ident,)*) => {$(
        #[test]
        fn $test() {
            each_shadow::$test::<X86<5>>(shadow());
            each_shadow::$test::<Ept>(nested(MmuKind::Tdp));
            each_shadow::$test::<Npt>(nested(MmuKind::Direct));
        }
    )*};
}

on_each_shadow! {
    each_kind_of_log_names_what_a_guest_writes_by_its_tables,
    a_ring_names_what_a_guest_writes_by_its_tables,
    a_guests_pages_are_aged_and_replaced,
    slots_change_under_a_guests_tables,
    prefault_and_prefetch_leave_a_guests_tables_as_they_are,
    a_promotion_leaves_a_guests_tables_as_they_are,
}

mod each_shadow {
    use super::*;

    fn policy<F: Format>(guest: &Guest<F>, name: &str, value: &str) {
        guest.vm.set_policy(Setting::parse(name, value).unwrap());
    }

    /// When dirty logging starts, the leaves are huge, and are split. Then logging stops.
    pub fn each_kind_of_log_names_what_a_guest_writes_by_its_tables<F: Format>(config: Config) {
        for method in ["write-protect", "dirty-bit", "buffer"] {
            let mut guest = Guest::<F>::new(config, Level::MEGA);
            policy(&guest, "dirty_log", method);
            policy(&guest, "dirty_log_reads", "off");
            guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
            guest.set(NONE);
            let (small, large) = (5, MIB2 + 6);
            for page in [small, large] {
                guest.cpu.page(page, Write);
            }
            guest.set(LOGGED);
            let named = |guest: &Guest<F>| {
                let mut bitmap = vec![0u64; FRAMES as usize / 64];
                guest.vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
                [5, 6].map(|page| bitmap[DATA as usize / 64] >> page & 1 != 0)
            };
            named(&guest);
            for written in [[true, false], [false, true], [true, true]] {
                for (page, _) in [small, large].iter().zip(written).filter(|(_, is)| *is) {
                    guest.cpu.page(*page, Write);
                }
                assert_eq!(named(&guest), written, "{method}");
                assert_eq!(named(&guest), [false; 2], "{method}");
            }
            guest.set(NONE);
            assert_eq!(guest.cpu.page(small, Write), DATA + 5);
            assert_eq!(guest.cpu.page(large, Write), DATA + 6);
            guest.vm.audit().unwrap();
        }
    }

    pub fn a_ring_names_what_a_guest_writes_by_its_tables<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::PAGE);
        guest.vm.use_dirty_rings();
        policy(&guest, "dirty_log_reads", "off");
        let mut client = slat_model::RingClient::new();
        guest.cpu.vcpu.set_dirty_ring(client.ring()).unwrap();
        guest.set(LOGGED);
        for round in 0..2 {
            guest.cpu.page(5, Write);
            let mut pages = Vec::new();
            while let Some(page) = client.collect() {
                pages.push(page.page);
            }
            assert!(pages.contains(&(DATA + 5)), "{round}: {pages:?}");
            guest.vm.reset_dirty_rings();
        }
        guest.vm.audit().unwrap();
    }

    pub fn a_guests_pages_are_aged_and_replaced<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::PAGE);
        guest.set(NONE);
        let page = DATA + 5..DATA + 6;
        guest.cpu.page(5, Write);
        assert!(guest.vm.age(HostMemory::hvas(&page), true) > 0);
        assert_eq!(guest.vm.age(HostMemory::hvas(&page), false), 0);
        guest.cpu.page(5, Read);
        assert!(guest.vm.age(HostMemory::hvas(&page), false) > 0);
        // Invalidates the page, and then a table.
        for pages in [page, TABLES[3]..TABLES[3] + 1] {
            let guard = guest.vm.invalidate(HostMemory::hvas(&pages));
            guest.platform.host.change(&pages, remap(Level::PAGE));
            drop(guard);
            let found = guest.cpu.try_virtual(5 << 12, Write).unwrap();
            let host = guest.platform.host.get(DATA + 5).unwrap();
            assert_eq!(found.host.pfn(), host.pfn);
        }
        guest.vm.audit().unwrap();
    }

    pub fn slots_change_under_a_guests_tables<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::MEGA);
        guest.set(NONE);
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        let lower = region().with_size((DATA + 4) << 12);
        let mut upper = region().with_size((FRAMES - DATA - 4) << 12);
        (upper.slot, upper.gpa) = (1, Gpa((DATA + 4) << 12));
        upper.backing = HostMemory::hva(DATA + 4);
        let both = [Change::Set(lower), Change::Set(upper)];
        guest.vm.set_memory_regions(0, &both).unwrap();
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        // The slot becomes read-only, and is then deleted.
        let read_only = upper.with_flags(SlotFlags::READONLY);
        let gpa = Gpa((DATA + 5) << 12);
        let mmio = Err(VirtualStop::Stop(Stop::Mmio { gpa }));
        guest.vm.remove_memory_region(0, 1).unwrap();
        for _ in 0..2 {
            assert_eq!(guest.cpu.try_virtual(5 << 12, Read), mmio);
        }
        guest.vm.set_memory_region(0, &read_only).unwrap();
        assert_eq!(guest.cpu.page(5, Read), DATA + 5);
        assert_eq!(guest.cpu.try_virtual(5 << 12, Write), mmio);
        assert_eq!(guest.cpu.page(3, Write), DATA + 3);
        guest.vm.audit().unwrap();
    }

    pub fn prefault_and_prefetch_leave_a_guests_tables_as_they_are<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::PAGE);
        guest.set(NONE);
        policy(&guest, "prefetch", "64");
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        let all = Gpa(0)..Gpa(FRAMES << 12);
        let prefaulted = {
            let mut vcpu = guest.cpu.vcpu.enter(0);
            loop {
                match vcpu.prefault(all.clone()) {
                    Err(Stop::Retry) => vcpu.quiesce(),
                    answer => break answer,
                }
            }
        };
        assert!(prefaulted.is_ok_and(|bytes| bytes > 0), "{prefaulted:?}");
        guest.vm.audit().unwrap();
        for page in [0, 6, 70] {
            assert_eq!(guest.cpu.page(page, Write), DATA + page);
        }
        assert!(guest.cpu.store(TABLES[2], 0, OTHERS[3] << 12 | USED));
        guest.memory.map(OTHERS[3], 3 * MIB2, USED);
        assert_eq!(guest.cpu.page(6, Read), 3 * MIB2 + 6);
        guest.vm.audit().unwrap();
    }

    pub fn a_promotion_leaves_a_guests_tables_as_they_are<F: Format>(config: Config) {
        let mut guest = Guest::<F>::new(config, Level::MEGA);
        guest.set(NONE);
        policy(&guest, "huge_pages", "off");
        guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
        for page in [5, MIB2 + 6] {
            guest.cpu.page(page, Write);
        }
        guest.cpu.physical(3 * MIB2 + 7, Write);
        policy(&guest, "huge_pages", "on");
        guest.vm.promote(&mut Promotion::default(), usize::MAX);
        guest.vm.audit().unwrap();
        assert_eq!(guest.cpu.page(5, Write), DATA + 5);
        assert_eq!(guest.cpu.page(MIB2 + 6, Write), DATA + 6);
        assert!(
            guest
                .cpu
                .store(TABLES[2], 1, (2 * MIB2) << 12 | USED | HUGE)
        );
        assert_eq!(guest.cpu.page(MIB2 + 6, Write), 2 * MIB2 + 6);
        guest.vm.audit().unwrap();
    }
}

/// The client changes an entry of the guest's table so that it maps memory instead of a device. As in KVM, the old MMIO
/// entry may be used until the guest's next flush. If the client has reported its stores, that may be any flush.
#[test]
fn a_device_that_the_client_replaces_by_memory_is_that_after_a_flush() {
    fn of<F: Format>(config: Config, flush: fn(&mut Cpu<F>)) {
        const AT: u64 = 7 << 12;
        let mut guest = Guest::<F>::new(config, Level::PAGE);
        guest.set(NONE);
        guest.memory.put(TABLES[3], 7, (2 * FRAMES) << 12 | USED);
        let gpa = Gpa((2 * FRAMES) << 12);
        let mmio = Err(VirtualStop::Stop(Stop::Mmio { gpa }));
        for _ in 0..2 {
            assert_eq!(guest.cpu.try_virtual(AT, Read), mmio);
        }
        guest.memory.put(TABLES[3], 7, (DATA + 7) << 12 | USED);
        guest.vm.guest_memory_changed();
        flush(&mut guest.cpu);
        assert_eq!(guest.cpu.page(7, Write), DATA + 7);
        // Now the entry maps a device instead of memory.
        guest.memory.put(TABLES[3], 7, (2 * FRAMES) << 12 | USED);
        guest.vm.guest_memory_changed();
        flush(&mut guest.cpu);
        assert_eq!(guest.cpu.try_virtual(AT, Read), mmio);
        guest.vm.audit().unwrap();
    }
    for flush in [flush, invlpg] {
        of::<X86<5>>(shadow(), flush);
    }
    for flush in [flush, invlpg] {
        of::<Ept>(nested(MmuKind::Tdp), flush);
    }
}
