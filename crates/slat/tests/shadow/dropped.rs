//! Translations that the MMU drops after a change by the guest or the client: stores to tables, flushes, deleted slots.

use super::*;

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
