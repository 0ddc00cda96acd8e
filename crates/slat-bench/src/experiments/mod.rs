//! One file each.

pub mod prefetch;
