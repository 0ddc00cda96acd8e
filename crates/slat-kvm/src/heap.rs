//! Vectors that return `ENOMEM` if there is no memory. (The standard library would end the process.)

use crate::errno::{Result, no_memory};

/// Returns an empty vector with memory for `len` elements.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    reserve(&mut vec, len)?;
    Ok(vec)
}

/// Allocates memory for `more` elements, so that pushing them allocates nothing.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn reserve<T>(vec: &mut Vec<T>, more: usize) -> Result<()> {
    vec.try_reserve(more).map_err(no_memory)
}

/// Returns `len` words of 0.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn zeroes(len: usize) -> Result<Vec<u64>> {
    let mut words = with_room(len)?;
    words.resize(len, 0);
    Ok(words)
}

/// Copies the elements of `slice` to a new vector.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn copy_of<T: Copy>(slice: &[T]) -> Result<Vec<T>> {
    let mut copy = with_room(slice.len())?;
    copy.extend_from_slice(slice);
    Ok(copy)
}
