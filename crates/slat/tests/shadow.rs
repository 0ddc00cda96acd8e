//! Tests the shadow MMU by page tables of a guest, which the tests write.
//!
//! `slat_model::guest` tests whether translations are those of a processor.

#[path = "common/guest.rs"]
mod guest;

use std::convert::Infallible;
use std::sync::Arc;

use guest::{HUGE, Memory, USED, paging};
use slat::format::{Entry, Npt, X86};
use slat::guest_walk::GuestPaging;
use slat::{
    Access::{self, *},
    Config, CreateVmError, DirtyLogReads, Ept, Gfn, Gpa, Level, MemoryType, MmuKind, Prefetch,
    Region, Rights, Setting, SlotFlags, Stats, Stop, VirtualPage, VirtualStop, Vm,
};
use slat_model::{HostMemory, SimPlatform};

const PAGES: u64 = 4096;
/// The frames of the guest's tables, from level 4 to level 1. The level 1 table maps the first 2 MiB.
const TABLES: [u64; 4] = [16, 17, 18, 19];
/// The first frame of the guest's data: the level 1 table maps page i to frame `DATA + i`.
const DATA: u64 = 512;

/// A guest that uses 4-level paging.
struct Guest {
    vm: Arc<Vm<SimPlatform, X86<5>>>,
    vcpu: slat::Vcpu<SimPlatform, X86<5>>,
    memory: Memory,
    cr3: u64,
}

impl Guest {
    /// Makes a guest with one slot that all of its host memory backs, mapped at `level`. Its tables map the first 2 MiB
    /// to [`DATA`]. A second address space has no slots.
    fn new(level: Level) -> Self {
        let platform = SimPlatform::at_level(PAGES, level);
        let config = Config::default().with_mmu(MmuKind::Shadow).with_spaces(2);
        let vm = Vm::new(platform, config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let guest = Guest {
            vcpu: vm.create_vcpu().unwrap(),
            vm,
            memory: Memory::new(PAGES),
            cr3: TABLES[0] << 12,
        };
        guest.set(SlotFlags::default());
        guest.memory.link(&TABLES);
        guest.memory.map(TABLES[3], DATA, USED);
        guest
    }

    fn set(&self, flags: SlotFlags) {
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0)).with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    fn try_access(
        &mut self,
        gva: u64,
        access: Access,
    ) -> Result<VirtualPage, VirtualStop<Infallible>> {
        self.try_access_in(&paging(self.cr3), gva, access)
    }

    /// Like [`Self::try_access`], but in the state `paging`.
    fn try_access_in(
        &mut self,
        paging: &GuestPaging,
        gva: u64,
        access: Access,
    ) -> Result<VirtualPage, VirtualStop<Infallible>> {
        let mut words = self.memory.words();
        let mut vcpu = self.vcpu.enter(0);
        loop {
            match vcpu.translate_virtual(gva, access, paging, &mut words) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                answer => return answer,
            }
        }
    }

    fn access(&mut self, gva: u64, access: Access) -> VirtualPage {
        self.try_access(gva, access).unwrap()
    }

    /// Returns the frame to which page `page` of the guest is translated.
    fn frame(&mut self, page: u64) -> u64 {
        let host = self.access(page << 12, Read).host;
        HostMemory::identify(host.pfn()).0
    }

    /// Stores an entry like the guest: by an access to the table's frame. Reports the store to the MMU if the MMU
    /// requires that.
    fn store(&mut self, table: u64, index: u64, entry: u64) {
        let mut vcpu = self.vcpu.enter(0);
        let gpa = Gpa((table << 12) + 8 * index);
        let found = loop {
            match vcpu.translate(gpa, Write) {
                Err(Stop::Retry) => vcpu.quiesce(),
                answer => break answer.unwrap(),
            }
        };
        assert!(found.write || found.tracked);
        self.memory.put(table, index, entry);
        if found.tracked {
            let _no_cpu_remembers_any = vcpu.stored(gpa, 8);
        }
    }

    fn flush(&mut self) {
        let mut vcpu = self.vcpu.enter(0);
        vcpu.flush_guest(&mut self.memory.words());
    }

    fn invlpg(&mut self, gva: u64) {
        let (paging, mut words) = (paging(self.cr3), self.memory.words());
        let _no_cpu_remembers_any = self.vcpu.enter(0).invlpg(gva, &paging, &mut words);
    }

    /// Returns the counts from while `work` runs.
    fn counted(&mut self, work: impl FnOnce(&mut Self)) -> Stats {
        let before = self.vm.stats();
        work(self);
        self.vm.audit().unwrap();
        self.vm.stats().since(&before)
    }
}

