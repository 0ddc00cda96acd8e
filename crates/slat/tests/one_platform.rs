//! One platform that serves several VMs: each request names the right VM, address space and slot.

#[macro_use]
#[path = "common/passing.rs"]
mod passing;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use slat::format::X86;
use slat::{
    Access::{self, *},
    Config, Ept, Format, Gfn, Gpa, HostPage, HostRun, Hva, MmuKind, Pfn, Platform, Region, Request,
    ResolveError, Setting, SlotFlags, Stale, Stop, Vcpu, Vm, VmId, WaitFor,
};
use slat_model::{HostMemory, SimPlatform};

const PAGES: u64 = 1024;

/// A machine that records requests and tables by VM.
struct Shared {
    machine: Arc<SimPlatform>,
    /// The VM that owns each frame of a table.
    tables: Mutex<BTreeMap<Pfn, VmId>>,
    requests: Mutex<Vec<Request>>,
    resident: Mutex<Vec<VmId>>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Shared {
            machine: SimPlatform::new(PAGES),
            tables: Mutex::default(),
            requests: Mutex::default(),
            resident: Mutex::default(),
        })
    }

    fn note(&self, vm: VmId, frame: Pfn) {
        let before = self.tables.lock().unwrap().insert(frame, vm);
        assert_eq!(before, None);
    }

    /// Returns the number of frames that contain tables of `vm`.
    fn tables_of(&self, vm: VmId) -> usize {
        let tables = self.tables.lock().unwrap();
        tables.values().filter(|owner| **owner == vm).count()
    }
}

// SAFETY: tables and host pages come from `SimPlatform`, which keeps the promises of the trait.
unsafe impl Platform for Shared {
    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        let frame = self.machine.alloc_table(vm)?;
        self.note(vm, frame);
        Some(frame)
    }
    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        let first = self.machine.alloc_root(vm, tables)?;
        (0..tables as u64).for_each(|table| self.note(vm, first.add(table)));
        Some(first)
    }
    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        let owner = self.tables.lock().unwrap().remove(&frame);
        assert_eq!(owner, Some(vm), "{frame:?} is freed for another VM");
        // SAFETY: `frame` is from `machine` for `vm` and is freed once, as `free_table` asks of its caller.
        unsafe { self.machine.free_table(vm, frame) };
    }
    passes_contents!();
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.requests.lock().unwrap().push(*request);
        self.machine.resolve(request)
    }
    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        self.resident.lock().unwrap().push(vm);
        self.machine.resolve_resident(vm, backing, found);
    }
    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.machine.flush(vm, range, stale);
    }
    fn wait(&self, _: u32, what: WaitFor) {
        panic!("one thread waits for {what:?}");
    }
}

fn access<F: Format>(vcpu: &mut Vcpu<Shared, F>, gfn: u64, access: Access) -> Result<(), Stop> {
    let mut vcpu = vcpu.enter(1);
    loop {
        vcpu.quiesce();
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => {}
            answer => break answer.map(drop),
        }
    }
}

fn vm<F: Format>(platform: &Arc<Shared>, mmu: MmuKind) -> Arc<Vm<Shared, F>> {
    let config = Config::default().with_spaces(2).with_mmu(mmu);
    let vm = Vm::new(platform.clone(), config).unwrap();
    vm.set_policy(Setting::parse("prefetch", "off").unwrap());
    vm
}

/// Each request, and each allocation and release of a table, names the right VM.
fn each_vm_is_served_as_itself<F: Format>(mmu: MmuKind) {
    let platform = Shared::new();
    let vms = [(); 2].map(|()| vm::<F>(&platform, mmu));
    for (i, vm) in vms.iter().enumerate() {
        let slot = 3 + i as u32;
        let (gpa, backing) = (Gpa(0x10_0000), HostMemory::hva(64 * i as u64));
        let region = Region::new(slot, gpa, 64 << 12, backing);
        vm.set_memory_region(1, &region).unwrap();
        let mut vcpu = vm.create_vcpu_in(1).unwrap();
        for (gfn, kind) in [(0x103, Read), (0x13f, Write), (0x100, Execute)] {
            access(&mut vcpu, gfn, kind).unwrap();
            let asked = platform.requests.lock().unwrap().pop().unwrap();
            let of = (asked.vm, asked.space, asked.slot, asked.gfn);
            assert_eq!(of, (vm.id(), 1, slot, Gfn(gfn)));
            let at = backing.add_pages(gfn - 0x100);
            assert_eq!((asked.backing, asked.access), (at, kind));
        }

        platform.resident.lock().unwrap().clear();
        vm.set_policy(Setting::parse("prefetch", "8").unwrap());
        access(&mut vcpu, 0x120, Read).unwrap();
        vm.set_memory_region(1, &region.with_flags(SlotFlags::LOG_DIRTY_PAGES))
            .unwrap();
        vm.set_memory_region(1, &region).unwrap();
        vm.audit().unwrap();
        let asked = platform.resident.lock().unwrap().clone();
        assert!(!asked.is_empty() && asked.iter().all(|asked| *asked == vm.id()));
        assert!(
            platform
                .requests
                .lock()
                .unwrap()
                .drain(..)
                .all(|asked| asked.vm == vm.id())
        );
    }
    let [first, second] = vms;
    let (a, b) = (first.id(), second.id());
    let before = platform.tables_of(b);
    assert!(platform.tables_of(a) > 2 * F::ROOT_TABLES);
    // The tables were freed by a flush, by dropping a vCPU, and by dropping the VM.
    first.remove_memory_region(1, 3).unwrap();
    drop(first);
    assert_eq!((platform.tables_of(a), platform.tables_of(b)), (0, before));
    drop(second);
    assert_eq!(platform.tables_of(b), 0);
    platform.machine.check();
}

#[test]
fn each_vm_of_a_tree_is_served_as_itself() {
    each_vm_is_served_as_itself::<Ept>(MmuKind::Tdp);
    each_vm_is_served_as_itself::<slat::format::Stage2<40>>(MmuKind::Tdp);
}

#[test]
fn each_vm_of_shadow_pages_is_served_as_itself() {
    each_vm_is_served_as_itself::<Ept>(MmuKind::Direct);
    each_vm_is_served_as_itself::<X86<5>>(MmuKind::Shadow);
}
