//! The engine's platform: the parts of a machine that `slat` needs.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::hint::spin_loop;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};

use slat::{
    Entries, Event, Format, Gfn, Granule, HostPage, HostRun, Hpa, Hva, Level, Pfn, Platform,
    Request, ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use slat_model::{Lock, Tlb};

use crate::bench::{GIB, MIB};
use crate::frames::Frames;
use crate::guest::{GuestVm, Tables};
use crate::{Heap, Machine, Memory};

/// The host: frames for tables, and the memory that backs memslots.
///
/// The backing address and the physical address of a page are equal, except for one page. [`Host::replace`] can
/// replace that page by another page, like a host that moves a guest's page.
pub struct Host<M> {
    frames: Frames,
    /// Guests' memory that the host maps by single pages only.
    small: Range<Hpa>,
    /// Guests' memory that consists of whole GiBs.
    large: Range<Hpa>,
    /// The level of the host's mappings of the large memory.
    level: AtomicU8,
    replaced: AtomicU64,
    replacement: AtomicU64,
    /// The entries that walkers may have cached. The entries are recorded for scenarios that ask for the record.
    tlb: Tlb,
    /// The error that a table was freed while a walker could reach it.
    freed_too_early: Lock<Option<String>>,
    /// The number of spins before each flush.
    delay: AtomicU32,
    machine: PhantomData<fn() -> M>,
}

impl<M: Machine> Host<M> {
    /// The size of the platform's pages: the size of the pages that its tables map.
    const GRANULE: Granule = Tables::<M>::GRANULE;

    /// The number of pages of [`Host::small`].
    pub const SMALL_PAGES: u64 = 16;

    /// Divides `memory`: a part for `heap`, one for tables, one for guests.
    ///
    /// # Safety
    /// - no other code uses `memory`. Its physical addresses are valid pointers;
    /// - `heap` is the global allocator, and has no memory yet.
    pub unsafe fn new(memory: Memory, heap: &Heap) -> Arc<Self> {
        let at = |offset: u64| Hpa(memory.monitor.start.0.next_multiple_of(MIB) + offset);
        let small = at(0)..at(Self::SMALL_PAGES * Self::GRANULE.bytes());
        assert!(at(48 * MIB) <= memory.monitor.end, "too little memory");
        // SAFETY: no other code uses `memory`, and its addresses are valid, as this function's `# Safety` asks of its
        // caller. The two parts do not overlap.
        let frames = unsafe {
            heap.give(at(MIB)..at(17 * MIB));
            Frames::new(at(17 * MIB)..memory.monitor.end, Self::GRANULE)
        };
        Arc::new(Host {
            frames,
            small,
            large: memory.data..Hpa(memory.data.0 + GIB),
            level: AtomicU8::new(Level::GIGA.0),
            replaced: AtomicU64::new(0),
            replacement: AtomicU64::new(0),
            tlb: Tlb::default(),
            freed_too_early: Lock::new(None),
            delay: AtomicU32::new(0),
            machine: PhantomData,
        })
    }

    /// Returns the first of the [`Host::SMALL_PAGES`] pages of guests' memory that the host maps by single pages only.
    pub fn small(&self) -> Hpa {
        self.small.start
    }

    /// Copies the guest's program, less than a page, to the first small page. Call while no guest runs.
    pub fn load(&self, program: &[u8]) {
        assert!(program.len() as u64 <= Self::GRANULE.bytes());
        let to = self.small.start.0 as *mut u8;
        // SAFETY: the page is in the guests' memory, and is large enough.
        unsafe { ptr::copy_nonoverlapping(program.as_ptr(), to, program.len()) };
    }

    /// Returns the GiB of guests' memory whose mappings may have any level.
    pub fn large(&self) -> Hpa {
        self.large.start
    }

    /// Returns the number of table frames in use.
    pub fn frames_used(&self) -> usize {
        self.frames.used()
    }

    /// Call before making a VM: maps the large memory at `level`, ends replacements of pages, and watches no VM.
    pub fn begin(&self, level: Level) {
        self.forget();
        self.map_at(level);
        self.replaced.store(0, SeqCst);
    }

    /// Maps the large memory at `level` from now on.
    pub fn map_at(&self, level: Level) {
        self.level.store(level.0, SeqCst);
    }

    /// Begins to record the entries that walkers of `vm`, which no CPU runs yet, may have cached: the tables are read
    /// whenever the engine reaches them, and before and after each flush. Each flush first waits for `delay` spins, so
    /// that other CPUs use translations that are not flushed yet.
    pub(crate) fn watch(&self, vm: &GuestVm<M>, delay: u32) {
        self.delay.store(delay, SeqCst);
        let root = vm.root(0).expect("a VM has an address space");
        // SAFETY: frames are memory at their addresses; between `alloc_table` and `free_table`, which tells the record,
        // only the engine and walkers write to them.
        unsafe { self.tlb.watch::<Tables<M>>(vm.id(), &[root]) };
    }

    /// Returns the record that [`Host::watch`] began.
    pub(crate) fn tlb(&self) -> &Tlb {
        &self.tlb
    }

    /// Ends the record that [`Host::watch`] began. Call when no CPU runs the VM any more.
    pub(crate) fn forget(&self) {
        self.tlb.forget();
        self.freed_too_early.lock().take();
        self.delay.store(0, SeqCst);
    }

    /// Call while no operation of the watched VM is in progress. Checks that the tables have all entries that walkers
    /// may have cached, and that no table was freed too early.
    pub(crate) fn nothing_is_stale(&self) -> Result<(), String> {
        let early = self.freed_too_early.lock().take();
        early.or_else(|| self.tlb.stale()).map_or(Ok(()), Err)
    }

    /// Makes `page` replace the page at `backing` from now on. Call while `backing` is invalidated. No mapping of
    /// `backing` may be larger than a page.
    pub fn replace(&self, backing: Hva, page: Hpa) {
        self.replacement.store(page.0, SeqCst);
        self.replaced.store(backing.0, SeqCst);
    }

    fn page(&self, backing: Hva) -> Option<HostPage> {
        let page = backing.0 & !(Self::GRANULE.bytes() - 1);
        let level = if self.large.contains(&Hpa(page)) {
            Level(self.level.load(SeqCst))
        } else if self.small.contains(&Hpa(page)) {
            Level::PAGE
        } else {
            return None;
        };
        let host = if page == self.replaced.load(SeqCst) {
            self.replacement.load(SeqCst)
        } else {
            page
        };
        Some(HostPage::new(Self::GRANULE.pfn(Hpa(host)), level))
    }
}

// SAFETY: frames and metadata are allocated from `Frames`, which keeps them at their addresses; `page` returns memory
// of the guests, which is never freed; `flush` is that of the machine, which has the same contract.
unsafe impl<M: Machine> Platform for Host<M> {
    fn granule(&self) -> Granule {
        Self::GRANULE
    }

    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        self.frames.alloc()
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        self.frames.alloc_run(tables)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        if let Err(why) = self.tlb.freed(frame) {
            *self.freed_too_early.lock() = Some(why);
        }
        // SAFETY: `frame` is from this platform and is freed once, as `Platform::free_table` asks of its caller.
        unsafe { self.frames.free(frame) }
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.tlb.reached(frame);
        self.frames.entries(frame)
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.frames.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        self.page(request.backing).ok_or(ResolveError::BadAddress)
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let pages = Self::GRANULE.pages_between(backing.start, backing.end);
        for backing in (0..pages).map(|i| Self::GRANULE.add_pages(backing.start, i)) {
            if let Some(first) = self.page(backing) {
                found(HostRun {
                    backing,
                    pages: 1,
                    first,
                });
            }
        }
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        let begun = self.tlb.flush_begins();
        (0..self.delay.load(Relaxed)).for_each(|_| spin_loop());
        M::flush_guests(vm, &range, stale);
        self.tlb.flush_ended(vm, &range, stale, begun);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        spin_loop();
    }

    fn trace(&self, event: Event) {
        if TRACES {
            M::print(&format!("trace {event}\n"));
        }
    }
}

/// Whether the monitor prints the engine's events. `metal/run --trace` builds such a monitor.
const TRACES: bool = option_env!("SLAT_METAL_TRACE").is_some();
