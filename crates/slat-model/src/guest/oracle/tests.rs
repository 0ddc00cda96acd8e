//! Tests each rule with outcomes that it allows and outcomes that it forbids.

use slat::guest_walk::error_code;
use slat::{Gpa, Region};

use super::super::entry::{G, RW, US};
use super::super::registers::*;
use super::*;

/// The flags of an entry that is present, grants all rights, and is accessed and dirty.
const ALL: u64 = P | RW | US | A | D;
/// An address that [`Guest::new`] maps. [`LEAF`] is the address of its leaf.
const GVA: u64 = 0x1000;
const LEAF: u64 = 0x4008;
/// The address of the entry that references the table that contains [`LEAF`].
const DIRECTORY: u64 = 0x3000;
/// An address that is translated by another leaf in the same table as [`LEAF`].
const NEIGHBOUR: u64 = 0x2000;
/// An address whose path shares only the highest entry with the path of [`GVA`].
const FAR: u64 = 0x4000_0000;

/// A guest with one vCPU and 4-level paging. Frames 1 to 5 are tables; frames from 8 on are data.
struct Guest {
    oracle: Oracle,
}

impl Guest {
    fn new() -> Guest {
        let mut oracle = Oracle::new(GuestMachine::new(64));
        let region = Region::new(0, Gpa(0), 32 << 12, HostMemory::BASE);
        oracle.memory.set_region(1, &region);
        let mut guest = Guest { oracle };
        for (at, entry) in [
            (0x1000, 0x2000),
            (0x2000, 0x3000),
            (DIRECTORY, 0x4000),
            (LEAF, 0x8000),
        ] {
            guest.store(at, entry | ALL);
        }
        guest.write(RegisterWrite::Cr0, |registers| {
            *registers = Registers {
                cr0: CR0_PG | CR0_WP,
                cr3: 0x1000,
                cr4: CR4_PAE,
                efer: EFER_LME | EFER_LMA,
                ..Registers::default()
            };
        });
        guest
    }

    fn with_pcids() -> Guest {
        let mut guest = Guest::new();
        guest.write(RegisterWrite::Cr4, |registers| registers.cr4 |= CR4_PCIDE);
        guest
    }

    fn with_global_pages() -> Guest {
        let mut guest = Guest::with_pcids();
        guest.store(LEAF, 0x8000 | ALL | G);
        guest.write(RegisterWrite::Cr4, |registers| registers.cr4 |= CR4_PGE);
        guest
    }

    fn store(&mut self, gpa: u64, entry: u64) {
        let now = self.oracle.tick();
        self.oracle.memory.store(now, gpa, &entry.to_le_bytes());
    }

    fn write(&mut self, write: RegisterWrite, change: impl FnOnce(&mut Registers)) {
        let mut registers = self.oracle.cpus[0].registers;
        change(&mut registers);
        self.oracle.written(0, write, &registers);
    }

    fn load_cr3(&mut self, cr3: u64, keep: bool) {
        self.write(RegisterWrite::Cr3 { keep }, |registers| registers.cr3 = cr3);
    }

    fn paging(&self) -> GuestPaging {
        let registers = &self.oracle.cpus[0].registers;
        registers.paging(&Privilege::KERNEL).expect("paging is on")
    }

    fn invlpg(&mut self, gva: u64) {
        let paging = self.paging();
        self.oracle.invlpg(0, gva, &paging);
    }

    fn allows(&self, gva: u64, access: Access, outcome: Outcome) -> bool {
        let access = GuestAccess {
            cpu: 0,
            gva,
            access,
            paging: &self.paging(),
        };
        let search = self.oracle.search(&access);
        search.find(Goal::Outcome(outcome)).is_some()
    }

    /// Whether a read of `gva` may reach the page in the frame `gfn`.
    fn may_read(&self, gva: u64, gfn: u64) -> bool {
        let page = self.oracle.memory.access(gfn << 12, Access::Read);
        self.allows(gva, Access::Read, page)
    }

    /// Returns the frames among 8 to 11 that a read of [`GVA`] may reach.
    fn readable(&self) -> Vec<u64> {
        (8..12).filter(|gfn| self.may_read(GVA, *gfn)).collect()
    }
}

