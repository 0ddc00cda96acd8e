//! Allocates frames for page tables. A frame has the size of a [`Granule`].
//!
//! Frames are parts of chunks of 2 MiB, which are aligned to their size. The first pages of a chunk contain the
//! [`TableMeta`] of all frames of the chunk. So the address of a frame's metadata can be calculated from the frame's
//! address, as with Linux's `struct page` array. As physical address of a frame, its address in this process is used.
//!
//! Chunks are mapped and unmapped by direct system calls, because slat's preload library watches the program's calls of
//! `mmap` and `munmap`, and would take the tables' memory for guest memory.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use slat::{Entries, Granule, Hpa, Pfn, Platform, TableMeta, VmId};
use slat_process::calls::{self, Call};

const CHUNK: usize = 2 << 20;

/// An allocator of table frames of `1 << PAGE_SHIFT` bytes.
#[derive(Default)]
pub struct Frames<const PAGE_SHIFT: u32 = 12> {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    chunks: Vec<NonNull<u8>>,
    free: Vec<Pfn>,
}

// SAFETY: the chunks belong to this allocator, and other code accesses them only through frames that the allocator has
// returned.
unsafe impl Send for Inner {}

/// Returns the granule whose pages have `1 << page_shift` bytes.
pub(crate) const fn granule(page_shift: u32) -> Granule {
    match page_shift {
        12 => Granule::Kib4,
        14 => Granule::Kib16,
        16 => Granule::Kib64,
        _ => panic!("pages have 4, 16 or 64 KiB"),
    }
}

impl<const PAGE_SHIFT: u32> Frames<PAGE_SHIFT> {
    pub(crate) const GRANULE: Granule = granule(PAGE_SHIFT);
    const FRAME: usize = Self::GRANULE.bytes() as usize;
    const FRAMES: usize = CHUNK / Self::FRAME;
    /// The number of frames at the start of a chunk that contain the metadata of the chunk's frames.
    const RESERVED: usize = (Self::FRAMES * size_of::<TableMeta>()).div_ceil(Self::FRAME);

    /// Allocates a frame with unspecified contents and new metadata. `None`: there is no memory.
    pub fn alloc(&self) -> Option<Pfn> {
        let mut frame = None;
        self.alloc_many(1, &mut |one| frame = Some(one));
        frame
    }

    /// Allocates `count` frames, or fewer if there is no memory, and passes each to `take`.
    pub fn alloc_many(&self, count: usize, take: &mut dyn FnMut(Pfn)) {
        let mut inner = self.lock();
        for _ in 0..count {
            if inner.free.is_empty() && Self::grow(&mut inner).is_none() {
                return;
            }
            let Some(frame) = inner.free.pop() else {
                return;
            };
            // SAFETY: the frame was free, so no other code uses its metadata, which are in its chunk.
            unsafe { Self::meta(frame).write(TableMeta::new()) };
            take(frame);
        }
    }

    /// Allocates `count` contiguous frames; `count` is a power of two, and the first frame is aligned to the size of
    /// all. `None`: there is no memory.
    pub fn alloc_run(&self, count: usize) -> Option<Pfn> {
        if count == 1 {
            return self.alloc();
        }
        let mut inner = self.lock();
        // Only root tables need contiguous frames. These are rare, so take each from a new chunk, whose frames are all
        // free and contiguous.
        let chunk = Self::grow(&mut inner)?.0;
        let first = chunk + Self::RESERVED.next_multiple_of(count) as u64;
        let run = first..first + count as u64;
        inner.free.retain(|frame| !run.contains(&frame.0));
        for frame in run {
            // SAFETY: the frame was free, so no other code uses its metadata, which are in its chunk.
            unsafe { Self::meta(Pfn(frame)).write(TableMeta::new()) };
        }
        Some(Pfn(first))
    }

