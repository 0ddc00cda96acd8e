//! Tests the functions for a hypervisor whose CPU walks shadow tables itself.
//!
//! The monitors in `metal/` test that such a CPU translates correctly by these tables. This file tests the cases that
//! no monitor has: CR0.WP clear, the page directories of 32-bit and PAE paging, and a store to a table by which the
//! store's own address is translated.

#[path = "common/guest.rs"]
mod guest;

use std::convert::Infallible;
use std::sync::Arc;

use guest::{HUGE, Memory, USED, paging};
use slat::format::{Entry, X86};
use slat::guest_walk::{GuestPaging, Mode};
use slat::{
    Access::{self, *},
    AfterPageFault::{self, *},
    Config, Format, Gpa, Hpa, Level, MmuKind, Platform, Prefetch, Region, Setting, Stop, Vcpu,
    VirtualStop, Vm,
};
use slat_model::{HostMemory, SimPlatform};

type Tables = X86<5>;

const PAGES: u64 = 1024;
/// The frames of the guest's tables, from level 4 to level 1.
const TABLES: [u64; 4] = [16, 17, 18, 19];
/// The first frame of the guest's data: its page i is frame `DATA + i`.
const DATA: u64 = 512;

/// A guest, and a CPU that walks the tables of the shadow MMU like hardware.
struct Guest {
    vm: Arc<Vm<SimPlatform, Tables>>,
    vcpu: Vcpu<SimPlatform, Tables>,
    memory: Memory,
    paging: GuestPaging,
}

impl Guest {
    /// Makes a guest in 4-level paging, whose tables map 2 MiB to [`DATA`].
    fn new() -> Self {
        let config = Config::default().with_mmu(MmuKind::Shadow);
        let vm = Vm::new(SimPlatform::new(PAGES), config).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0));
        vm.set_memory_region(0, &region).unwrap();
        let guest = Guest {
            vcpu: vm.create_vcpu().unwrap(),
            vm,
            memory: Memory::new(PAGES),
            paging: paging(TABLES[0] << 12),
        };
        guest.memory.link(&TABLES);
        guest.memory.map(TABLES[3], DATA, USED);
        guest
    }

    fn fault(
        &mut self,
        gva: u64,
        access: Access,
    ) -> Result<AfterPageFault, VirtualStop<Infallible>> {
        let mut words = self.memory.words();
        let (vcpu, paging) = (&mut self.vcpu, &self.paging);
        vcpu.hardware_page_fault(gva, access, paging, &mut words)
    }

    /// Returns the table that the CPU loads for `gva`, with its level.
    fn root(&mut self, gva: u64) -> Option<(Hpa, Level)> {
        let level = match self.paging.mode {
            Mode::Bits32 { .. } | Mode::Pae => Level::MEGA,
            Mode::Level4 => Level(4),
            Mode::Level5 => Level(5),
        };
        let root = self.vcpu.hardware_root(gva, &self.paging)?;
        Some((root, level))
    }

    /// Walks the shadow table as a CPU with CR0.WP set does. Returns the host page; `None`: the access faults.
    fn walk(&mut self, gva: u64, access: Access) -> Option<u64> {
        let (root, mut level) = self.root(gva)?;
        let mut frame = root.pfn();
        loop {
            let index = gva >> (12 + 9 * (u64::from(level.0) - 1)) & 511;
            let table = self.vm.platform().entries(frame).cast::<u64>();
            // SAFETY: `table` is one of the VM's tables, and no other thread changes it.
            let entry = unsafe { table.add(index as usize).read_volatile() };
            match Tables::decode(entry, level) {
                Entry::Table(below) => (frame, level) = (below, Level(level.0 - 1)),
                Entry::Leaf(leaf) => {
                    let may = match access {
                        Read => true,
                        Write => leaf.write,
                        Execute => leaf.execute,
                    };
                    let may = may && (leaf.privilege.is_user() || !self.paging.user);
                    let page = leaf.pfn.add(gva >> 12 & (level.pages() - 1));
                    return may.then(|| HostMemory::identify(page).0);
                }
                _ => return None,
            }
        }
    }

    /// Makes the access, and handles its faults. Returns the host page, or how the access ended.
    fn access(&mut self, gva: u64, access: Access) -> Result<u64, Ended> {
        for _ in 0..10 {
            if let Some(page) = self.walk(gva, access) {
                return Ok(page);
            }
            match self.fault(gva, access) {
                Ok(Run) => {}
                Ok(Emulate) => return Err(Ended::Emulate),
                Err(stop) => return Err(Ended::Stop(stop)),
            }
        }
        panic!("{access:?} of {gva:#x} faults for ever");
    }
}

#[derive(Debug, PartialEq)]
enum Ended {
    Emulate,
    Stop(VirtualStop<Infallible>),
}