/// If reads are logged, a read maps its page as writable. A page that contains a tracked table stays write-protected.
#[test]
fn a_logged_read_of_a_tracked_table_does_not_allow_stores() {
    let mut guest = Guest::new(Level::PAGE);
    guest
        .vm
        .set_policy(Setting::DirtyLogReads(DirtyLogReads::On));
    guest.set(SlotFlags::LOG_DIRTY_PAGES);
    guest.memory.put(TABLES[3], 5, TABLES[2] << 12 | USED);
    guest.frame(0);
    let found = guest.access(5 << 12, Read);
    assert!(!found.write, "{found:?}");
}

#[test]
fn it_has_the_tables_of_x86_and_no_others() {
    let shadow = || Config::default().with_mmu(MmuKind::Shadow);
    let refused = |error| matches!(error, Some(CreateVmError::NoSuchMmu { .. }));
    let ept = Vm::<_, Ept>::new(SimPlatform::new(1), shadow());
    let npt = Vm::<_, Npt>::new(SimPlatform::new(1), shadow());
    assert!(refused(ept.err()) && refused(npt.err()));
    let direct = Config::default().with_mmu(MmuKind::Direct);
    assert!(refused(
        Vm::<_, X86<5>>::new(SimPlatform::new(1), direct).err()
    ));
}

#[test]
fn a_mapped_page_is_reached_without_a_look_at_the_guests_tables() {
    let mut guest = Guest::new(Level::PAGE);
    (0..512).for_each(|page| assert_eq!(guest.frame(page), DATA + page));
    let counted = guest.counted(|guest| {
        for round in 0..200u64 {
            // Changes bit 3 of CR3 (PWT): CR3 differs from its value in the last round, but names the same table.
            guest.cr3 ^= 8 * (round % 2);
            (0..512).for_each(|page| assert_eq!(guest.frame(page), DATA + page));
        }
    });
    assert_eq!(
        (
            counted.guest_pte_reads,
            counted.pf_taken,
            counted.slot_lookups
        ),
        (0, 0, 0)
    );
}

/// The slot limits the rights, whatever the guest's tables grant.
#[test]
fn no_shadow_leaf_exceeds_the_limits_of_its_slot() {
    let rights = [
        Rights::ALL.with_execute(false),
        Rights::READ.with_execute(true),
        Rights::READ,
    ];
    for (rights, level) in rights
        .into_iter()
        .flat_map(|r| [(r, Level::PAGE), (r, Level::MEGA)])
    {
        let mut guest = Guest::new(level);
        guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
        // The slot that contains the tables has all rights.
        let (data, size) = (Gpa(DATA << 12), 1024 << 12);
        guest.vm.remove_memory_region(0, 0).unwrap();
        let tables = Region::new(0, Gpa(0), DATA << 12, HostMemory::hva(0));
        guest.vm.set_memory_region(0, &tables).unwrap();
        let limited = Region::new(1, data, size, HostMemory::hva(DATA))
            .with_rights(rights)
            .with_memory(MemoryType::WriteBack);
        guest.vm.set_memory_region(0, &limited).unwrap();
        guest
            .vm
            .set_policy(Setting::parse("prefetch", "8").unwrap());
        for gva in [3 << 12, (2 << 20) + 0x5000] {
            let gpa = Gpa((DATA << 12) + gva % (2 << 20));
            for access in [Execute, Read, Write, Execute] {
                let answer = guest.try_access(gva, access);
                match (rights.allow(access), access) {
                    (true, _) => assert!(answer.is_ok(), "{access:?}: {answer:?}"),
                    (false, Write) => {
                        assert_eq!(answer, Err(VirtualStop::Stop(Stop::Mmio { gpa })));
                    }
                    (false, _) => {
                        assert_eq!(answer, Err(VirtualStop::Stop(Stop::NoExecute { gpa })));
                    }
                }
            }
        }
        let mut leaves = Vec::new();
        let frames = Gfn(DATA)..Gfn(DATA + 1024);
        guest.vm.visit_leaves(0, frames, &mut |gfn, _, entry| {
            let Entry::Leaf(leaf) = entry else {
                panic!("{entry:?}")
            };
            assert!(rights.write || !leaf.write && !leaf.may_write, "{leaf:?}");
            assert!(rights.execute || !leaf.execute, "{leaf:?}");
            leaves.push(gfn);
        });
        assert!(leaves.len() > 1);
        for gfn in leaves {
            let found = guest.vm.lookup(0, gfn).unwrap().rights;
            assert!(rights.write || !found.write);
        }
        guest.vm.audit().unwrap();
    }
}

