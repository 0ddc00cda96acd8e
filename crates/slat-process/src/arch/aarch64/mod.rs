//! 64-bit Arm, little-endian.

pub mod caller;
pub(crate) mod calls;
pub mod context;
pub(crate) mod gate;
pub(crate) mod handler;
pub(crate) mod memory;
pub(crate) mod noted;
pub mod pointers;
