//! A platform for unit tests.

use std::alloc::{Layout, alloc, dealloc};
use std::boxed::Box;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::vec::Vec;

use core::ops::Range;
use core::ptr::NonNull;

use crate::addr::{Gfn, Granule, Hpa, Hva, Pfn};
use crate::frame::{Entries, TableMeta};
use crate::platform::{
    HostPage, HostRun, Platform, Request, ResolveError, Stale, VmId, WaitFor, ZappedLeaf,
};

/// A platform with frames from the heap, and no host memory.
pub(crate) struct Heap {
    granule: Granule,
    frames: Mutex<Frames>,
    pub(crate) zapped: Mutex<Vec<ZappedLeaf>>,
    /// The function that resolves a page. At first, it is a function that finds no page.
    pub(crate) resolve: Mutex<Resolve>,
    /// A function that each flush calls, at the time when a real platform would wait for the hardware.
    pub(crate) in_flush: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A function that implements [`Platform::resolve`].
pub(crate) type Resolve = fn(&Request) -> Result<HostPage, ResolveError>;

#[derive(Default)]
struct Frames {
    /// The allocated frames, by frame number.
    used: BTreeMap<u64, Frame>,
    /// The memory of single tables that were freed, for reuse.
    spare: Vec<Memory>,
}

struct Frame {
    meta: Box<TableMeta>,
    /// The frame's memory; for a frame of a root, the memory of all tables of the root.
    memory: Arc<Memory>,
}

/// The memory of one or several tables, aligned to its size.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the value owns the memory alone.
unsafe impl Send for Memory {}
// SAFETY: a shared reference to a `Memory` reads only the address and the layout, which never change.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: u64) -> Self {
        let layout = Layout::from_size_align(bytes as usize, bytes as usize).unwrap();
        // SAFETY: the size of the layout is not 0.
        let start = NonNull::new(unsafe { alloc(layout) }).expect("there is memory");
        // SAFETY: the memory has the size of the layout.
        unsafe { start.write_bytes(0xff, layout.size()) };
        Memory { start, layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `alloc` has returned the memory for this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl Default for Heap {
    fn default() -> Self {
        Heap::new(Granule::Kib4)
    }
}

impl Heap {
    /// Makes a platform whose pages have the size of `granule`.
    pub(crate) fn new(granule: Granule) -> Self {
        Heap {
            granule,
            frames: Mutex::default(),
            zapped: Mutex::default(),
            resolve: Mutex::new(|_| Err(ResolveError::BadAddress)),
            in_flush: OnceLock::new(),
        }
    }

    fn alloc(&self, tables: usize) -> Pfn {
        let mut frames = self.frames.lock().unwrap();
        let spare = if tables == 1 {
            frames.spare.pop()
        } else {
            None
        };
        let memory = spare.unwrap_or_else(|| Memory::new(tables as u64 * self.granule.bytes()));
        let first = self.granule.pfn(Hpa(memory.start.as_ptr() as u64));
        let memory = Arc::new(memory);
        for i in 0..tables as u64 {
            let frame = Frame {
                meta: Box::default(),
                memory: memory.clone(),
            };
            frames.used.insert(first.add(i).0, frame);
        }
        first
    }

    pub(crate) fn live(&self) -> usize {
        self.frames.lock().unwrap().used.len()
    }
}

// SAFETY: a frame's memory and metadata keep their addresses until the frame is freed.
unsafe impl Platform for Heap {
    fn granule(&self) -> Granule {
        self.granule
    }

    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        Some(self.alloc(1))
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        Some(self.alloc(tables))
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        let mut frames = self.frames.lock().unwrap();
        let freed = frames.used.remove(&frame.0).expect("freed twice");
        let memory = Arc::into_inner(freed.memory);
        let single = memory.filter(|memory| memory.layout.size() as u64 == self.granule.bytes());
        frames.spare.extend(single);
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        let frames = self.frames.lock().unwrap();
        let memory = &frames.used.get(&frame.0).expect("used after free").memory;
        let offset = self.granule.hpa(frame).0 - memory.start.as_ptr() as u64;
        // SAFETY: the offset is that of a frame in this memory.
        unsafe { memory.start.add(offset as usize) }.cast()
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        let frames = self.frames.lock().unwrap();
        NonNull::from(&*frames.used.get(&frame.0).expect("used after free").meta)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let resolve = *self.resolve.lock().unwrap();
        resolve(request)
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
