//! What looking ahead asks of the host: the number of pages in calls of `resolve_resident`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};

use slat::{
    Access, Config, Entries, Ept, Gfn, Gpa, HostPage, HostRun, Hva, MmuKind, Pfn, Platform, Region,
    ResolveError, Stale, TableMeta, Vm, VmId, WaitFor,
};
use slat_model::{HostMemory, SimPlatform};

/// Host memory of which a page is resident from the time it is resolved.
struct Lazy {
    machine: Arc<SimPlatform>,
    resident: Mutex<BTreeSet<Hva>>,
    /// Pages that were asked for by `resolve_resident`.
    asked: AtomicU64,
}

// SAFETY: as `SimPlatform`.
unsafe impl Platform for Lazy {
    fn alloc_table(&self) -> Option<Pfn> {
        self.machine.alloc_table()
    }
    fn alloc_root(&self, tables: usize) -> Option<Pfn> {
        self.machine.alloc_root(tables)
    }
    unsafe fn free_table(&self, frame: Pfn) {
        // SAFETY: the caller's promise.
        unsafe { self.machine.free_table(frame) };
    }
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.machine.entries(frame)
    }
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.machine.meta(frame)
    }
    fn resolve(&self, backing: Hva, access: Access) -> Result<HostPage, ResolveError> {
        self.resident.lock().unwrap().insert(backing);
        self.machine.resolve(backing, access)
    }
    fn resolve_resident(&self, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        self.asked
            .fetch_add((backing.end.0 - backing.start.0) >> 12, Relaxed);
        let resident: Vec<Hva> = (self.resident.lock().unwrap().range(backing))
            .copied()
            .collect();
        for run in resident.chunk_by(|a, b| a.add_pages(1) == *b) {
            let range = run[0]..run[0].add_pages(run.len() as u64);
            self.machine.resolve_resident(range, found);
        }
    }
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.machine.flush(vm, range, stale);
    }
    fn wait(&self, _: u32, what: WaitFor) {
        panic!("one thread waits for {what:?}");
    }
}

const PAGES: u64 = 2048;

/// Makes a VM with a memslot of [`PAGES`] pages from frame 0 on, of which none is resident.
fn vm(mmu: MmuKind) -> Arc<Vm<Lazy, Ept>> {
    let platform = Lazy {
        machine: SimPlatform::new(PAGES),
        resident: Mutex::default(),
        asked: AtomicU64::new(0),
    };
    let vm = Vm::new(Arc::new(platform), Config::default().with_mmu(mmu)).unwrap();
    let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0));
    vm.set_memory_region(0, &region).unwrap();
    vm
}

#[test]
fn a_prefault_asks_for_each_page_that_is_not_resident_once() {
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        let vm = vm(mmu);
        let mut vcpu = vm.create_vcpu().unwrap();
        let mapped = vcpu.enter(1).prefault(Gpa(0)..Gpa(PAGES << 12));
        assert_eq!(mapped, Ok(PAGES << 12));
        assert_eq!(vm.stats().pages_4k, PAGES);
        let asked = vm.platform().asked.load(Relaxed);
        assert!(asked <= 2 * PAGES, "{mmu:?}: {asked} pages asked for");
    }
}