/// With EFER.NXE clear, the guest's tables cannot forbid execution. But the slot does.
#[test]
fn a_slot_keeps_code_out_where_the_guest_cannot() {
    let mut guest = Guest::new(Level::PAGE);
    guest.vm.remove_memory_region(0, 0).unwrap();
    let tables = Region::new(0, Gpa(0), DATA << 12, HostMemory::hva(0));
    guest.vm.set_memory_region(0, &tables).unwrap();
    let data = Region::new(1, Gpa(DATA << 12), 512 << 12, HostMemory::hva(DATA))
        .with_rights(Rights::ALL.with_execute(false));
    guest.vm.set_memory_region(0, &data).unwrap();
    let paging = GuestPaging {
        no_execute: false,
        ..paging(guest.cr3)
    };
    let page = guest.try_access_in(&paging, 0, Read).unwrap();
    assert!(page.read && !page.execute);
    let gpa = Gpa(DATA << 12);
    assert_eq!(
        guest.try_access_in(&paging, 0, Execute),
        Err(VirtualStop::Stop(Stop::NoExecute { gpa }))
    );
}

/// A frame has a leaf for each virtual page by which the guest has used it.
#[test]
fn a_look_up_of_a_frame_finds_each_right_that_a_leaf_of_it_has() {
    const READ_ONLY: u64 = 0x65;
    let mut guest = Guest::new(Level::PAGE);
    let mapping = |guest: &Guest, gfn| guest.vm.lookup(0, Gfn(gfn));
    assert_eq!(mapping(&guest, DATA), None);
    guest.memory.put(TABLES[3], 1, DATA << 12 | READ_ONLY);
    let host = guest.access(1 << 12, Read).host;
    let by_one = mapping(&guest, DATA).unwrap();
    assert_eq!((by_one.pfn.hpa(), by_one.level), (host, Level::PAGE));
    assert_eq!(by_one.rights, Rights::READ.with_execute(true));
    assert!(guest.access(0, Write).write);
    let by_two = mapping(&guest, DATA).unwrap();
    assert_eq!((by_two.pfn, by_two.rights), (by_one.pfn, Rights::ALL));
    assert_eq!(guest.vcpu.enter(0).lookup(Gfn(DATA)), Some(by_two));
    // A virtual page is not looked up as the frame with the same number, nor in another address space.
    assert_eq!(mapping(&guest, 1), None);
    assert_eq!(guest.vm.lookup(1, Gfn(DATA)), None);
    assert_eq!(guest.vm.lookup(2, Gfn(DATA)), None);

    drop(guest.vm.invalidate(HostMemory::hvas(&(DATA..DATA + 1))));
    assert_eq!(mapping(&guest, DATA), None);
    guest.vm.audit().unwrap();
}

