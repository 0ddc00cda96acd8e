//! Runs of bytes: copies, fills and comparison.
//!
//! # Order
//! A run as a whole is ordered like a load, if it reads, and like a store, if it writes ([`access`](crate::access)).
//! Other threads may see its bytes read or written in any order, and only single bytes are single-copy atomic.

use crate::Gone;
use crate::access::load;
use crate::arch::bulk::{self, LINE, matches_line};

fn done(len: usize, left: usize) -> Result<(), usize> {
    if left == 0 { Ok(()) } else { Err(len - left) }
}

/// Reads `dst.len()` bytes. `Err` holds how many were read before the memory was gone.
///
/// # Safety
/// The requirements of [`load`], for every byte.
pub unsafe fn copy_in(dst: &mut [u8], src: *const u8) -> Result<(), usize> {
    // SAFETY: `dst` is a slice, which nothing else uses. `src` may be read by guarded accesses, as this function's
    // `# Safety` asks of its caller.
    unsafe { copy(dst.as_mut_ptr(), src, dst.len()) }
}

/// Writes `src`. `Err` holds how many bytes were written before the memory was gone.
///
/// # Safety
/// The requirements of [`store`](crate::store), for every byte.
pub unsafe fn copy_out(dst: *mut u8, src: &[u8]) -> Result<(), usize> {
    // SAFETY: `src` is a slice, which nothing writes. `dst` may be written by guarded accesses, as this function's
    // `# Safety` asks of its caller.
    unsafe { copy(dst, src.as_ptr(), src.len()) }
}

/// Copies `len` bytes one after the other, beginning with the first. So a copy to overlapping higher addresses repeats
/// a pattern. `Err` holds the number of bytes that were copied before memory of either side was gone.
///
/// # Safety
/// The requirements of [`load`] and [`store`](crate::store), for every byte.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> Result<(), usize> {
    // SAFETY: `src` may be read and `dst` written by guarded accesses, as this function's `# Safety` asks of its
    // caller.
    done(len, unsafe { bulk::copy(dst, src, len) })
}

/// Writes the low `BYTES` (1, 2, 4 or 8) bytes of `value` `times` times. `Err` holds the number of copies that were
/// written before the memory was gone.
///
/// # Safety
/// The requirements of [`store`](crate::store), for every byte.
#[inline]
pub unsafe fn fill_elements<const BYTES: u64>(
    dst: *mut u8,
    value: u64,
    times: usize,
) -> Result<(), usize> {
    // SAFETY: every byte may be written by guarded accesses, as this function's `# Safety` asks of its caller.
    done(times, unsafe {
        bulk::fill_elements::<BYTES>(dst, value, times)
    })
}

/// Fills `len` bytes with `byte`. `Err` holds the number of bytes that were written before the memory was gone.
///
/// # Safety
/// The requirements of [`store`](crate::store), for every byte.
pub unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> Result<(), usize> {
    // SAFETY: every byte may be written by guarded accesses, as this function's `# Safety` asks of its caller.
    unsafe { fill_elements::<1>(dst, byte.into(), len) }
}

/// Whether the memory at `p` holds `bytes`.
///
/// # Safety
/// The requirements of [`load`], for every byte.
#[inline]
pub unsafe fn matches(mut p: *const u8, bytes: &[u8]) -> Result<bool, Gone> {
    let (lines, bytes) = bytes.as_chunks::<LINE>();
    for line in lines {
        // SAFETY: the line at `p` consists of bytes that the caller lets this function read by guarded accesses.
        if !unsafe { matches_line(p, line)? } {
            return Ok(false);
        }
        p = p.wrapping_add(LINE);
    }
    let len = bytes.len();
    if len < 8 {
        for (i, &byte) in bytes.iter().enumerate() {
            // SAFETY: the byte is one of those that the caller lets this function read by guarded accesses.
            if unsafe { load(p.wrapping_add(i))? } != byte {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let mut at = 0;
    let mut differ = 0;
    while at + 8 <= len {
        // SAFETY: the word consists of bytes that the caller lets this function read by guarded accesses.
        differ |= unsafe { load(p.wrapping_add(at).cast::<u64>())? } ^ word(at);
        at += 8;
    }
    // The tail overlaps bytes that were compared already.
    // SAFETY: the word consists of bytes that the caller lets this function read by guarded accesses.
    differ |= unsafe { load(p.wrapping_add(len - 8).cast::<u64>())? } ^ word(len - 8);
    Ok(differ == 0)
}