#[test]
fn a_translation_is_used_until_a_flush_that_concerns_it() {
    type Flush = fn(&mut Guest);
    let keeps: [Flush; 8] = [
        |_| (),
        |guest| guest.invlpg(NEIGHBOUR),
        |guest| guest.load_cr3(0x1000, true),
        |guest| {
            let pcid = 7;
            guest.oracle.invpcid(0, Invpcid::Context { pcid });
        },
        |guest| {
            let (pcid, gva) = (7, GVA);
            guest.oracle.invpcid(0, Invpcid::Address { pcid, gva });
        },
        |guest| {
            let (pcid, gva) = (0, NEIGHBOUR);
            guest.oracle.invpcid(0, Invpcid::Address { pcid, gva });
        },
        |guest| guest.write(RegisterWrite::Cr0, |registers| registers.cr0 ^= CR0_WP),
        |guest| guest.write(RegisterWrite::Cr4, |registers| registers.cr4 ^= CR4_PKE),
    ];
    let drops: [Flush; 8] = [
        |guest| guest.invlpg(GVA),
        |guest| guest.load_cr3(0x1000, false),
        |guest| guest.oracle.invpcid(0, Invpcid::Context { pcid: 0 }),
        |guest| {
            let (pcid, gva) = (0, GVA);
            guest.oracle.invpcid(0, Invpcid::Address { pcid, gva });
        },
        |guest| guest.oracle.invpcid(0, Invpcid::AllButGlobal),
        |guest| guest.oracle.invpcid(0, Invpcid::All),
        |guest| guest.write(RegisterWrite::Cr4, |registers| registers.cr4 ^= CR4_PGE),
        |guest| guest.write(RegisterWrite::Cr4, |registers| registers.cr4 ^= CR4_SMEP),
    ];
    for (flushes, left) in [(keeps, vec![8, 9]), (drops, vec![9])] {
        for (i, flush) in flushes.iter().enumerate() {
            let mut guest = Guest::with_pcids();
            guest.store(LEAF, 0x9000 | ALL);
            flush(&mut guest);
            assert_eq!(guest.readable(), left, "flush {i}");
        }
    }
}

#[test]
fn a_global_translation_outlives_flushes_of_its_context() {
    let mut guest = Guest::with_global_pages();
    guest.store(LEAF, 0x9000 | ALL);
    guest.load_cr3(0x1000, false);
    guest.oracle.invpcid(0, Invpcid::AllButGlobal);
    guest.oracle.invpcid(0, Invpcid::Context { pcid: 0 });
    assert_eq!(guest.readable(), [8, 9]);
    // A global translation is also used under another PCID, whose own tables map nothing.
    guest.load_cr3(0x5007, false);
    assert_eq!(guest.readable(), [8]);
    guest.invlpg(NEIGHBOUR);
    assert_eq!(guest.readable(), [8]);
    guest.invlpg(GVA);
    assert_eq!(guest.readable(), [0; 0]);
}

#[test]
fn a_pcid_has_its_own_translations_only() {
    // A value that is in memory only while another PCID is current cannot be cached for the first PCID.
    let mut guest = Guest::with_pcids();
    guest.load_cr3(0x5007, true);
    assert_eq!(guest.readable(), [0; 0]);
    guest.store(LEAF, 0x9000 | ALL);
    guest.store(LEAF, 0xa000 | ALL);
    guest.load_cr3(0x1000, true);
    assert_eq!(guest.readable(), [8, 10]);
    guest.load_cr3(0x1000, false);
    assert_eq!(guest.readable(), [10]);
}

#[test]
fn a_lower_entry_may_be_read_through_an_upper_one_that_was_cached() {
    let mut guest = Guest::new();
    guest.store(DIRECTORY, 0x5000 | ALL);
    guest.store(LEAF, 0xa000 | ALL);
    assert_eq!(guest.readable(), [8, 10]);
    // INVLPG of any address drops the upper entry from the paging-structure caches. But the translation to frame 10 may
    // have been cached before.
    guest.invlpg(FAR);
    guest.store(LEAF, 0xb000 | ALL);
    assert_eq!(guest.readable(), [8, 10]);
}

#[test]
fn an_upper_entry_is_dropped_for_the_addresses_that_it_translates() {
    for (flushed, readable) in [(FAR, vec![8, 10]), (NEIGHBOUR, vec![8])] {
        let mut guest = Guest::new();
        guest.store(DIRECTORY, 0x5000 | ALL);
        let (pcid, gva) = (0, flushed);
        guest.oracle.invpcid(0, Invpcid::Address { pcid, gva });
        guest.store(LEAF, 0xa000 | ALL);
        assert_eq!(guest.readable(), readable, "{flushed:#x}");
    }
}