#[test]
fn a_look_up_of_a_frame_finds_the_largest_leaf() {
    let mut guest = Guest::new(Level::MEGA);
    guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
    guest.access((2 << 20) + 0x5000, Read);
    let huge = guest.vm.lookup(0, Gfn(DATA + 5)).unwrap();
    assert_eq!((huge.level, huge.pfn.0 % 512), (Level::MEGA, 5));
    // The guest maps the frame by a small page in another of its tables, too.
    let small = guest.access(5 << 12, Write);
    assert_eq!(small.host, huge.pfn.hpa());
    assert_eq!(guest.vm.lookup(0, Gfn(DATA + 5)), Some(huge));
}

#[test]
fn a_store_to_an_entry_zaps_what_was_made_of_it_and_no_more() {
    let mut guest = Guest::new(Level::PAGE);
    (0..512).for_each(|page| assert_eq!(guest.frame(page), DATA + page));
    // The first store to the level 1 table makes its shadow page unsynced. The old translation may be used until the
    // flush.
    let counted = guest.counted(|guest| guest.store(TABLES[3], 7, (DATA + 600) << 12 | USED));
    assert_eq!((counted.mmu_unsync, counted.zapped), (1, 0));
    assert_eq!(guest.frame(7), DATA + 7);
    let counted = guest.counted(Guest::flush);
    assert_eq!(counted.zapped, 1, "{counted:?}");
    assert_eq!(guest.frame(7), DATA + 600);
    // After a store to a table of a higher level, the entry is zapped at once.
    guest.memory.put(20, 0, (DATA + 700) << 12 | USED);
    let counted = guest.counted(|guest| guest.store(TABLES[2], 0, 20 << 12 | USED));
    assert_eq!((counted.mmu_pte_write, counted.mmu_pde_zapped), (1, 1));
    assert_eq!(guest.frame(0), DATA + 700);
}

/// A store to a table of level 1 need not be noticed at once. A store to a directory must be noticed, because INVLPG
/// does not compare directories.
#[test]
fn stores_to_a_table_that_is_a_directory_elsewhere_are_noticed() {
    const BOTH: u64 = 20;
    const OTHER: u64 = 21;
    let (by_directory, by_table) = (1 << 30, 1 << 21);
    let mut guest = Guest::new(Level::PAGE);
    guest.memory.put(TABLES[1], 1, BOTH << 12 | USED);
    guest.memory.put(TABLES[2], 1, BOTH << 12 | USED);
    guest.memory.put(BOTH, 0, TABLES[3] << 12 | USED);
    guest.memory.put(OTHER, 0, (DATA + 700) << 12 | USED);
    assert_eq!(guest.frame(by_directory >> 12), DATA);
    assert_eq!(guest.frame(by_table >> 12), TABLES[3]);
    guest.store(BOTH, 0, OTHER << 12 | USED);
    guest.invlpg(by_directory);
    assert_eq!(guest.frame(by_directory >> 12), DATA + 700);
}

#[test]
fn memory_that_is_a_table_no_more_is_let_go() {
    let mut guest = Guest::new(Level::PAGE);
    guest.frame(0);
    let counted = guest.counted(|guest| {
        (256..300).for_each(|index| guest.store(TABLES[2], index, 0));
    });
    assert_eq!(counted.mmu_flooded, 1);
    // All other stores were made without a report to the MMU.
    assert!(counted.mmu_pte_write <= 3, "{counted:?}");
}

#[test]
fn what_the_client_has_written_counts_after_it_has_set_the_registers() {
    let mut guest = Guest::new(Level::PAGE);
    guest.frame(0);
    guest.memory.put(20, 0, (DATA + 700) << 12 | USED);
    guest.memory.put(TABLES[2], 0, 20 << 12 | USED);
    guest.vm.guest_memory_changed();
    guest.flush();
    assert_eq!(guest.frame(0), DATA + 700);
    guest.vm.audit().unwrap();
}

