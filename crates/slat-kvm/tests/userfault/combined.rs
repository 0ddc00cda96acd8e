//! Tests `KVM_MEM_USERFAULT` with each MMU, and together with KVM's other ways to use memory.

use super::*;
use slat::MmuKind;
use slat_kvm::GuestMemfdFd;
use std::os::fd::AsRawFd;

/// The number of the page that [`LONG`] reads. The next constants are the number of the page that it writes, and the
/// numbers of the pages that contain page tables.
const READ: u64 = 0x20;
const WRITTEN: u64 = 0x21;
const TABLES: std::ops::Range<u64> = 0x10..0x14;

/// ```text
/// mov rax, [0x20000]
/// mov [0x21000], rax
/// hlt
/// ```
const LONG: &[u8] = &[
    0x48, 0x8b, 0x04, 0x25, 0x00, 0x00, 0x02, 0x00, 0x48, 0x89, 0x04, 0x25, 0x00, 0x10, 0x02, 0x00,
    0xf4,
];

/// Creates a VM whose pages are all absent, and a vCPU that will run [`LONG`] in 64-bit mode. The page tables are in
/// absent pages, too.
fn long_guest(late: &Late, mmu: MmuKind, flags: u32) -> (VmFd, VcpuFd) {
    let vm = kvm().with_mmu(mmu).create_vm().unwrap();
    set(&vm, late.region(KVM_MEM_USERFAULT | flags)).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    start_at_code(&vcpu);
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.l, sregs.cs.db, sregs.cs.g, sregs.cs.type_) = (1, 0, 1, 11);
    (sregs.cr0, sregs.cr4, sregs.efer) = (0x8000_0011, 0x20, 0x500);
    sregs.cr3 = TABLES.start * PAGE;
    vcpu.set_sregs(&sregs).unwrap();
    (vm, vcpu)
}

/// Stores the contents of `page` that [`long_guest`] needs. Does not tell slat that the page is there.
fn store(late: &Late, page: u64) {
    if page == CODE / PAGE {
        late.memory.write(CODE, LONG);
    } else if page == READ {
        late.memory.write(page * PAGE, &word(page).to_le_bytes());
    } else if page == TABLES.end - 1 {
        for mapped in 0..PAGES {
            let entry = (mapped * PAGE) | 3;
            late.memory
                .write(page * PAGE + 8 * mapped, &entry.to_le_bytes());
        }
    } else if TABLES.contains(&page) {
        let entry = ((page + 1) * PAGE) | 3;
        late.memory.write(page * PAGE, &entry.to_le_bytes());
    }
}

/// Runs the vCPU. Returns the address of the absent page for which it waits. `None`: the vCPU has halted.
fn waits_for(vcpu: &mut VcpuFd) -> Option<u64> {
    match vcpu.run() {
        Ok(VcpuExit::MemoryFault { flags, gpa, size }) => {
            assert_eq!((flags, size), (KVM_MEMORY_EXIT_FLAG_USERFAULT, PAGE));
            Some(gpa)
        }
        Ok(VcpuExit::Hlt) => None,
        other => panic!("{other:?}"),
    }
}

/// Runs [`LONG`] to its end. Returns the pages for which it has waited.
fn run_long(vcpu: &mut VcpuFd, late: &Late) -> Vec<u64> {
    let mut brought = Vec::new();
    while let Some(gpa) = waits_for(vcpu) {
        let page = gpa / PAGE;
        brought.push(page);
        store(late, page);
        late.clear(page);
    }
    let mut written = [0; 2];
    late.memory.read(WRITTEN * PAGE, &mut written);
    assert_eq!(written, word(READ).to_le_bytes());
    brought
}

/// Returns the pages that [`LONG`] uses, in the order of their use.
fn of_long() -> Vec<u64> {
    TABLES.chain([CODE / PAGE, READ, WRITTEN]).collect()
}

#[test]
fn each_mmu_waits_for_the_same_pages() {
    for mmu in MmuKind::ALL {
        let late = Late::new();
        let vm = kvm().with_mmu(*mmu).create_vm().unwrap();
        set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
        let mut vcpu = vm.create_vcpu(0).unwrap();
        start_at_code(&vcpu);
        let expected: Vec<_> = [CODE / PAGE].into_iter().chain(SUMMED).collect();
        assert_eq!(run(&mut vcpu, &late), expected, "{mmu:?}");
        late.set(0x20);
        set(&vm, late.region(0)).unwrap();
        assert_eq!(run(&mut vcpu, &late), [], "{mmu:?}");
        set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
        assert_eq!(run(&mut vcpu, &late), [0x20], "{mmu:?}");
    }
}

