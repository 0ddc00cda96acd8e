//! What the demonstration does on each architecture.
//!
//! | module | idea |
//! |---|---|
//! | `program` | the program itself: makes a VM, uses its memory, and describes what it did |
//!
//! This is the only file that asks for the architecture. Each architecture also has what slat's other crates use, in
//! `for_other_crates`.

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
