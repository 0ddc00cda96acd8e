//! Tests that call a fault's steps one by one, make changes between two steps, and cover each result of the platform.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::convert::Infallible;
use std::boxed::Box;
use std::sync::Mutex;

use super::*;
use crate::addr::{Hpa, Hva, Pfn};
use crate::format::{Npt, Stage2, X86};
use crate::guest_walk::{GuestPaging, Mode};
use crate::heap::Shared;
use crate::mmu::MmuKind;
use crate::platform::ResolveError;
use crate::policy::Setting;
use crate::slots::{Change, Edit, MemoryAttributes, OwnedSlot, Region, SlotFlags};
use crate::stats::Stats;
use crate::sync::quiesce::Attention;
use crate::table::heap_platform::{Heap, Resolve};
use crate::vcpu::{HostWords, VirtualPage, VirtualStop};
use crate::vm::{Config, DirtyGfn, DirtyLog, DirtyRing, Vm};

const PAGES: u64 = 512;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;
const GPA: Gpa = Gpa(7 << 12);
/// An address that no memslot contains.
const BEYOND: Gpa = Gpa(PAGES << 13);

fn region(flags: SlotFlags) -> Region {
    Region::new(0, Gpa(0), PAGES << 12, Hva(0)).with_flags(flags)
}

fn vm<F: Format>(region: &Region) -> Arc<Vm<Heap, F>> {
    let vm = Vm::new(Arc::new(Heap::default()), Config::default()).unwrap();
    vm.set_memory_region(0, region).unwrap();
    vm
}

/// Makes the platform resolve guest frame n to host frame n, in a host mapping of `level`.
fn map_pages(vm: &Vm<Heap, impl Format>, level: Level) {
    *vm.platform.resolve.lock().unwrap() = match level {
        Level::PAGE => |of| Ok(HostPage::new(Pfn(of.gfn.0), Level::PAGE)),
        _ => |of| Ok(HostPage::new(Pfn(of.gfn.0), Level::MEGA)),
    };
}

/// Makes a new vCPU fault for a write to `GPA`, and calls `meanwhile` after the fault has chosen its leaf. Returns why
/// the install failed (`None`: it did not), and the vCPU's counts.
fn write_while<F: Format>(
    vm: &Arc<Vm<Heap, F>>,
    attention: u32,
    meanwhile: impl FnOnce(),
) -> (Option<Next>, Stats) {
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    vcpu.make_room(GPA).unwrap();
    let walk = vcpu.pause(crate::table::Reached::nothing::<F>(
        vcpu.key(F::GRANULE.gfn(GPA)),
    ));
    let mut fault = Fault::new(&mut vcpu, walk, None, GPA, Access::Write, true);
    assert!(fault.find_slot().is_ok());
    fault.page = Some(HostPage::new(Pfn(7), Level::PAGE));
    let leaf = fault.choose_leaf();
    meanwhile();
    fault.vcpu.attention().raise(attention);
    let why = fault.install(leaf).err();
    vcpu.leave();
    (why, vcpu.stats())
}

fn is_mapped<F: Format>(vm: &Vm<Heap, F>) -> bool {
    vm.lookup(0, F::GRANULE.gfn(GPA)).is_some()
}

#[test]
fn a_write_is_noted_in_the_log_of_its_slot_or_installed_nowhere() {
    let bitmap = || DirtyLog::bitmap(LogKind::Bitmap, PAGES, false).unwrap();
    let new_log = || Shared::try_new(bitmap()).unwrap();
    for (flags, other) in [(LOGGED, Some(new_log())), (SlotFlags(0), None)] {
        let vm = vm::<Npt>(&region(LOGGED));
        let mut change = vm.spaces[0].slots.change(|_| ());
        change.catch_up(&vm.readers, |_, _| ());
        let new = OwnedSlot::new(&region(flags), Npt::GRANULE, other.clone());
        let edit = Edit {
            id: 0,
            new: Some(new),
        };
        // The slot is replaced in a new published set, but the invalidation sequence is not raised.
        let (why, did) = write_while(&vm, 0, || {
            change.replace(&mut [edit], &vm.readers).unwrap();
        });
        assert!(matches!(why, Some(Next::Again)));
        assert_eq!((is_mapped(&vm), did.pf_retried), (false, 1));
        let is_marked = |log: &Shared<DirtyLog>| (0..PAGES).any(|page| log.is_marked(page));
        assert!(!other.as_ref().is_some_and(is_marked));
    }
    // If the slot does not change during the fault, the fault installs its leaf, and the log contains the write.
    let vm = vm::<Npt>(&region(LOGGED));
    assert!(write_while(&vm, 0, || ()).0.is_none());
    let change = vm.spaces[0].slots.change(|_| ());
    let log = change.by_id(0).unwrap().share_log().unwrap();
    assert!((0..PAGES).all(|page| log.is_marked(page) == (page == 7)));
}

