//! Memory that is allocated in pieces and freed as a whole.
//!
//! A CPU has some hundred thousand pieces of memory with decoded code. On the heap, each piece would need its own
//! bookkeeping, and the pieces would be far apart, so that code that runs only a few times would mostly wait for cache
//! misses. A pool's pieces are next to one another, and all are freed at once. (Huge pages gave no measurable
//! improvement.)

use crate::heap::{self, OutOfMemory};
use std::alloc::{Layout, alloc, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The number of bytes of a pool's first chunk. Each further chunk is as large as all chunks before it, up to
/// [`LARGEST`].
const PAGE: usize = 4 << 10;
const LARGEST: usize = 2 << 20;
/// The alignment of chunks: a cache line, the largest alignment of a piece.
const LINE: usize = 64;

struct Chunk {
    start: NonNull<u8>,
    layout: Layout,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout. It is freed only when no code uses its pieces any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Memory that is allocated in pieces. A piece never moves.
#[derive(Default)]
pub(crate) struct Pool {
    chunks: Vec<Chunk>,
    /// The total size of all chunks in bytes.
    bytes: usize,
    /// The number of bytes of the last chunk that are allocated to pieces.
    used: usize,
}

impl Pool {
    /// Returns the number of heap bytes that the pool uses.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes + self.chunks.capacity() * size_of::<Chunk>()
    }

    /// Returns the number of heap bytes that the pool will use after `more` bytes are allocated in small pieces.
    pub(crate) fn bytes_with(&self, more: usize) -> usize {
        let left = self.chunks.last().map_or(0, |last| last.layout.size()) - self.used;
        match more <= left {
            true => self.bytes(),
            false => self.bytes() + self.next_chunk(),
        }
    }

    fn next_chunk(&self) -> usize {
        self.bytes.clamp(PAGE, LARGEST)
    }

    /// Allocates memory for a value of this layout.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    fn take(&mut self, layout: Layout) -> Result<NonNull<u8>, OutOfMemory> {
        debug_assert!(layout.align() <= LINE && layout.size() <= LARGEST);
        let at = self.used.next_multiple_of(layout.align());
        if let Some(last) = self.chunks.last()
            && at + layout.size() <= last.layout.size()
        {
            self.used = at + layout.size();
            // SAFETY: the offset is within the chunk, as checked above.
            return Ok(unsafe { last.start.add(at) });
        }
        let size = self.next_chunk().max(layout.size().next_multiple_of(PAGE));
        let chunk = Layout::from_size_align(size, LINE).map_err(|_| OutOfMemory)?;
        let count = self.chunks.len() + 1;
        heap::reserve(&mut self.chunks, count)?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc(chunk) }).ok_or(OutOfMemory)?;
        self.chunks.push(Chunk {
            start,
            layout: chunk,
        });
        self.bytes += size;
        self.used = layout.size();
        Ok(start)
    }

    /// Moves `value` into the pool and returns its address. The value is never dropped.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn put<T>(&mut self, value: T) -> Result<NonNull<T>, OutOfMemory> {
        let place = self.take(Layout::new::<T>())?.cast();
        // SAFETY: the memory was allocated just now for a value of this type, so no other pointer to it exists.
        unsafe { place.write(value) };
        Ok(place)
    }

    /// Frees all pieces.
    ///
    /// # Safety
    /// - The caller uses none of the pieces any more.
    pub(crate) unsafe fn clear(&mut self) {
        *self = Self::default();
    }
}

/// A list with a fixed capacity, in a pool.
pub(crate) struct List<T> {
    start: NonNull<T>,
    len: u32,
    capacity: u32,
}

impl<T: Copy> List<T> {
    /// Returns a list without capacity.
    pub(crate) const fn empty() -> Self {
        Self {
            start: NonNull::dangling(),
            len: 0,
            capacity: 0,
        }
    }

