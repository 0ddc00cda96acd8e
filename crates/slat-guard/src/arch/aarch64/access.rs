//! Guarded accesses of single words on AArch64.
//!
//! # Order
//! Guarded accesses have x86's order ([`access`](crate::access)). The instructions in this file ensure this order as
//! follows, by the Arm Architecture Reference Manual ("Definition of the Arm memory model", "Synchronization and
//! semaphores").
//!
//! | access | aligned | not aligned |
//! |---|---|---|
//! | load | LDAR | LDR, then DMB ISHLD |
//! | store | STLR | DMB ISH, then STR |
//! | 16-byte load | LDP, then DMB ISHLD | the same |
//! | 16-byte store | DMB ISH, then STP | the same |
//! | read-modify-write | loop of LDXR and STLXR, then DMB ISH | see below |
//!
//! * **Load.** LDAR, or DMB ISHLD after a load, orders the load before all later loads and stores.
//! * **Store.** STLR, or DMB ISH before a store, orders all earlier loads and stores before the store.
//! * Together with the architecture's multi-copy atomicity, these two rules give total store order. (In total store
//!   order a load may happen before an earlier store; LDAR and STLR do not allow even this.)
//! * **Read-modify-write.** The STLXR that succeeds writes the result. It orders all accesses that are earlier in the
//!   program before this write, and DMB ISH orders the write before all later accesses. Only the LDXR may happen before
//!   an access that is earlier in the program. This is harmless: no other thread has written the word between LDXR and
//!   STLXR, or the STLXR would have failed. So an LDXR at the moment of the write would have read the same value. All
//!   this is also true of a compare and exchange that finds another value, because it writes that value again.
//!
//! # Two instructions that may fail
//! A loop has two guarded instructions, LDXR and STLXR, and both are in the exception table. If LDXR faults, the access
//! has done nothing. If STLXR faults, it has written nothing, because the word is aligned and so in one page. Then the
//! processor's exclusive monitor may still be set for the word. It is cleared by the ERET by which the thread returns
//! from the fault or signal, before the access returns [`Gone`]. Even if the monitor stayed set, no later
//! store-exclusive could wrongly succeed: before each one there is a load-exclusive, which sets the monitor anew.
//!
//! The instructions between LDXR and STLXR are not in the table, so a kick that arrives between the two does not end
//! the access. Then the ERET has cleared the monitor, the STLXR writes nothing, and the loop repeats.
//!
//! # Words that are not aligned
//! LDAR, STLR, LDXR and STLXR need aligned memory. A read-modify-write of an unaligned word that lies within 16 aligned
//! bytes is a read-modify-write of these 16 bytes. For any other unaligned word it is a load and a store between two
//! barriers, which is not atomic, because Arm has no instruction for it.

use super::table::{guarded, guarded_to_label, report};
use crate::Gone;
use crate::access::{Sealed, Word, update};
use std::arch::asm;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;

/// Atomically replaces a word of `bytes` bytes, which lies within 16 aligned bytes, by `change` of its value. Returns
/// the old value.
///
/// # Safety
/// The requirements of [`store`](crate::store).
unsafe fn change_within(
    p: *mut u8,
    bytes: usize,
    change: impl Fn(u128) -> u128,
) -> Result<u128, Gone> {
    let offset = p.addr() % WHOLE;
    let shift = 8 * offset;
    let mask = !0u128 >> (8 * (WHOLE - bytes));
    let whole = p.wrapping_sub(offset).cast::<u128>();
    let changed =
        |old: u128| old & !(mask << shift) | (change(old >> shift & mask) & mask) << shift;
    // SAFETY: the bytes of the word may be written, as this function's `# Safety` asks of its caller. The others of the
    // 16 aligned bytes are in the same page, and are atomically written with the values that they have.
    let old = unsafe { update(whole, changed)? };
    Ok(old >> shift & mask)
}

/// The number of aligned bytes that [`change_within`] reads and writes.
const WHOLE: usize = size_of::<u128>();

