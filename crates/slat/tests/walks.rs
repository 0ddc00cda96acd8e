//! Counts how often an access walks from the root, reads the guest's tables, and looks up a slot. The numbers are
//! exact.

#[path = "common/guest.rs"]
mod guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use guest::{Memory, USED, paging};
use slat::format::{Npt, Stage2, Sv48x4, X86};
use slat::{
    Access::{self, *},
    Config, DirtyLogReads, Ept, Format, Gpa, Level, MmuKind, Prefetch, Region, Setting, SlotFlags,
    Stop, Vcpu, VirtualStop, Vm,
};
use slat_model::{Event, HostMemory, SimPlatform};

const PAGES: u64 = 4096;
const HUGE: u64 = 512;

struct World<F: Format> {
    platform: Arc<SimPlatform>,
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: Vcpu<SimPlatform, F>,
    /// The number of reads of a root table.
    roots: Arc<AtomicU64>,
}

impl<F: Format> World<F> {
    fn new(kind: MmuKind, level: Level) -> Self {
        let platform = SimPlatform::at_level(PAGES, level);
        let vm = Vm::<_, F>::new(platform.clone(), Config::default().with_mmu(kind)).unwrap();
        vm.set_policy(Setting::Prefetch(Prefetch::Off));
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.enter_unguarded(0);
        vcpu.quiesce();
        let world = World {
            platform,
            vcpu,
            vm,
            roots: Arc::default(),
        };
        world.set(SlotFlags::default());
        world
    }

    fn set(&self, flags: SlotFlags) {
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0)).with_flags(flags);
        self.vm.set_memory_region(0, &region).unwrap();
    }

    fn access(&mut self, page: u64, access: Access) {
        while let Err(stop) = self.vcpu.translate(Gpa(page << 12), access) {
            assert_eq!(stop, Stop::Retry);
            self.vcpu.quiesce();
        }
    }

    /// Runs `change` while the CPU is outside its reader section.
    fn outside(&mut self, change: impl FnOnce(&mut Self)) {
        self.vcpu.leave();
        change(self);
        self.vcpu.enter_unguarded(0);
        self.vcpu.quiesce();
    }

    /// Returns how often `access` reads a root table. The access takes one fault, and the vCPU has no table in its
    /// cache.
    fn walks(&mut self, page: u64, access: Access) -> u64 {
        self.outside(|_| ());
        let root = self.vm.root(0).unwrap();
        let roots = self.roots.clone();
        let before = (roots.load(SeqCst), self.vcpu.stats());
        self.platform.set_hook(move |event| {
            roots.fetch_add(u64::from(event == Event::Entries(root)), SeqCst);
        });
        self.vcpu.translate(Gpa(page << 12), access).unwrap();
        self.platform.clear_hook();
        let did = self.vcpu.stats().since(&before.1);
        assert_eq!(
            (did.pf_taken, did.pf_fixed),
            (1, 1),
            "{access:?} at page {page}"
        );
        self.roots.load(SeqCst) - before.0
    }
}

impl<F: Format> Drop for World<F> {
    fn drop(&mut self) {
        self.vcpu.leave();
    }
}

fn a_fault_walks_from_the_root_once<F: Format>() {
    let mut world = World::<F>::new(MmuKind::Tdp, Level::PAGE);
    world.access(0, Read);
    assert_eq!(world.walks(1, Read), 1, "{}", F::NAME);
    assert_eq!(world.walks(2, Write), 1, "{}", F::NAME);
    assert_eq!(world.walks(3, Execute), 1, "{}", F::NAME);
    // The leaf is write-protected only for the log, so the fault looks up neither the slot nor the host page.
    world.outside(|world| {
        world
            .vm
            .set_policy(Setting::DirtyLogReads(DirtyLogReads::Off));
        world.set(SlotFlags::LOG_DIRTY_PAGES);
    });
    world.access(5, Read);
    // The second walk of a write proves that the leaf is still in the tree. On formats with write-protected tables, the
    // first write walks once more, to push the protection of the entry above down to the leaves.
    let protects_tables = F::TABLE_WRITE != 0;
    let walks = 2 + u64::from(protects_tables);
    assert_eq!(world.walks(5, Write), walks, "{}", F::NAME);
    assert_eq!(world.walks(4, Read), 1, "{}", F::NAME);
    assert_eq!(world.walks(4, Write), 2, "{}", F::NAME);
    assert!(world.vcpu.stats().pf_fast > 0, "{}", F::NAME);
}

#[test]
fn a_fault_of_a_tree_walks_from_the_root_once() {
    a_fault_walks_from_the_root_once::<Ept>();
    a_fault_walks_from_the_root_once::<Npt>();
    a_fault_walks_from_the_root_once::<Stage2<48>>();
    a_fault_walks_from_the_root_once::<Sv48x4>();
}

/// The second walk is made under the lock of the table that receives the huge leaf, because NX may have made a table
/// there meanwhile.
#[test]
fn a_fault_that_maps_a_huge_page_walks_twice_for_nx() {
    let mut world = World::<Ept>::new(MmuKind::Tdp, Level::MEGA);
    world.access(0, Read);
    assert_eq!(world.walks(HUGE, Read), 1);
    world.outside(|world| {
        world
            .vm
            .set_policy(Setting::parse("nx_huge_pages", "on").unwrap())
    });
    world.access(0, Read);
    assert_eq!(world.walks(2 * HUGE, Read), 2);
    // The leaf is split in place.
    assert_eq!(world.walks(2 * HUGE, Execute), 1);
}

#[test]
fn a_fault_of_the_shadow_mmu_reads_each_entry_of_the_guest_once() {
    const TABLES: [u64; 4] = [16, 17, 18, 19];
    let mut world = World::<X86<5>>::new(MmuKind::Shadow, Level::PAGE);
    let memory = Memory::new(PAGES);
    memory.link(&TABLES);
    memory.map(TABLES[3], 512, USED);
    let paging = paging(TABLES[0] << 12);
    let access = |world: &mut World<X86<5>>, page: u64, access: Access| {
        let before = world.vcpu.stats();
        let mut words = memory.words();
        while let Err(stop) =
            (world.vcpu).translate_virtual(page << 12, access, &paging, &mut words)
        {
            assert_eq!(stop, VirtualStop::Stop(Stop::Retry));
            world.vcpu.quiesce();
        }
        world.vcpu.stats().since(&before)
    };
    // Tracking of the guest's tables begins.
    access(&mut world, 0, Read);
    for (page, kind) in [(1, Read), (2, Write), (3, Execute)] {
        let did = access(&mut world, page, kind);
        assert_eq!((did.pf_taken, did.pf_fixed), (1, 1));
        assert_eq!(did.guest_pte_reads, 4, "{kind:?}: one for each level");
        let looked_up = did.slot_lookups + did.slot_lookups_saved;
        assert_eq!(looked_up, 1, "{kind:?}: the slot of the page");
    }
    world.outside(|_| ());
}
