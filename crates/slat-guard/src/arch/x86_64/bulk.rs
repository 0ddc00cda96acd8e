//! Guarded accesses of runs of bytes on x86-64, by string instructions and vector instructions.

use super::table::{guarded, report};
use crate::Gone;
use std::arch::asm;
use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8,
};

/// The number of bytes that [`matches_line`] compares.
pub const LINE: usize = 64;

/// Copies `len` bytes one after the other, beginning with the first. Returns the number of bytes that were not copied
/// because memory of the source or the destination was not accessible.
///
/// # Safety
/// The requirements of [`copy`](crate::copy).
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let left: usize;
    // SAFETY: guarded accesses to both ranges are allowed, as `copy` asks of its caller. If `rep movsb` faults or is
    // interrupted between two bytes, RCX contains the number of remaining bytes. The exception table makes the thread
    // continue after the copy.
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
    left
}

/// Writes the low `BYTES` (1, 2, 4 or 8) bytes of `value` `times` times. Returns the number of copies that were not
/// written because the memory was not accessible.
///
/// # Safety
/// The requirements of [`fill_elements`](crate::fill_elements).
#[inline]
pub unsafe fn fill_elements<const BYTES: u64>(dst: *mut u8, value: u64, times: usize) -> usize {
    let left: usize;
    macro_rules! fill {
        ($store:literal) => {
            // SAFETY: guarded writes to the range are allowed, as `fill_elements` asks of its caller. If the
            // instruction faults or is interrupted between two elements, RCX contains the number of remaining elements.
            // The exception table makes the thread continue after the instruction.
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
    left
}

/// Whether the bytes at `p` are equal to `line`.
///
/// # Safety
/// The requirements of [`matches`](crate::matches).
#[inline]
pub unsafe fn matches_line(p: *const u8, line: &[u8; LINE]) -> Result<bool, Gone> {
    let gone: u32;
    let (a, b, c, d): (__m128i, __m128i, __m128i, __m128i);
    // SAFETY: the instructions read memory; if one faults, the exception table makes the thread continue at the fix-up.
    // Guarded reads of the bytes are allowed, as `matches` asks of its caller.
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
    // SAFETY: each of the four parts is within `line`, and the load needs no alignment.
    let equal =
        |k: usize, quarter| unsafe { _mm_cmpeq_epi8(quarter, _mm_loadu_si128(quarters.add(k))) };
    let [a, b, c, d] = [equal(0, a), equal(1, b), equal(2, c), equal(3, d)];
    // SAFETY: each x86-64 processor has these instructions.
    let all = unsafe { _mm_and_si128(_mm_and_si128(a, b), _mm_and_si128(c, d)) };
    // SAFETY: each x86-64 processor has this instruction.
    Ok(unsafe { _mm_movemask_epi8(all) } == 0xffff)
}