/// The guest's dirty flag is clear, so the leaf is not writable until the first write sets the flag.
#[test]
fn a_right_that_a_leaf_has_got_later_is_taken_away_too() {
    const CLEAN: u64 = 0x27;
    const READ_ONLY: u64 = 0x65;
    let mut guest = Guest::new(Level::PAGE);
    guest.memory.put(TABLES[3], 0, DATA << 12 | CLEAN);
    assert!(!guest.access(0, Read).write);
    assert!(guest.access(0, Write).write);
    guest.store(TABLES[3], 0, DATA << 12 | READ_ONLY);
    guest.flush();
    assert!(matches!(
        guest.try_access(0, Write),
        Err(VirtualStop::PageFault { code: 7 })
    ));
}

/// SDM 3A, "Operations that Invalidate TLBs and Paging-Structure Caches". A CPU has looked up an address through a
/// table, and stays in its reader section. Then another CPU stores to the directory above that table.
#[test]
fn an_address_is_looked_up_in_its_old_table_until_the_cpu_must_drop_that() {
    const CLEAN: u64 = 0x27;
    const READ_ONLY: u64 = 0x65;
    const OTHER: u64 = 20;
    // No frame of a table has the same index in the CPU's cache as this address.
    const GVA: u64 = 4 << 21;
    enum Drops {
        Fault,
        Invlpg,
        Flush,
    }
    for drops in [Drops::Fault, Drops::Invlpg, Drops::Flush] {
        let mut guest = Guest::new(Level::PAGE);
        guest.memory.put(TABLES[3], 0, DATA << 12 | CLEAN);
        guest.memory.put(TABLES[2], 4, TABLES[3] << 12 | USED);
        guest.memory.put(TABLES[2], 5, OTHER << 12 | USED);
        guest.memory.put(OTHER, 0, (DATA + 700) << 12 | READ_ONLY);
        let frames = [4, 5].map(|index| guest.frame(512 * index));
        assert_eq!(frames, [DATA, DATA + 700]);
        let (paging, mut words) = (paging(guest.cr3), guest.memory.words());
        let mut vcpu = guest.vcpu.enter(0);
        let mut frame = |vcpu: &mut slat::Vcpu<_, _>| {
            let page = vcpu.translate_virtual(GVA, Read, &paging, &mut words);
            HostMemory::identify(page.unwrap().host.pfn()).0
        };
        assert_eq!(frame(&mut vcpu), DATA);
        let gpa = Gpa((TABLES[2] << 12) + 8 * 4);
        let mut other = guest.vm.create_vcpu().unwrap();
        let mut other = other.enter(1);
        assert!(other.translate(gpa, Write).unwrap().tracked);
        guest.memory.put(TABLES[2], 4, OTHER << 12 | USED);
        assert!(!other.stored(gpa, 8));
        assert_eq!(frame(&mut vcpu), DATA);
        match drops {
            // Neither the old nor the new table allows the access.
            Drops::Fault => assert!(matches!(
                vcpu.translate_virtual(GVA, Write, &paging, &mut guest.memory.words()),
                Err(VirtualStop::PageFault { code: 7 })
            )),
            Drops::Invlpg => assert!(!vcpu.invlpg(GVA, &paging, &mut guest.memory.words())),
            Drops::Flush => vcpu.flush_guest(&mut guest.memory.words()),
        }
        assert_eq!(frame(&mut vcpu), DATA + 700);
    }
}

/// The test uses more tables than are compared at a time.
#[test]
fn a_flush_compares_all_tables_that_were_stored_to() {
    const COUNT: u64 = 70;
    let mut guest = Guest::new(Level::PAGE);
    guest.vm.set_mmu_pages(1000);
    let table = |i| 1024 + i;
    for i in 0..COUNT {
        guest.memory.put(TABLES[2], i, table(i) << 12 | USED);
        guest.memory.put(table(i), 0, DATA << 12 | USED);
        assert_eq!(guest.frame(512 * i), DATA);
    }
    (0..COUNT).for_each(|i| guest.store(table(i), 0, (DATA + 1) << 12 | USED));
    let counted = guest.counted(Guest::flush);
    assert_eq!(counted.zapped, COUNT);
    (0..COUNT).for_each(|i| assert_eq!(guest.frame(512 * i), DATA + 1));
}