#[test]
fn page_tables_come_later_too() {
    for mmu in MmuKind::ALL {
        let late = Late::new();
        let (vm, mut vcpu) = long_guest(&late, *mmu, 0);
        assert_eq!(run_long(&mut vcpu, &late), of_long(), "{mmu:?}");
        // Runs the code once more, when only a table is absent.
        late.set(TABLES.end - 1);
        set(&vm, late.region(0)).unwrap();
        set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        regs.rip = CODE;
        vcpu.set_regs(&regs).unwrap();
        assert_eq!(run_long(&mut vcpu, &late), [TABLES.end - 1], "{mmu:?}");
    }
}

#[test]
fn the_dirty_log_names_a_page_once_it_is_there() {
    for mmu in MmuKind::ALL {
        let late = Late::new();
        let (vm, mut vcpu) = long_guest(&late, *mmu, KVM_MEM_LOG_DIRTY_PAGES);
        let logged = || {
            let log = vm.get_dirty_log(0, (PAGES * PAGE) as usize).unwrap();
            log[WRITTEN as usize / 64] >> (WRITTEN % 64) & 1 != 0
        };
        while let Some(gpa) = waits_for(&mut vcpu) {
            assert!(!logged(), "{mmu:?}: {gpa:#x} is waited for");
            store(&late, gpa / PAGE);
            late.clear(gpa / PAGE);
        }
        assert!(logged(), "{mmu:?}");
        // Removes the flag KVM_MEM_USERFAULT, and keeps the log.
        set(&vm, late.region(KVM_MEM_LOG_DIRTY_PAGES)).unwrap();
        assert!(!logged(), "{mmu:?}");
        let mut regs = vcpu.get_regs().unwrap();
        regs.rip = CODE;
        vcpu.set_regs(&regs).unwrap();
        assert_eq!(run_long(&mut vcpu, &late), [], "{mmu:?}");
        assert!(logged(), "{mmu:?}");
    }
}

#[test]
fn to_map_pages_in_advance_ends_at_an_absent_page() {
    const THERE: u64 = 5;
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        let late = Late::new();
        let (_vm, vcpu) = long_guest(&late, mmu, 0);
        (0..THERE).for_each(|page| late.clear(page));
        let mut range = kvm_pre_fault_memory {
            size: PAGES * PAGE,
            ..Default::default()
        };
        let mut ask = || {
            let done = vcpu.pre_fault_memory(&mut range);
            (done.map_err(|error| error.errno()), range.gpa / PAGE)
        };
        assert_eq!(ask(), (Ok(()), THERE), "{mmu:?}");
        assert_eq!(ask(), (Err(libc::EFAULT), THERE), "{mmu:?}");
        late.clear(THERE);
        assert_eq!(ask(), (Ok(()), THERE + 1), "{mmu:?}");
        (0..PAGES).for_each(|page| late.clear(page));
        assert_eq!(ask(), (Ok(()), PAGES), "{mmu:?}");
    }
}

#[test]
fn huge_pages_come_back_without_the_flag() {
    let memory = Memory::new(2 * HUGE);
    let Some(start) = huge_memory(&memory) else {
        return;
    };
    let code = start as u64 - memory.start as u64 + CODE;
    memory.write(code, &[0xf4]);
    let bitmap = [const { AtomicU64::new(0) }; HUGE / PAGE as usize / 64];
    for mmu in MmuKind::ALL {
        let vm = kvm().with_mmu(*mmu).create_vm().unwrap();
        let mut vcpu = vm.create_vcpu(0).unwrap();
        let stats = vm.get_stats_fd().unwrap();
        for (flags, pages) in [
            (KVM_MEM_USERFAULT, [1, 0]),
            (0, [0, 1]),
            (KVM_MEM_USERFAULT, [1, 0]),
        ] {
            let mut region = kvm_userspace_memory_region2 {
                flags,
                memory_size: HUGE as u64,
                userspace_addr: start as u64,
                ..Default::default()
            };
            region.pad2[0] = bitmap.as_ptr() as u64;
            set(&vm, region).unwrap();
            start_at_code(&vcpu);
            assert_eq!(waits_for(&mut vcpu), None);
            let mapped = ["pages_4k", "pages_2m"].map(|name| statistic(&stats, name));
            assert_eq!(mapped, pages, "{mmu:?}");
        }
    }
}

