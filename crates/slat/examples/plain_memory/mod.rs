//! A whole [`Platform`] on plain memory: an array of 4 KiB frames, of which some hold page tables and some back guest
//! memory.
//!
//! Nothing here needs an OS. A hypervisor would use its own memory map instead of the array, and would flush its CPUs
//! where this code only counts flushes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};

use slat::{
    ENTRIES, Entries, Gfn, HostPage, HostRun, Hpa, Hva, Level, MetaMap, PAGE_SIZE, Pfn, Platform,
    Request, ResolveError, Stale, TableMeta, VmId, WaitFor,
};

/// A page of memory, as the words in it. It has the layout of [`Entries`]: a table is a page whose words are entries.
#[repr(C, align(4096))]
pub struct Page([AtomicU64; ENTRIES]);

/// The words of a page that was reclaimed and is in no frame.
pub type Content = Box<[u64; ENTRIES]>;

struct Frame {
    page: Page,
    used: AtomicBool,
}

pub struct PlainMemory {
    /// Host-physical memory: the frame with number n is element n.
    frames: Box<[Frame]>,
    /// The frame that backs each page of guest memory; 0: none yet. Backing addresses count from the
    /// first of these pages.
    backing: Box<[AtomicU64]>,
    /// The contents of reclaimed pages, by the number of the backing page.
    pub swapped: Mutex<BTreeMap<u64, Content>>,
    /// The pages that were kept for a snapshot, by the number of the backing page.
    saved: Mutex<BTreeMap<u64, Content>>,
    /// The engine's metadata of the frames that hold tables, like `struct page` in Linux.
    metas: MetaMap,
    /// Number of flushes so far.
    pub flushes: AtomicU64,
}

impl PlainMemory {
    /// Makes a host with `frames` frames, on which guests may have `pages` pages of memory.
    pub fn new(frames: usize, pages: usize) -> Self {
        let frame = |_| Frame {
            page: Page([const { AtomicU64::new(0) }; ENTRIES]),
            used: AtomicBool::new(false),
        };
        let host = PlainMemory {
            frames: (0..frames).map(frame).collect(),
            backing: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            swapped: Mutex::default(),
            saved: Mutex::default(),
            metas: MetaMap::new(),
            flushes: AtomicU64::new(0),
        };
        // Number 0 means "none" in `backing`.
        host.frames[0].used.store(true, Relaxed);
        host
    }

    /// Allocates `count` consecutive frames, the first aligned to `count`. Takes no lock, so several CPUs may call it
    /// at once, also in an interrupt handler.
    pub fn allocate(&self, count: usize) -> Option<Pfn> {
        let own = |frame: &&Frame| !frame.used.swap(true, Acquire);
        for first in (0..self.frames.len()).step_by(count) {
            let run = self.frames.get(first..first + count)?;
            let owned = run.iter().take_while(own).count();
            if owned == count {
                return Some(Pfn(first as u64));
            }
            for frame in &run[..owned] {
                frame.used.store(false, Release);
            }
        }
        None
    }

    /// Frees a frame that nothing refers to any more.
    pub fn free(&self, frame: Pfn) {
        self.frame(frame).used.store(false, Release);
    }

