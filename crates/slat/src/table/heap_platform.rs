//! A platform for unit tests.

use std::boxed::Box;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::vec::Vec;

use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{Gfn, Hva, Pfn};
use crate::frame::{ENTRIES, Entries, TableMeta};
use crate::platform::{
    HostPage, HostRun, Platform, Request, ResolveError, Stale, VmId, WaitFor, ZappedLeaf,
};
use crate::sync::atomic::AtomicU64;

/// A platform with frames from the heap, and no host memory.
#[derive(Default)]
pub(crate) struct Heap {
    frames: Mutex<BTreeMap<u64, Frame>>,
    pub(crate) zapped: Mutex<Vec<ZappedLeaf>>,
    /// Called in each flush, while it waits for the hardware.
    pub(crate) in_flush: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Frame {
    memory: Box<Aligned>,
    /// Metadata of each table.
    meta: Box<[TableMeta; 16]>,
    /// The number of tables not freed yet: those of a root, or one.
    live: usize,
}

#[repr(align(65536))]
struct Aligned([Entries; 16]);

impl Heap {
    fn alloc(&self, tables: usize) -> Pfn {
        let entries = || Entries([const { AtomicU64::new(!0) }; ENTRIES]);
        let memory = Box::new(Aligned(core::array::from_fn(|_| entries())));
        let pfn = Pfn(memory.0.as_ptr() as u64 >> 12);
        let meta = Box::new([const { TableMeta::new() }; 16]);
        let frame = Frame {
            memory,
            meta,
            live: tables,
        };
        self.frames.lock().unwrap().insert(pfn.0, frame);
        pfn
    }

    pub(crate) fn live(&self) -> usize {
        self.frames.lock().unwrap().values().map(|f| f.live).sum()
    }
}

// SAFETY: a frame's memory and metadata stay in their boxes until it is freed.
unsafe impl Platform for Heap {
    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        Some(self.alloc(1))
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        Some(self.alloc(tables))
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        let mut frames = self.frames.lock().unwrap();
        let block = frame.0 & !15;
        let entry = frames.get_mut(&block).expect("freed twice");
        entry.live -= 1;
        if entry.live == 0 {
            frames.remove(&block);
        }
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        let frames = self.frames.lock().unwrap();
        let block = frames.get(&(frame.0 & !15)).expect("used after free");
        NonNull::from(&block.memory.0[frame.0 as usize & 15])
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        let frames = self.frames.lock().unwrap();
        let block = frames.get(&(frame.0 & !15)).expect("used after free");
        NonNull::from(&block.meta[frame.0 as usize & 15])
    }

    fn resolve(&self, _: &Request) -> Result<HostPage, ResolveError> {
        Err(ResolveError::BadAddress)
    }

    fn resolve_resident(&self, _: VmId, _: Range<Hva>, _: &mut dyn FnMut(HostRun)) {}

    fn flush(&self, _: VmId, _: Range<Gfn>, _: Stale) {
        self.in_flush.get().into_iter().for_each(|then| then());
    }

    const WANTS_ZAPPED: bool = true;

    fn zapped(&self, leaf: ZappedLeaf) {
        self.zapped.lock().unwrap().push(leaf);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        thread::yield_now();
    }
}