/// ```text
/// mov ax, 0x2000
/// mov ds, ax
/// mov bx, [0]
/// mov ax, 0xa000
/// mov ds, ax
/// mov bx, [0]
/// hlt
/// ```
const TWICE: &[u8] = &[
    0xb8, 0x00, 0x20, 0x8e, 0xd8, 0x8b, 0x1e, 0x00, 0x00, 0xb8, 0x00, 0xa0, 0x8e, 0xd8, 0x8b, 0x1e,
    0x00, 0x00, 0xf4,
];

#[test]
fn slots_of_the_same_memory_have_bitmaps_of_their_own() {
    const HALF: u64 = PAGES / 2;
    const USED: u64 = 0x20;
    for mmu in MmuKind::ALL {
        for absent in [[false, false], [false, true], [true, false], [true, true]] {
            let lates = [Late::new(), Late::new()];
            lates[0].memory.write(CODE, TWICE);
            let vm = kvm().with_mmu(*mmu).create_vm().unwrap();
            for (slot, late) in (0..).zip(&lates) {
                (0..PAGES).for_each(|page| late.clear(page));
                if absent[slot as usize] {
                    late.set(USED);
                }
                let region = kvm_userspace_memory_region2 {
                    slot,
                    guest_phys_addr: u64::from(slot) * HALF * PAGE,
                    memory_size: HALF * PAGE,
                    userspace_addr: lates[0].memory.start as u64,
                    ..late.region(KVM_MEM_USERFAULT)
                };
                set(&vm, region).unwrap();
            }
            let mut vcpu = vm.create_vcpu(0).unwrap();
            start_at_code(&vcpu);
            let mut brought = [false; 2];
            while let Some(gpa) = waits_for(&mut vcpu) {
                let slot = (gpa / PAGE / HALF) as usize;
                assert_eq!(gpa / PAGE % HALF, USED);
                brought[slot] = true;
                lates[slot].clear(USED);
            }
            assert_eq!(brought, absent, "{mmu:?}");
        }
    }
}

/// ```text
/// mov al, [0x8000]
/// mov al, [0x9000]
/// hlt
/// ```
const BOTH: &[u8] = &[0xa0, 0x00, 0x80, 0xa0, 0x00, 0x90, 0xf4];

#[test]
fn private_pages_come_later_as_shared_ones_do() {
    const SIZE: u64 = 2 * PAGE;
    kvm();
    let mut guest = Guest::of_type(KVM_X86_SW_PROTECTED_VM, BOTH, |_| {});
    let args = kvm_create_guest_memfd {
        size: SIZE,
        ..Default::default()
    };
    let fd = guest.vm.create_guest_memfd(args).unwrap();
    // SAFETY: KVM has created the descriptor just now, and nothing else owns it.
    let file = unsafe { GuestMemfdFd::from_raw(fd) }.unwrap();
    let late = Late::new();
    let region = kvm_userspace_memory_region2 {
        slot: 1,
        guest_phys_addr: DEVICE,
        memory_size: SIZE,
        guest_memfd: file.as_raw_fd() as u32,
        ..late.region(KVM_MEM_GUEST_MEMFD | KVM_MEM_USERFAULT)
    };
    set(&guest.vm, region).unwrap();
    let private = kvm_memory_attributes {
        address: DEVICE,
        size: PAGE,
        attributes: KVM_MEMORY_ATTRIBUTE_PRIVATE.into(),
        flags: 0,
    };
    guest.vm.set_memory_attributes(private).unwrap();
    // The exit also tells whether the page is private.
    let flags = [KVM_MEMORY_EXIT_FLAG_PRIVATE.into(), 0];
    for (page, flags) in (0..).zip(flags) {
        match guest.vcpu.run() {
            Ok(VcpuExit::MemoryFault {
                flags: said,
                gpa,
                size,
            }) => {
                assert_eq!((gpa, size), (DEVICE + page * PAGE, PAGE));
                assert_eq!(said, flags | KVM_MEMORY_EXIT_FLAG_USERFAULT);
            }
            other => panic!("{other:?}"),
        }
        late.clear(page);
    }
    assert!(matches!(guest.vcpu.run(), Ok(VcpuExit::Hlt)));
    // As with any slot that has private memory, the client can only delete this slot.
    let changed = kvm_userspace_memory_region2 {
        flags: KVM_MEM_GUEST_MEMFD,
        ..region
    };
    assert_eq!(set(&guest.vm, changed), Err(libc::EINVAL));
}