/// INVLPG compares one entry with the guest's table. The other entries are compared when the guest flushes.
#[test]
fn a_table_of_which_one_entry_was_compared_is_not_compared_yet() {
    let mut guest = Guest::new(Level::PAGE);
    for page in 0..2 {
        guest.frame(page);
        guest.memory.put(TABLES[3], page, (DATA + 700) << 12 | USED);
    }
    guest.vm.guest_memory_changed();
    guest.invlpg(0);
    assert_eq!(guest.frame(0), DATA + 700);
    guest.flush();
    assert_eq!(guest.frame(1), DATA + 700);
    guest.vm.audit().unwrap();
}

#[test]
fn a_repeated_access_to_mmio_needs_neither_slots_nor_the_guests_tables() {
    let mut guest = Guest::new(Level::PAGE);
    guest.memory.put(TABLES[3], 3, 0xfee0_0067);
    let mmio = |guest: &mut Guest| match guest.try_access(0x3008, Write) {
        Err(VirtualStop::Stop(Stop::Mmio { gpa })) => gpa,
        other => panic!("{other:?}"),
    };
    assert_eq!(mmio(&mut guest), Gpa(0xfee0_0008));
    let counted = guest.counted(|guest| {
        (0..1000).for_each(|_| assert_eq!(mmio(guest), Gpa(0xfee0_0008)));
    });
    assert_eq!(counted.mmio_cached, 1000);
    assert_eq!(
        (
            counted.guest_pte_reads,
            counted.slot_lookups,
            counted.pf_taken
        ),
        (0, 0, 0)
    );
    // A memslot is created at the device's frame, so the MMIO entry belongs to an old generation.
    let region = Region::new(1, Gpa(0xfee0_0000), 4096, HostMemory::hva(9));
    guest.vm.set_memory_region(0, &region).unwrap();
    assert_eq!(guest.frame(3), 9);
}

/// An MMIO entry stores the low bits of the generation. After many slot changes the same bits occur again.
#[test]
fn an_mmio_entry_is_not_believed_when_its_generation_comes_again() {
    let mut guest = Guest::new(Level::PAGE);
    guest.memory.put(TABLES[3], 3, 0xfee0_0067);
    assert!(guest.try_access(0x3000, Read).is_err());
    let region = Region::new(1, Gpa(0xfee0_0000), 4096, HostMemory::hva(9));
    guest.vm.set_memory_region(0, &region).unwrap();
    // Together with the change above, the number of changes is that of the generations that the bits distinguish.
    for change in 0..(1u64 << 18) - 1 {
        let region = Region::new(2, Gpa(1 << 32), 4096, HostMemory::hva(1));
        let changed = match change % 2 {
            0 => guest.vm.set_memory_region(0, &region),
            _ => guest.vm.remove_memory_region(0, 2),
        };
        changed.unwrap();
    }
    assert_eq!(guest.frame(3), 9);
}

#[test]
fn a_huge_page_of_the_guests_is_mapped_huge_unless_it_holds_a_table() {
    let mut guest = Guest::new(Level::MEGA);
    // Entry 1 maps the 2 MiB that contain the data, and entry 2 those that contain the tables.
    guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
    guest.memory.put(TABLES[2], 2, USED | HUGE);
    let counted = guest.counted(|guest| _ = guest.access(1 << 21, Write));
    // Another leaf maps the tables, for the MMU's own walks of them.
    assert_eq!(counted.pages_2m, 2);
    let table = (2 << 21) + (TABLES[3] << 12);
    guest.access(0, Read);
    let counted = guest.counted(|guest| {
        let page = guest.access(table, Write);
        assert!(page.write, "an unsynced table");
        let page = guest.access((2 << 21) + (TABLES[2] << 12), Write);
        assert!(!page.write);
        assert_eq!(page.tracked, Some(Gpa(TABLES[2] << 12)));
        let page = guest.access((2 << 21) + (100 << 12), Write);
        assert_eq!((page.write, page.bits, page.tracked), (true, 21, None));
    });
    assert_eq!(counted.pages_2m, 0);
}

