//! Heap memory that may run out. `Box::new` and `Vec::push` abort then; these return [`OutOfMemory`].

use std::alloc::{Layout, alloc, alloc_zeroed};
use std::fmt;

/// The heap has no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory")
    }
}

impl std::error::Error for OutOfMemory {}

/// A type that bytes of zero are a value of.
///
/// # Safety
/// - memory of the type's size and alignment that is all zero holds a valid value.
pub(crate) unsafe trait Zeroed {}

/// `Box::new`.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(OutOfMemory);
    }
    // SAFETY: allocated just now, with the layout that the box will free.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// A `T` of zeroes. The host provides the pages of a large one when they are written first.
pub(crate) fn zeroed<T: Zeroed>() -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(OutOfMemory);
    }
    // SAFETY: allocated just now, with the layout that the box will free; zeroes are a value, as `Zeroed` promises.
    Ok(unsafe { Box::from_raw(memory) })
}

/// An empty vector with memory for `capacity` elements.
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

/// Whether the heap has `bytes` bytes in one piece now.
pub(crate) fn probe(bytes: usize) -> Result<(), OutOfMemory> {
    vec::<u8>(bytes).map(drop)
}
