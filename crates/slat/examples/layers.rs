//! A hundred VMs on one base and two deltas: each VM costs its tables and the pages that it writes.
//!
//! Run it: `cargo run -p slat --example layers`.

mod plain_memory;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use plain_memory::PlainMemory;
use slat::layers::{PageFrames, Stack};
use slat::{
    Access, Config, Entries, Ept, ForkError, Gfn, Gpa, Granule, HostPage, HostRun, Hpa, Hva, Level,
    PAGE_SIZE, Pfn, Platform, Region, Request, ResolveError, Stale, Stop, TableMeta, Vcpu, Vm,
    VmId, WaitFor,
};

/// The number of pages of each VM: 8 MiB.
const PAGES: u64 = 4 * Level::MEGA.pages();

impl PageFrames for PlainMemory {
    fn copy(&self, from: Option<Pfn>) -> Option<Pfn> {
        let copy = self.allocate(1)?;
        for offset in (0..PAGE_SIZE).step_by(8) {
            let word = |frame: Pfn| self.word(Hpa(frame.hpa().0 + offset));
            word(copy).store(from.map_or(0, |from| word(from).load(Relaxed)), Relaxed);
        }
        Some(copy)
    }

    fn free(&self, first: Pfn, pages: u64) {
        (0..pages).for_each(|n| PlainMemory::free(self, first.add(n)));
    }
}

/// The memory of one VM.
struct Memory {
    vm: OnceLock<Weak<Vm<Layered, Ept>>>,
    stack: Mutex<Stack<PlainMemory>>,
}

impl Memory {
    fn stack(&self) -> MutexGuard<'_, Stack<PlainMemory>> {
        self.stack.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The platform: tables are in plain memory, and so are the pages, which stacks know.
struct Layered {
    host: Arc<PlainMemory>,
    vms: Mutex<BTreeMap<u64, Arc<Memory>>>,
}

impl Layered {
    fn vms(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Memory>>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self, vm: VmId) -> Arc<Memory> {
        self.vms()[&vm.0].clone()
    }

    fn add(&self, vm: VmId, stack: Stack<PlainMemory>) {
        let memory = Memory {
            vm: OnceLock::new(),
            stack: Mutex::new(stack),
        };
        self.vms().insert(vm.0, Arc::new(memory));
    }
}

// SAFETY:
// - tables are those of `PlainMemory`, which keeps the promises of the trait;
// - a stack keeps each frame until it is dropped, which is after its VM, and lets one VM write to it.
unsafe impl Platform for Layered {
    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let memory = self.memory(request.vm);
        loop {
            let mut stack = memory.stack();
            match stack.find(request.backing) {
                Some(page) if page.writable || request.access != Access::Write => return Ok(page),
                _ => {}
            }
            let copy = stack.copy(request.backing)?;
            // The invalidation waits for readers, which may be in `resolve_resident`: hold no lock.
            drop(stack);
            let vm = memory.vm.get().and_then(Weak::upgrade);
            let vm = vm.ok_or(ResolveError::BadAddress)?;
            let pages = request.backing..request.backing.add_pages(1);
            let guard = copy.is_replacement().then(|| vm.invalidate_exact(pages));
            memory.stack().insert(copy);
            drop(guard);
        }
    }

    fn resolve_resident(&self, vm: VmId, mut backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let memory = self.memory(vm);
        let next = |pages| memory.stack().resident(pages);
        while let Some(run) = next(backing.clone()) {
            backing.start = run.backing.add_pages(run.pages);
            found(run);
        }
    }

    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let stack = self.memory(parent).stack().share()?;
        self.add(child, stack);
        Ok(())
    }

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.host.alloc_table(vm)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        self.host.alloc_root(vm, tables)
    }

    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        // SAFETY: the frame is from `host` for `vm`, and is freed once, as this method asks of its caller.
        unsafe { self.host.free_table(vm, frame) };
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.host.entries(frame)
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.host.meta(frame)
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        self.host.flush(vm, range, stale);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.host.wait(round, what);
    }
}

/// A VM with one CPU.
struct Guest {
    vm: Arc<Vm<Layered, Ept>>,
    cpu: Vcpu<Layered, Ept>,
}

impl Guest {
    fn new(vm: Vm<Layered, Ept>) -> Result<Self, Box<dyn Error>> {
        let vm = Arc::new(vm);
        let memory = vm.platform().memory(vm.id());
        memory.vm.get_or_init(|| Arc::downgrade(&vm));
        let cpu = vm.create_vcpu()?;
        Ok(Guest { vm, cpu })
    }

    /// Makes a VM with this VM's memory as it is now.
    fn fork(&self) -> Result<Self, Box<dyn Error>> {
        Guest::new(Vm::fork_from(&self.vm)?)
    }

    /// Makes the CPU access the first word of `page`, and write `value` to it, if given. Returns the word.
    fn access(&mut self, page: u64, value: Option<u64>) -> Result<u64, Stop> {
        let access = value.map_or(Access::Read, |_| Access::Write);
        let host = self.vm.platform().host.clone();
        let mut cpu = self.cpu.enter(0);
        loop {
            cpu.quiesce();
            match cpu.translate(Gpa(page * PAGE_SIZE), access) {
                Err(Stop::Retry) => {}
                found => {
                    let word = host.word(found?.host);
                    value
                        .into_iter()
                        .for_each(|value| word.store(value, Relaxed));
                    return Ok(word.load(Relaxed));
                }
            }
        }
    }

