//! Single accesses: loads, stores and locked read-modify-writes of 1 to 16 bytes.
//!
//! Each access is one guarded machine instruction, so it happens as a whole or not at all. Loads and stores of up to 8
//! bytes that do not cross a cache line are single-copy atomic, as the processor guarantees; for 16-byte loads and
//! stores the processor guarantees nothing.

use crate::Gone;
use std::arch::asm;
use std::arch::x86_64::__m128i;

/// Adds an entry to the exception table: the instruction at label 2, continuing at label 4.
macro_rules! guarded {
    () => {
        ".pushsection slat_guard_table,\"aR\",@progbits\n.long 2b - .\n.long 4f - .\n.popsection"
    };
}
pub(crate) use guarded;

/// Defines the fix-up of accesses that report through a register: sets `gone` and continues after the access.
macro_rules! report {
    () => {
        ".pushsection .text.slat_guard_fixup,\"ax\",@progbits\n4: mov {gone:e}, 1\njmp 3b\n.popsection"
    };
}
pub(crate) use report;

mod sealed {
    pub trait Sealed: Copy + Eq {
        unsafe fn load(p: *const Self) -> Result<Self, crate::Gone>;
        unsafe fn store(p: *mut Self, v: Self) -> Result<(), crate::Gone>;
        unsafe fn compare_exchange(
            p: *mut Self,
            old: Self,
            new: Self,
        ) -> Result<Result<Self, Self>, crate::Gone>;
        unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, crate::Gone>;
        unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, crate::Gone>;
        fn and(self, other: Self) -> Self;
        fn or(self, other: Self) -> Self;
        fn xor(self, other: Self) -> Self;
    }
}
pub(crate) use sealed::Sealed;

/// A word that a guarded access moves: `u8`, `u16`, `u32`, `u64` or `u128`.
pub trait Word: Sealed {}

