//! Heap allocations that return [`OutOfMemory`] where `Box::new` and `Vec::push` would abort.

use std::alloc::{Layout, alloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The error of a failed allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory")
    }
}

impl std::error::Error for OutOfMemory {}

/// A type of which all-zero bytes are a valid value.
///
/// # Safety
/// - All-zero memory of the type's size and alignment holds a valid value.
pub(crate) unsafe trait Zeroed {}

/// Boxes `value`, like `Box::new`.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout's size is not 0.
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(OutOfMemory);
    }
    // SAFETY: the memory was allocated just now, with the layout that the box will use to free it.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// A `T` that is initially zero, in pages of its own. The host provides memory for each page at first use. (Zeroed
/// memory of the heap may use memory at once, because the heap clears memory that it reuses.)
pub(crate) struct Pages<T>(NonNull<T>);

// SAFETY: the value owns its `T`, as a box does.
unsafe impl<T: Send> Send for Pages<T> {}
// SAFETY: the value owns its `T`, as a box does.
unsafe impl<T: Sync> Sync for Pages<T> {}

impl<T: Zeroed> Pages<T> {
    pub(crate) fn zeroed() -> Result<Self, OutOfMemory> {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096) };
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let len = size_of::<T>();
        // SAFETY: the call makes a new mapping at an address that the host chooses.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(OutOfMemory);
        }
        // A huge page would provide memory for all of this at once, even if the CPU uses little of it. On a host
        // without huge pages the call fails, which does no harm. SAFETY: the mapping was made just now, and only this
        // function knows it.
        unsafe { libc::madvise(memory, len, libc::MADV_NOHUGEPAGE) };
        NonNull::new(memory.cast()).map(Pages).ok_or(OutOfMemory)
    }
}

impl<T> Deref for Pages<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the memory is mapped until `self` is dropped. It began as zeroes, which are a valid `T`, because `T`
        // is `Zeroed`.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Pages<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the memory is mapped until `self` is dropped. It began as zeroes, which are a valid `T`, and `self`
        // is borrowed exclusively.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Pages<T> {
    fn drop(&mut self) {
        // SAFETY: `self` is being dropped, so the value is not used again, and the mapping belongs to `self`.
        unsafe {
            self.0.drop_in_place();
            libc::munmap(self.0.as_ptr().cast(), size_of::<T>());
        }
    }
}

/// Returns an empty vector with memory for `capacity` elements.
pub(crate) fn vec<T>(capacity: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(capacity).map_err(|_| OutOfMemory)?;
    Ok(vec)
}

/// Makes sure that `vec` can hold `len` elements.
pub(crate) fn reserve<T>(vec: &mut Vec<T>, len: usize) -> Result<(), OutOfMemory> {
    vec.try_reserve_exact(len.saturating_sub(vec.len()))
        .map_err(|_| OutOfMemory)
}

/// Checks that the heap can provide `bytes` contiguous bytes now.
pub(crate) fn probe(bytes: usize) -> Result<(), OutOfMemory> {
    vec::<u8>(bytes).map(drop)
}

/// Returns the heap bytes of a hash map with this `capacity`, whose entries have `entry` bytes each. The table's size
/// is a power of two, and at most seven eighths of it are used. Each entry needs one more byte.
pub(crate) fn map_bytes(capacity: usize, entry: usize) -> usize {
    (capacity * 8 / 7).next_power_of_two() * (entry + 1)
}