/// Executes an atomic read-modify-write of the aligned memory at `$p`: loads the operand `seen`, executes `$between`,
/// stores the operand `$stored`, and repeats this if another thread has written in between. Returns the loaded word.
macro_rules! exclusive {
    ($size:literal, $r:literal, $p:expr, [$($between:literal),*] => $stored:literal, $($operands:tt)*) => {{
        let gone: u32;
        let seen: u64;
        asm!(
            "mov {gone:w}, wzr",
            "5:",
            concat!("2: ldxr", $size, " {seen:", $r, "}, [{p}]"),
            guarded!(),
            $($between,)*
            concat!("2: stlxr", $size, " {failed:w}, {", $stored, ":", $r, "}, [{p}]"),
            guarded!(),
            "cbnz {failed:w}, 5b",
            "dmb ish",
            "3:",
            report!(),
            p = in(reg) $p,
            gone = out(reg) gone,
            seen = out(reg) seen,
            failed = out(reg) _,
            $($operands)*
            options(nostack),
        );
        if gone == 0 { Ok(seen) } else { Err(Gone) }
    }};
}

macro_rules! word {
    ($ty:ty, $size:literal, $r:literal) => {
        impl Word for $ty {}
        impl Sealed for $ty {
            #[inline(always)]
            unsafe fn load(p: *const Self) -> Result<Self, Gone> {
                #[cold]
                unsafe fn load_unaligned(p: *const $ty) -> Result<$ty, Gone> {
                    let gone: u32;
                    let v: u64;
                    // SAFETY: the instruction reads memory; if it faults, the exception table makes the thread continue
                    // at the fix-up. The bytes may be read, as `load` asks of its caller.
                    unsafe {
                        asm!(
                            "mov {gone:w}, wzr",
                            concat!("2: ldr", $size, " {v:", $r, "}, [{p}]"),
                            "dmb ishld",
                            "3:",
                            guarded!(),
                            report!(),
                            p = in(reg) p,
                            gone = out(reg) gone,
                            v = out(reg) v,
                            options(nostack, readonly, preserves_flags),
                        );
                    }
                    if gone == 0 { Ok(v as $ty) } else { Err(Gone) }
                }
                if !p.addr().is_multiple_of(size_of::<Self>()) {
                    // SAFETY: the bytes may be read, as `load` asks of its caller.
                    return unsafe { load_unaligned(p) };
                }
                let gone: u32;
                let v: u64;
                // SAFETY: the instruction reads memory; if it faults, the exception table makes the thread continue at
                // the fix-up. The bytes may be read, as `load` asks of its caller.
                unsafe {
                    asm!(
                        "mov {gone:w}, wzr",
                        concat!("2: ldar", $size, " {v:", $r, "}, [{p}]"),
                        "3:",
                        guarded!(),
                        report!(),
                        p = in(reg) p,
                        gone = out(reg) gone,
                        v = out(reg) v,
                        options(nostack, readonly, preserves_flags),
                    );
                }
                if gone == 0 { Ok(v as $ty) } else { Err(Gone) }
            }

            #[inline(always)]
            unsafe fn store(p: *mut Self, v: Self) -> Result<(), Gone> {
                #[cold]
                unsafe fn store_unaligned(p: *mut $ty, v: $ty) -> Result<(), Gone> {
                    // SAFETY: the instruction writes memory; if it faults, the exception table makes the thread
                    // continue at the label. The bytes may be written, as `store` asks of its caller.
                    unsafe {
                        asm!(
                            "dmb ish",
                            concat!("2: str", $size, " {v:", $r, "}, [{p}]"),
                            guarded_to_label!(),
                            p = in(reg) p,
                            v = in(reg) u64::from(v),
                            gone = label { return Err(Gone) },
                            options(nostack, preserves_flags),
                        );
                    }
                    Ok(())
                }
                if !p.addr().is_multiple_of(size_of::<Self>()) {
                    // SAFETY: the bytes may be written, as `store` asks of its caller.
                    return unsafe { store_unaligned(p, v) };
                }
                // SAFETY: the instruction writes memory; if it faults, the exception table makes the thread continue at
                // the label. The bytes may be written, as `store` asks of its caller.
                unsafe {
                    asm!(
                        concat!("2: stlr", $size, " {v:", $r, "}, [{p}]"),
                        guarded_to_label!(),
                        p = in(reg) p,
                        v = in(reg) u64::from(v),
                        gone = label { return Err(Gone) },
                        options(nostack, preserves_flags),
                    );
                }
                Ok(())
            }

            #[inline(always)]
            unsafe fn compare_exchange(
                p: *mut Self,
                old: Self,
                new: Self,
            ) -> Result<Result<Self, Self>, Gone> {
                let seen = if p.addr().is_multiple_of(size_of::<Self>()) {
                    // SAFETY: both instructions that access memory are guarded. The bytes may be written, as `store`
                    // asks of its caller.
                    let seen = unsafe {
                        exclusive!(
                            $size, $r, p,
                            ["cmp {seen}, {old}", "csel {next}, {new}, {seen}, eq"] => "next",
                            old = in(reg) u64::from(old),
                            new = in(reg) u64::from(new),
                            next = out(reg) _,
                        )
                    };
                    seen? as $ty
                } else {
                    let change = move |seen| if seen == old { new } else { seen };
                    // SAFETY: the bytes may be written, as `store` asks of its caller.
                    unsafe { Self::change_unaligned(p, change)? }
                };
                Ok(if seen == old { Ok(seen) } else { Err(seen) })
            }

            #[inline(always)]
            unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, Gone> {
                if !p.addr().is_multiple_of(size_of::<Self>()) {
                    // SAFETY: the bytes may be written, as `store` asks of its caller.
                    return unsafe { Self::change_unaligned(p, move |_| v) };
                }
                // SAFETY: both instructions that access memory are guarded. The bytes may be written, as `store` asks
                // of its caller.
                let seen = unsafe {
                    exclusive!($size, $r, p, [] => "v", v = in(reg) u64::from(v),)
                };
                seen.map(|seen| seen as $ty)
            }

            #[inline(always)]
            unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, Gone> {
                if !p.addr().is_multiple_of(size_of::<Self>()) {
                    // SAFETY: the bytes may be written, as `store` asks of its caller.
                    return unsafe { Self::change_unaligned(p, move |old| old.wrapping_add(v)) };
                }
                // SAFETY: both instructions that access memory are guarded. The bytes may be written, as `store` asks
                // of its caller.
                let seen = unsafe {
                    exclusive!(
                        $size, $r, p,
                        ["add {next}, {seen}, {v}"] => "next",
                        v = in(reg) u64::from(v),
                        next = out(reg) _,
                    )
                };
                seen.map(|seen| seen as $ty)
            }
        }

        impl Unaligned for $ty {
            #[cold]
            unsafe fn change_unaligned(
                p: *mut Self,
                change: impl Fn(Self) -> Self,
            ) -> Result<Self, Gone> {
                if p.addr() % WHOLE + size_of::<Self>() <= WHOLE {
                    let change = |old| u128::from(change(old as $ty));
                    // SAFETY: the word is within 16 aligned bytes. Its bytes may be written, as `store` asks of its
                    // caller.
                    let old = unsafe { change_within(p.cast(), size_of::<Self>(), change)? };
                    return Ok(old as $ty);
                }
                fence(SeqCst);
                // SAFETY: the bytes may be read and written, as `store` asks of its caller.
                let old = unsafe { Self::load(p)? };
                // SAFETY: the bytes may be written, as `store` asks of its caller.
                unsafe { Self::store(p, change(old))? };
                fence(SeqCst);
                Ok(old)
            }
        }
    };
}

