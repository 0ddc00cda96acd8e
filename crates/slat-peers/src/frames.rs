//! The only source of table frames: an arena, all of whose memory was touched at the beginning. The frame that was
//! freed last is allocated first. The physical address of a frame is its address in this process. The contents of a new
//! frame are unspecified, so a caller that needs zeroes writes them.

use std::alloc::{Layout, alloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use slat::{Entries, PAGE_SIZE, Pfn, TableMeta};

/// The number of frames. It is enough for every crate: mapping 1 GiB by 4 KiB pages needs 515 tables, and
/// [`embed`](crate::embed) also allocates 64 MiB for a guest.
const FRAMES: usize = 4096 + (64 << 20) / FRAME;
const FRAME: usize = PAGE_SIZE as usize;

/// The distance in bytes between the metadata of two frames. As with Linux's `struct page`, the two are in different
/// cache lines.
const META_STRIDE: usize = 64;
const _: () = assert!(size_of::<TableMeta>() <= META_STRIDE);

/// All frames and their metadata.
pub struct Arena {
    base: NonNull<u8>,
    meta: NonNull<u8>,
    free: Mutex<Vec<NonNull<u8>>>,
}

// SAFETY: the memory is accessed only through frames, each of which has one owner.
unsafe impl Send for Arena {}
// SAFETY: the memory is accessed only through frames, each of which has one owner. The free list has a lock.
unsafe impl Sync for Arena {}

static ARENA: LazyLock<Arena> = LazyLock::new(Arena::new);

/// Returns the only arena.
pub fn arena() -> &'static Arena {
    &ARENA
}

/// Allocates `size` bytes that are never freed. They are zero, and were touched.
fn forever(size: usize, align: usize) -> NonNull<u8> {
    let layout = Layout::from_size_align(size, align).expect("the arena fits the address space");
    // SAFETY: the layout's size is not 0.
    let memory = NonNull::new(unsafe { alloc(layout) });
    let memory = memory.unwrap_or_else(|| handle_alloc_error(layout));
    // SAFETY: `size` bytes were allocated at this address.
    unsafe { memory.write_bytes(0, size) };
    memory
}

impl Arena {
    fn new() -> Self {
        let base = forever(FRAMES * FRAME, 2 << 20);
        let meta = forever(FRAMES * META_STRIDE, META_STRIDE);
        // SAFETY: the address is in the arena, which has `FRAMES` frames.
        let frame = |i| unsafe { base.add(i * FRAME) };
        Arena {
            base,
            meta,
            free: Mutex::new((0..FRAMES).rev().map(frame).collect()),
        }
    }

    fn index(&self, frame: NonNull<u8>) -> usize {
        (frame.as_ptr() as usize - self.base.as_ptr() as usize) / FRAME
    }

    /// Returns the metadata that slat keeps for a frame.
    #[inline]
    pub fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        let index = self.index(frame_at(frame.hpa().0));
        // SAFETY: the frame is in the arena, which has metadata for each of its frames.
        unsafe { self.meta.add(index * META_STRIDE).cast() }
    }
}

fn free_list() -> MutexGuard<'static, Vec<NonNull<u8>>> {
    ARENA.free.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates a frame of 4096 bytes.
pub fn alloc_frame() -> NonNull<u8> {
    free_list().pop().expect("the arena is large enough")
}

/// Allocates several frames. Calls `take` with each.
pub fn alloc_many(count: usize, take: &mut dyn FnMut(NonNull<u8>)) {
    let mut free = free_list();
    let rest = free.len().checked_sub(count);
    let rest = rest.expect("the arena is large enough");
    free.drain(rest..).rev().for_each(take);
}

/// Allocates `count` adjacent frames. The first is aligned to the total size.
pub fn alloc_frames(count: usize) -> NonNull<u8> {
    if count == 1 {
        return alloc_frame();
    }
    let mut free = free_list();
    let mut sorted: Vec<usize> = free.iter().map(|frame| ARENA.index(*frame)).collect();
    sorted.sort_unstable();
    let run = sorted
        .windows(count)
        .find(|run| run[0] % count == 0 && run[count - 1] - run[0] == count - 1)
        .expect("the arena is large enough");
    let run = run[0]..run[0] + count;
    free.retain(|frame| !run.contains(&ARENA.index(*frame)));
    // SAFETY: the address is in the arena.
    unsafe { ARENA.base.add(run.start * FRAME) }
}

/// Frees a frame.
pub fn free_frame(frame: NonNull<u8>) {
    free_list().push(frame);
}

/// Frees several frames.
pub fn free_many(frames: impl Iterator<Item = NonNull<u8>>) {
    free_list().extend(frames);
}

/// Returns the frame at this address.
pub fn frame_at(address: u64) -> NonNull<u8> {
    debug_assert!(address != 0);
    // SAFETY: no frame is at address 0.
    unsafe { NonNull::new_unchecked(address as *mut u8) }
}

/// Returns the entries in a frame.
#[inline]
pub fn entries(frame: Pfn) -> NonNull<Entries> {
    frame_at(frame.hpa().0).cast()
}