    /// Returns the pages that were kept for a snapshot, by the number of the backing page.
    pub fn saved(&self) -> MutexGuard<'_, BTreeMap<u64, Content>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn frame(&self, frame: Pfn) -> &Frame {
        &self.frames[frame.0 as usize]
    }

    /// Returns the word at a host-physical address: how a software CPU accesses memory.
    pub fn word(&self, host: Hpa) -> &AtomicU64 {
        &self.frame(host.pfn()).page.0[(host.0 % PAGE_SIZE) as usize / 8]
    }

    /// Returns the number of the frame that backs the page at `backing`; 0: none yet. `None`: no memory is there.
    pub fn owner(&self, backing: Hva) -> Option<&AtomicU64> {
        self.backing.get((backing.0 / PAGE_SIZE) as usize)
    }

    /// Returns the frame that backs the page at `backing`, if it has one.
    pub fn resident(&self, backing: Hva) -> Option<Pfn> {
        let frame = self.owner(backing)?.load(Acquire);
        (frame != 0).then_some(Pfn(frame))
    }

    /// Returns the frame that backs the page at `backing`. If the page has no frame, gives it one, with the contents
    /// that the page had when it was reclaimed, or else full of zeros.
    pub fn make_resident(&self, backing: Hva) -> Result<Pfn, ResolveError> {
        let owner = self.owner(backing).ok_or(ResolveError::BadAddress)?;
        if let Some(frame) = self.resident(backing) {
            return Ok(frame);
        }
        let mut swapped = self.swapped.lock().unwrap_or_else(PoisonError::into_inner);
        // Another CPU may have given the page a frame meanwhile.
        if let Some(frame) = self.resident(backing) {
            return Ok(frame);
        }
        let new = self.allocate(1).ok_or(ResolveError::OutOfMemory)?;
        let content = swapped.remove(&(backing.0 / PAGE_SIZE));
        let content = content.unwrap_or(Box::new([0; ENTRIES]));
        for (word, value) in self.frame(new).page.0.iter().zip(*content) {
            word.store(value, Relaxed);
        }
        owner.store(new.0, Release);
        Ok(new)
    }
}

/// Returns the description of a page in frame `pfn`, for the engine. A host that maps larger pages passes a higher
/// level, and the engine then uses leaves of that level.
pub fn page(pfn: Pfn) -> HostPage {
    HostPage::new(pfn, Level::PAGE)
}

// SAFETY:
// - `allocate` gives each frame once until it is freed; its page and its metadata stay at their addresses;
// - the frames that `resolve` returns back guest memory until `free` is called, under an invalidation;
// - no hardware walks the tables. With hardware, `flush` has to flush it.
unsafe impl Platform for PlainMemory {
    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.alloc_root(vm, 1)
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        let first = self.allocate(tables)?;
        let frames = || (0..tables as u64).map(|i| first.add(i));
        if frames().any(|frame| self.metas.prepare(frame).is_err()) {
            frames().for_each(|frame| self.free(frame));
            return None;
        }
        Some(first)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        self.free(frame);
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        NonNull::from(&self.frame(frame).page).cast()
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        (self.metas.get(frame)).expect("`alloc_table` has prepared it")
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.make_resident(request.backing).map(page)
    }

    fn populate(&self, _: VmId, backing: Range<Hva>) {
        for at in (backing.start.0..backing.end.0).step_by(PAGE_SIZE as usize) {
            if self.make_resident(Hva(at)).is_err() {
                return;
            }
        }
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        for at in (backing.start.0..backing.end.0).step_by(PAGE_SIZE as usize) {
            let backing = Hva(at);
            if let Some(first) = self.resident(backing).map(page) {
                let pages = 1;
                found(HostRun {
                    backing,
                    pages,
                    first,
                });
            }
        }
    }

    const KEEPS_OLD_PAGES: bool = true;

    fn keep(&self, _: VmId, backing: Range<Hva>) {
        for at in (backing.start.0..backing.end.0).step_by(PAGE_SIZE as usize) {
            let mut copy: Content = Box::new([0; ENTRIES]);
            if let Some(frame) = self.resident(Hva(at)) {
                for (to, word) in copy.iter_mut().zip(&self.frame(frame).page.0) {
                    *to = word.load(Relaxed);
                }
            }
            // A later snapshot replaces what an earlier one has saved.
            self.saved().insert(at / PAGE_SIZE, copy);
        }
    }

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {
        // A hypervisor interrupts the CPUs that run this VM, each of which executes INVEPT.
        self.flushes.fetch_add(1, Relaxed);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        std::hint::spin_loop();
    }
}