    /// Makes sure that the list can hold `len` elements. The list may move to other memory of `pool`.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the list is unchanged.
    ///
    /// # Safety
    /// - The list is not used after the pool is cleared or dropped.
    pub(crate) unsafe fn reserve(
        &mut self,
        pool: &mut Pool,
        len: usize,
    ) -> Result<(), OutOfMemory> {
        if len > self.capacity as usize {
            let layout = Layout::array::<T>(len).map_err(|_| OutOfMemory)?;
            let start = pool.take(layout)?.cast();
            // SAFETY: the old memory has `len` elements; the new memory is separate, and has space for them.
            unsafe { start.copy_from_nonoverlapping(self.start, self.len as usize) };
            (self.start, self.capacity) = (start, len as u32);
        }
        Ok(())
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds an element, and returns it. The list must have space for it.
    pub(crate) fn push(&mut self, value: T) -> &mut T {
        assert!(self.len < self.capacity, "no room was reserved");
        // SAFETY: the list has space for one more element, as checked above, and `self` is borrowed exclusively.
        let last = unsafe {
            let mut last = self.start.add(self.len as usize);
            last.write(value);
            last.as_mut()
        };
        self.len += 1;
        last
    }

    /// Adds elements. The list must have space for them.
    pub(crate) fn extend(&mut self, values: &[T]) {
        let (len, room) = (self.len as usize, (self.capacity - self.len) as usize);
        assert!(values.len() <= room, "no room was reserved");
        let values_start = NonNull::from(values).cast();
        // SAFETY: the list has space for `values.len()` more elements. `values` is not in that space, because no code
        // can borrow that space.
        unsafe {
            (self.start.add(len)).copy_from_nonoverlapping(values_start, values.len());
        }
        self.len += values.len() as u32;
    }
}

impl<T> Deref for List<T> {
    type Target = [T];
    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were written, and the pool was not cleared or dropped, as `reserve` asks of its
        // caller.
        unsafe { NonNull::slice_from_raw_parts(self.start, self.len as usize).as_ref() }
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` elements were written, the pool was not cleared or dropped, and `self` is borrowed exclusively.
        unsafe { NonNull::slice_from_raw_parts(self.start, self.len as usize).as_mut() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_contents_and_chunks_double() {
        let mut pool = Pool::default();
        assert_eq!(pool.bytes(), 0);
        let numbers: Vec<_> = (0..100_000).map(|n: u64| pool.put(n).unwrap()).collect();
        let mut list = List::empty();
        for round in 0..100u8 {
            // SAFETY: the pool is cleared only at the end of the test.
            unsafe { list.reserve(&mut pool, list.len() + 3) }.unwrap();
            list.extend(&[round, round]);
            list.push(round);
        }
        let expected: Vec<u8> = (0..300).map(|k| (k / 3) as u8).collect();
        assert_eq!(*list, *expected);
        // SAFETY: all numbers are still in the pool.
        let held = numbers.iter().map(|number| unsafe { *number.as_ref() });
        assert!(held.eq(0..100_000));
        let chunks = pool.chunks.iter().map(|chunk| chunk.layout.size() / PAGE);
        assert!(chunks.eq([1, 1, 2, 4, 8, 16, 32, 64, 128]));
        // SAFETY: no code uses the pool's pieces after this.
        unsafe { pool.clear() };
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn pieces_are_aligned_and_a_pool_tells_how_much_it_will_have() {
        #[repr(align(64))]
        struct Line(#[expect(unused, reason = "only its place matters")] u8);
        let mut pool = Pool::default();
        for _ in 0..200 {
            let expected = pool.bytes_with(128);
            pool.put(1u8).unwrap();
            let line = pool.put(Line(1)).unwrap();
            assert!(line.is_aligned());
            assert!(pool.bytes() <= expected.max(pool.bytes_with(0)));
        }
    }

    #[test]
    #[should_panic(expected = "no room was reserved")]
    fn a_list_never_exceeds_its_capacity() {
        List::empty().push(1u8);
    }
}
