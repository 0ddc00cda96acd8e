//! The heap. The size of each block is a power of two. Freed blocks are kept in one list for each size.

use core::alloc::{GlobalAlloc, Layout};
use core::ops::Range;
use core::ptr;

use slat::Hpa;

use slat_model::Lock;

/// The heap, for `#[global_allocator]`. The heap has no memory until [`Heap::give`] is called.
pub struct Heap(Lock<Blocks>);

struct Blocks {
    /// Memory that was never allocated.
    fresh: Range<usize>,
    /// For each power of two, the first free block of that size. Free blocks are linked through their first words.
    free: [usize; usize::BITS as usize],
}

impl Heap {
    /// Makes a heap without memory.
    pub const fn new() -> Self {
        Heap(Lock::new(Blocks {
            fresh: 0..0,
            free: [0; usize::BITS as usize],
        }))
    }

    /// Gives the heap its memory. Call once.
    ///
    /// # Safety
    /// - no other code uses `memory`. Its physical addresses are valid pointers.
    pub unsafe fn give(&self, memory: Range<Hpa>) {
        self.0.lock().fresh = memory.start.0 as usize..memory.end.0 as usize;
    }
}

impl Default for Heap {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns a block's size, as a power of two: at least its alignment, and large enough for the
/// link.
fn order(layout: Layout) -> u32 {
    let size = layout.size().max(layout.align()).max(size_of::<usize>());
    size.next_power_of_two().trailing_zeros()
}

// SAFETY: a block is aligned to its size, and belongs to one owner until it is freed.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let order = order(layout);
        let mut blocks = self.0.lock();
        let first = blocks.free[order as usize];
        if first != 0 {
            // SAFETY: a free block belongs to the heap, and begins with the link that `dealloc`
            // wrote.
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
        // SAFETY: the block belongs to the heap again, and is large enough for a link.
        unsafe { ptr::write(block.cast::<usize>(), blocks.free[order]) };
        blocks.free[order] = block as usize;
    }
}
