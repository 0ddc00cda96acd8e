//! The demonstration on AArch64: guest memory without a guest. There is no program for arm64 guests yet, so threads
//! make the accesses that vCPUs would make.
//!
//! | file | idea |
//! |---|---|
//! | `access` | an access to guest memory, through the engine |
//! | `vm` | a VM with its memslots |
//! | `program` | what the threads do with the memory, and the report about it |

mod access;
pub(crate) mod program;
mod vm;

/// The items that slat's other crates use. There are none on this architecture.
pub mod for_other_crates {}
