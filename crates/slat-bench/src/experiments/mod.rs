//! The experiments that run on the engine without a guest. Some of them also have a measurement with a guest, in
//! `crate::arch`. Each experiment has a file or a directory.

pub mod faults;
pub mod memslots;
pub mod split;
pub mod waits;

/// The names of the experiments that only measure guests.
pub const WITH_GUESTS: &[&str] = &[
    "prefetch", "mmio", "exit", "execute", "dirty", "nested", "clone", "cpu", "vmm",
];