/// Read-modify-writes of words that are not aligned.
trait Unaligned: Sealed {
    /// Replaces a word by `change` of its value. Returns the old value.
    ///
    /// # Safety
    /// The requirements of [`store`](crate::store).
    unsafe fn change_unaligned(p: *mut Self, change: impl Fn(Self) -> Self) -> Result<Self, Gone>;
}

word!(u8, "b", "w");
word!(u16, "h", "w");
word!(u32, "", "w");
word!(u64, "", "x");

/// Returns the 16-byte word with the low half `lo` and the high half `hi`.
fn joined(lo: u64, hi: u64) -> u128 {
    u128::from(lo) | u128::from(hi) << 64
}

impl Word for u128 {}
impl Sealed for u128 {
    #[inline(always)]
    unsafe fn load(p: *const Self) -> Result<Self, Gone> {
        let gone: u32;
        let (lo, hi): (u64, u64);
        // SAFETY: the instructions that access memory are guarded. The bytes may be read, as `load` asks of its caller.
        unsafe {
            asm!(
                "mov {gone:w}, wzr",
                "2: ldp {lo}, {hi}, [{p}]",
                "dmb ishld",
                "3:",
                guarded!(),
                report!(),
                p = in(reg) p,
                gone = out(reg) gone,
                lo = out(reg) lo,
                hi = out(reg) hi,
                options(nostack, readonly, preserves_flags),
            );
        }
        if gone == 0 {
            Ok(joined(lo, hi))
        } else {
            Err(Gone)
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut Self, v: Self) -> Result<(), Gone> {
        // SAFETY: the instructions that access memory are guarded. The bytes may be written, as `store` asks of its
        // caller.
        unsafe {
            asm!(
                "dmb ish",
                "2: stp {lo}, {hi}, [{p}]",
                guarded_to_label!(),
                p = in(reg) p,
                lo = in(reg) v as u64,
                hi = in(reg) (v >> 64) as u64,
                gone = label { return Err(Gone) },
                options(nostack, preserves_flags),
            );
        }
        Ok(())
    }

    /// Like `compare_exchange` of the narrower words, but LDXP requires that `p` is aligned to 16 bytes; otherwise the
    /// result is [`Gone`]. The two halves that LDXP reads are guaranteed to be one value only if a later STLXP
    /// succeeds. So the loop always ends with an STLXP, even if the value is not `old`.
    #[inline(always)]
    unsafe fn compare_exchange(
        p: *mut Self,
        old: Self,
        new: Self,
    ) -> Result<Result<Self, Self>, Gone> {
        if !p.addr().is_multiple_of(WHOLE) {
            return Err(Gone);
        }
        let gone: u32;
        let (lo, hi): (u64, u64);
        // SAFETY: the instructions that access memory are guarded. The bytes may be written, as `store` asks of its
        // caller.
        unsafe {
            asm!(
                "mov {gone:w}, wzr",
                "5:",
                "2: ldxp {lo}, {hi}, [{p}]",
                guarded!(),
                "cmp {lo}, {old_lo}",
                "ccmp {hi}, {old_hi}, #0, eq",
                "csel {next_lo}, {new_lo}, {lo}, eq",
                "csel {next_hi}, {new_hi}, {hi}, eq",
                "2: stlxp {failed:w}, {next_lo}, {next_hi}, [{p}]",
                guarded!(),
                "cbnz {failed:w}, 5b",
                "dmb ish",
                "3:",
                report!(),
                p = in(reg) p,
                old_lo = in(reg) old as u64,
                old_hi = in(reg) (old >> 64) as u64,
                new_lo = in(reg) new as u64,
                new_hi = in(reg) (new >> 64) as u64,
                gone = out(reg) gone,
                lo = out(reg) lo,
                hi = out(reg) hi,
                next_lo = out(reg) _,
                next_hi = out(reg) _,
                failed = out(reg) _,
                options(nostack),
            );
        }
        let seen = joined(lo, hi);
        match gone {
            0 if seen == old => Ok(Ok(seen)),
            0 => Ok(Err(seen)),
            _ => Err(Gone),
        }
    }

    #[inline(always)]
    unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, Gone> {
        // SAFETY: the bytes may be written, as `store` asks of its caller.
        unsafe { update(p, |_| v) }
    }

    #[inline(always)]
    unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, Gone> {
        // SAFETY: the bytes may be written, as `store` asks of its caller.
        unsafe { update(p, |old| old.wrapping_add(v)) }
    }
}
