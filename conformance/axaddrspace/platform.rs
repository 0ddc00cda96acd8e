//! The engine's platform, implemented by the `PagingHandler` of an ArceOS hypervisor.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use memory_addr::PhysAddr;
use page_table_multiarch::{PagingHandler, PagingMetaData};
use slat::{
    Entries, Gfn, HostPage, HostRun, Hva, Level, MetaMap, PAGE_SIZE, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use spin::Mutex;

use super::Flushes;

/// A bit of backing addresses. The backing address of allocated memory is its guest-physical address with this bit.
/// Other backing addresses are host-physical addresses.
pub const ALLOCATED: u64 = 1 << 59;

/// The number of pages of allocated memory in a chunk.
const CHUNK: u64 = 512;
/// The frames that back the pages of a chunk. 0: the page was not accessed yet. Frames are stored under the lock of
/// all chunks, and loaded without the lock.
type Chunk = [AtomicU64; CHUNK as usize];

/// Returns the numbers of the chunks that hold `backing`, each with the range of its pages in `backing`.
fn chunks(backing: Range<Hva>) -> impl Iterator<Item = (u64, Range<usize>)> {
    let end = backing.end.0 / PAGE_SIZE;
    let mut page = backing.start.0 / PAGE_SIZE;
    core::iter::from_fn(move || {
        let (number, first) = (page / CHUNK, page % CHUNK);
        let pages = (CHUNK - first).min(end.checked_sub(page).filter(|pages| *pages > 0)?);
        page += pages;
        Some((number, first as usize..(first + pages) as usize))
    })
}

fn address(frame: Pfn) -> PhysAddr {
    PhysAddr::from_usize(frame.hpa().0 as usize)
}

/// The frames of one VM's tables and of its allocated memory.
pub struct Host<H> {
    /// The frames that back allocated memory, by the number of the chunk.
    frames: Mutex<BTreeMap<u64, Arc<Chunk>>>,
    metas: MetaMap,
    handler: PhantomData<fn() -> H>,
}

impl<H: PagingHandler + 'static> Host<H> {
    pub fn new() -> Self {
        Host {
            frames: Mutex::new(BTreeMap::new()),
            metas: MetaMap::new(),
            handler: PhantomData,
        }
    }

    /// Frees the allocated pages in `backing`, which no memslot refers to any more.
    pub fn free(&self, backing: Range<Hva>) {
        let mut frames = self.frames.lock();
        for (number, pages) in chunks(backing) {
            let Some(chunk) = frames.get(&number) else {
                continue;
            };
            for page in &chunk[pages] {
                let frame = page.swap(0, Relaxed);
                if frame != 0 {
                    H::dealloc_frame(address(Pfn(frame)));
                }
            }
            if chunk.iter().all(|page| page.load(Relaxed) == 0) {
                frames.remove(&number);
            }
        }
    }

    /// Allocates frames for the pages in `backing` that have no frame, in order, until there is no memory. Returns the
    /// last frame.
    fn allocate(&self, backing: Range<Hva>) -> Result<Pfn, ResolveError> {
        let mut frames = self.frames.lock();
        let mut last = Err(ResolveError::BadAddress);
        for (number, pages) in chunks(backing) {
            let chunk = frames
                .entry(number)
                .or_insert_with(|| Arc::new([const { AtomicU64::new(0) }; CHUNK as usize]));
            for page in &chunk[pages] {
                if page.load(Relaxed) == 0 {
                    let new = H::alloc_frame().ok_or(ResolveError::OutOfMemory)?;
                    page.store(new.as_usize() as u64 / PAGE_SIZE, Relaxed);
                }
                last = Ok(Pfn(page.load(Relaxed)));
            }
        }
        last
    }
}

/// Returns the first range within `pages` of a chunk whose frames are next to each other, and the first of these
/// frames.
fn first_run(chunk: &Chunk, pages: Range<usize>) -> Option<(Range<usize>, Pfn)> {
    let frame = |page: usize| chunk[page].load(Relaxed);
    let first = pages.clone().find(|page| frame(*page) != 0)?;
    let next = |page: &usize| frame(*page) == frame(first) + (*page - first) as u64;
    let end = (first + 1..pages.end).take_while(next).count() + first + 1;
    Some((first..end, Pfn(frame(first))))
}

/// Returns the host page of linear memory from `backing` on. The engine's leaves stay within the memslot, so the host
/// page may be as large as any leaf.
fn linear(backing: Hva) -> HostPage {
    HostPage::new(Pfn(backing.0 / PAGE_SIZE), Level::GIGA)
}

// SAFETY:
// - the handler gives each frame once until it is freed, and its page stays at its address, as the metadata does;
// - what backs a memslot stays until `free`, after the slot was deleted; linear memory is the caller's of `map_linear`.
// The flush is that of the crate: on x86_64 its tests cannot execute it.
unsafe impl<H: PagingHandler + 'static> Platform for Host<H> {
    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.alloc_root(vm, 1)
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        let new = H::alloc_frames(tables, tables * PAGE_SIZE as usize)?;
        let first = Pfn(new.as_usize() as u64 / PAGE_SIZE);
        if (0..tables as u64).any(|i| self.metas.prepare(first.add(i)).is_err()) {
            H::dealloc_frames(new, tables);
            return None;
        }
        Some(first)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        H::dealloc_frame(address(frame));
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        let page = H::phys_to_virt(address(frame));
        NonNull::new(page.as_mut_ptr().cast()).expect("a frame has an address")
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        (self.metas.get(frame)).expect("`alloc_root` has prepared it")
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let backing = request.backing;
        if backing.0 & ALLOCATED == 0 {
            return Ok(linear(backing));
        }
        let frame = self.allocate(backing..Hva(backing.0 + PAGE_SIZE))?;
        Ok(HostPage::new(frame, Level::PAGE))
    }

    fn populate(&self, _: VmId, backing: Range<Hva>) {
        if backing.start.0 & ALLOCATED != 0 {
            // Pages that get no frame here are resolved one by one. `resolve` then returns the reason.
            let _ = self.allocate(backing);
        }
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        if backing.start.0 & ALLOCATED == 0 {
            return found(HostRun {
                backing: backing.start,
                pages: (backing.end.0 - backing.start.0) / PAGE_SIZE,
                first: linear(backing.start),
            });
        }
        for (number, mut pages) in chunks(backing) {
            // The lock is not held during `found`, which takes the lock of a table.
            let Some(chunk) = self.frames.lock().get(&number).cloned() else {
                continue;
            };
            while let Some((run, frame)) = first_run(&chunk, pages.clone()) {
                found(HostRun {
                    backing: Hva((number * CHUNK + run.start as u64) * PAGE_SIZE),
                    pages: run.len() as u64,
                    first: HostPage::new(frame, Level::PAGE),
                });
                pages.start = run.end;
            }
        }
    }

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {
        Flushes::flush_tlb(None);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        core::hint::spin_loop();
    }
}
