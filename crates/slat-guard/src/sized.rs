//! Accesses of words whose size only the instruction that is executed knows.
//!
//! A word has `1 << size` bytes. Values are zero-extended, and a value that is stored is truncated.

use crate::Gone;
use crate::access::{compare_exchange, load, store};

/// Evaluates `$access` with `$word` as the type of a word of 1 << `$size` bytes, which fits in 8 bytes.
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
    /// Returns a loaded word, zero-extended.
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

/// Compares and exchanges a word of at most 16 bytes. Returns the word that was there. A word of 16 bytes must be
/// aligned.
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