#[test]
fn a_fault_waits_for_a_move_only_if_the_log_is_in_the_leaves() {
    for (method, waits) in [("dirty-bit", true), ("write-protect", false)] {
        let vm = vm::<Npt>(&region(SlotFlags(0)));
        vm.set_policy(Setting::parse("dirty_log", method).unwrap());
        vm.set_memory_region(0, &region(LOGGED)).unwrap();
        let moving = vm.in_progress.slot_moves();
        // A bit in the attention word makes the vCPU stop waiting for the move.
        let (why, did) = write_while(&vm, Attention::FLUSH << 1, || ());
        assert_eq!(matches!(why, Some(Next::Stop(Stop::Retry))), waits);
        assert_eq!((is_mapped(&vm), did.pf_retried), (!waits, u64::from(waits)));
        drop(moving);
        assert!(write_while(&vm, 0, || ()).0.is_none());
    }
}

#[test]
fn what_was_looked_up_before_the_sequence_was_raised_is_not_installed() {
    let vm = vm::<Stage2<48>>(&region(SlotFlags(0)));
    let (why, did) = write_while(&vm, 0, || vm.in_progress.raise());
    assert!(matches!(why, Some(Next::Again)));
    assert_eq!((is_mapped(&vm), did.pf_retried), (false, 1));
    assert!(write_while(&vm, 0, || ()).0.is_none());
    assert!(is_mapped(&vm));
}

#[test]
fn each_answer_of_the_platform_stops_an_access_in_its_own_way() {
    let shared = region(SlotFlags(0));
    let both = shared.with_private(Some(Hva(1 << 30)));
    let private_alone = shared.with_private(Some(Hva(0)));
    for (region, is_private) in [
        (shared, false),
        (both, false),
        (both, true),
        (private_alone, false),
        (private_alone, true),
    ] {
        let vm = vm::<Npt>(&region);
        if is_private {
            let gfns = Gfn(0)..Gfn(PAGES);
            vm.set_memory_attributes(gfns, MemoryAttributes::PRIVATE)
                .unwrap();
        }
        let backing = if is_private {
            region.private.unwrap()
        } else {
            region.backing
        };
        let hva = Hva(backing.0 + GPA.0);
        let fault = |absent| Stop::MemoryFault {
            gpa: GPA,
            access: Access::Read,
            private: is_private,
            absent,
        };
        let error = ResolveError::BadAddress;
        let unresolved = match is_private || region == private_alone {
            true => fault(false),
            false => Stop::BadAddress {
                gpa: GPA,
                hva,
                error,
            },
        };
        let mut vcpu = vm.create_vcpu().unwrap();
        let mut vcpu = vcpu.enter(0);
        let interrupted: Resolve = |_| Err(ResolveError::Interrupted);
        for (answer, stop) in [
            (interrupted, Stop::Retry),
            (|_| Err(ResolveError::Absent), fault(true)),
            (|_| Err(ResolveError::BadAddress), unresolved),
        ] {
            *vm.platform.resolve.lock().unwrap() = answer;
            assert_eq!(vcpu.translate(GPA, Access::Read), Err(stop));
        }
        assert_eq!(vcpu.stats().pf_emulate, 0);
    }
}

#[test]
fn a_private_page_without_private_memory_is_no_device() {
    let vm = vm::<Npt>(&region(SlotFlags(0)));
    let all = Gfn(0)..Gfn(4 * PAGES);
    vm.set_memory_attributes(all, MemoryAttributes::PRIVATE)
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    for gpa in [GPA, BEYOND] {
        let fault = Stop::MemoryFault {
            gpa,
            access: Access::Write,
            private: true,
            absent: false,
        };
        assert_eq!(vcpu.translate(gpa, Access::Write), Err(fault));
    }
    assert_eq!(vcpu.stats().pf_emulate, 0);
}

