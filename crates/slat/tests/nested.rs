//! Nested tables, shadowed beside a second level: the effects of range operations, logs and MMIO on a nested guest
//! (L2).
//!
//! `slat_model::guest` tests whether translations are those of a processor.

#[path = "common/guest.rs"]
mod guest;

use std::convert::Infallible;
use std::sync::Arc;

use guest::{HUGE, Memory, USED, paging};
use slat::format::{Npt5, Stage2};
use slat::guest_walk::{GuestPaging, Mode};
use slat::{
    Access::{self, *},
    Config, CreateVmError, DirtyLogMethod, DirtyLogReads, Ept, Format, Gfn, Gpa, Level, MmuKind,
    Prefetch, Region, Setting, SlotFlags, Stop, Translation, VirtualPage, VirtualStop, Vm,
};
use slat_model::{HostMemory, SimPlatform};

const PAGES: u64 = 4096;
/// The frames of L1's nested tables, from level 4 to level 1. The level 1 table maps the first 2 MiB of L2.
const TABLES: [u64; 4] = [16, 17, 18, 19];
/// The first frame of L2's memory: the level 1 table maps page i to frame `DATA + i`. From 2 MiB on, a huge page maps
/// L2's memory.
const DATA: u64 = 512;
const MIB2: u64 = 2 << 20;
/// An address of L2 that L1's nested tables map, but that is in no memslot.
const DEVICE: u64 = 510 << 12;

/// A hypervisor, L1, with a guest, L2.
struct Guest<F: Format> {
    platform: Arc<SimPlatform>,
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: slat::Vcpu<SimPlatform, F>,
    memory: Memory,
}

type Accessed = Result<VirtualPage, VirtualStop<Infallible>>;

impl<F: Format> Guest<F> {
    fn new(mmu: MmuKind, level: Level) -> Self {
        let platform = SimPlatform::at_level(PAGES, level);
        let config = Config::default().with_mmu(mmu).with_nested(true);
        let vm = Vm::new(platform.clone(), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let guest = Guest {
            platform,
            vcpu: vm.create_vcpu().unwrap(),
            vm,
            memory: Memory::new(PAGES),
        };
        guest.set(SlotFlags::default());
        guest.memory.link(&TABLES);
        guest.memory.map(TABLES[3], DATA, USED);
        guest
            .memory
            .put(TABLES[3], DEVICE >> 12, PAGES << 12 | USED);
        guest
            .memory
            .put(TABLES[2], 1, (2 * DATA) << 12 | USED | HUGE);
        guest
    }

    fn set(&self, flags: SlotFlags) {
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0)).with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    fn try_l2(&mut self, gpa: u64, access: Access) -> Accessed {
        let paging = GuestPaging {
            reserves_table_global: true,
            ..paging(TABLES[0] << 12)
        };
        self.try_with(&paging, gpa, access)
    }

