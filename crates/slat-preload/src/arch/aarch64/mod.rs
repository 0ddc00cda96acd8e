//! 64-bit Arm, little-endian.

pub mod calls;
pub mod carried;
pub mod code;
pub(crate) mod entries;
pub mod files;
pub mod frame;
pub mod pointer_calls;
pub(crate) mod site_entry;
pub mod sites;
pub(crate) mod start;
pub(crate) mod threads;
