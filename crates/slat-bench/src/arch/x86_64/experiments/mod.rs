//! The experiments with guests. Each experiment has a file or a directory.

pub mod clone;
pub mod cpu;
pub mod dirty;
pub mod execute;
pub mod exit;
pub mod memslots;
pub mod mmio;
pub mod nested;
pub mod prefetch;
pub mod vmm;