    /// Makes an access of L2, whose second level is L1's tables in the state `paging`.
    fn try_with(&mut self, paging: &GuestPaging, gpa: u64, access: Access) -> Accessed {
        let mut words = self.memory.words();
        let mut vcpu = self.vcpu.enter(0);
        loop {
            match vcpu.translate_virtual(gpa, access, paging, &mut words) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                answer => return answer,
            }
        }
    }

    /// Makes the table of level 3 the page-directory-pointer entries of PAE tables. Returns the paging state without
    /// these entries, and the state with them.
    fn pae(&mut self) -> (GuestPaging, GuestPaging) {
        const PRESENT: u64 = 1;
        let pointer = TABLES[2] << 12 | PRESENT;
        self.memory.put(TABLES[1], 0, pointer);
        let in_memory = GuestPaging {
            mode: Mode::Pae,
            reserves_table_global: true,
            ..paging(TABLES[1] << 12)
        };
        let in_registers = GuestPaging {
            pdptes: Some([pointer, 0, 0, 0]),
            ..in_memory
        };
        (in_memory, in_registers)
    }

    /// Returns the frame of L1 that an access of L2 reaches.
    fn l2(&mut self, gpa: u64, access: Access) -> u64 {
        let page = self.try_l2(gpa, access).unwrap();
        HostMemory::identify(page.host.pfn()).0
    }

    fn l1(&mut self, gfn: u64, access: Access) -> Translation {
        let mut vcpu = self.vcpu.enter(0);
        loop {
            match vcpu.translate(Gpa(gfn << 12), access) {
                Err(Stop::Retry) => vcpu.quiesce(),
                answer => return answer.unwrap(),
            }
        }
    }

    /// Stores an entry as L1 does. Returns whether the store had to be reported to the engine.
    fn store(&mut self, table: u64, index: u64, entry: u64) -> bool {
        let found = self.l1(table, Write);
        assert!(found.write || found.tracked);
        self.memory.put(table, index, entry);
        if found.tracked {
            let gpa = Gpa((table << 12) + 8 * index);
            let _no_cpu_remembers_any = self.vcpu.enter(0).stored(gpa, 8);
        }
        found.tracked
    }

    /// Returns, for each leaf that maps the frame in either MMU, its level and whether it is writable.
    fn leaves(&self, gfn: u64) -> Vec<(u8, bool)> {
        let mut leaves = Vec::new();
        let frame = Gfn(gfn)..Gfn(gfn + 1);
        (self.vm).visit_leaves(0, frame, &mut |_, level, entry| {
            if let slat::format::Entry::Leaf(leaf) = entry {
                leaves.push((level.0, leaf.write));
            }
        });
        leaves.sort_unstable();
        leaves
    }

    /// Checks that writes by L1 and by L2 to logged memory are in the log. The host has pages of `level`.
    fn is_logged(&mut self, level: Level) {
        self.l2(MIB2, Write);
        self.l1(3 * DATA, Write);
        self.set(SlotFlags::LOG_DIRTY_PAGES);
        self.l2(0, Write);
        self.log();
        self.l2(MIB2 + 0x5000, Write);
        self.l1(3 * DATA + 1, Write);
        assert_eq!(self.log(), [2 * DATA + 5, 3 * DATA + 1]);
        assert_eq!(self.log(), [0u64; 0]);
        self.l2(MIB2 + 0x5000, Write);
        assert_eq!(self.log(), [2 * DATA + 5]);
        self.l2(MIB2 + 0x6000, Read);
        assert_eq!(self.log(), [0u64; 0]);
        self.l2(MIB2 + 0x6000, Write);
        // After its write was noted, the page takes no more faults.
        let before = self.vm.stats();
        self.l2(MIB2 + 0x6000, Write);
        assert_eq!(self.vm.stats().since(&before).pf_taken, 0);
        assert_eq!(self.log(), [2 * DATA + 6]);
        self.set(SlotFlags::default());
        // In a range that contains no tracked table, L1's leaves are large again.
        assert_eq!(self.l1(3 * DATA, Write).level, level);
    }

    fn log(&self) -> Vec<u64> {
        let mut bitmap = vec![0; PAGES as usize / 64];
        self.vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
        let is_set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 != 0;
        (0..PAGES).filter(is_set).collect()
    }
}

/// Runs a test for the formats and MMUs that can shadow nested tables.
macro_rules! for_each_guest {
    ($level:expr, $guest:ident => $then:block) => {
        for_each_guest!(@ $level, $guest => $then: Npt5 Tdp, Npt5 Direct, Ept Tdp, Ept Direct)
    };
    (@ $level:expr, $guest:ident => $then:block: $($format:ident $mmu:ident),*) => {$({
        let mut $guest = Guest::<$format>::new(MmuKind::$mmu, $level);
        $then
        $guest.vm.audit().unwrap();
    })*};
}

#[test]
fn formats_that_cannot_shadow_say_so() {
    let nested = Config::default().with_nested(true);
    let made = Vm::<_, Stage2<48>>::new(SimPlatform::new(1), nested);
    assert!(matches!(made.err(), Some(CreateVmError::NoNested { .. })));
}

