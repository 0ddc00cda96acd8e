//! The heap: blocks of powers of two, freed ones kept by size.

use core::alloc::{GlobalAlloc, Layout};
use core::ops::Range;
use core::ptr;

use slat::Hpa;

use slat_model::Lock;

/// For `#[global_allocator]`. Empty until [`Heap::give`].
pub struct Heap(Lock<Blocks>);

struct Blocks {
    /// Never used so far.
    fresh: Range<usize>,
    /// First of the free blocks of each power of two, linked through their first word.
    free: [usize; usize::BITS as usize],
}

impl Heap {
    /// No memory yet.
    pub const fn new() -> Self {
        Heap(Lock::new(Blocks {
            fresh: 0..0,
            free: [0; usize::BITS as usize],
        }))
    }

    /// Gives it memory, once.
    ///
    /// # Safety
    /// - nobody else uses `memory`, whose addresses are valid as they are.
    pub unsafe fn give(&self, memory: Range<Hpa>) {
        self.0.lock().fresh = memory.start.0 as usize..memory.end.0 as usize;
    }
}

impl Default for Heap {
    fn default() -> Self {
        Self::new()
    }
}

/// A block's size is its alignment, and holds the link.
fn order(layout: Layout) -> u32 {
    let size = layout.size().max(layout.align()).max(size_of::<usize>());
    size.next_power_of_two().trailing_zeros()
}

// SAFETY: a block is as large as it is aligned, and given to one owner until it is freed.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let order = order(layout);
        let mut blocks = self.0.lock();
        let first = blocks.free[order as usize];
        if first != 0 {
            // SAFETY: a free block is the heap's, and begins with the link that `dealloc` wrote.
            blocks.free[order as usize] = unsafe { ptr::read(first as *const usize) };
            return first as *mut u8;
        }
        let start = blocks.fresh.start.next_multiple_of(1 << order);
        if start + (1 << order) > blocks.fresh.end {
            return ptr::null_mut();
        }
        blocks.fresh.start = start + (1 << order);
        start as *mut u8
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let order = order(layout) as usize;
        let mut blocks = self.0.lock();
        // SAFETY: the block is the heap's again, and has room for a link.
        unsafe { ptr::write(block.cast::<usize>(), blocks.free[order]) };
        blocks.free[order] = block as usize;
    }
}
