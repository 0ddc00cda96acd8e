//! Tests how prefetch asks the host: the number of calls of `resolve_resident`, and of pages in them. Also tests that
//! the host's reply is used for later faults, but not after it has become stale.

#[macro_use]
#[path = "common/passing.rs"]
mod passing;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};

use slat::{
    Access, Config, Ept, Gfn, Gpa, HostPage, HostRun, Hva, Level, MmuKind, Pfn, Platform, Prefetch,
    Region, Request, ResolveError, Setting, Stale, Stop, Switch, Vcpu, Vm, VmId, WaitFor,
};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

/// Host memory in which a page becomes resident when it is resolved.
struct Lazy {
    machine: Arc<SimPlatform>,
    resident: Mutex<BTreeSet<Hva>>,
    /// The number of calls of `resolve_resident`, and the number of pages in them.
    asks: AtomicU64,
    asked: AtomicU64,
    /// Whether `populate` makes pages resident; and the number of pages resolved.
    populates: AtomicBool,
    resolves: AtomicU64,
}

// SAFETY: tables and host pages come from `SimPlatform`, which keeps the promises of the trait.
unsafe impl Platform for Lazy {
    passes_tables!();
    fn populate(&self, _: VmId, backing: Range<Hva>) {
        if self.populates.load(Relaxed) {
            let pages = (backing.end.0 - backing.start.0) >> 12;
            assert!(pages <= Level::MEGA.pages(), "{pages} pages at once");
            let mut resident = self.resident.lock().unwrap();
            resident.extend((0..pages).map(|page| backing.start.add_pages(page)));
        }
    }
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.resolves.fetch_add(1, Relaxed);
        self.resident.lock().unwrap().insert(request.backing);
        self.machine.resolve(request)
    }
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        self.asks.fetch_add(1, Relaxed);
        self.asked
            .fetch_add((backing.end.0 - backing.start.0) >> 12, Relaxed);
        let resident: Vec<Hva> = (self.resident.lock().unwrap().range(backing))
            .copied()
            .collect();
        for run in resident.chunk_by(|a, b| a.add_pages(1) == *b) {
            let range = run[0]..run[0].add_pages(run.len() as u64);
            self.machine.resolve_resident(vm, range, found);
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

impl Lazy {
    /// Makes all pages resident.
    fn make_all_resident(&self) {
        *self.resident.lock().unwrap() = (0..PAGES).map(HostMemory::hva).collect();
    }

    fn asks(&self) -> (u64, u64) {
        (self.asks.load(Relaxed), self.asked.load(Relaxed))
    }
}

/// Makes a VM with a memslot of [`PAGES`] pages from frame 0 on. No page is resident.
fn vm(mmu: MmuKind) -> Arc<Vm<Lazy, Ept>> {
    let platform = Lazy {
        machine: SimPlatform::new(PAGES),
        resident: Mutex::default(),
        asks: AtomicU64::new(0),
        asked: AtomicU64::new(0),
        populates: AtomicBool::new(false),
        resolves: AtomicU64::new(0),
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
        let (_, asked) = vm.platform().asks();
        assert!(asked <= 3 * PAGES, "{mmu:?}: {asked} pages asked for");
    }
}

#[test]
fn a_prefault_resolves_no_page_that_the_host_populates() {
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        for populates in [true, false] {
            let vm = vm(mmu);
            vm.platform().populates.store(populates, Relaxed);
            let mut vcpu = vm.create_vcpu().unwrap();
            // The range neither begins nor ends at the boundary of a table, and its last pages are in no slot.
            let mapped = vcpu.hardware_prefault(Gpa(100 << 12)..Gpa((PAGES + 9) << 12));
            assert_eq!(mapped, Ok((PAGES - 100) << 12));
            assert_eq!(vm.stats().pages_4k, PAGES - 100);
            let resolved = vm.platform().resolves.load(Relaxed);
            assert_eq!(resolved, if populates { 0 } else { PAGES - 100 });
            vm.audit().unwrap();
        }
    }
}

