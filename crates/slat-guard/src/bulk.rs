//! Runs of bytes: copies, fills and comparison.

use crate::access::guarded;
use crate::{Gone, load};
use std::arch::asm;

fn done(len: usize, left: usize) -> Result<(), usize> {
    if left == 0 { Ok(()) } else { Err(len - left) }
}

/// Reads `dst.len()` bytes. `Err` holds how many were read before the memory was gone.
///
/// # Safety
/// As for [`load`], for every byte.
pub unsafe fn copy_in(dst: &mut [u8], src: *const u8) -> Result<(), usize> {
    // SAFETY: `dst` is ours; the caller promises `src`.
    unsafe { copy(dst.as_mut_ptr(), src, dst.len()) }
}

/// Writes `src`. `Err` holds how many bytes were written before the memory was gone.
///
/// # Safety
/// As for [`store`](crate::store), for every byte.
pub unsafe fn copy_out(dst: *mut u8, src: &[u8]) -> Result<(), usize> {
    // SAFETY: `src` is ours; the caller promises `dst`.
    unsafe { copy(dst, src.as_ptr(), src.len()) }
}

/// Copies `len` bytes from the first to the last, one after the other, so that a copy to overlapping higher addresses repeats a
/// pattern. `Err` holds how many were copied before memory of either side was gone.
///
/// # Safety
/// As for [`load`] and [`store`](crate::store), for every byte.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> Result<(), usize> {
    let left: usize;
    // SAFETY: the caller answers for both ranges. `rep movsb` can be interrupted between bytes with
    // RCX counting the rest; the exception table turns the interruption into the end of the copy.
    unsafe {
        asm!(
            "2: rep movsb",
            guarded!(),
            "4:",
            inout("rdi") dst => _,
            inout("rsi") src => _,
            inout("rcx") len => left,
            options(nostack, preserves_flags),
        );
    }
    done(len, left)
}

/// Writes the low `BYTES` (1, 2, 4 or 8) bytes of `value` `times` times. `Err` holds how many times they were written before the
/// memory was gone.
///
/// # Safety
/// As for [`store`](crate::store), for every byte.
#[inline]
pub unsafe fn fill_elements<const BYTES: u64>(
    dst: *mut u8,
    value: u64,
    times: usize,
) -> Result<(), usize> {
    let left: usize;
    macro_rules! fill {
        ($store:literal) => {
            // SAFETY: the caller answers for the range; interruption as in `copy`.
            unsafe {
                asm!(
                    concat!("2: rep ", $store),
                    guarded!(),
                    "4:",
                    inout("rdi") dst => _,
                    in("rax") value,
                    inout("rcx") times => left,
                    options(nostack, preserves_flags),
                )
            }
        };
    }
    match BYTES {
        1 => fill!("stosb"),
        2 => fill!("stosw"),
        4 => fill!("stosd"),
        _ => fill!("stosq"),
    }
    done(times, left)
}

/// Fills `len` bytes with `byte`. `Err` holds how many were written before the memory was gone.
///
/// # Safety
/// As for [`store`](crate::store), for every byte.
pub unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> Result<(), usize> {
    // SAFETY: the caller's promise.
    unsafe { fill_elements::<1>(dst, byte.into(), len) }
}

/// Whether the memory at `p` holds `bytes`. Meant for the few dozen bytes of a code block.
///
/// # Safety
/// As for [`load`], for every byte.
#[inline]
pub unsafe fn matches(p: *const u8, bytes: &[u8]) -> Result<bool, Gone> {
    let len = bytes.len();
    if len < 8 {
        for (i, &byte) in bytes.iter().enumerate() {
            // SAFETY: within the range that the caller promises.
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
        // SAFETY: within the range that the caller promises.
        differ |= unsafe { load(p.wrapping_add(at).cast::<u64>())? } ^ word(at);
        at += 8;
    }
    // The tail overlaps bytes that were compared already.
    // SAFETY: within the range that the caller promises.
    differ |= unsafe { load(p.wrapping_add(len - 8).cast::<u64>())? } ^ word(len - 8);
    Ok(differ == 0)
}