/// Tests that shadowing costs no frame if the guest is no hypervisor.
#[test]
fn without_nested_tables_there_is_not_even_a_frame_more() {
    let vm = |nested| {
        let config = Config::default().with_nested(nested);
        Vm::<_, Ept>::new(SimPlatform::new(1), config).unwrap()
    };
    assert_eq!(vm(true).memory_usage(), vm(false).memory_usage());
}

#[test]
fn l1_and_l2_share_memory_but_no_translation() {
    for_each_guest!(Level::PAGE, guest => {
        assert_eq!(guest.l2(0, Write), DATA);
        assert_eq!(HostMemory::identify(guest.l1(0, Read).host.pfn()).0, 0);
        assert_eq!(guest.l2(MIB2 + 0x3000, Read), 2 * DATA + 3);
        // L1's entry does not grant writing.
        let flags = USED & !2;
        assert!(guest.store(TABLES[2], 1, (2 * DATA) << 12 | flags | HUGE));
        assert!(matches!(guest.try_l2(MIB2, Write), Err(VirtualStop::PageFault { .. })));
        assert!(guest.l1(2 * DATA, Write).write);
    });
}

#[test]
fn no_huge_leaf_of_l1_covers_a_table() {
    for_each_guest!(Level::MEGA, guest => {
        // As long as no tracked table is in the range, L1 has a huge leaf there.
        assert_eq!(guest.l1(0, Write).level, Level::MEGA);
        assert_eq!(guest.l2(MIB2, Write), 2 * DATA);
        assert_eq!(guest.leaves(2 * DATA), [(2, true)]);
        let first = guest.l1(1, Write);
        assert_eq!((first.level, first.write), (Level::PAGE, true));
        let tracked = guest.l1(TABLES[2], Write);
        assert!(tracked.tracked && !tracked.write);
        assert_eq!(guest.leaves(TABLES[2]), [(1, false)]);
        // A table of level 1 may become writable. Then a store to it makes the table's shadow page unsynced.
        assert!(guest.l1(TABLES[3], Write).write || guest.l1(TABLES[3], Write).tracked);
    });
}

#[test]
fn an_invalidation_finds_the_leaves_of_both() {
    for_each_guest!(Level::PAGE, guest => {
        guest.l2(0, Write);
        guest.l1(DATA, Write);
        assert!(!guest.leaves(DATA).is_empty());
        drop(guest.vm.invalidate(HostMemory::hvas(&(DATA..DATA + 1))));
        assert!(guest.leaves(DATA).is_empty());
        guest.l2(0, Write);
        // The leaves in both MMUs have the accessed bit set, and `age` finds both.
        assert!(guest.vm.age(HostMemory::hvas(&(DATA..DATA + 1)), true) > 0);
        assert_eq!(guest.vm.age(HostMemory::hvas(&(DATA..DATA + 1)), false), 0);
    });
}

#[test]
fn what_l2_writes_is_in_the_dirty_log() {
    for method in [
        DirtyLogMethod::WriteProtect,
        DirtyLogMethod::DirtyBit,
        DirtyLogMethod::Buffer,
    ] {
        for level in [Level::PAGE, Level::MEGA] {
            for_each_guest!(level, guest => {
                guest.vm.set_policy(Setting::DirtyLog(method));
                guest.vm.set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
                guest.is_logged(level);
            });
        }
    }
}

/// L1's tables are tracked while a log has write-protected an entry of the tree above the leaves that map them. Then a
/// write pushes that protection down.
#[test]
fn a_table_stays_tracked_when_a_log_has_protected_it_from_above() {
    for_each_guest!(Level::PAGE, guest => {
        guest.l1(TABLES[2], Write);
        guest.l1(DATA, Write);
        guest.set(SlotFlags::LOG_DIRTY_PAGES);
        guest.l2(MIB2, Read);
        guest.l1(TABLES[0] - 1, Write);
        assert!(guest.store(TABLES[2], 1, (3 * DATA) << 12 | USED | HUGE));
        assert_eq!(guest.l2(MIB2, Write), 3 * DATA);
        guest.set(SlotFlags::default());
        assert!(guest.store(TABLES[2], 1, (4 * DATA) << 12 | USED | HUGE));
        assert_eq!(guest.l2(MIB2, Write), 4 * DATA);
    });
}

