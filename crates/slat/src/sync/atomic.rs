//! The engine's atomics. They are those of `core`. In a build with `--cfg loom` they are those of the model checker
//! loom, which runs the engine's own code in all interleavings and with all values that a load may return
//! (`crate::loom_tests`).
//!
//! Counters and policies use `core`'s atomics in both builds, because no protocol depends on their values.

pub use core::sync::atomic::Ordering;

#[cfg(loom)]
pub use model::*;
#[cfg(not(loom))]
pub use plain::*;

/// Defines a constructor that is `const`. Under loom the constructor is not `const`, because loom's atomics are made at
/// run time.
macro_rules! const_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident() -> Self $body:block) => {
        #[cfg(not(loom))]
        $(#[$meta])* $vis const fn $name() -> Self $body
        #[cfg(loom)]
        $(#[$meta])* $vis fn $name() -> Self $body
    };
}
pub(crate) use const_fn;

#[cfg(not(loom))]
mod plain {
    pub use core::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, fence,
    };

    /// Stores a value in an atomic on which another thread may do a read-modify-write at the same time. This is a
    /// separate function because under loom it must be implemented differently: loom does not order a plain store with
    /// a read-modify-write.
    #[inline(always)]
    pub fn overwrite(atomic: &AtomicU64, value: u64, order: super::Ordering) {
        atomic.store(value, order);
    }

    /// Represents memory whose accesses are safe because of a protocol, not because of the compiler's checks. Under
    /// loom, which thus checks the protocol, it is a cell: loom reports a call of [`Watch::owned`] that is concurrent
    /// with any other use. Otherwise it does nothing.
    #[derive(Clone, Default)]
    pub struct Watch;

    impl Watch {
        pub const fn new() -> Self {
            Watch
        }

        /// Call at each shared use of the memory: other threads may use it at the same time.
        #[inline(always)]
        pub fn used(&self) {}

        /// Call at each exclusive use of the memory: all earlier uses must have happened before it.
        #[inline(always)]
        pub fn owned(&self) {}
    }
}

#[cfg(loom)]
#[allow(dead_code)]
mod model {
    use alloc::boxed::Box;
    use core::ops::{Deref, DerefMut};
    use core::sync::atomic::Ordering::{self, *};

    pub use loom::sync::atomic::fence;

    /// Stores a value, like `plain::overwrite`, but by a read-modify-write, which loom orders with other
    /// read-modify-writes.
    pub fn overwrite(atomic: &AtomicU64, value: u64, order: Ordering) {
        atomic.swap(value, order);
    }

    pub struct Watch(loom::cell::UnsafeCell<()>);

    // SAFETY: the cell contains nothing, and loom runs one thread at a time.
    unsafe impl Sync for Watch {}

    impl Watch {
        #[track_caller]
        pub fn new() -> Self {
            Watch(loom::cell::UnsafeCell::new(()))
        }

        #[track_caller]
        pub fn used(&self) {
            if !loom::thread::panicking() {
                self.0.with(|_| ());
            }
        }

        #[track_caller]
        pub fn owned(&self) {
            if !loom::thread::panicking() {
                self.0.with_mut(|_| ());
            }
        }
    }

