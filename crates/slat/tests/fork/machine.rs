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

/// The number of pages of a VM's memory.
pub const PAGES: u64 = 1024;
/// The number of frames of the machine. It suffices for all VMs of a test, even if they share no page.
const FRAMES: u64 = 8 * PAGES;

/// Returns the backing address of a page.
pub fn memory(page: u64) -> Hva {
    Hva(1 << 40).add_pages(page)
}

pub struct Cow<F: Format> {
    machine: Arc<SimPlatform>,
    /// The contents of the frames.
    words: Vec<AtomicU64>,
    /// The level at which the first VM's pages are mapped.
    level: Level,
    books: Mutex<Books<F>>,
    copies: AtomicU64,
}

struct Books<F: Format> {
    /// The frame of each page, by VM.
    maps: HashMap<VmId, Vec<u64>>,
    vms: HashMap<VmId, Weak<Vm<Cow<F>, F>>>,
    /// The number of users of each frame.
    users: Vec<u32>,
}

impl<F: Format> Books<F> {
    /// Returns the page that backs `page` of `vm`. The page has `level` only if all its frames are those of the first
    /// VM, and either all or none of them have several users.
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
    /// Makes a machine whose first VM has host pages of `level`.
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

    /// Call for the first VM before it runs, and for each clone.
    pub fn add(&self, vm: &Arc<Vm<Self, F>>) {
        let mut books = self.books.lock().unwrap();
        if books.maps.is_empty() {
            books.maps.insert(vm.id(), (0..PAGES).collect());
            books.users[..PAGES as usize].fill(1);
        }
        books.vms.insert(vm.id(), Arc::downgrade(vm));
    }

    /// Makes the model of a TLB check the tables of `vm` from now on, and those of no other VM.
    pub fn watch(&self, vm: &Vm<Self, F>) {
        let roots = [vm.root(0).unwrap()];
        // SAFETY: frames stay memory until the platform is dropped; the engine's accesses are atomic.
        unsafe { self.machine.tlb.watch::<F>(vm.id(), &roots) };
    }

    /// Ends [`Self::watch`]. Call when the watched VM does not run.
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

    /// Call while nothing runs. Panics if a TLB may still contain a translation that the tables do not allow.
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
        // Do not hold the lock here: the invalidation waits for readers, and these call `resolve_resident`, which takes
        // the lock.
        let _invalidation = handle.invalidate_exact(memory(page)..memory(page + 1));
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

// SAFETY: the methods for tables are those of `SimPlatform`. A frame has one user when this returns the frame as
// writable, and it keeps its users until a write.
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
