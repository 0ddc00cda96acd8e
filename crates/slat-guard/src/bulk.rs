//! Guarded accesses of runs of bytes: copies, fills and comparison.
//!
//! # Order
//! As a whole, an access that reads a run is ordered like a load, and an access that writes a run is ordered like a
//! store ([`access`](crate::access)). Within the run, other threads may see bytes read or written in any order, and
//! only single bytes are single-copy atomic.

use crate::Gone;
use crate::access::load;
use crate::arch::bulk::{self, LINE, matches_line};

fn done(len: usize, left: usize) -> Result<(), usize> {
    if left == 0 { Ok(()) } else { Err(len - left) }
}

/// Reads `dst.len()` bytes. `Err` contains the number of bytes that were read before one was not accessible.
///
/// # Safety
/// The requirements of [`load`], for every byte.
pub unsafe fn copy_in(dst: &mut [u8], src: *const u8) -> Result<(), usize> {
    // SAFETY: `dst` is a mutable slice, which no other code uses. `src` may be read by guarded accesses, as this
    // function's `# Safety` asks of its caller.
    unsafe { copy(dst.as_mut_ptr(), src, dst.len()) }
}

/// Writes `src`. `Err` contains the number of bytes that were written before one was not accessible.
///
/// # Safety
/// The requirements of [`store`](crate::store), for every byte.
pub unsafe fn copy_out(dst: *mut u8, src: &[u8]) -> Result<(), usize> {
    // SAFETY: `src` is a slice, which no other code writes. `dst` may be written by guarded accesses, as this
    // function's `# Safety` asks of its caller.
    unsafe { copy(dst, src.as_ptr(), src.len()) }
}

/// Copies `len` bytes one after the other, beginning with the first. So if the destination overlaps the source at
/// higher addresses, the bytes before the overlap are repeated as a pattern. `Err` contains the number of bytes that
/// were copied before one was not accessible, in the source or the destination.
///
/// # Safety
/// The requirements of [`load`] and [`store`](crate::store), for every byte.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> Result<(), usize> {
    // SAFETY: `src` may be read and `dst` written by guarded accesses, as this function's `# Safety` asks of its
    // caller.
    done(len, unsafe { bulk::copy(dst, src, len) })
}

/// Writes the low `BYTES` (1, 2, 4 or 8) bytes of `value` `times` times. `Err` contains the number of copies that were
/// written before memory was not accessible.
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

/// Fills `len` bytes with `byte`. `Err` contains the number of bytes that were written before one was not accessible.
///
/// # Safety
/// The requirements of [`store`](crate::store), for every byte.
pub unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> Result<(), usize> {
    // SAFETY: every byte may be written by guarded accesses, as this function's `# Safety` asks of its caller.
    unsafe { fill_elements::<1>(dst, byte.into(), len) }
}

/// Whether the bytes at `p` are equal to `bytes`.
///
/// # Safety
/// The requirements of [`load`], for every byte.
#[inline]
pub unsafe fn matches(mut p: *const u8, bytes: &[u8]) -> Result<bool, Gone> {
    let (lines, bytes) = bytes.as_chunks::<LINE>();
    for line in lines {
        // SAFETY: the line at `p` consists of bytes that this function may read by guarded accesses, as its `# Safety`
        // says.
        if !unsafe { matches_line(p, line)? } {
            return Ok(false);
        }
        p = p.wrapping_add(LINE);
    }
    let len = bytes.len();
    if len < 8 {
        for (i, &byte) in bytes.iter().enumerate() {
            // SAFETY: this function may read the byte by guarded accesses, as its `# Safety` says.
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
        // SAFETY: the word consists of bytes that this function may read by guarded accesses, as its `# Safety` says.
        differ |= unsafe { load(p.wrapping_add(at).cast::<u64>())? } ^ word(at);
        at += 8;
    }
    // The last word may overlap bytes that were already compared.
    // SAFETY: the word consists of bytes that this function may read by guarded accesses, as its `# Safety` says.
    differ |= unsafe { load(p.wrapping_add(len - 8).cast::<u64>())? } ^ word(len - 8);
    Ok(differ == 0)
}