    /// Frees `frames`, which held page tables.
    ///
    /// # Safety
    /// - This allocator has allocated each frame. Each is freed once, and is not used any more.
    pub unsafe fn free(&self, frames: &[Pfn]) {
        self.lock().free.extend_from_slice(frames);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds a chunk of free frames. Returns the chunk's first frame.
    fn grow(inner: &mut Inner) -> Option<Pfn> {
        inner.chunks.try_reserve(1).ok()?;
        // Reserve space in the list of free frames for every frame, so that `free` never allocates.
        inner
            .free
            .try_reserve((inner.chunks.len() + 1) * Self::FRAMES)
            .ok()?;
        let chunk = map_aligned()?;
        inner.chunks.push(chunk);
        let first = Self::GRANULE.pfn(Hpa(chunk.as_ptr() as u64));
        let frames = (Self::RESERVED as u64..Self::FRAMES as u64).rev();
        inner.free.extend(frames.map(|i| first.add(i)));
        Some(first)
    }

    /// Returns the page-table entries in `frame`.
    #[inline]
    pub fn entries(frame: Pfn) -> NonNull<Entries> {
        debug_assert!(frame.0 != 0);
        // SAFETY: no frame is at address 0.
        unsafe { NonNull::new_unchecked(Self::GRANULE.hpa(frame).0 as *mut Entries) }
    }

    /// Returns the metadata of the page table in `frame`.
    #[inline]
    pub fn meta(frame: Pfn) -> NonNull<TableMeta> {
        let address = Self::GRANULE.hpa(frame).0 as usize;
        let chunk = address & !(CHUNK - 1);
        let index = address % CHUNK / Self::FRAME;
        let meta = chunk as *mut TableMeta;
        // SAFETY: the metadata array begins at the chunk's start and has an element for each frame of the chunk.
        unsafe { NonNull::new_unchecked(meta.add(index)) }
    }
}

impl<const PAGE_SHIFT: u32> Drop for Frames<PAGE_SHIFT> {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(|e| e.into_inner());
        for chunk in inner.chunks.drain(..) {
            // SAFETY: `map_aligned` has mapped the chunk with this size, and no code uses its frames any more: the
            // engine has freed them.
            unsafe { unmap(chunk.as_ptr() as usize, CHUNK) };
        }
    }
}

/// Makes `frames` free frames resident, for benchmarks. In a kernel, frames are always resident, so the time in which
/// the host makes a page resident must not count as the engine's time.
pub fn warm(platform: &impl Platform, frames: usize) {
    // Any VM will do, because this platform does not count frames by VM.
    let vm = VmId(0);
    let mut warm = Vec::with_capacity(frames);
    platform.alloc_tables(vm, frames, &mut |frame| warm.push(frame));
    for frame in &warm {
        let entries: NonNull<Entries> = platform.entries(*frame);
        // SAFETY: the frame was allocated above, and no other code uses it.
        unsafe { entries.write(Entries::default()) };
    }
    // SAFETY: the frames were allocated above, and are freed once.
    unsafe { platform.free_tables(vm, &warm) };
}

/// Unmaps `len` bytes at `start`.
///
/// # Safety
/// - The bytes were mapped by [`map_aligned`], and are not used any more.
unsafe fn unmap(start: usize, len: usize) {
    // SAFETY: no code uses the bytes any more, as this function's `# Safety` asks of its caller. The call cannot fail,
    // because the range is within one mapping.
    let _ = unsafe { calls::make(Call::Unmap, [start, len, 0, 0, 0, 0]) };
}

/// Maps one chunk at a multiple of its size.
fn map_aligned() -> Option<NonNull<u8>> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = [0, 2 * CHUNK, rights as usize, flags as usize, usize::MAX, 0];
    // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
    let start = unsafe { calls::make(Call::MapTables, arguments) }.ok()? as usize;
    let chunk = start.next_multiple_of(CHUNK);
    let trim = |from: usize, to: usize| {
        if to > from {
            // SAFETY: the range is an unused part of the mapping that was made above. No other code knows the mapping
            // yet.
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

    fn a_run_is_aligned_and_given_away_once<const PAGE_SHIFT: u32>() {
        let frames = Frames::<PAGE_SHIFT>::default();
        let run = frames.alloc_run(16).unwrap();
        assert_eq!(run.0 % 16, 0);
        for _ in 0..Frames::<PAGE_SHIFT>::FRAMES {
            let frame = frames.alloc().unwrap();
            assert!(!(run.0..run.0 + 16).contains(&frame.0));
        }
    }

    fn frames_are_distinct_aligned_and_come_back<const PAGE_SHIFT: u32>() {
        let frames = Frames::<PAGE_SHIFT>::default();
        let mut all: Vec<_> = (0..2000).map(|_| frames.alloc().unwrap()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2000);
        for frame in &all {
            let meta = Frames::<PAGE_SHIFT>::meta(*frame).as_ptr() as usize;
            let entries = Frames::<PAGE_SHIFT>::entries(*frame).as_ptr() as usize;
            let bytes = Frames::<PAGE_SHIFT>::FRAME;
            assert!(entries.is_multiple_of(bytes) && entries / bytes != meta / bytes);
            // SAFETY: the frame is from `alloc`, and is freed once.
            unsafe { frames.free(&[*frame]) };
        }
        let chunks = frames.inner.lock().unwrap().chunks.len();
        for _ in 0..2000 {
            frames.alloc().unwrap();
        }
        assert_eq!(frames.inner.lock().unwrap().chunks.len(), chunks);
    }

    #[test]
    fn frames_of_every_granule_belong_to_one_table_each() {
        a_run_is_aligned_and_given_away_once::<12>();
        a_run_is_aligned_and_given_away_once::<14>();
        a_run_is_aligned_and_given_away_once::<16>();
        frames_are_distinct_aligned_and_come_back::<12>();
        frames_are_distinct_aligned_and_come_back::<14>();
        frames_are_distinct_aligned_and_come_back::<16>();
    }
}
