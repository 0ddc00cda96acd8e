//! Single accesses: loads, stores and locked read-modify-writes of 1 to 16 bytes.
//!
//! Each access changes memory by one guarded machine instruction at most, so the access happens as a whole or not at
//! all. There is one exception, on arm64: if a word crosses a page boundary and one of the two pages is not accessible,
//! a store may have changed the bytes in the other page.
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
//! * Other threads see what a thread does after a load as after the load. (Acquire.)
//! * Other threads see what a thread does before a store as before the store. (Release.)
//! * A read-modify-write has both properties, and is a full barrier: all threads see what a thread does before it as
//!   before what the thread does after it. This is also true of a compare and exchange that finds another value,
//!   because it writes that value again. So a compare and exchange always needs writable memory.
//!
//! A load may happen before a store that is earlier in the program. An access that returns [`Gone`] orders nothing. The
//! compiler may move accesses of Rust code to ordinary memory across a guarded load, because it is told that the load
//! writes no memory.

use crate::Gone;

mod sealed {
    use std::ops::{BitAnd, BitOr};

    /// The accesses to a word, each made by one machine instruction or a few. Each architecture has its own
    /// implementation (`arch`).
    ///
    /// # Safety
    /// The requirements of `load` are those of [`load`](super::load); the requirements of all other functions are those
    /// of [`store`](super::store).
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

/// A type that guarded accesses read and write: `u8`, `u16`, `u32`, `u64` or `u128`.
pub trait Word: Sealed {}

/// Reads a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address: if the memory is not mapped, the result is [`Gone`].
/// * Other users of the memory must expect that it is read at any time.
/// * [`install`](crate::install) must have been called; otherwise a fault ends the process.
#[inline(always)]
pub unsafe fn load<T: Word>(p: *const T) -> Result<T, Gone> {
    // SAFETY: any address may be read here, as this function's `# Safety` says: the access is guarded, and the handlers
    // that turn a fault into `Gone` are installed.
    unsafe { T::load(p) }
}

/// Writes a word. `p` need not be aligned.
///
/// # Safety
/// * `p` may be any address; but if the memory is mapped, it must contain no Rust object, so that it may be
///   overwritten.
/// * [`install`](crate::install) must have been called; otherwise a fault ends the process.
#[inline(always)]
pub unsafe fn store<T: Word>(p: *mut T, v: T) -> Result<(), Gone> {
    // SAFETY: no Rust object is at `p`, and the handlers that turn a fault into `Gone` are installed, as this
    // function's `# Safety` asks of its caller.
    unsafe { T::store(p, v) }
}

/// Does an atomic compare and exchange (on x86: LOCK CMPXCHG). Returns `Ok(Ok(old))` if the word was `old` and is now
/// `new`, or `Ok(Err(seen))` if it was another value, `seen`. A `u128` must be aligned.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn compare_exchange<T: Word>(p: *mut T, old: T, new: T) -> Result<Result<T, T>, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::compare_exchange(p, old, new) }
}

/// Atomically replaces the word by `v` (on x86: XCHG). Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn swap<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::swap(p, v) }
}

/// Atomically adds `v` to the word, wrapping (on x86: LOCK XADD). Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_add<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { T::fetch_add(p, v) }
}

/// Atomically replaces the word by its AND with `v`. Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_and<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { update(p, |old| old & v) }
}

/// Atomically replaces the word by its OR with `v`. Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
#[inline(always)]
pub unsafe fn fetch_or<T: Word>(p: *mut T, v: T) -> Result<T, Gone> {
    // SAFETY: no Rust object is at `p` and the handlers are installed, as `store` asks of its caller.
    unsafe { update(p, |old| old | v) }
}

/// Atomically replaces the word by `f` of its value, in a loop of compare and exchange. Returns the old value. For
/// operations for which there is no single instruction that also returns the old value.
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
