//! Frames for page tables: a range of memory. The first pages of the range hold the engine's metadata of each frame.
//! So a frame and its metadata are both computed from the frame's number.

use core::ops::Range;
use core::ptr::{self, NonNull};

use slat::{Entries, Granule, Hpa, Pfn, TableMeta};
use slat_model::Lock;

/// An allocator of table frames.
pub(crate) struct Frames {
    granule: Granule,
    /// All frames of the range. The first ones hold the array of [`TableMeta`], with one element for each frame.
    all: Range<Pfn>,
    free: Lock<Free>,
}

struct Free {
    fresh: Range<u64>,
    /// The first of the freed frames, which are linked through their first words; 0 ends the list.
    list: u64,
    used: usize,
}

impl Frames {
    /// Makes an allocator of frames of `granule`.
    ///
    /// # Safety
    /// - no other code uses `memory`, which consists of whole pages and does not begin at 0. Its physical addresses
    ///   are valid pointers.
    pub(crate) unsafe fn new(memory: Range<Hpa>, granule: Granule) -> Self {
        let all = granule.pfn(memory.start)..granule.pfn(memory.end);
        let frames = all.end.0 - all.start.0;
        let reserved = (frames * size_of::<TableMeta>() as u64).div_ceil(granule.bytes());
        Frames {
            granule,
            free: Lock::new(Free {
                fresh: all.start.0 + reserved..all.end.0,
                list: 0,
                used: 0,
            }),
            all,
        }
    }

    /// Returns the number of frames in use.
    pub(crate) fn used(&self) -> usize {
        self.free.lock().used
    }

    /// Allocates a frame of unspecified contents, with fresh metadata. `None`: there is no free frame.
    pub(crate) fn alloc(&self) -> Option<Pfn> {
        let mut free = self.free.lock();
        let frame = match free.list {
            0 => free.fresh.next()?,
            first => {
                // SAFETY: a frame in the list belongs to this allocator, and begins with a link.
                free.list = unsafe { ptr::read(self.granule.hpa(Pfn(first)).0 as *const u64) };
                first
            }
        };
        free.used += 1;
        drop(free);
        Some(self.prepare(Pfn(frame)))
    }

    /// Allocates `count` contiguous frames (a power of two), the first aligned to `count` frames.
    pub(crate) fn alloc_run(&self, count: usize) -> Option<Pfn> {
        let mut free = self.free.lock();
        let start = free.fresh.start.next_multiple_of(count as u64);
        let end = start + count as u64;
        if end > free.fresh.end {
            return None;
        }
        for skipped in free.fresh.start..start {
            free.push(self.granule, Pfn(skipped));
        }
        free.fresh.start = end;
        free.used += count;
        drop(free);
        (start..end).for_each(|frame| {
            self.prepare(Pfn(frame));
        });
        Some(Pfn(start))
    }

    /// # Safety
    /// - `frame` was allocated by this allocator, is freed once, and is not used any more.
    pub(crate) unsafe fn free(&self, frame: Pfn) {
        let mut free = self.free.lock();
        free.push(self.granule, frame);
        free.used -= 1;
    }

    fn prepare(&self, frame: Pfn) -> Pfn {
        // SAFETY: the frame is not used, so its metadata is not used either.
        unsafe { self.meta(frame).write(TableMeta::new()) };
        frame
    }

    pub(crate) fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        debug_assert!(self.all.contains(&frame));
        // SAFETY: no frame of this allocator is at address 0.
        unsafe { NonNull::new_unchecked(self.granule.hpa(frame).0 as *mut Entries) }
    }

    pub(crate) fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        debug_assert!(self.all.contains(&frame));
        let array = self.granule.hpa(self.all.start).0 as *mut TableMeta;
        // SAFETY: the array has an element for each frame of the range, and is not at address 0.
        unsafe { NonNull::new_unchecked(array.add((frame.0 - self.all.start.0) as usize)) }
    }
}

impl Free {
    fn push(&mut self, granule: Granule, frame: Pfn) {
        // SAFETY: the frame is free, so its memory belongs to the allocator.
        unsafe { ptr::write(granule.hpa(frame).0 as *mut u64, self.list) };
        self.list = frame.0;
    }
}