#[test]
fn there_is_a_root_after_the_first_fault() {
    let mut guest = Guest::new();
    assert_eq!(guest.root(0x3000), None);
    assert_eq!(guest.access(0x3000, Write), Ok(DATA + 3));
    let root = guest.root(0x3000);
    // After another flush of the guest, the root is the same. Another address space has no root yet.
    guest.vcpu.hardware_flush(&mut guest.memory.words());
    assert_eq!(guest.root(0x3000), root);
    guest.paging.cr3 = 40 << 12;
    assert_eq!(guest.root(0x3000), None);
}

#[test]
fn a_store_to_an_upper_table_is_made_after_that_is_shadowed_no_more() {
    let mut guest = Guest::new();
    // The guest maps the tables at the addresses of their frames plus 1 GiB, by other tables.
    for (table, below) in [(TABLES[1], 30), (30, 31)] {
        guest
            .memory
            .put(table, if table == 30 { 0 } else { 1 }, below << 12 | USED);
    }
    guest.memory.map(31, 0, USED);
    let at = |table: u64| (1 << 30) + (table << 12);
    assert_eq!(guest.access(0x3000, Read), Ok(DATA + 3));
    assert_eq!(guest.access(at(TABLES[2]), Write), Ok(TABLES[2]));
    assert!(guest.walk(0x3000, Read).is_none(), "the table is let go");
    guest.memory.put(TABLES[2], 0, DATA << 12 | USED | HUGE);
    guest.vm.audit().unwrap();
    // A store to a table of the next higher level is also a store to a table of its own path.
    assert_eq!(guest.access(at(TABLES[1]), Write), Err(Ended::Emulate));
    assert_eq!(
        guest.access(at(31), Write),
        Ok(31),
        "a last table, unsynced"
    );
}

#[test]
fn what_the_guest_does_not_grant_is_its_fault() {
    let mut guest = Guest::new();
    let fault = |code| Err(Ended::Stop(VirtualStop::PageFault { code }));
    guest.memory.put(TABLES[3], 4, 0);
    assert_eq!(guest.access(0x4000, Read), fault(4));
    guest.memory.put(TABLES[3], 5, (DATA + 5) << 12 | USED & !2);
    assert_eq!(guest.access(0x5000, Write), fault(7));
    assert_eq!(guest.access(0x5000, Read), Ok(DATA + 5));
    guest.memory.put(TABLES[3], 6, 0xfee0_0000 | USED);
    let mmio = Stop::Mmio {
        gpa: Gpa(0xfee0_0008),
    };
    let mmio = Err(Ended::Stop(VirtualStop::Stop(mmio)));
    assert_eq!(guest.access(0x6008, Read), mmio);
}

#[test]
fn a_supervisors_store_that_no_leaf_can_allow_is_to_be_emulated() {
    let mut guest = Guest::new();
    guest.paging.user = false;
    guest.paging.write_protect = false;
    guest.memory.put(TABLES[3], 5, (DATA + 5) << 12 | USED & !2);
    assert_eq!(guest.access(0x5000, Read), Ok(DATA + 5));
    assert_eq!(guest.access(0x5000, Write), Err(Ended::Emulate));
    assert_eq!(guest.access(0x3000, Write), Ok(DATA + 3));
}

#[test]
fn short_modes_have_a_page_directory_for_each_gib() {
    let directory = 50;
    for mode in [Mode::Bits32 { pse: true }, Mode::Pae] {
        let mut guest = Guest::new();
        guest.paging.mode = mode;
        guest.paging.cr3 = directory << 12;
        let pointers = [0, 1, 2, 3].map(|gib| (directory + gib) << 12 | 1);
        guest.paging.pdptes = (mode == Mode::Pae).then_some(pointers);
        // The third GiB, and its first 4 MiB, begin with 4 KiB pages: entry 0 of a table maps to DATA.
        let table = 60;
        match mode {
            Mode::Pae => {
                guest.memory.put(directory + 2, 2, table << 12 | USED);
                guest.memory.put(table, 7, (DATA + 7) << 12 | USED);
            }
            _ => {
                // Sets entry 513 of the directory and entry 7 of the table, which are the upper halves of 8-byte words.
                guest.memory.put(directory, 256, (table << 12 | USED) << 32);
                guest.memory.put(table, 3, ((DATA + 7) << 12 | USED) << 32);
            }
        }
        let gva = (2 << 30) + (4 << 20) + 0x7000;
        assert_eq!(guest.access(gva, Write), Ok(DATA + 7), "{mode:?}");
        assert_eq!(guest.root(0), None, "{mode:?}");
    }
}

#[test]
#[should_panic = "shadows tables of the guest"]
fn a_vm_without_the_shadow_mmu_has_no_such_calls() {
    let vm = Vm::<_, Tables>::new(SimPlatform::new(16), Config::default()).unwrap();
    let memory = Memory::new(16);
    let mut vcpu = vm.create_vcpu().unwrap();
    let _ = vcpu.hardware_page_fault(0, Read, &paging(0), &mut memory.words());
}