#[test]
fn a_lower_entry_is_not_read_before_the_upper_one() {
    let mut guest = Guest::new();
    guest.store(0x5008, 0xa000 | ALL);
    guest.store(0x5008, 0xb000 | ALL);
    guest.store(DIRECTORY, 0x5000 | ALL);
    assert_eq!(guest.readable(), [8, 11]);
}

#[test]
fn an_entry_is_cached_only_with_its_accessed_flag() {
    for at in [LEAF, DIRECTORY] {
        let mut guest = Guest::new();
        let entry = guest.oracle.memory.entry(at, 8);
        guest.store(at, entry & !A);
        guest.invlpg(GVA);
        guest.store(at, 0);
        assert_eq!(guest.readable(), [0; 0]);
    }
}

#[test]
fn a_write_needs_the_dirty_flag() {
    let mut guest = Guest::new();
    guest.store(LEAF, 0x8000 | ALL & !D);
    guest.invlpg(GVA);
    let page = guest.oracle.memory.access(0x8000, Access::Write);
    assert!(!guest.allows(GVA, Access::Write, page));
    guest.store(LEAF, 0x8000 | ALL);
    assert!(guest.allows(GVA, Access::Write, page));
    // For writes, only the leaf with the dirty flag was cached.
    guest.store(LEAF, 0);
    assert!(guest.allows(GVA, Access::Write, page));
}

#[test]
fn a_page_fault_for_a_right_may_be_stale_once() {
    let mut guest = Guest::new();
    guest.store(LEAF, 0x8000 | ALL & !RW);
    guest.store(LEAF, 0x8000 | ALL);
    let code = error_code::PRESENT | error_code::WRITE;
    let fault = Outcome::PageFault { code };
    assert!(guest.allows(GVA, Access::Write, fault));
    let access = GuestAccess {
        cpu: 0,
        gva: GVA,
        access: Access::Write,
        paging: &guest.paging(),
    };
    assert_eq!(
        guest.oracle.judge(&access, &fault),
        Ok(Found::StaleTranslation)
    );
    assert!(!guest.allows(GVA, Access::Write, fault));
}

#[test]
fn what_is_not_present_is_not_cached() {
    let mut guest = Guest::new();
    guest.store(LEAF, 0);
    let fault = Outcome::PageFault { code: 0 };
    assert!(guest.allows(GVA, Access::Read, fault));
    guest.store(LEAF, 0x8000 | ALL);
    assert!(!guest.allows(GVA, Access::Read, fault));
}

#[test]
fn a_memslot_that_is_deleted_is_gone_at_once() {
    let mut guest = Guest::new();
    let region = Region::new(1, Gpa(0x4000_0000), 1 << 12, HostMemory::hva(40));
    let now = guest.oracle.tick();
    guest.oracle.memory.set_region(now, &region);
    guest.store(LEAF, 0x4000_0000 | ALL);
    guest.invlpg(GVA);
    let page = guest.oracle.memory.access(0x4000_0000, Access::Read);
    assert!(guest.allows(GVA, Access::Read, page));
    let now = guest.oracle.tick();
    guest.oracle.memory.set_region(now, &region.with_size(0));
    assert!(!guest.allows(GVA, Access::Read, page));
    let gpa = Gpa(0x4000_0000);
    assert!(guest.allows(GVA, Access::Read, Outcome::Mmio { gpa }));
}

#[test]
fn a_flag_is_set_only_where_a_walk_may_be() {
    let mut guest = Guest::new();
    guest.store(LEAF, 0x8000 | ALL & !A);
    guest.store(LEAF + 8, 0x9000 | ALL & !A);
    let ram = guest.oracle.memory.machine.ram.clone();
    let mut set = |gva: u64, at: u64| {
        let host = slat::Hpa(at);
        let old = ram.read(host, 8);
        assert!(ram.compare_exchange(host, 8, old, old | A));
        let access = GuestAccess {
            cpu: 0,
            gva,
            access: Access::Read,
            paging: &guest.paging(),
        };
        let page = guest.oracle.memory.access(0x8000, Access::Read);
        guest.oracle.judge(&access, &page)
    };
    assert_eq!(set(GVA, LEAF), Ok(Found::Fresh));
    assert!(set(GVA, LEAF + 8).is_err());
}