/// INVLPG of any address in the guest's huge page drops all of that page, also if a CPU has found only a part of it in
/// the shadow table.
#[test]
fn a_part_of_a_huge_page_of_the_guests_says_how_large_that_is() {
    let mut guest = Guest::new(Level::PAGE);
    guest.memory.put(TABLES[2], 1, DATA << 12 | USED | HUGE);
    for _ in 0..2 {
        let page = guest.access(1 << 21, Read);
        assert!(page.bits >= 21, "{page:?}");
    }
    assert_eq!(guest.access(0, Read).bits, 12);
}

#[test]
fn entries_that_were_used_before_are_mapped_ahead() {
    let faults = |prefetch| {
        let mut guest = Guest::new(Level::PAGE);
        guest.vm.set_policy(Setting::Prefetch(prefetch));
        guest.frame(0);
        let counted = guest.counted(|guest| {
            (0..512).for_each(|page| assert_eq!(guest.frame(page), DATA + page));
        });
        counted.pf_taken
    };
    assert_eq!(faults(Prefetch::Off), 511);
    assert_eq!(faults(Prefetch::Window(8)), 512 / 8 - 1);
    // Prefetch maps no page whose accessed flag is clear, because the MMU would have to set the flag.
    let mut guest = Guest::new(Level::PAGE);
    guest.vm.set_policy(Setting::Prefetch(Prefetch::Window(8)));
    (0..512).for_each(|page| guest.memory.put(TABLES[3], page, (DATA + page) << 12 | 7));
    guest.frame(0);
    let counted = guest.counted(|guest| {
        (1..64).for_each(|page| assert_eq!(guest.frame(page), DATA + page));
    });
    assert_eq!(counted.pf_taken, 63);
}

#[test]
fn the_number_of_shadow_pages_is_limited() {
    let mut guest = Guest::new(Level::PAGE);
    guest.vm.set_mmu_pages(64);
    // The address spaces have different roots, and share all other tables.
    for space in 0..100 {
        let root = 1024 + space;
        guest.memory.put(root, 0, TABLES[1] << 12 | USED);
        guest.cr3 = root << 12;
        assert_eq!(guest.frame(5), DATA + 5);
        let stats = guest.vm.stats();
        assert!(stats.mmu_cache_miss - stats.mmu_shadow_zapped <= 64);
    }
    assert!(guest.vm.stats().mmu_recycled > 0);
    guest.vm.audit().unwrap();
}

#[test]
fn a_logged_write_is_noted_once_in_each_round() {
    let mut guest = Guest::new(Level::PAGE);
    guest.set(SlotFlags::LOG_DIRTY_PAGES);
    for round in 0..3 {
        let counted = guest.counted(|guest| {
            for page in (0..64).chain(0..64) {
                assert!(guest.access(page << 12, Write).write);
            }
        });
        let mut log = vec![0; PAGES as usize / 64];
        guest.vm.get_dirty_log(0, 0, &mut log).unwrap();
        let first = DATA as usize / 64;
        assert_eq!(log[first], u64::MAX, "round {round}: {counted:?}");
    }
}

#[test]
fn a_deleted_slot_takes_the_tables_in_it_along() {
    let mut guest = Guest::new(Level::PAGE);
    guest.frame(0);
    let counted = guest.counted(|guest| {
        guest.vm.remove_memory_region(0, 0).unwrap();
    });
    assert!(counted.mmu_shadow_zapped >= 4);
    // Other memory, without tables, replaces the slot's memory.
    let region = Region::new(0, Gpa(0), 1 << 20, HostMemory::hva(2048));
    guest.vm.set_memory_region(0, &region).unwrap();
    assert!(matches!(
        guest.try_access(0, Read),
        Err(VirtualStop::PageFault { code: 4 })
    ));
}

