//! A machine whose VMs share pages until one of them writes: it counts the users of each frame.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, Weak};

use slat::{
    Access, ForkError, Format, HostPage, HostRun, Hpa, Hva, Level, PAGE_SHIFT, Pfn, Platform,
    Request, ResolveError, Stale, Vm, VmId, WaitFor,
};
use slat_model::SimPlatform;

/// Pages of a VM's memory.
pub const PAGES: u64 = 1024;
/// Frames of the machine: enough for the VMs of a test, each with all pages of its own.
const FRAMES: u64 = 8 * PAGES;

/// Returns the backing address of a page.
pub fn memory(page: u64) -> Hva {
    Hva(1 << 40).add_pages(page)
}

pub struct Cow<F: Format> {
    machine: Arc<SimPlatform>,
    /// What the frames contain.
    words: Vec<AtomicU64>,
    /// How the first VM's pages are mapped.
    level: Level,
    books: Mutex<Books<F>>,
    copies: AtomicU64,
}

struct Books<F: Format> {
    /// The frame of each page.
    maps: HashMap<VmId, Vec<u64>>,
    vms: HashMap<VmId, Weak<Vm<Cow<F>, F>>>,
    /// The users of each frame.
    users: Vec<u32>,
}

impl<F: Format> Books<F> {
    /// Returns what backs `page` of `vm`. A huge page is one whose frames are as in the first VM,
    /// with as many users each.
    fn get(&self, vm: VmId, page: u64, level: Level) -> HostPage {
        let map = &self.maps[&vm];
        let frame = map[page as usize];
        let writable = |frame: u64| self.users[frame as usize] == 1;
        let start = page & !(level.pages() - 1);
        let is_huge = (start..start + level.pages())
            .all(|page| map[page as usize] == page && writable(page) == writable(frame));
        let level = if is_huge { level } else { Level::PAGE };
        HostPage::new(Pfn(frame), level).with_writable(writable(frame))
    }
}

impl<F: Format> Cow<F> {
    /// Makes a machine whose first VM has its memory in pages of `level`.
    pub fn new(level: Level) -> Arc<Self> {
        Arc::new(Cow {
            machine: SimPlatform::new(FRAMES),
            words: (0..FRAMES).map(|_| AtomicU64::new(0)).collect(),
            level,
            books: Mutex::new(Books {
                maps: HashMap::new(),
                vms: HashMap::new(),
                users: vec![0; FRAMES as usize],
            }),
            copies: AtomicU64::new(0),
        })
    }

    /// Call for the first VM before it runs, and for clones.
    pub fn add(&self, vm: &Arc<Vm<Self, F>>) {
        let mut books = self.books.lock().unwrap();
        if books.maps.is_empty() {
            books.maps.insert(vm.id(), (0..PAGES).collect());
            books.users[..PAGES as usize].fill(1);
        }
        books.vms.insert(vm.id(), Arc::downgrade(vm));
    }

    /// Has the model of a TLB watch the tables of `vm` from now on, and of no other VM.
    pub fn watch(&self, vm: &Vm<Self, F>) {
        let roots = [vm.root(0).unwrap()];
        // SAFETY: frames stay memory until the platform is dropped; the engine's accesses are atomic.
        unsafe { self.machine.tlb.watch::<F>(vm.id(), &roots) };
    }

    /// Call when no VM runs that is watched.
    pub fn forget(&self) {
        self.machine.tlb.forget();
    }

    /// Call after a VM was dropped.
    pub fn remove(&self, vm: VmId) {
        let mut books = self.books.lock().unwrap();
        books.vms.remove(&vm);
        for frame in books.maps.remove(&vm).unwrap() {
            books.users[frame as usize] -= 1;
        }
    }

    pub fn word(&self, host: Hpa) -> &AtomicU64 {
        &self.words[(host.0 >> PAGE_SHIFT) as usize]
    }

    /// Returns how many pages were copied.
    pub fn copies(&self) -> u64 {
        self.copies.load(SeqCst)
    }

    /// Panics if frames or entries of the tables are misused.
    pub fn check(&self) {
        self.machine.check();
    }

    /// Call while nothing runs. Panics if a TLB may still hold what the tables do not allow.
    pub fn check_tlb(&self) {
        assert_eq!(self.machine.tlb.stale(), None);
    }

    pub fn live_frames(&self) -> usize {
        self.machine.live_frames()
    }

    pub fn fail_allocation(&self, n: u64, stay: bool) {
        self.machine.fail_allocation(n, stay);
    }

    pub fn stop_failing(&self) -> bool {
        self.machine.stop_failing()
    }

    /// Gives `vm` a frame of its own for `page`.
    fn copy(&self, vm: VmId, page: u64) {
        let handle = self
            .books
            .lock()
            .unwrap()
            .vms
            .get(&vm)
            .and_then(Weak::upgrade);
        let handle = handle.expect("the VM of a vCPU");
        // Held without the lock: it waits for readers, which ask what is resident.
        let _invalidation = handle.invalidate(memory(page)..memory(page + 1));
        let mut books = self.books.lock().unwrap();
        let old = books.maps[&vm][page as usize] as usize;
        if books.users[old] == 1 {
            return;
        }
        let unused = books
            .users
            .iter()
            .skip(PAGES as usize)
            .position(|users| *users == 0);
        let new = unused.expect("a frame for each page of each VM") + PAGES as usize;
        self.words[new].store(self.words[old].load(SeqCst), SeqCst);
        books.users[old] -= 1;
        books.users[new] = 1;
        books.maps.get_mut(&vm).unwrap()[page as usize] = new as u64;
        self.copies.fetch_add(1, SeqCst);
    }
}

fn page_of(hva: Hva) -> u64 {
    (hva.0 - memory(0).0) >> PAGE_SHIFT
}

// SAFETY: as `SimPlatform`; a frame has one user when it is returned as writable, and keeps its users until a write.
unsafe impl<F: Format> Platform for Cow<F> {
    passes_tables!();

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let (vm, page) = (request.vm, page_of(request.backing));
        loop {
            let found = self.books.lock().unwrap().get(vm, page, self.level);
            if found.writable || request.access != Access::Write {
                return Ok(found);
            }
            self.copy(vm, page);
        }
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        for page in page_of(backing.start)..page_of(backing.end) {
            let first = self.books.lock().unwrap().get(vm, page, self.level);
            let (backing, pages) = (memory(page), 1);
            found(HostRun {
                backing,
                pages,
                first,
            });
        }
    }

    fn share(&self, parent: VmId, child: VmId) -> Result<(), ForkError> {
        let mut books = self.books.lock().unwrap();
        let map = books.maps[&parent].clone();
        for frame in &map {
            books.users[*frame as usize] += 1;
        }
        books.maps.insert(child, map);
        Ok(())
    }

    fn flush(&self, vm: VmId, range: Range<slat::Gfn>, stale: Stale) {
        self.machine.flush(vm, range, stale);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        self.machine.wait(round, what);
    }
}
