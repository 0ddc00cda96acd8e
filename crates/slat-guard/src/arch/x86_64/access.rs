//! Guarded accesses of single words on x86-64. Each is one instruction.
//!
//! # Order
//! The processor's own order suffices: a load is ordered before all later accesses, a store after all earlier accesses,
//! and a read-modify-write (LOCK) both after all earlier and before all later accesses.

use super::table::{guarded, report};
use crate::Gone;
use crate::access::{Sealed, Word, update};
use std::arch::asm;
use std::arch::x86_64::__m128i;

/// Executes a read-modify-write of the memory at `$p`. Its value is whether the memory was accessible.
macro_rules! locked {
    ($instruction:expr, $p:expr, $($operands:tt)*) => {{
        let gone: u32;
        asm!(
            "xor {gone:e}, {gone:e}",
            $instruction,
            "3:",
            guarded!(),
            report!(),
            p = in(reg) $p,
            gone = out(reg) gone,
            $($operands)*
            options(nostack),
        );
        gone == 0
    }};
}

macro_rules! word {
    ($ty:ty, $load:literal, $v:literal, $ptr:literal, $acc:tt, $class:ident) => {
        impl Word for $ty {}
        impl Sealed for $ty {
            #[inline(always)]
            unsafe fn load(p: *const Self) -> Result<Self, Gone> {
                let gone: u32;
                let v: u64;
                // SAFETY: the instruction reads memory; if it faults, the exception table makes the thread continue at
                // the fix-up. The bytes may be read, as `load` asks of its caller.
                unsafe {
                    asm!(
                        "xor {gone:e}, {gone:e}",
                        concat!("2: ", $load, ", ", $ptr, " ptr [{p}]"),
                        "3:",
                        guarded!(),
                        report!(),
                        p = in(reg) p,
                        gone = out(reg) gone,
                        v = out(reg) v,
                        options(nostack, readonly),
                    );
                }
                if gone == 0 { Ok(v as $ty) } else { Err(Gone) }
            }

            #[inline(always)]
            unsafe fn store(p: *mut Self, v: Self) -> Result<(), Gone> {
                // SAFETY: the instruction writes memory; if it faults, the exception table makes the thread continue at
                // the label. The bytes may be written, as `store` asks of its caller.
                unsafe {
                    asm!(
                        concat!("2: mov ", $ptr, " ptr [{p}], ", $v),
                        ".pushsection slat_guard_table,\"aR\",@progbits",
                        ".long 2b - .",
                        ".long {gone} - .",
                        ".popsection",
                        p = in(reg) p,
                        v = in($class) v,
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
                let seen: $ty;
                // SAFETY: the instruction is guarded. The bytes may be written, as `store` asks of its caller.
                let is_done = unsafe {
                    locked!(
                        concat!("2: lock cmpxchg ", $ptr, " ptr [{p}], ", $v),
                        p,
                        v = in($class) new,
                        inout($acc) old => seen,
                    )
                };
                match is_done {
                    true if seen == old => Ok(Ok(seen)),
                    true => Ok(Err(seen)),
                    false => Err(Gone),
                }
            }

            #[inline(always)]
            unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, Gone> {
                let seen: $ty;
                // SAFETY: the instruction is guarded. The bytes may be written, as `store` asks of its caller.
                let is_done = unsafe {
                    locked!(
                        concat!("2: xchg ", $ptr, " ptr [{p}], ", $v),
                        p,
                        v = inout($class) v => seen,
                    )
                };
                if is_done { Ok(seen) } else { Err(Gone) }
            }

            #[inline(always)]
            unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, Gone> {
                let seen: $ty;
                // SAFETY: the instruction is guarded. The bytes may be written, as `store` asks of its caller.
                let is_done = unsafe {
                    locked!(
                        concat!("2: lock xadd ", $ptr, " ptr [{p}], ", $v),
                        p,
                        v = inout($class) v => seen,
                    )
                };
                if is_done { Ok(seen) } else { Err(Gone) }
            }
        }
    };
}

word!(u8, "movzx {v:e}", "{v}", "byte", "al", reg_byte);
word!(u16, "movzx {v:e}", "{v:x}", "word", "ax", reg);
word!(u32, "mov {v:e}", "{v:e}", "dword", "eax", reg);
word!(u64, "mov {v:r}", "{v:r}", "qword", "rax", reg);

impl Word for u128 {}
impl Sealed for u128 {
    #[inline(always)]
    unsafe fn load(p: *const Self) -> Result<Self, Gone> {
        let gone: u32;
        let v: __m128i;
        // SAFETY: the instruction is guarded. The bytes may be read, as `load` asks of its caller.
        unsafe {
            asm!(
                "xor {gone:e}, {gone:e}",
                "2: movups {v}, xmmword ptr [{p}]",
                "3:",
                guarded!(),
                report!(),
                p = in(reg) p,
                gone = out(reg) gone,
                v = out(xmm_reg) v,
                options(nostack, readonly),
            );
        }
        if gone != 0 {
            return Err(Gone);
        }
        // SAFETY: both types consist of 16 bytes of which every value is valid.
        Ok(unsafe { std::mem::transmute::<__m128i, u128>(v) })
    }

    #[inline(always)]
    unsafe fn store(p: *mut Self, v: Self) -> Result<(), Gone> {
        // SAFETY: both types consist of 16 bytes of which every value is valid.
        let v = unsafe { std::mem::transmute::<u128, __m128i>(v) };
        // SAFETY: the instruction is guarded. The bytes may be written, as `store` asks of its caller.
        unsafe {
            asm!(
                "2: movups xmmword ptr [{p}], {v}",
                ".pushsection slat_guard_table,\"aR\",@progbits",
                ".long 2b - .",
                ".long {gone} - .",
                ".popsection",
                p = in(reg) p,
                v = in(xmm_reg) v,
                gone = label { return Err(Gone) },
                options(nostack, preserves_flags),
            );
        }
        Ok(())
    }

    /// Like `compare_exchange` of the narrower words, but `cmpxchg16b` requires that `p` is aligned to 16 bytes;
    /// otherwise the result is [`Gone`].
    #[inline(always)]
    unsafe fn compare_exchange(
        p: *mut Self,
        old: Self,
        new: Self,
    ) -> Result<Result<Self, Self>, Gone> {
        let gone: u32;
        let (lo, hi): (u64, u64);
        // SAFETY: the instruction is guarded. The bytes may be written, as `store` asks of its caller. Inline assembly
        // cannot use RBX as an operand, so the operand is exchanged with RBX before and after the instruction. `p` and
        // `gone` have explicit registers, so that they are not in RBX.
        unsafe {
            asm!(
                "xchg rbx, rsi",
                "xor r8d, r8d",
                "2: lock cmpxchg16b xmmword ptr [rdi]",
                "3: mov rbx, rsi",
                guarded!(),
                ".pushsection .text.slat_guard_fixup,\"ax\",@progbits",
                "4: mov r8d, 1",
                "jmp 3b",
                ".popsection",
                in("rdi") p,
                inout("rsi") new as u64 => _,
                in("rcx") (new >> 64) as u64,
                inout("rax") old as u64 => lo,
                inout("rdx") (old >> 64) as u64 => hi,
                out("r8") gone,
                options(nostack),
            );
        }
        let seen = u128::from(lo) | u128::from(hi) << 64;
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