/// The first fault has made a shadow page for the table. It needed no flush, because no leaf allows stores to these
/// tables.
#[test]
fn no_walk_begins_with_a_root_that_was_zapped() {
    let mut guest = Guest::new(Level::PAGE);
    for _ in 0..2 {
        guest.vm.remove_memory_region(0, 0).unwrap();
        guest.set(SlotFlags::READONLY);
        assert_eq!(guest.frame(0), DATA);
    }
    guest.vm.platform().check();
}

/// A vCPU's roots of shadow tables, and the table in which flags were set last, belong to one address space.
#[test]
fn a_cpu_uses_nothing_of_the_address_space_that_it_has_left() {
    const UNUSED: u64 = 7;
    /// The first host page of the second address space's memory.
    const SECOND: u64 = PAGES / 2;
    let mut guest = Guest::new(Level::PAGE);
    let region = Region::new(0, Gpa(0), SECOND << 12, HostMemory::hva(SECOND));
    guest.vm.set_memory_region(1, &region).unwrap();
    let entry = |page| (DATA + page) << 12 | UNUSED;
    for first in [0, SECOND] {
        for pair in TABLES.windows(2) {
            guest.memory.put(first + pair[0], 0, pair[1] << 12 | USED);
        }
        (0..3).for_each(|page| guest.memory.put(first + TABLES[3], page, entry(page)));
    }
    let paging = paging(guest.cr3);
    let mut vcpu = guest.vcpu.enter(0);
    let mut last = 0;
    for (space, page) in [(0, 0), (0, 1), (1, 2), (0, 0), (1, 0), (0, 0)] {
        if space != last {
            vcpu.use_space(space);
            last = space;
        }
        let mut words = guest.memory.words();
        let found = loop {
            match vcpu.translate_virtual(page << 12, Read, &paging, &mut words) {
                Err(VirtualStop::Stop(Stop::Retry)) => vcpu.quiesce(),
                answer => break answer.unwrap(),
            }
        };
        let (host, _) = HostMemory::identify(found.host.pfn());
        assert_eq!(host, [0, SECOND][space] + DATA + page);
    }
    assert_eq!(
        guest.memory.entry(TABLES[3], 2),
        entry(2),
        "a flag of the other's"
    );
}

/// The first access finds the address by a walk of the guest's tables, and the second by the MMIO entry.
#[test]
fn an_mmio_entry_keeps_all_52_bits_of_an_address() {
    let mut guest = Guest::new(Level::PAGE);
    let wide = GuestPaging {
        physical_bits: 52,
        ..paging(guest.cr3)
    };
    for (page, base) in (1..).zip([0, 1 << 50, 1 << 51, 0xf_ffff << 32]) {
        let device = base | 0xfee0_0000;
        guest.memory.put(TABLES[3], page, device | USED);
        for _ in 0..2 {
            let found = guest.try_access_in(&wide, page << 12 | 8, Read);
            let gpa = Gpa(device | 8);
            assert_eq!(found, Err(VirtualStop::Stop(Stop::Mmio { gpa })));
        }
    }
    assert_eq!(guest.vm.stats().mmio_cached, 4);
    guest.vm.audit().unwrap();
}

/// A cached table for a virtual address is not used for the guest-physical address with the same number.
#[test]
fn no_guest_physical_address_is_taken_for_a_virtual_one() {
    let mut guest = Guest::new(Level::PAGE);
    let gva = 5 << 12;
    guest.frame(5);
    guest.frame(5);
    let mut vcpu = guest.vcpu.enter(0);
    let mut words = guest.memory.words();
    let paging = paging(guest.cr3);
    vcpu.translate_virtual(gva, Read, &paging, &mut words)
        .unwrap();
    for bit in 57..64 {
        let gpa = Gpa(gva | 1 << bit);
        assert_eq!(vcpu.translate(gpa, Read), Err(Stop::Mmio { gpa }));
    }
}
