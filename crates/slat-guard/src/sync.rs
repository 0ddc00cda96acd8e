//! The atomics for data that handlers share with other threads. They are the standard library's, or, in this crate's
//! own tests with `cfg(loom)`, the model checker's. (The models of other crates use this crate with the standard
//! library's atomics.)

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