#[test]
fn a_prefault_maps_resident_huge_pages_by_tables_and_not_by_faults() {
    let huge = HostChange::Remap {
        level: Level::MEGA,
        writable: true,
        kind: PageKind::Ordinary,
    };
    let vm = vm(MmuKind::Tdp);
    let platform = vm.platform();
    platform.machine.host.change(&(0..PAGES), huge);
    platform.make_all_resident();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mapped = vcpu.hardware_prefault(Gpa(0)..Gpa(PAGES << 12));
    assert_eq!(mapped, Ok(PAGES << 12));
    assert_eq!((vm.stats().pages_2m, vm.stats().pages_4k), (PAGES / 512, 0));
    assert_eq!(platform.resolves.load(Relaxed), 0);
    let (asks, _) = platform.asks();
    assert_eq!(asks, 2, "for a table's pages, and for all");

    // The second of the four leaves is replaced by a table with one leaf. A fault replaces that table.
    vm.zap(0, Gfn(512)..Gfn(1024));
    vm.set_policy(Setting::HugePages(Switch::Off));
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    read(&mut vcpu, 600);
    vm.set_policy(Setting::HugePages(Switch::On));
    assert_eq!(
        (vm.stats().pages_2m, vm.stats().pages_4k),
        (PAGES / 512 - 1, 1)
    );
    platform.resolves.store(0, Relaxed);
    // The range begins in the middle of a leaf, and ends in the middle of another.
    let (mut next, end) = (Gpa(100 << 12), Gpa((PAGES - 100) << 12));
    while next < end {
        // A call ends early where the fault has to zap the table.
        next.0 += vcpu.hardware_prefault(next..end).unwrap();
    }
    assert_eq!((vm.stats().pages_2m, vm.stats().pages_4k), (PAGES / 512, 0));
    assert_eq!(platform.resolves.load(Relaxed), 1);
    vm.audit().unwrap();
}

fn read(vcpu: &mut Vcpu<Lazy, Ept>, gfn: u64) -> Pfn {
    let mut vcpu = vcpu.enter(1);
    loop {
        match vcpu.translate(Gpa(gfn << 12), Access::Read) {
            Ok(page) => return page.host.pfn(),
            Err(Stop::Retry) => vcpu.quiesce(),
            Err(stop) => panic!("{stop}"),
        }
    }
}

#[test]
fn a_window_seldom_asks_the_host_in_a_stream() {
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        for backwards in [false, true] {
            let vm = vm(mmu);
            vm.set_policy(Setting::Prefetch(Prefetch::Window(8)));
            vm.platform().make_all_resident();
            let mut vcpu = vm.create_vcpu().unwrap();
            for i in 0..PAGES {
                read(&mut vcpu, if backwards { PAGES - 1 - i } else { i });
            }
            assert_eq!(vm.stats().pf_fixed, PAGES / 8);
            // The windows have 8 pages, 16 and so on, up to the pages of a table. From then on there is one call for
            // each table.
            let (asks, asked) = vm.platform().asks();
            assert_eq!((asks, asked), (7 + 3, 1016 + 3 * 512));
        }
    }
}

#[test]
fn scattered_faults_seldom_ask_the_host() {
    let vm = vm(MmuKind::Tdp);
    vm.platform().make_all_resident();
    for (policy, most) in [(Prefetch::Window(8), 30), (Prefetch::Adaptive, 0)] {
        vm.set_policy(Setting::Prefetch(policy));
        vm.zap(0, Gfn(0)..Gfn(PAGES));
        let before = vm.platform().asks().0;
        let mut vcpu = vm.create_vcpu().unwrap();
        // The multiplier is odd, so each page is read once, and far from the page before.
        for i in 0..PAGES / 8 {
            read(&mut vcpu, i * 8 * 77 % PAGES);
        }
        let asks = vm.platform().asks().0 - before;
        assert!(asks <= most, "{policy}: {asks}");
    }
}

#[test]
fn what_the_host_has_said_ends_with_an_invalidation() {
    let vm = vm(MmuKind::Tdp);
    vm.set_policy(Setting::Prefetch(Prefetch::Window(8)));
    let platform = vm.platform();
    platform.make_all_resident();
    let mut vcpu = vm.create_vcpu().unwrap();
    // The host's reply was a run from page 0 to page 512.
    (0..300).for_each(|gfn| _ = read(&mut vcpu, gfn));
    let before = platform.asks().0;
    read(&mut vcpu, 304);
    assert_eq!(platform.asks().0, before);
    let replaced = 400..440;
    let remap = HostChange::Remap {
        level: Level::PAGE,
        writable: true,
        kind: PageKind::Ordinary,
    };
    let invalidation = vm.invalidate(HostMemory::hvas(&replaced));
    platform.machine.host.change(&replaced, remap);
    drop(invalidation);
    for gfn in 305..512 {
        let now = platform.machine.host.get(gfn).unwrap().pfn;
        assert_eq!(read(&mut vcpu, gfn), now, "page {gfn}");
    }
    assert!(platform.asks().0 > before);
    vm.audit().unwrap();
}
