//! Where the engine's atomics come from: `core`, or, in a build with `--cfg loom`, the model checker
//! loom, which then runs the engine's own source through all interleavings and through all values
//! that a load may see (`crate::loom_tests`).
//!
//! Counters and policies are `core`'s in both: no protocol rests on them.

pub use core::sync::atomic::Ordering;

#[cfg(loom)]
pub use model::*;
#[cfg(not(loom))]
pub use plain::*;

/// A constructor that is `const`, unless it makes atomics of loom, which are made at run time.
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

    /// A relaxed store that may meet somebody's read-modify-write. Its own function because loom's
    /// order of modifications is a partial one, in which such a store and such a write stay unordered.
    #[inline(always)]
    pub fn overwrite(atomic: &AtomicU64, value: u64) {
        atomic.store(value, super::Ordering::Relaxed);
    }

    /// Stands for memory that protocols protect without the compiler knowing. Nothing at run time;
    /// under loom a cell that must not be owned while it is used.
    #[derive(Clone, Default)]
    pub struct Watch;

    impl Watch {
        pub const fn new() -> Self {
            Watch
        }

        /// Somebody looks at the memory; others may, too.
        #[inline(always)]
        pub fn used(&self) {}

        /// Somebody has it alone: everything before happened before this.
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

    /// What it means, said so that loom puts it in one order with the others.
    pub fn overwrite(atomic: &AtomicU64, value: u64) {
        atomic.swap(value, Relaxed);
    }

    pub struct Watch(loom::cell::UnsafeCell<()>);

    // SAFETY: there is nothing in it, and loom runs one thread at a time.
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

    /// The value of an atomic that nobody else can reach; written back when dropped.
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

    /// loom's, with two differences.
    ///
    /// Sequentially consistent loads are made here: loom lets them see values that such a load must
    /// not see (an older one than the newest sequentially consistent store). An exchange that fails
    /// sees the newest value and changes nothing.
    ///
    /// Other loads take a *turn* first. To find the interleavings worth running, loom remembers only
    /// the last access to an atomic: with a load by one thread, then a load and a store by another, it
    /// forgets that the store could have come before the first load. Turns, as read-modify-writes,
    /// make it try both orders of any two loads, and with that also of the store.
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