#[test]
fn l2_finds_a_device_without_a_look_up() {
    for_each_guest!(Level::PAGE, guest => {
        let mmio = Err(VirtualStop::Stop(Stop::Mmio { gpa: Gpa((PAGES << 12) + 8) }));
        assert_eq!(guest.try_l2(DEVICE + 8, Write), mmio);
        let before = guest.vm.stats();
        assert_eq!(guest.try_l2(DEVICE + 8, Write), mmio);
        let counted = guest.vm.stats().since(&before);
        assert_eq!((counted.mmio_cached, counted.slot_lookups), (1, 0));
    });
}

/// L1 is a 32-bit hypervisor with PAE paging. Its page-directory-pointer entries are in memory, and no register holds
/// them.
#[test]
fn l2_reaches_memory_below_pae_pointers_in_memory_without_a_shadow_leaf() {
    for_each_guest!(Level::PAGE, guest => {
        let (in_memory, _) = guest.pae();
        for access in [Read, Write] {
            let page = guest.try_with(&in_memory, 0, access).unwrap();
            assert_eq!(HostMemory::identify(page.host.pfn()).0, DATA);
            // The access has left no shadow leaf: the next one is a fault again.
            let before = guest.vm.stats();
            assert_eq!(guest.try_with(&in_memory, 0, access).unwrap(), page);
            assert_eq!(guest.vm.stats().since(&before).pf_taken, 1);
        }
        let before = guest.vm.stats();
        guest.memory.put(TABLES[1], 0, 0);
        let gone = guest.try_with(&in_memory, 0, Read);
        assert!(matches!(gone, Err(VirtualStop::PageFault { .. })), "{gone:?}");
        assert_eq!(guest.vm.stats().since(&before).pf_guest, 1);
    });
}

/// A caller that has read the page-directory-pointer entries gets shadow leaves.
#[test]
fn l2_gets_shadow_leaves_below_pae_pointers_that_the_caller_has_read() {
    for_each_guest!(Level::PAGE, guest => {
        let (_, in_registers) = guest.pae();
        let page = guest.try_with(&in_registers, 0, Write).unwrap();
        assert_eq!(HostMemory::identify(page.host.pfn()).0, DATA);
        let before = guest.vm.stats();
        assert_eq!(guest.try_with(&in_registers, 0, Write).unwrap(), page);
        assert_eq!(guest.vm.stats().since(&before).pf_taken, 0);
        // Another entry begins at another root.
        let other = GuestPaging {
            pdptes: Some([0; 4]),
            ..in_registers
        };
        let gone = guest.try_with(&other, 0, Read);
        assert!(matches!(gone, Err(VirtualStop::PageFault { .. })), "{gone:?}");
    });
}

#[test]
fn the_tables_of_a_slot_that_goes_are_let_go() {
    for_each_guest!(Level::PAGE, guest => {
        guest.l2(0, Read);
        guest.vm.remove_memory_region(0, 0).unwrap();
        assert!(matches!(guest.try_l2(0, Read), Err(VirtualStop::PageFault { .. })));
        guest.set(SlotFlags::default());
        assert_eq!(guest.l2(0, Read), DATA);
    });
}

/// L2's first access makes shadow pages and a leaf.
#[test]
fn a_fault_survives_each_allocation_that_fails() {
    for failing in 0.. {
        let mut guest = Guest::<Ept>::new(MmuKind::Tdp, Level::PAGE);
        guest.platform.fail_allocation(failing, true);
        let first = guest.try_l2(0, Write);
        let failed = guest.platform.stop_failing();
        guest.vm.audit().unwrap();
        assert_eq!(guest.l2(0, Write), DATA);
        match first {
            Err(VirtualStop::Stop(Stop::OutOfMemory { .. })) => assert!(failed),
            Ok(_) => return assert!(failing > 4 && !failed, "{failing} allocations"),
            other => panic!("{other:?}"),
        }
    }
}
