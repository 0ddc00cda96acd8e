//! The atomics of data that handlers share with other threads. They are the standard library's, except in this crate's
//! own tests with `cfg(loom)`, where they are those of the model checker loom. (Loom models of other crates use this
//! crate with the standard library's atomics.)
//!
//! In the models of sequence locks, the main thread changes the values, and the thread that it spawns reads them. This
//! order matters: loom 0.7 runs the main thread first, and to find interleavings it compares each access of a word only
//! with the last access of that word. If the spawned thread made the change, its own load of the version would hide
//! that the main thread's earlier load is concurrent with the change, and loom would never try the change before that
//! load (tokio-rs/loom#392).

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

/// Defines a constructor that is `const`, except in builds for loom, whose atomics are made at run time.
macro_rules! const_fn {
    ($vis:vis fn $name:ident() -> Self $body:block) => {
        #[cfg(not(all(test, loom)))]
        $vis const fn $name() -> Self $body
        #[cfg(all(test, loom))]
        $vis fn $name() -> Self $body
    };
}
pub(crate) use const_fn;

/// Defines a global variable of a type that has such a constructor. Loom models do not use the variable.
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