    /// Returns a line that says what the VM has and costs.
    fn cost(&self, name: &str) -> String {
        let stats = self.vm.stats();
        let memory = self.vm.platform().memory(self.vm.id());
        let stack = memory.stack();
        format!(
            "{name}: {} own pages on {} layers; {} leaves of 2 MiB, {} of 4 KiB in {} KiB of tables; {} bytes of records; {} faults\n",
            stack.own_pages(),
            stack.layers(),
            stats.pages_2m,
            stats.pages_4k,
            self.vm.memory_usage().table_bytes / 1024,
            stack.heap_bytes(),
            stats.pf_fixed,
        )
    }

    /// Ends the VM. Its memory is dropped after it.
    fn end(self) {
        let (id, platform) = (self.vm.id(), self.vm.platform().clone());
        drop(self);
        platform.vms().remove(&id.0);
    }
}

/// Makes a VM with a base of consecutive frames.
fn boot(platform: &Arc<Layered>) -> Result<Guest, Box<dyn Error>> {
    let vm = Vm::unshared(platform.clone(), Config::default())?;
    vm.set_memory_region(0, &Region::new(0, Gpa(0), PAGES * PAGE_SIZE, Hva(0)))?;
    let memory = Hva(0)..Hva(PAGES * PAGE_SIZE);
    let mut stack = Stack::new(platform.host.clone(), Granule::Kib4, memory);
    let first = platform.host.allocate(PAGES as usize);
    stack.put(Hva(0), first.ok_or("no memory for the base")?, PAGES)?;
    platform.add(vm.id(), stack);
    Guest::new(vm)
}

/// Returns the lines that the program prints.
fn run() -> Result<String, Box<dyn Error>> {
    let platform = Arc::new(Layered {
        host: Arc::new(PlainMemory::new(3 * PAGES as usize, 0)),
        vms: Mutex::default(),
    });
    let mut printed = String::new();

    // The guest boots: it writes to all its memory, which then is the base.
    let mut first = boot(&platform)?;
    for page in 0..PAGES {
        first.access(page, Some(page))?;
    }
    let base = first.fork()?;
    first.end();
    printed += &base.cost("base");

    // Two more VMs run, each on what the one before has left. A layer keeps what they have written.
    let mut runs = base.fork()?;
    for page in 0..100 {
        runs.access(page, Some(1000 + page))?;
    }
    printed += &runs.cost("delta 1");
    let delta1 = runs.fork()?;
    runs.end();
    let mut runs = delta1.fork()?;
    for page in 90..120 {
        runs.access(page, Some(2000 + page))?;
    }
    printed += &runs.cost("delta 2");
    let delta2 = runs.fork()?;
    runs.end();

    // A hundred VMs run on these layers at once. Each reads all memory, and writes to three pages.
    let mut guests = Vec::new();
    for n in 0..100 {
        let below = [&base, &delta1, &delta2][n % 3];
        let mut guest = below.fork()?;
        let layers = n % 3;
        for page in 0..PAGES {
            let expected = match page {
                90..120 if layers == 2 => 2000 + page,
                0..100 if layers >= 1 => 1000 + page,
                _ => page,
            };
            assert_eq!(guest.access(page, None)?, expected);
        }
        assert_eq!(guest.vm.stats().pf_fixed, 0, "faults of reads");
        for page in [5, 6, PAGES - 1] {
            guest.access(page, Some(n as u64))?;
        }
        guests.push(guest);
    }
    for (guest, name) in guests
        .iter()
        .zip(["a VM on the base", "on delta 1", "on delta 2"])
    {
        printed += &guest.cost(name);
    }
    for (guest, n) in guests.iter_mut().zip(0..) {
        assert_eq!(guest.access(6, None)?, n);
    }
    let tables = guests
        .iter()
        .map(|guest| guest.vm.memory_usage().table_bytes);
    writeln!(
        printed,
        "100 VMs of {} MiB: {} KiB of tables, {} KiB of pages",
        (PAGES * PAGE_SIZE) >> 20,
        tables.sum::<u64>() / 1024,
        300 * PAGE_SIZE / 1024,
    )?;
    guests.into_iter().for_each(Guest::end);
    [base, delta1, delta2].into_iter().for_each(Guest::end);
    Ok(printed)
}

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", run()?);
    Ok(())
}

#[test]
fn a_vm_costs_its_tables_and_what_it_writes() {
    let printed = run().unwrap();
    let expected = [
        "base: 0 own pages on 1 layers; 4 leaves of 2 MiB, 0 of 4 KiB in 12 KiB of tables; 0 bytes of records; 0 faults",
        "delta 1: 100 own pages on 1 layers; 3 leaves of 2 MiB, 512 of 4 KiB in ",
        "on delta 2: 3 own pages on 3 layers; 2 leaves of 2 MiB, 1024 of 4 KiB in ",
    ];
    for line in expected {
        assert!(printed.contains(line), "{line:?} is not in\n{printed}");
    }
}
