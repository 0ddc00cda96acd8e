//! The engine's platform, made of the `PagingHandler` of a hypervisor of ArceOS.

use alloc::collections::BTreeMap;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::NonNull;

use memory_addr::PhysAddr;
use page_table_multiarch::{PagingHandler, PagingMetaData};
use slat::{
    Entries, Gfn, HostPage, HostRun, Hva, Level, MetaMap, PAGE_SIZE, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use spin::Mutex;

use super::Flushes;

/// The backing of allocated memory: its guest-physical address with this bit. Other backings are host-physical addresses.
pub const ALLOCATED: u64 = 1 << 59;

fn address(frame: Pfn) -> PhysAddr {
    PhysAddr::from_usize(frame.hpa().0 as usize)
}

/// The frames of one VM's tables and of its allocated memory.
pub struct Host<H> {
    /// What backs the pages of allocated memory that the guest has touched.
    frames: Mutex<BTreeMap<Hva, Pfn>>,
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
        let mut freed = frames.split_off(&backing.start);
        frames.append(&mut freed.split_off(&backing.end));
        drop(frames);
        freed
            .into_values()
            .for_each(|frame| H::dealloc_frame(address(frame)));
    }

    /// Returns the frame that backs the page at `backing`, allocated if it has none.
    fn allocated(&self, backing: Hva) -> Result<Pfn, ResolveError> {
        let mut frames = self.frames.lock();
        if let Some(frame) = frames.get(&backing) {
            return Ok(*frame);
        }
        let new = H::alloc_frame().ok_or(ResolveError::OutOfMemory)?;
        let frame = Pfn(new.as_usize() as u64 / PAGE_SIZE);
        frames.insert(backing, frame);
        Ok(frame)
    }
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
        match request.backing.0 & ALLOCATED {
            // The engine's leaves stay in the memslot.
            0 => Ok(HostPage::new(
                Pfn(request.backing.0 / PAGE_SIZE),
                Level::GIGA,
            )),
            _ => Ok(HostPage::new(self.allocated(request.backing)?, Level::PAGE)),
        }
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        for (&backing, &frame) in self.frames.lock().range(backing) {
            let first = HostPage::new(frame, Level::PAGE);
            found(HostRun {
                backing,
                pages: 1,
                first,
            });
        }
    }

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {
        Flushes::flush_tlb(None);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        core::hint::spin_loop();
    }
}