    impl Clone for Watch {
        fn clone(&self) -> Self {
            self.used();
            Watch::new()
        }
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            self.owned();
        }
    }

    /// The value of an atomic that no other thread can reach. When this is dropped, the value is written back to the
    /// atomic.
    pub struct Owned<'a, T> {
        value: T,
        write: Box<dyn FnMut(&T) + 'a>,
    }

    impl<T> Deref for Owned<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.value
        }
    }

    impl<T> DerefMut for Owned<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.value
        }
    }

    impl<T> Drop for Owned<'_, T> {
        fn drop(&mut self) {
            (self.write)(&self.value);
        }
    }

    /// Defines atomics that wrap loom's, with two differences.
    ///
    /// A sequentially consistent load is a compare-exchange of a value with itself, which returns the newest value.
    /// Loom's own `load` may return values that are older than the newest sequentially consistent store, which a
    /// sequentially consistent load must not return.
    ///
    /// Every other load first does a read-modify-write of a second atomic, `turn`. The reason: to choose the
    /// interleavings to run, loom remembers only the last access to an atomic. If one thread loads, and then another
    /// thread loads and stores, loom forgets that the store could also come before the first load. With the accesses to
    /// `turn`, loom tries both orders of the two loads, and so also both orders of the first load and the store.
    macro_rules! atomics {
        ($($name:ident $(<$t:ident>)?: $value:ty, $any:expr;)*) => {$(
            #[derive(Debug)]
            pub struct $name $(<$t>)? {
                word: loom::sync::atomic::$name $(<$t>)?,
                turn: loom::sync::atomic::AtomicBool,
            }

            impl $(<$t>)? $name $(<$t>)? {
                #[track_caller]
                pub fn new(value: $value) -> Self {
                    Self {
                        word: loom::sync::atomic::$name::new(value),
                        turn: loom::sync::atomic::AtomicBool::new(false),
                    }
                }

                #[track_caller]
                pub fn load(&self, order: Ordering) -> $value {
                    if order != SeqCst {
                        self.turn.swap(true, Relaxed);
                        return self.word.load(order);
                    }
                    match self.word.compare_exchange($any, $any, Acquire, Acquire) {
                        Ok(value) | Err(value) => value,
                    }
                }

                #[track_caller]
                pub fn store(&self, value: $value, order: Ordering) {
                    self.word.store(value, order);
                }

                #[track_caller]
                pub fn swap(&self, value: $value, order: Ordering) -> $value {
                    self.word.swap(value, order)
                }

                #[track_caller]
                pub fn compare_exchange(
                    &self,
                    old: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    self.word.compare_exchange(old, new, success, failure)
                }

                #[track_caller]
                pub fn compare_exchange_weak(
                    &self,
                    old: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    self.word.compare_exchange_weak(old, new, success, failure)
                }

                #[track_caller]
                pub fn fetch_update(
                    &self,
                    set: Ordering,
                    fetch: Ordering,
                    mut change: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let mut old = self.load(fetch);
                    while let Some(new) = change(old) {
                        match self.compare_exchange(old, new, set, fetch) {
                            Ok(_) => return Ok(old),
                            Err(now) => old = now,
                        }
                    }
                    Err(old)
                }
            }
        )*};
    }

    atomics! {
        AtomicBool: bool, false;
        AtomicPtr<T>: *mut T, core::ptr::null_mut();
        AtomicU16: u16, u16::MAX;
        AtomicU32: u32, u32::MAX;
        AtomicU64: u64, u64::MAX;
        AtomicUsize: usize, usize::MAX;
    }

    macro_rules! numbers {
        ($($name:ident: $value:ty;)*) => {$(
            impl Default for $name {
                fn default() -> Self {
                    Self::new(0)
                }
            }

            impl $name {
                #[track_caller]
                pub fn get_mut(&mut self) -> Owned<'_, $value> {
                    Owned {
                        value: self.word.with_mut(|value| *value),
                        write: Box::new(|value| self.word.with_mut(|word| *word = *value)),
                    }
                }

                numbers!(@ $value: fetch_add fetch_sub fetch_or fetch_and fetch_max);
            }
        )*};
        (@ $value:ty: $($operation:ident)*) => {$(
            #[track_caller]
            pub fn $operation(&self, value: $value, order: Ordering) -> $value {
                self.word.$operation(value, order)
            }
        )*};
    }

    numbers! {
        AtomicU16: u16;
        AtomicU32: u32;
        AtomicU64: u64;
        AtomicUsize: usize;
    }

    impl Default for AtomicBool {
        fn default() -> Self {
            Self::new(false)
        }
    }
}
