//! Runs of bytes: copies, fills and comparison.

use crate::access::{guarded, report};
use crate::{Gone, load};
use std::arch::asm;
use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8,
};

/// Bytes that are compared at once.
const LINE: usize = 64;

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

/// Copies `len` bytes one after the other, beginning with the first. So a copy to overlapping higher addresses repeats
/// a pattern. `Err` holds how many were copied before memory of either side was gone.
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

/// Writes the low `BYTES` (1, 2, 4 or 8) bytes of `value` `times` times. `Err` holds how many times they were written
/// before the memory was gone.
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

/// Whether the memory at `p` holds a line.
///
/// # Safety
/// As for [`load`], for every byte.
#[inline]
unsafe fn matches_line(p: *const u8, line: &[u8; LINE]) -> Result<bool, Gone> {
    let gone: u32;
    let (a, b, c, d): (__m128i, __m128i, __m128i, __m128i);
    // SAFETY: instructions that read memory; if one cannot, the exception table sends the thread to the fix-up. The
    // caller answers for the bytes.
    unsafe {
        asm!(
            "xor {gone:e}, {gone:e}",
            "2: movups {a}, xmmword ptr [{p}]",
            guarded!(),
            "2: movups {b}, xmmword ptr [{p} + 16]",
            guarded!(),
            "2: movups {c}, xmmword ptr [{p} + 32]",
            guarded!(),
            "2: movups {d}, xmmword ptr [{p} + 48]",
            guarded!(),
            "3:",
            report!(),
            p = in(reg) p,
            gone = out(reg) gone,
            a = out(xmm_reg) a,
            b = out(xmm_reg) b,
            c = out(xmm_reg) c,
            d = out(xmm_reg) d,
            options(nostack, readonly),
        );
    }
    if gone != 0 {
        return Err(Gone);
    }
    let quarters = line.as_ptr().cast::<__m128i>();
    // SAFETY: the quarters are within the line, at any alignment.
    let equal =
        |k: usize, quarter| unsafe { _mm_cmpeq_epi8(quarter, _mm_loadu_si128(quarters.add(k))) };
    let [a, b, c, d] = [equal(0, a), equal(1, b), equal(2, c), equal(3, d)];
    // SAFETY: each x86-64 processor has these instructions.
    let all = unsafe { _mm_and_si128(_mm_and_si128(a, b), _mm_and_si128(c, d)) };
    // SAFETY: as above.
    Ok(unsafe { _mm_movemask_epi8(all) } == 0xffff)
}

/// Whether the memory at `p` holds `bytes`.
///
/// # Safety
/// As for [`load`], for every byte.
#[inline]
pub unsafe fn matches(mut p: *const u8, bytes: &[u8]) -> Result<bool, Gone> {
    let (lines, bytes) = bytes.as_chunks::<LINE>();
    for line in lines {
        // SAFETY: within the range that the caller promises.
        if !unsafe { matches_line(p, line)? } {
            return Ok(false);
        }
        p = p.wrapping_add(LINE);
    }
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
