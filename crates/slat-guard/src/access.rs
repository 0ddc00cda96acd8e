//! Single accesses: loads, stores and locked read-modify-writes of 1 to 16 bytes.
//!
//! Each access changes memory by one guarded machine instruction at most, so the access happens as a whole or not at
//! all. There is one exception, on arm64: if a word crosses into another page and one of the two pages is gone, a store
//! may have changed the bytes in the other page.
//!
//! | access | x86-64 | arm64 |
//! |---|---|---|
//! | load, store of up to 8 bytes | single-copy atomic unless it crosses a cache line | single-copy atomic if it is aligned; with FEAT_LSE2, also within 16 aligned bytes |
//! | load, store of 16 bytes | nothing is guaranteed | each aligned half is single-copy atomic |
//! | read-modify-write of up to 8 bytes | atomic | atomic unless it crosses a multiple of 16 bytes |
//! | compare and exchange of 16 aligned bytes | atomic | atomic |
//!
//! # Order
//! On each architecture, guarded accesses have the order of x86 (total store order), because guests and clients may
//! rely on it:
//!
//! * What a thread does after a load, other threads see after it. (Acquire.)
//! * What a thread does before a store, other threads see before it. (Release.)
//! * A read-modify-write has both properties, and is a full barrier: what a thread does before it, all threads see
//!   before what the thread does after it. That also holds for a compare and exchange that finds another value: it
//!   writes that value again. So a compare and exchange needs writable memory.
//!
//! A load may happen before an earlier store. An access that returns [`Gone`] orders nothing. The compiler may still
//! move an access of Rust code to ordinary memory across a guarded load, because the compiler knows that the load
//! writes nothing.

use crate::Gone;

mod sealed {
    use std::ops::{BitAnd, BitOr};

    /// The machine accesses, each by one instruction or a few. Each architecture has its own implementation (`arch`).
    ///
    /// # Safety
    /// `load` has the requirements of [`load`](super::load), and all others have those of [`store`](super::store).
    pub trait Sealed: Copy + Eq + BitAnd<Output = Self> + BitOr<Output = Self> {
        unsafe fn load(p: *const Self) -> Result<Self, crate::Gone>;
        unsafe fn store(p: *mut Self, v: Self) -> Result<(), crate::Gone>;
        unsafe fn compare_exchange(
            p: *mut Self,
            old: Self,
            new: Self,
        ) -> Result<Result<Self, Self>, crate::Gone>;
        unsafe fn swap(p: *mut Self, v: Self) -> Result<Self, crate::Gone>;
        unsafe fn fetch_add(p: *mut Self, v: Self) -> Result<Self, crate::Gone>;
    }
}
pub(crate) use sealed::Sealed;

/// A word that a guarded access moves: `u8`, `u16`, `u32`, `u64` or `u128`.
pub trait Word: Sealed {}

/// Reads a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address: unmapped memory returns [`Gone`].
/// * Other users of the memory must expect reads at any time.
/// * [`install`](crate::install) must have been called, or a fault ends the process.
#[inline(always)]
pub unsafe fn load<T: Word>(p: *const T) -> Result<T, Gone> {
    // SAFETY: any address may be read here, as this function's `# Safety` says: the access is guarded, and the handlers
    // that turn a fault into `Gone` are installed.
    unsafe { T::load(p) }
}

/// Writes a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address that, where mapped, this process may overwrite: no Rust object lives there.
/// * [`install`](crate::install) must have been called, or a fault ends the process.
#[inline(always)]
pub unsafe fn store<T: Word>(p: *mut T, v: T) -> Result<(), Gone> {
    // SAFETY: no Rust object is at `p`, and the handlers that turn a fault into `Gone` are installed, as this
    // function's `# Safety` asks of its caller.
    unsafe { T::store(p, v) }
}

/// Compares and exchanges, on x86 by LOCK CMPXCHG: `Ok(Ok(old))` if the word was `old` and is now `new`,
/// `Ok(Err(seen))` otherwise. A `u128` must be aligned.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn compare_exchange<T: Word>(p: *mut T, old: T, new: T) -> Result<Result<T, T>, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::compare_exchange(p, old, new) }
}

/// Exchanges, on x86 by XCHG: writes `v`, returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn swap<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::swap(p, v) }
}

/// Adds `v` (wrapping), on x86 by LOCK XADD. Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_add<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::fetch_add(p, v) }
}

/// Does a locked AND, returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_and<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { update(p, |old| old & v) }
}

/// Does a locked OR, returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_or<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { update(p, |old| old | v) }
}

/// Runs a compare-and-exchange loop, for operations that no single instruction does while returning the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub(crate) unsafe fn update<T: Word>(p: *mut T, f: impl Fn(T) -> T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    let mut old = unsafe { T::load(p)? };
    loop {
        // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
        match unsafe { T::compare_exchange(p, old, f(old))? } {
            Ok(old) => return Ok(old),
            Err(seen) => old = seen,
        }
    }
}
