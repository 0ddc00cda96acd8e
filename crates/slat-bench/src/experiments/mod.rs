//! One file each.

pub mod cpu;
pub mod execute;
pub mod mmio;
pub mod prefetch;