#[test]
fn each_access_that_the_client_emulates_is_counted_once() {
    let vm = vm::<Npt>(&region(SlotFlags::READONLY));
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    let last = Gpa(!0xfff);
    for (count, gpa) in (1..).zip([GPA, GPA, BEYOND, last, last]) {
        assert_eq!(vcpu.translate(gpa, Access::Write), Err(Stop::Mmio { gpa }));
        let did = vcpu.stats();
        assert_eq!((did.pf_emulate, did.mmio_cached), (count, 0));
    }
    // The MMIO entry that the fault has installed serves the next access.
    let mmio = Stop::Mmio { gpa: BEYOND };
    assert_eq!(vcpu.translate(BEYOND, Access::Read), Err(mmio));
    let did = vcpu.stats();
    assert_eq!((did.pf_emulate, did.mmio_cached), (5, 1));
    assert_eq!(did.pf_mmio_spte_created, 1);
}

#[test]
fn a_bitmap_is_marked_also_by_a_cpu_that_has_a_ring() {
    let vm = vm::<Npt>(&region(LOGGED));
    map_pages(&vm, Level::PAGE);
    let entries: Vec<DirtyGfn> = (0..1024).map(|_| DirtyGfn::new()).collect();
    let ring = Arc::new(DirtyRing::new(entries).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(ring).unwrap();
    assert!(vcpu.enter(0).translate(GPA, Access::Write).unwrap().write);
    let mut bitmap = [0; PAGES as usize / 64];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    assert_eq!(bitmap.map(u64::count_ones).iter().sum::<u32>(), 1);
}

#[test]
fn a_table_made_for_nx_is_replaced_when_that_is_off() {
    let vm = vm::<Npt>(&region(SlotFlags(0)));
    map_pages(&vm, Level::MEGA);
    let set = |value| vm.set_policy(Setting::parse("nx_huge_pages", value).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut level = |gpa, access| {
        let mut vcpu = vcpu.enter(0);
        loop {
            match vcpu.translate(gpa, access) {
                Err(Stop::Retry) => vcpu.quiesce(),
                found => return found.unwrap().level,
            }
        }
    };
    set("on");
    assert_eq!(level(GPA, Access::Execute), Level::PAGE);
    assert_eq!(level(Gpa(8 << 12), Access::Read), Level::PAGE);
    set("off");
    assert_eq!(level(Gpa(9 << 12), Access::Read), Level::MEGA);
}

#[test]
fn a_fault_is_spurious_if_another_cpu_has_mapped_the_page_and_fixed_if_that_lacked_a_right() {
    for (first, flags, counts) in [
        (Access::Write, SlotFlags(0), (0, 1)),
        (Access::Write, LOGGED, (0, 1)),
        (Access::Read, LOGGED, (1, 0)),
    ] {
        let vm = vm::<Npt>(&region(flags));
        vm.set_policy(Setting::parse("dirty_log_reads", "off").unwrap());
        map_pages(&vm, Level::PAGE);
        let mut other = vm.create_vcpu().unwrap();
        let (why, did) = write_while(&vm, 0, || {
            other.enter(0).translate(GPA, first).unwrap();
        });
        assert!(why.is_none());
        assert_eq!((did.pf_fixed, did.pf_spurious), counts);
        assert_eq!((did.pages_4k, vm.stats().pages_4k), (0, 1));
    }
}

#[test]
fn a_split_that_gives_the_right_is_a_fix() {
    fn check<F: Format>() {
        let vm = vm::<F>(&region(SlotFlags(0)));
        map_pages(&vm, Level::MEGA);
        vm.set_policy(Setting::parse("nx_huge_pages", "on").unwrap());
        let mut vcpu = vm.create_vcpu().unwrap();
        let mut vcpu = vcpu.enter(0);
        assert!(!vcpu.translate(GPA, Access::Read).unwrap().execute);
        while vcpu.translate(GPA, Access::Execute) == Err(Stop::Retry) {
            vcpu.quiesce();
        }
        let did = vcpu.stats();
        assert_eq!((did.splits, did.pf_fixed, did.pf_spurious), (1, 2, 0));
    }
    check::<Npt>();
    // The same with a format that requires break-before-make.
    check::<Stage2<48>>();
}

#[test]
fn a_protected_leaf_is_not_believed_while_a_slot_leaves() {
    let vm = vm::<Npt>(&region(LOGGED));
    vm.set_policy(Setting::parse("dirty_log_reads", "off").unwrap());
    map_pages(&vm, Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    let mut write = |gpa| {
        assert!(!vcpu.translate(gpa, Access::Read).unwrap().write);
        let before = vcpu.stats();
        assert!(vcpu.translate(gpa, Access::Write).unwrap().write);
        vcpu.stats().since(&before)
    };
    let leaving = vm.in_progress.slot_leaves();
    let did = write(GPA);
    assert_eq!((did.pf_fixed, did.pf_fast), (1, 0));
    drop(leaving);
    let did = write(Gpa(8 << 12));
    assert_eq!((did.pf_fixed, did.pf_fast), (1, 1));
}

/// While the fault asks the host for the page, the slot is deleted, or moved by a page.
#[test]
fn a_page_of_a_slot_that_has_left_is_not_installed() {
    let shared = region(SlotFlags(0));
    for change in [
        Change::Remove(0),
        Change::Set(shared.with_gpa(Gpa(1 << 12))),
    ] {
        let vm = vm::<Npt>(&shared);
        map_pages(&vm, Level::PAGE);
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(0);
        vcpu.make_room(GPA).unwrap();
        let walk = vcpu.pause(crate::table::Reached::nothing::<Npt>(
            vcpu.key(Npt::GRANULE.gfn(GPA)),
        ));
        let mut fault = Fault::new(&mut vcpu, walk, None, GPA, Access::Read, true);
        assert!(fault.find_slot().is_ok());
        (fault.vcpu).outside(|vcpu| vcpu.vm().set_memory_regions(0, &[change]).unwrap());
        fault.page = Some(HostPage::new(Pfn(7), Level::PAGE));
        let leaf = fault.choose_leaf();
        assert!(matches!(fault.install(leaf), Err(Next::Again)));
        vcpu.leave();
        assert_eq!((is_mapped(&vm), vcpu.stats().pf_retried), (false, 1));
    }
}

/// A guest that has its own page tables. Guest frame n is in host frame n.
struct Guest {
    vm: Arc<Vm<Heap, X86<5>>>,
    memory: Words,
}

/// The guest's memory, in 64-bit words.
struct Words(Vec<u64>);

impl HostWords for Words {
    type Error = Infallible;

    fn read(&mut self, host: Hpa, _: usize) -> Result<u64, Infallible> {
        Ok(self.0[host.0 as usize / 8])
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        _: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Infallible> {
        assert_eq!(self.0[host.0 as usize / 8], old);
        self.0[host.0 as usize / 8] = new;
        Ok(true)
    }
}

/// The guest's tables, from level 4 to level 1. The last table maps the first 512 virtual pages to the frames from
/// `DATA` on.
const TABLES: [u64; 4] = [16, 17, 18, 19];
const DIRECTORY: u64 = TABLES[2];
const TABLE: u64 = TABLES[3];
const DATA: u64 = 64;
/// Flags of a guest's entry: present, writable, user, accessed, dirty.
const USED: u64 = 0x67;
const UNUSED: u64 = 0x07;
const READ_ONLY: u64 = 0x65;
const USER: u64 = 0x04;

impl Guest {
    /// The number of pages in the guest's memory: two huge pages.
    const PAGES: u64 = 1024;

    /// Makes a guest whose memory the host maps at `level`.
    fn new(level: Level) -> Self {
        let config = Config::default().with_mmu(MmuKind::Shadow);
        let vm = Vm::new(Arc::new(Heap::default()), config).unwrap();
        let region = Region::new(0, Gpa(0), Self::PAGES << 12, Hva(0));
        vm.set_memory_region(0, &region).unwrap();
        map_pages(&vm, level);
        let memory = Words(vec![0; Self::PAGES as usize * 512]);
        let mut guest = Guest { vm, memory };
        for tables in TABLES.windows(2) {
            guest.put(tables[0], 0, tables[1], USED);
        }
        (0..512).for_each(|page| guest.put(TABLE, page, DATA + page, USED));
        guest
    }

    /// Writes entry `index` of the table in frame `table`. Does not report the store to the MMU.
    fn put(&mut self, table: u64, index: u64, frame: u64, flags: u64) {
        self.memory.0[(table * 512 + index) as usize] = frame << 12 | flags;
    }

    /// Accesses virtual page `page` in the state `paging`. Returns the translation, and what the access has added to
    /// the VM's counts.
    fn access_in(
        &mut self,
        vcpu: &mut Vcpu<Heap, X86<5>>,
        paging: &GuestPaging,
        page: u64,
        access: Access,
    ) -> (VirtualPage, Stats) {
        let before = self.vm.stats();
        let found = loop {
            match vcpu.translate_virtual(page << 12, access, paging, &mut self.memory) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                found => break found.unwrap(),
            }
        };
        (found, self.vm.stats().since(&before))
    }

    fn access(
        &mut self,
        vcpu: &mut Vcpu<Heap, X86<5>>,
        page: u64,
        access: Access,
    ) -> (VirtualPage, Stats) {
        self.access_in(vcpu, &paging(TABLES[0]), page, access)
    }

    /// Makes an access to virtual page `page`, for which the guest must get a page fault. Returns the error code.
    fn page_fault(&mut self, vcpu: &mut Vcpu<Heap, X86<5>>, page: u64, access: Access) -> u32 {
        loop {
            match vcpu.translate_virtual(page << 12, access, &paging(TABLES[0]), &mut self.memory) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                Err(VirtualStop::PageFault { code }) => return code,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Returns the paging state of a user program whose table of level 4 is in frame `table`.
fn paging(table: u64) -> GuestPaging {
    GuestPaging {
        cr3: table << 12,
        mode: Mode::Level4,
        user: true,
        write_protect: true,
        no_execute: true,
        smep: false,
        smap: false,
        pkru: 0,
        pdptes: None,
        physical_bits: 40,
        reserves_table_global: false,
    }
}

/// In KVM, the shadow page of a level 1 table to which the guest may store without a fault is called `unsync`.
#[test]
fn stores_to_a_table_are_told_of_except_to_one_of_level_1() {
    let mut guest = Guest::new(Level::PAGE);
    guest.put(TABLE, 1, DATA + 1, UNUSED);
    for (page, table) in (2..).zip([DIRECTORY, DIRECTORY, TABLE, TABLE]) {
        guest.put(TABLE, page, table, USED);
    }
    let vm = guest.vm.clone();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    guest.access(&mut vcpu, 0, Access::Read);
    // The MMU sets flags in the guest's table: such a write does not count as a store of the guest.
    let (found, did) = guest.access(&mut vcpu, 1, Access::Write);
    assert!(found.write);
    assert_eq!(guest.memory.0[(TABLE * 512 + 1) as usize] & 0xfff, USED);
    assert_eq!((did.pf_fixed, did.mmu_unsync), (1, 0));
    for (page, access, is_told, unsynced) in [
        (2, Access::Read, false, 0),
        (3, Access::Write, true, 0),
        (4, Access::Read, false, 0),
        (5, Access::Write, false, 1),
    ] {
        let (found, did) = guest.access(&mut vcpu, page, access);
        assert_eq!(found.write, unsynced > 0, "page {page}");
        let told = found.tracked;
        assert_eq!(told, is_told.then_some(Gpa(DIRECTORY << 12)), "page {page}");
        let told = u64::from(is_told);
        assert_eq!((did.pf_emulate, did.pf_fixed), (told, 1 - told));
        assert_eq!((did.pf_spurious, did.mmu_unsync), (0, unsynced));
    }
}

/// The guest changes its tables without reporting the stores. The fault must zap the shadow entry that differs from the
/// guest's tables, and no other entry.
#[test]
fn a_fault_replaces_what_the_guests_tables_do_not_say_any_more() {
    const OTHER: u64 = 20;
    let mut guest = Guest::new(Level::PAGE);
    let vm = guest.vm.clone();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    guest.put(TABLE, 0, DATA, READ_ONLY);
    for page in [0, 1] {
        guest.access(&mut vcpu, page, Access::Read);
    }
    guest.put(TABLE, 0, DATA + 7, USED);
    let (found, did) = guest.access(&mut vcpu, 0, Access::Write);
    assert_eq!(found.host, Hpa((DATA + 7) << 12));
    assert_eq!((did.pf_fixed, did.pf_spurious), (1, 0));
    assert_eq!((did.zapped, did.mmu_pde_zapped), (1, 0));
    // The guest replaces its whole level 1 table.
    guest.put(OTHER, 2, DATA + 9, USED);
    guest.put(DIRECTORY, 0, OTHER, USED);
    let (found, did) = guest.access(&mut vcpu, 2, Access::Write);
    assert_eq!(found.host, Hpa((DATA + 9) << 12));
    assert_eq!((did.pf_fixed, did.pf_spurious), (1, 0));
    assert_eq!((did.zapped, did.mmu_pde_zapped), (0, 1));
    // The guest's entry maps the same page as before, but only for supervisors.
    guest.put(OTHER, 3, DATA, READ_ONLY);
    guest.access(&mut vcpu, 3, Access::Read);
    guest.put(OTHER, 3, DATA, USED & !USER);
    let mut supervisor = paging(TABLES[0]);
    supervisor.user = false;
    let (_, did) = guest.access_in(&mut vcpu, &supervisor, 3, Access::Write);
    assert_eq!((did.zapped, did.mmu_pde_zapped), (1, 0));
    assert_eq!(guest.page_fault(&mut vcpu, 3, Access::Read), 5);
}

/// Like the test above, for a huge page of the guest that becomes a table of small pages.
#[test]
fn a_fault_splits_no_huge_leaf_that_the_guests_tables_do_not_say_any_more() {
    const OTHER: u64 = 20;
    const HUGE: u64 = 0x80;
    let mut guest = Guest::new(Level::MEGA);
    let vm = guest.vm.clone();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    guest.put(DIRECTORY, 1, 512, READ_ONLY | HUGE);
    guest.access(&mut vcpu, 512, Access::Read);
    guest.put(OTHER, 0, 512 + 7, USED);
    guest.put(DIRECTORY, 1, OTHER, USED);
    let (found, did) = guest.access(&mut vcpu, 512, Access::Write);
    assert_eq!(found.host, Hpa((512 + 7) << 12));
    assert_eq!((did.zapped, did.splits, did.mmu_pde_zapped), (1, 0, 0));
    assert_eq!(guest.page_fault(&mut vcpu, 512 + 1, Access::Read), 4);
}

/// Another vCPU begins to track the root's guest table, and its flush is in progress. Until that flush is done, only a
/// fault may return this root, because it must be compared with the guest's table afterwards.
#[test]
fn the_root_that_a_fault_has_reached_serves_the_next_accesses() {
    const ROOT: u64 = 20;
    const PAGE: u64 = 3 << 18;
    let mut guest = Guest::new(Level::PAGE);
    guest.put(ROOT, 0, TABLE, USED);
    guest.put(TABLE, 1, ROOT, USED);
    let with_root = GuestPaging {
        mode: Mode::Pae,
        pdptes: Some([0, 0, 0, ROOT << 12 | 1]),
        ..paging(0)
    };
    let vm = guest.vm.clone();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    // This write makes the page that contains the root table writable, so a flush is needed to begin tracking the
    // table.
    guest.access(&mut vcpu, 1, Access::Write);
    let faults = Arc::new(Mutex::new(Vec::new()));
    let (counted, vm_in_flush, words) =
        (faults.clone(), Arc::downgrade(&vm), guest.memory.0.clone());
    let in_flush = move || {
        let vm = vm_in_flush.upgrade().unwrap();
        vm.guest_memory_changed();
        let memory = Words(words.clone());
        let mut guest = Guest { vm, memory };
        let mut other = guest.vm.create_vcpu().unwrap();
        let mut other = other.enter(1);
        for _ in 0..2 {
            let (_, did) = guest.access_in(&mut other, &with_root, PAGE, Access::Read);
            counted.lock().unwrap().push(did.pf_taken);
        }
    };
    assert!(vm.platform.in_flush.set(Box::new(in_flush)).is_ok());
    guest.access_in(&mut vcpu, &with_root, PAGE, Access::Read);
    assert_eq!(*faults.lock().unwrap(), [1, 0]);
}
