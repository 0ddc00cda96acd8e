//! Vectors for which there may be no memory: `ENOMEM`, where the standard library would end the process.

use crate::errno::{Result, no_memory};

/// An empty vector with room for `len` elements.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    reserve(&mut vec, len)?;
    Ok(vec)
}

/// Makes room for `more` elements: to push as many allocates nothing.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn reserve<T>(vec: &mut Vec<T>, more: usize) -> Result<()> {
    vec.try_reserve(more).map_err(no_memory)
}

/// `len` words of 0.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn zeroes(len: usize) -> Result<Vec<u64>> {
    let mut words = with_room(len)?;
    words.resize(len, 0);
    Ok(words)
}

/// The elements of `slice`.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn copy_of<T: Copy>(slice: &[T]) -> Result<Vec<T>> {
    let mut copy = with_room(slice.len())?;
    copy.extend_from_slice(slice);
    Ok(copy)
}
