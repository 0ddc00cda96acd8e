//! The engine's platform: what `slat` needs of a machine.

use alloc::string::String;
use alloc::sync::Arc;
use core::hint::spin_loop;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};

use slat::{
    Access, Entries, Gfn, HostPage, HostRun, Hpa, Hva, Level, MemoryType, PAGE_SIZE, Pfn, Platform,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use slat_model::{Lock, Tlb};

use crate::bench::{GIB, MIB};
use crate::frames::Frames;
use crate::guest::{GuestVm, Tables};
use crate::{Heap, Machine, Memory};

/// Frames for tables, and the memory that backs memslots.
///
/// Backing address and physical address are the same, but for one page that can be made to stand for
/// another ([`Host::replace`]): a host that moves a guest's page.
pub struct Host<M> {
    frames: Frames,
    /// Guests' memory of which the host has no mapping larger than a page.
    small: Range<Hpa>,
    /// Guests' memory that is whole GiBs.
    large: Range<Hpa>,
    /// How large the host's mappings of that are.
    level: AtomicU8,
    replaced: AtomicU64,
    replacement: AtomicU64,
    /// What the walkers may have cached, for a scenario that asks for it.
    tlb: Tlb,
    /// A table that was freed while a walker could reach it.
    freed_too_early: Lock<Option<String>>,
    /// How long a flush waits before it flushes.
    delay: AtomicU32,
    machine: PhantomData<fn() -> M>,
}

impl<M: Machine> Host<M> {
    /// See [`Host::small`].
    pub const SMALL_PAGES: u64 = 16;

    /// Divides `memory` up: a part goes to `heap`, one to tables, one to guests.
    ///
    /// # Safety
    /// - `memory` is nobody else's, and its addresses are valid as they are;
    /// - `heap` is the global allocator, and has no memory yet.
    pub unsafe fn new(memory: Memory, heap: &Heap) -> Arc<Self> {
        let at = |offset: u64| Hpa(memory.monitor.start.0.next_multiple_of(MIB) + offset);
        let small = at(0)..at(Self::SMALL_PAGES * PAGE_SIZE);
        assert!(at(48 * MIB) <= memory.monitor.end, "too little memory");
        // SAFETY: the caller's promise; the parts do not overlap.
        let frames = unsafe {
            heap.give(at(MIB)..at(17 * MIB));
            Frames::new(at(17 * MIB)..memory.monitor.end)
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

    /// The first page of guests' memory of which the host has no mapping larger than a page, of
    /// [`Host::SMALL_PAGES`].
    pub fn small(&self) -> Hpa {
        self.small.start
    }

    /// Copies the guest's program, less than a page, to the first small page. No guest runs.
    pub fn load(&self, program: &[u8]) {
        assert!(program.len() as u64 <= PAGE_SIZE);
        let to = self.small.start.0 as *mut u8;
        // SAFETY: guests' memory, large enough.
        unsafe { ptr::copy_nonoverlapping(program.as_ptr(), to, program.len()) };
    }

    /// The GiB of guests' memory that the host maps as it likes.
    pub fn large(&self) -> Hpa {
        self.large.start
    }

    /// Table frames in use.
    pub fn frames_used(&self) -> usize {
        self.frames.used()
    }

    /// For a new VM: mappings of the large memory have `level`, no page stands for another, and no VM is
    /// watched.
    pub fn begin(&self, level: Level) {
        self.forget();
        self.map_at(level);
        self.replaced.store(0, SeqCst);
    }

    /// From now on mappings of the large memory have `level`.
    pub fn map_at(&self, level: Level) {
        self.level.store(level.0, SeqCst);
    }

    /// From now on there is a record of what walkers of `vm`, which no CPU runs yet, may have cached: the
    /// tables are read whenever the engine reaches them, and before and after each flush. Each flush waits
    /// for `delay` spins first, so that other CPUs meet what is not flushed yet.
    pub(crate) fn watch(&self, vm: &GuestVm<M>, delay: u32) {
        self.delay.store(delay, SeqCst);
        let root = vm.root(0).expect("a VM has an address space");
        // SAFETY: frames are memory at their addresses; between `alloc_table` and `free_table`, which tells
        // the record, only the engine and walkers write to them.
        unsafe { self.tlb.watch::<Tables<M>>(vm.id(), &[root]) };
    }

    /// What [`Host::watch`] began.
    pub(crate) fn tlb(&self) -> &Tlb {
        &self.tlb
    }

    /// Ends what [`Host::watch`] began. No CPU runs the VM any more.
    pub(crate) fn forget(&self) {
        self.tlb.forget();
        self.freed_too_early.lock().take();
        self.delay.store(0, SeqCst);
    }

    /// While no operation of the watched VM is in progress: whether all that walkers may have cached is in
    /// the tables, and no table was freed too early.
    pub(crate) fn nothing_is_stale(&self) -> Result<(), String> {
        let early = self.freed_too_early.lock().take();
        early.or_else(|| self.tlb.stale()).map_or(Ok(()), Err)
    }

    /// From now on the page at `backing` is the one at `page`: to be called while `backing` is
    /// invalidated. No mapping that holds it may be larger than a page.
    pub fn replace(&self, backing: Hva, page: Hpa) {
        self.replacement.store(page.0, SeqCst);
        self.replaced.store(backing.0, SeqCst);
    }

    fn page(&self, backing: Hva) -> Option<HostPage> {
        let page = backing.0 & !(PAGE_SIZE - 1);
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
        Some(HostPage {
            pfn: Hpa(host).pfn(),
            level,
            writable: true,
            memory: MemoryType::WriteBack,
        })
    }
}

// SAFETY: frames and metadata come from `Frames`, which keeps them in place; `page` answers with memory
// of the guests, which never goes away; `flush` is the machine's, with the same contract.
unsafe impl<M: Machine> Platform for Host<M> {
    fn alloc_table(&self) -> Option<Pfn> {
        self.frames.alloc()
    }

    fn alloc_root(&self, tables: usize) -> Option<Pfn> {
        self.frames.alloc_run(tables)
    }

    unsafe fn free_table(&self, frame: Pfn) {
        if let Err(why) = self.tlb.freed(frame) {
            *self.freed_too_early.lock() = Some(why);
        }
        // SAFETY: the caller's promise.
        unsafe { self.frames.free(frame) }
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.tlb.reached(frame);
        self.frames.entries(frame)
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.frames.meta(frame)
    }

    fn resolve(&self, backing: Hva, _: Access) -> Result<HostPage, ResolveError> {
        self.page(backing).ok_or(ResolveError::BadAddress)
    }

    fn resolve_resident(&self, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let pages = (backing.end.0 - backing.start.0) / PAGE_SIZE;
        for backing in (0..pages).map(|i| backing.start.add_pages(i)) {
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
}
