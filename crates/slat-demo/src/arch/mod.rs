//! The parts of the demonstration that depend on the architecture.
//!
//! | module | idea |
//! |---|---|
//! | `program` | the program itself: makes a VM, uses its memory, and describes what it did |
//!
//! This is the only file that tests which architecture it is built for. Each architecture also has a module
//! `for_other_crates`, with the items that slat's other crates use.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as chosen;
#[cfg(target_arch = "x86_64")]
use x86_64 as chosen;

pub use chosen::for_other_crates;
pub(crate) use chosen::program::run;
