//! The atomics of what handlers share with other threads: the standard library's, or the model checker's in this
//! crate's own tests with `cfg(loom)`. (Models of other crates use this crate as it always is.)
//!
//! In the models of sequence locks, the main thread changes the values, and the thread that it spawns reads them. Loom
//! 0.7 runs the main thread first, and compares each access of a word only with the last access of that word. A thread
//! that loads the version and then changes it would hide from loom that an earlier load by another thread is concurrent
//! with the change. Loom would not try the change before that load (tokio-rs/loom#392).

#[cfg(all(test, loom))]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence},
};
#[cfg(not(all(test, loom)))]
pub(crate) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence},
};

/// Defines a constructor that is `const`, except with loom, whose atomics are made at run time.
macro_rules! const_fn {
    ($vis:vis fn $name:ident() -> Self $body:block) => {
        #[cfg(not(all(test, loom)))]
        $vis const fn $name() -> Self $body
        #[cfg(all(test, loom))]
        $vis fn $name() -> Self $body
    };
}
pub(crate) use const_fn;

/// Defines a variable of a type with such a constructor. Models do not use it.
macro_rules! global {
    ($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $(#[$meta])*
        #[cfg(not(all(test, loom)))]
        static $name: $type = $value;
        $(#[$meta])*
        #[cfg(all(test, loom))]
        static $name: std::sync::LazyLock<$type> = std::sync::LazyLock::new(|| $value);
    };
}
pub(crate) use global;
