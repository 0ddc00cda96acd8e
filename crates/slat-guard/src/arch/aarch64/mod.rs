//! 64-bit Arm, little-endian.

mod access;
pub(crate) mod bulk;
pub(crate) mod entries;
mod table;
