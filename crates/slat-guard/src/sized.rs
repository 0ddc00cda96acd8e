//! Guarded accesses of words whose size is known only at run time, from the guest's instruction.
//!
//! A word has `1 << size` bytes. A loaded word is zero-extended, and a value to store is truncated.

use crate::Gone;
use crate::access::{compare_exchange, load, store};

/// Evaluates `$access` with `$word` defined as the unsigned type of `1 << $size` bytes, at most 8.
macro_rules! of_size {
    ($size:expr, $word:ident => $access:expr) => {
        match $size {
            0 => {
                type $word = u8;
                $access
            }
            1 => {
                type $word = u16;
                $access
            }
            2 => {
                type $word = u32;
                $access
            }
            _ => {
                type $word = u64;
                $access
            }
        }
    };
}

/// Reads a word of at most 8 bytes.
///
/// # Safety
/// The requirements of [`load`].
#[inline(always)]
pub unsafe fn load_sized(p: *const u8, size: u8) -> Result<u64, Gone> {
    /// Zero-extends a loaded word.
    fn widened<W: Into<u64>>(loaded: Result<W, Gone>) -> Result<u64, Gone> {
        loaded.map(Into::into)
    }
    // SAFETY: `p` may be read by guarded accesses, as `load` asks of its caller.
    of_size!(size, Word => widened(unsafe { load(p.cast::<Word>()) }))
}

/// Writes a word of at most 8 bytes.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn store_sized(p: *mut u8, size: u8, value: u64) -> Result<(), Gone> {
    // SAFETY: `p` may be written by guarded accesses, as `store` asks of its caller.
    of_size!(size, Word => unsafe { store(p.cast::<Word>(), value as Word) })
}

/// Does an atomic compare and exchange of a word of at most 16 bytes. Returns the word's old value. A word of 16 bytes
/// must be aligned.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn compare_exchange_sized(
    p: *mut u8,
    size: u8,
    [old, new]: [u128; 2],
) -> Result<u128, Gone> {
    if size == 4 {
        // SAFETY: `p` may be written by guarded accesses, as `store` asks of its caller.
        let found = unsafe { compare_exchange(p.cast::<u128>(), old, new)? };
        return Ok(found.unwrap_or_else(|found| found));
    }
    of_size!(size, Word => {
        // SAFETY: `p` may be written by guarded accesses, as `store` asks of its caller.
        let found = unsafe { compare_exchange(p.cast::<Word>(), old as Word, new as Word)? };
        Ok(found.unwrap_or_else(|found| found).into())
    })
}