macro_rules! word {
    ($ty:ty, $load:literal, $v:literal, $ptr:literal, $acc:tt, $class:ident) => {
        impl Word for $ty {}
        impl Sealed for $ty {
            #[inline(always)]
            unsafe fn load(p: *const Self) -> Result<Self, Gone> {
                let gone: u32;
                let v: u64;
                // SAFETY: one instruction that reads memory; if it cannot, the exception table sends the thread to the
                // fix-up. The caller answers for the bytes.
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
                // SAFETY: one instruction that writes memory; if it cannot, the exception table sends the thread to the
                // label. The caller answers for the bytes.
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
                let gone: u32;
                let seen: $ty;
                // SAFETY: as for a store.
                unsafe {
                    asm!(
                        "xor {gone:e}, {gone:e}",
                        concat!("2: lock cmpxchg ", $ptr, " ptr [{p}], ", $v),
                        "3:",
                        guarded!(),
                        report!(),
                        p = in(reg) p,
                        v = in($class) new,
                        gone = out(reg) gone,
                        inout($acc) old => seen,
                        options(nostack),
                    );
                }
                match gone {
                    0 if seen == old => Ok(Ok(seen)),
                    0 => Ok(Err(seen)),
                    _ => Err(Gone),
                }
            }

            #[inline(always)]
            unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, Gone> {
                let gone: u32;
                let seen: $ty;
                // SAFETY: as for a store.
                unsafe {
                    asm!(
                        "xor {gone:e}, {gone:e}",
                        concat!("2: xchg ", $ptr, " ptr [{p}], ", $v),
                        "3:",
                        guarded!(),
                        report!(),
                        p = in(reg) p,
                        v = inout($class) v => seen,
                        gone = out(reg) gone,
                        options(nostack),
                    );
                }
                if gone == 0 { Ok(seen) } else { Err(Gone) }
            }

            #[inline(always)]
            unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, Gone> {
                let gone: u32;
                let seen: $ty;
                // SAFETY: as for a store.
                unsafe {
                    asm!(
                        "xor {gone:e}, {gone:e}",
                        concat!("2: lock xadd ", $ptr, " ptr [{p}], ", $v),
                        "3:",
                        guarded!(),
                        report!(),
                        p = in(reg) p,
                        v = inout($class) v => seen,
                        gone = out(reg) gone,
                        options(nostack),
                    );
                }
                if gone == 0 { Ok(seen) } else { Err(Gone) }
            }

            word!(@bits);
        }
    };
    (@bits) => {
        #[inline(always)]
        fn and(self, other: Self) -> Self { self & other }
        #[inline(always)]
        fn or(self, other: Self) -> Self { self | other }
        #[inline(always)]
        fn xor(self, other: Self) -> Self { self ^ other }
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
        // SAFETY: as for the narrower words.
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
        // SAFETY: both are 16 bytes without invalid values.
        Ok(unsafe { std::mem::transmute::<__m128i, u128>(v) })
    }

    #[inline(always)]
    unsafe fn store(p: *mut Self, v: Self) -> Result<(), Gone> {
        // SAFETY: both are 16 bytes without invalid values.
        let v = unsafe { std::mem::transmute::<u128, __m128i>(v) };
        // SAFETY: as for the narrower words.
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

    /// Like `compare_exchange` of the narrower words, but `p` must be 16-byte aligned, as `cmpxchg16b` demands;
    /// otherwise the access is [`Gone`].
    #[inline(always)]
    unsafe fn compare_exchange(
        p: *mut Self,
        old: Self,
        new: Self,
    ) -> Result<Result<Self, Self>, Gone> {
        let gone: u32;
        let (lo, hi): (u64, u64);
        // SAFETY: as for the narrower words. RBX cannot be named as an operand, so it is swapped in and out around the
        // instruction; naming the registers of `p` and `gone` keeps them out of RBX.
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
        // SAFETY: the caller's promise is that of `compare_exchange`.
        unsafe { update(p, |_| v) }
    }

    #[inline(always)]
    unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, Gone> {
        // SAFETY: the caller's promise is that of `compare_exchange`.
        unsafe { update(p, |old| old.wrapping_add(v)) }
    }

    word!(@bits);
}

/// Reads a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address: unmapped memory returns [`Gone`].
/// * Other users of the memory must expect reads at any time.
/// * [`install`](crate::install) must have been called, or a fault ends the process.
#[inline(always)]
pub unsafe fn load<T: Word>(p: *const T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { T::load(p) }
}

/// Writes a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address that, where mapped, this process may overwrite: no Rust object lives there.
/// * [`install`](crate::install) must have been called, or a fault ends the process.
#[inline(always)]
pub unsafe fn store<T: Word>(p: *mut T, v: T) -> Result<(), Gone> {
    // SAFETY: the caller's promise.
    unsafe { T::store(p, v) }
}

/// Compares and exchanges by LOCK CMPXCHG: `Ok(Ok(old))` if the word was `old` and is now `new`, `Ok(Err(seen))`
/// otherwise. A `u128` must be aligned.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn compare_exchange<T: Word>(p: *mut T, old: T, new: T) -> Result<Result<T, T>, Gone> {
    // SAFETY: the caller's promise.
    unsafe { T::compare_exchange(p, old, new) }
}

/// Exchanges by XCHG: writes `v`, returns the old value.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn swap<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { T::swap(p, v) }
}

/// Adds `v` (wrapping) by LOCK XADD, returns the old value.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn fetch_add<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { T::fetch_add(p, v) }
}

/// Does LOCK AND, returns the old value.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn fetch_and<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { update(p, |old| old.and(v)) }
}

/// Does LOCK OR, returns the old value.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn fetch_or<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { update(p, |old| old.or(v)) }
}

/// Does LOCK XOR, returns the old value.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub unsafe fn fetch_xor<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    unsafe { update(p, |old| old.xor(v)) }
}

/// Runs a compare-and-exchange loop, for operations that no single instruction does while returning the old value.
#[inline(always)]
unsafe fn update<T: Word>(p: *mut T, f: impl Fn(T) -> T) -> Result<T, Gone> {
    // SAFETY: the caller's promise.
    let mut old = unsafe { T::load(p)? };
    loop {
        // SAFETY: the caller's promise.
        match unsafe { T::compare_exchange(p, old, f(old))? } {
            Ok(old) => return Ok(old),
            Err(seen) => old = seen,
        }
    }
}
