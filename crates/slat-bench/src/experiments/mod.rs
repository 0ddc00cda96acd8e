//! The experiments that use the engine without a guest, or whose measurement with a guest is apart. Each has a file or a
//! directory.

pub mod faults;
pub mod memslots;
pub mod split;
pub mod waits;

/// The names of the experiments that measure nothing without a guest.
pub const WITH_GUESTS: &[&str] = &[
    "prefetch", "mmio", "exit", "execute", "dirty", "nested", "clone", "cpu", "vmm",
];
