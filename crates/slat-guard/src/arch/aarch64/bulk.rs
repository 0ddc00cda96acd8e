//! Guarded accesses of runs of bytes on AArch64, by pairs of registers.
//!
//! # Order
//! This gives the order that [`bulk`](crate::bulk) promises: a DMB ISH before a run that writes orders all earlier
//! accesses before the run, and a DMB ISHLD after a run that reads orders all later accesses after the run.

use super::table::{guarded, report};
use crate::Gone;
use std::arch::asm;

/// The number of bytes that [`matches_line`] compares.
pub const LINE: usize = 64;

/// The number of bytes in a pair of registers.
const PAIR: usize = 16;

/// Copies `len` bytes one after the other, beginning with the first. Returns the number of bytes that were not copied
/// because memory of the source or the destination was not accessible.
///
/// If source and destination are at least 16 bytes apart, copies by pairs of registers, with the same result. If the
/// access to a pair faults, copies its bytes one by one, so that each byte before the inaccessible one is copied. If
/// the pair crosses a page boundary, some of its bytes may already be written. They are written again with the same
/// values, because the write of the pair cannot have changed the source.
///
/// # Safety
/// The requirements of [`copy`](crate::copy).
#[inline]
pub unsafe fn copy(mut dst: *mut u8, mut src: *const u8, len: usize) -> usize {
    let mut left = len;
    // SAFETY: guarded accesses to both ranges are allowed, as `copy` asks of its caller. If an instruction faults, the
    // exception table ends its loop, with `left` and the addresses as they were before this pair or byte.
    unsafe {
        asm!("dmb ish", options(nostack, preserves_flags));
        if dst.addr().abs_diff(src.addr()) >= PAIR {
            asm!(
                "subs {left}, {left}, #16",
                "b.lo 4f",
                "5:",
                "2: ldp {a}, {b}, [{src}]",
                guarded!(),
                "2: stp {a}, {b}, [{dst}]",
                guarded!(),
                "add {src}, {src}, #16",
                "add {dst}, {dst}, #16",
                "subs {left}, {left}, #16",
                "b.hs 5b",
                "4: add {left}, {left}, #16",
                dst = inout(reg) dst,
                src = inout(reg) src,
                left = inout(reg) left,
                a = out(reg) _,
                b = out(reg) _,
                options(nostack),
            );
        }
        asm!(
            "cbz {left}, 4f",
            "5:",
            "2: ldrb {a:w}, [{src}]",
            guarded!(),
            "2: strb {a:w}, [{dst}]",
            guarded!(),
            "add {src}, {src}, #1",
            "add {dst}, {dst}, #1",
            "sub {left}, {left}, #1",
            "cbnz {left}, 5b",
            "4: dmb ishld",
            dst = inout(reg) dst => _,
            src = inout(reg) src => _,
            left = inout(reg) left,
            a = out(reg) _,
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
pub unsafe fn fill_elements<const BYTES: u64>(mut dst: *mut u8, value: u64, times: usize) -> usize {
    let pattern = match BYTES {
        1 => u64::from(value as u8) * 0x0101_0101_0101_0101,
        2 => u64::from(value as u16) * 0x0001_0001_0001_0001,
        4 => u64::from(value as u32) * 0x0000_0001_0000_0001,
        _ => value,
    };
    let mut left = times;
    macro_rules! fill {
        ($store:literal) => {
            // SAFETY: guarded writes to the range are allowed, as `fill_elements` asks of its caller. If an instruction
            // faults, the exception table ends its loop, with `left` and the address as they were before this
            // instruction. Then the elements of the pair are written one by one.
            unsafe {
                asm!(
                    "dmb ish",
                    "subs {left}, {left}, {elements}",
                    "b.lo 4f",
                    "5:",
                    "2: stp {pattern}, {pattern}, [{dst}]",
                    guarded!(),
                    "add {dst}, {dst}, #16",
                    "subs {left}, {left}, {elements}",
                    "b.hs 5b",
                    "4: add {left}, {left}, {elements}",
                    dst = inout(reg) dst,
                    left = inout(reg) left,
                    pattern = in(reg) pattern,
                    elements = const PAIR as u64 / BYTES,
                    options(nostack),
                );
                asm!(
                    "cbz {left}, 4f",
                    "5:",
                    concat!("2: ", $store, ", [{dst}]"),
                    guarded!(),
                    "add {dst}, {dst}, {bytes}",
                    "sub {left}, {left}, #1",
                    "cbnz {left}, 5b",
                    "4:",
                    dst = inout(reg) dst => _,
                    left = inout(reg) left,
                    pattern = in(reg) pattern,
                    bytes = const BYTES,
                    options(nostack, preserves_flags),
                );
            }
        };
    }
    match BYTES {
        1 => fill!("strb {pattern:w}"),
        2 => fill!("strh {pattern:w}"),
        4 => fill!("str {pattern:w}"),
        _ => fill!("str {pattern}"),
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
    let mut words = [0u64; LINE / 8];
    let [a, b, c, d, e, f, g, h] = &mut words;
    // SAFETY: the instructions read memory; if one faults, the exception table makes the thread continue at the fix-up.
    // Guarded reads of the bytes are allowed, as `matches` asks of its caller.
    unsafe {
        asm!(
            "mov {gone:w}, wzr",
            "2: ldp {a}, {b}, [{p}]",
            guarded!(),
            "2: ldp {c}, {d}, [{p}, #16]",
            guarded!(),
            "2: ldp {e}, {f}, [{p}, #32]",
            guarded!(),
            "2: ldp {g}, {h}, [{p}, #48]",
            guarded!(),
            "dmb ishld",
            "3:",
            report!(),
            p = in(reg) p,
            gone = out(reg) gone,
            a = out(reg) *a,
            b = out(reg) *b,
            c = out(reg) *c,
            d = out(reg) *d,
            e = out(reg) *e,
            f = out(reg) *f,
            g = out(reg) *g,
            h = out(reg) *h,
            options(nostack, readonly, preserves_flags),
        );
    }
    if gone != 0 {
        return Err(Gone);
    }
    let (expected, _) = line.as_chunks::<8>();
    let differ = words.iter().zip(expected);
    Ok(differ.fold(0, |differ, (word, bytes)| {
        differ | word ^ u64::from_le_bytes(*bytes)
    }) == 0)
}
