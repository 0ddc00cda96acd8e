//! The experiments that need guests of the host's architecture, and the KVMs on which these guests run.
//!
//! | item | what an architecture provides |
//! |---|---|
//! | `EXPERIMENTS` | all experiments in the order in which they run, those of all architectures and its own |
//! | `Guests` | the KVMs on which its experiments run guests, with `open` |
//! | `Tables` | the usual format of a VM's tables |
//! | `real_kvm` | a sentence that says whether a real `/dev/kvm` is measured, too |
//! | `as_client` | what this process does if an experiment started it as a KVM program |
//!
//! This is the only file of the crate that tests which architecture it is built for.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as chosen;
#[cfg(target_arch = "x86_64")]
use x86_64 as chosen;

pub(crate) use chosen::real_kvm;
pub use chosen::{EXPERIMENTS, Guests, as_client};
