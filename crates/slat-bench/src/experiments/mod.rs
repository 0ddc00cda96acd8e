//! The experiments that every host has. Most run on the engine without a guest; some of these also have a measurement
//! with a guest, in `crate::arch`. `a64` has guests, but neither the engine nor KVM. Each has a file or a directory.

pub mod a64;
pub mod faults;
pub mod memslots;
pub mod snapshot;
pub mod split;
pub mod waits;

/// The names of the experiments that only measure guests.
pub const WITH_GUESTS: &[&str] = &[
    "prefetch", "mmio", "exit", "execute", "dirty", "nested", "clone", "cpu", "vmm",
];
