//! Frames for page tables.
//!
//! Frames are cut from chunks of 2 MiB, aligned to their size. The first pages of a chunk hold the
//! [`TableMeta`] of all its frames, so that both are found from a frame's address by arithmetic, as
//! with Linux's `struct page` array. The physical address of a frame is its address in this process.
//!
//! Memory is mapped and unmapped by direct system calls: the preload library watches the program's `mmap` and `munmap`,
//! and would take the tables' own memory for guest memory.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use slat::{Entries, PAGE_SIZE, Pfn, TableMeta};
use slat_process::calls::{self, Call};

const CHUNK: usize = 2 << 20;
const FRAME: usize = PAGE_SIZE as usize;
const FRAMES: usize = CHUNK / FRAME;
/// The frames at the start of a chunk that hold the metadata of the chunk's other frames.
const RESERVED: usize = (FRAMES * size_of::<TableMeta>()).div_ceil(FRAME);

/// An allocator of table frames.
#[derive(Default)]
pub struct Frames {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    chunks: Vec<NonNull<u8>>,
    free: Vec<Pfn>,
}

// SAFETY: the chunks belong to this allocator, and other code touches them only through frames that the allocator has
// returned.
unsafe impl Send for Inner {}

impl Frames {
    /// Allocates a frame of unspecified contents, with fresh metadata. `None` when memory is out.
    pub fn alloc(&self) -> Option<Pfn> {
        let mut frame = None;
        self.alloc_many(1, &mut |one| frame = Some(one));
        frame
    }

    /// Allocates up to `count` frames and gives each to `take`; fewer when memory is out.
    pub fn alloc_many(&self, count: usize, take: &mut dyn FnMut(Pfn)) {
        let mut inner = self.lock();
        for _ in 0..count {
            if inner.free.is_empty() && inner.grow().is_none() {
                return;
            }
            let Some(frame) = inner.free.pop() else {
                return;
            };
            // SAFETY: the frame was free, so no other code uses its metadata, which is in its chunk.
            unsafe { meta(frame).write(TableMeta::new()) };
            take(frame);
        }
    }

    /// Allocates `count` contiguous frames (a power of two), the first aligned to `count` frames.
    pub fn alloc_run(&self, count: usize) -> Option<Pfn> {
        if count == 1 {
            return self.alloc();
        }
        let mut inner = self.lock();
        // Roots are rare, so each is cut from a new chunk, whose free frames are all contiguous.
        inner.grow()?;
        let chunk = inner.chunks.last()?.as_ptr() as u64 / PAGE_SIZE;
        let first = chunk + RESERVED.next_multiple_of(count) as u64;
        let run = first..first + count as u64;
        inner.free.retain(|frame| !run.contains(&frame.0));
        for frame in run {
            // SAFETY: the frame was free, so no other code uses its metadata, which is in its chunk.
            unsafe { meta(Pfn(frame)).write(TableMeta::new()) };
        }
        Some(Pfn(first))
    }

    /// Frees frames.
    ///
    /// # Safety
    /// - This allocator has allocated each frame. Each is freed once, and is not used any more.
    pub unsafe fn free(&self, frames: &[Pfn]) {
        self.lock().free.extend_from_slice(frames);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Inner {
    fn grow(&mut self) -> Option<()> {
        self.chunks.try_reserve(1).ok()?;
        // Reserve an entry for every frame, so that `free` never allocates.
        self.free
            .try_reserve((self.chunks.len() + 1) * FRAMES)
            .ok()?;
        let chunk = map_aligned()?;
        self.chunks.push(chunk);
        let first = chunk.as_ptr() as u64 / PAGE_SIZE;
        let frames = (RESERVED as u64..FRAMES as u64).rev();
        self.free.extend(frames.map(|i| Pfn(first + i)));
        Some(())
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(|e| e.into_inner());
        for chunk in inner.chunks.drain(..) {
            // SAFETY: `map_aligned` has mapped the chunk with this size; the engine has freed all frames or is dropped
            // with its VM, so nothing refers to the chunk.
            unsafe { unmap(chunk.as_ptr() as usize, CHUNK) };
        }
    }
}

/// Returns the page-table entries in a frame.
#[inline]
pub fn entries(frame: Pfn) -> NonNull<Entries> {
    debug_assert!(frame.0 != 0);
    // SAFETY: frames are never at address 0.
    unsafe { NonNull::new_unchecked(frame.hpa().0 as *mut Entries) }
}

/// Returns the metadata of a frame.
#[inline]
pub fn meta(frame: Pfn) -> NonNull<TableMeta> {
    let address = frame.hpa().0 as usize;
    let chunk = address & !(CHUNK - 1);
    let index = address % CHUNK / FRAME;
    let meta = chunk as *mut TableMeta;
    // SAFETY: the metadata array begins at the chunk's start and has an element for each frame of the chunk.
    unsafe { NonNull::new_unchecked(meta.add(index)) }
}

/// Unmaps `len` bytes at `start`.
///
/// # Safety
/// - The bytes were mapped by [`map_aligned`], and are not used any more.
unsafe fn unmap(start: usize, len: usize) {
    // SAFETY: by the caller's promise, no code uses the range any more. The call cannot fail: the range is a part of
    // one mapping, or all of it.
    let _ = unsafe { calls::make(Call::Unmap, [start, len, 0, 0, 0, 0]) };
}

/// Maps one chunk at a multiple of its size.
fn map_aligned() -> Option<NonNull<u8>> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = [0, 2 * CHUNK, rights as usize, flags as usize, usize::MAX, 0];
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let start = unsafe { calls::make(Call::MapTables, arguments) }.ok()? as usize;
    let chunk = start.next_multiple_of(CHUNK);
    let trim = |from: usize, to: usize| {
        if to > from {
            // SAFETY: an unused part of the mapping made above, which no other code has seen.
            unsafe { unmap(from, to - from) };
        }
    };
    trim(start, chunk);
    trim(chunk + CHUNK, start + 2 * CHUNK);
    NonNull::new(chunk as *mut u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_aligned_and_given_away_once() {
        let frames = Frames::default();
        let run = frames.alloc_run(16).unwrap();
        assert_eq!(run.0 % 16, 0);
        for _ in 0..FRAMES {
            let frame = frames.alloc().unwrap();
            assert!(!(run.0..run.0 + 16).contains(&frame.0));
        }
    }

    #[test]
    fn frames_are_distinct_aligned_and_come_back() {
        let frames = Frames::default();
        let mut all: Vec<_> = (0..2000).map(|_| frames.alloc().unwrap()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2000);
        for frame in &all {
            assert_ne!(meta(*frame).as_ptr() as u64, frame.hpa().0);
            // SAFETY: the frame is from `alloc`, and is freed once.
            unsafe { frames.free(&[*frame]) };
        }
        let chunks = frames.inner.lock().unwrap().chunks.len();
        for _ in 0..2000 {
            frames.alloc().unwrap();
        }
        assert_eq!(frames.inner.lock().unwrap().chunks.len(), chunks);
    }
}
