//! Tests the reports of zapped leaves that a platform gets: they tell which pages may have been written to, so that the
//! host can write these back.

#[macro_use]
#[path = "common/passing.rs"]
mod passing;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use slat::format::Stage2;
use slat::{
    Access, Config, Ept, Format, Gfn, Gpa, HostPage, HostRun, Hva, Level, MmuKind, Platform,
    Prefetch, Region, Request, ResolveError, Setting, SlotFlags, Stale, Stop, Vm, VmId, WaitFor,
    ZappedLeaf,
};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

/// A machine that records the reports.
struct Listening {
    machine: Arc<SimPlatform>,
    told: Mutex<Vec<ZappedLeaf>>,
}

// SAFETY: tables and host pages come from `SimPlatform`, which keeps the promises of the trait.
unsafe impl Platform for Listening {
    const WANTS_ZAPPED: bool = true;

    passes_tables!();
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.machine.resolve(request)
    }
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        self.machine.resolve_resident(vm, backing, found);
    }
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.machine.flush(vm, range, stale);
    }
    fn zapped(&self, leaf: ZappedLeaf) {
        self.told.lock().unwrap().push(leaf);
    }
    fn wait(&self, _: u32, what: WaitFor) {
        panic!("one thread waits for {what:?}");
    }
}

const PAGES: u64 = 1024;
/// The page to which the guest writes.
const WRITTEN: u64 = 3;
/// The page that the guest only reads. Its leaf allows writing.
const READ: u64 = 4;

type Zap<F> = fn(&Vm<Listening, F>);

/// Returns operations that zap the leaves: one by one, with their table, and with their slot.
fn zaps<F: Format>() -> [Zap<F>; 3] {
    [
        |vm| drop(vm.invalidate(HostMemory::hvas(&(WRITTEN..READ + 1)))),
        |vm| vm.zap(0, Gfn(0)..Gfn(512)),
        |vm| vm.remove_memory_region(0, 0).unwrap(),
    ]
}

fn region() -> Region {
    Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0))
}

fn written_pages_are_told<F: Format>(mmu: MmuKind) {
    for zap in zaps::<F>() {
        // Dirty logging removes the right to write from the leaves. The pages that were written before must still be
        // reported as dirty.
        for logs in [false, true] {
            let machine = SimPlatform::new(PAGES);
            let remap = HostChange::Remap {
                level: Level::PAGE,
                writable: true,
                kind: PageKind::Ordinary,
            };
            machine.host.change(&(0..PAGES), remap);
            let told = Mutex::default();
            let platform = Arc::new(Listening { machine, told });
            let vm = Vm::<_, F>::new(platform, Config::default().with_mmu(mmu)).unwrap();
            vm.set_policy(Setting::Prefetch(Prefetch::Off));
            vm.set_memory_region(0, &region()).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            for (page, access) in [(WRITTEN, Access::Write), (READ, Access::Read)] {
                let mut vcpu = vcpu.enter(1);
                while vcpu.translate(Gpa(page << 12), access) == Err(Stop::Retry) {
                    vcpu.quiesce();
                }
            }
            if logs {
                let logged = region().with_flags(SlotFlags::LOG_DIRTY_PAGES);
                vm.set_memory_region(0, &logged).unwrap();
            }
            zap(&vm);
            let mut told: Vec<_> = (vm.platform().told.lock().unwrap().iter())
                .map(|leaf| (HostMemory::identify(leaf.pfn).0, leaf.level, leaf.dirty))
                .collect();
            told.sort_unstable();
            // If walkers set no dirty bit, a page that was only read may count as written.
            let unknown = !F::SETS_DIRTY;
            let both = [(WRITTEN, Level::PAGE, true), (READ, Level::PAGE, unknown)];
            assert_eq!(told, both, "{}, logs: {logs}", F::NAME);
        }
    }
}

#[test]
fn on_every_kind_of_walker() {
    written_pages_are_told::<Ept>(MmuKind::Tdp);
    written_pages_are_told::<Ept>(MmuKind::Direct);
    written_pages_are_told::<Stage2<48, true>>(MmuKind::Tdp);
}
