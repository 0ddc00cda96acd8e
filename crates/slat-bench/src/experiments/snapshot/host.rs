//! The platform of VMs that are saved: it keeps old pages in memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering::*};

use slat::{
    Entries, ForkError, Gfn, HostPage, HostRun, Hva, Level, PAGE_SHIFT, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use slat_demo::memory::Memory;

use crate::Failure;
use crate::bare::{Bare, PAGE};

/// The number of 64-bit words in a page.
const WORDS: usize = PAGE as usize / 8;

/// Guest memory that is resident, with addresses of this process as backing addresses, and a copy into which pages are
/// saved. Its VMs only translate; the experiment itself writes to the memory in their place.
pub(super) struct Host {
    tables: Bare,
    memory: Memory,
    /// The copy is as large as the memory, and repeats as it does.
    copy: Memory,
    /// The number of pages that were saved.
    kept: AtomicU64,
    /// Whether several VMs share the memory.
    shared: AtomicBool,
}

impl Host {
    /// Maps `size` bytes of guest memory, which the host maps by pages of `level`. Every `piece` bytes, the memory begins
    /// again.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(super) fn new(size: u64, piece: u64, level: Level) -> Result<Arc<Self>, Failure> {
        let [size, piece] = [size, piece].map(|bytes| bytes as usize);
        let aliased = || -> Result<Memory, Failure> {
            let memory = Memory::aliased(size, piece, 1 << 30)?;
            // The pages of the file are resident when the first piece is.
            for page in memory.words()[..piece / 8].chunks(WORDS) {
                page[0].store(0, Relaxed);
            }
            Ok(memory)
        };
        Ok(Arc::new(Host {
            tables: Bare::new(level),
            memory: aliased()?,
            copy: aliased()?,
            kept: AtomicU64::new(0),
            shared: AtomicBool::new(false),
        }))
    }

    /// Returns the backing address of the memory.
    pub(super) fn backing(&self) -> u64 {
        self.memory.address()
    }

    /// Returns the number of pages that were saved since the last call.
    pub(super) fn take_kept(&self) -> u64 {
        self.kept.swap(0, Relaxed)
    }

    /// Returns the words of page number `page` of the memory, as the guest sees it.
    pub(super) fn page(&self, page: u64) -> &[AtomicU64] {
        &self.memory.words()[page as usize * WORDS..][..WORDS]
    }

    /// Returns the words of the saved page number `page`.
    pub(super) fn saved(&self, page: u64) -> &[AtomicU64] {
        &self.copy.words()[page as usize * WORDS..][..WORDS]
    }

    /// Saves page number `page`.
    pub(super) fn save(&self, page: u64) {
        for (to, from) in self.saved(page).iter().zip(self.page(page)) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }
}

// SAFETY:
// - frames and their metadata are those of `Bare`;
// - `memory` lives as long as the platform, so longer than each VM on it; no guest accesses the memory, and this process
//   accesses it as atomics;
// - no hardware walks these tables, so there is nothing to flush.
unsafe impl Platform for Host {
    const KEEPS_OLD_PAGES: bool = true;

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.tables.alloc_table(vm)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        self.tables.alloc_root(vm, tables)
    }

    unsafe fn free_table(&self, vm: VmId, frame: Pfn) {
        // SAFETY: the caller promises what `free_table` requires, and `tables` has allocated the frame.
        unsafe { self.tables.free_table(vm, frame) }
    }

    fn alloc_tables(&self, vm: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        self.tables.alloc_tables(vm, frames, take);
    }

    unsafe fn free_tables(&self, vm: VmId, frames: &[Pfn]) {
        // SAFETY: the caller promises what `free_tables` requires, and `tables` has allocated the frames.
        unsafe { self.tables.free_tables(vm, frames) }
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        self.tables.entries(frame)
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.tables.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let page = self.tables.resolve(request)?;
        Ok(page.with_writable(!self.shared.load(Relaxed)))
    }

    fn resolve_resident(&self, vm: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let is_shared = self.shared.load(Relaxed);
        self.tables.resolve_resident(vm, backing, &mut |run| {
            let first = run.first.with_writable(!is_shared);
            found(HostRun { first, ..run });
        });
    }

    fn keep(&self, _: VmId, backing: Range<Hva>) {
        let first = (backing.start.0 - self.backing()) >> PAGE_SHIFT;
        let end = (backing.end.0 - self.backing()) >> PAGE_SHIFT;
        (first..end).for_each(|page| self.save(page));
        self.kept.fetch_add(end - first, Relaxed);
    }

    fn share(&self, _: VmId, _: VmId) -> Result<(), ForkError> {
        self.shared.store(true, Relaxed);
        Ok(())
    }

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {}

    fn wait(&self, round: u32, what: WaitFor) {
        self.tables.wait(round, what);
    }
}
