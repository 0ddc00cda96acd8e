//! Tests the shadow MMU by page tables of a guest, which the tests write.
//!
//! `slat_model::guest` tests whether translations are those of a processor.

mod dropped;
#[path = "../common/guest.rs"]
mod guest;
mod mapped;

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
