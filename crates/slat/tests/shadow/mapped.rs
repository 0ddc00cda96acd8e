//! Translations that the MMU makes: their rights, and the cost of a repeated access.

use super::*;

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
    // A look-up of a frame does not find the virtual page with the same number, and nothing of another address space.
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
