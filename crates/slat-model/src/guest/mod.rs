//! A guest that writes its own page tables at random, and a judge (the oracle) that checks the MMU which translates for
//! this guest.
//!
//! An MMU that shadows the guest's tables must behave like a processor: it may use a stale translation only as long as
//! the SDM allows a processor to use it. To test an MMU, implement [`GuestMmu`]:
//!
//! ```
//! # use slat_model::guest::EngineMmu as MyMmu;
//! use slat_model::guest::GuestSubject;
//!
//! let tally = GuestSubject::new("my MMU", |machine| MyMmu::new(machine)).run_seeds(0..2, 1000);
//! assert!(tally.of("access") >= 2000);
//! ```
//!
//! Two vCPUs share a guest memory of some dozen pages, and a few tables in all paging modes, which refer to each other
//! and to themselves. The guest stores whole entries, parts of one entry and parts of two, with and without a LOCK
//! prefix, through its own mappings or at physical addresses. The guest accesses addresses with all privileges,
//! executes INVLPG and INVPCID, and writes control registers. The VMM changes memslots and collects dirty logs, and the
//! host replaces pages. The judge checks each outcome, and each flag that the MMU sets in an entry. If a run fails, the
//! message ends with a short sequence of its operations that fails, too ([`GuestFailure`]).
//!
//! The comment of `oracle.rs` has the judge's rules, and explains why they are neither too strict nor too lax.
//! [`CachingMmu`] tests the judge: it caches everything that it may cache. There is also a [`CachingMmu`] with each
//! [`Defect`].
//!
//! # The modules
//! | module | content |
//! |---|---|
//! | `mmu`, `ram`, `registers` | the trait that an MMU under test implements, and the arguments of its methods |
//! | `entry` | the meaning of a page-table entry |
//! | `memory`, `flushes` | the earlier values of memory, and the flushes of a vCPU |
//! | `search`, `oracle` | the outcomes that this history allows |
//! | `layout`, `ops`, `generator`, `runner`, `trial` | operations, and runs of them |
//! | `engine`, `shadow`, `saved` | the engine as a guest MMU: a walk for each access, its shadow MMU, and the same while the VM is saved |
//! | `caches`, `caching`, `defects` | MMUs to try the judge with |

mod caches;
mod caching;
mod defects;
mod engine;
mod entry;
mod flushes;
mod generator;
mod layout;
mod memory;
mod mmu;
mod ops;
mod oracle;
mod ram;
mod registers;
mod runner;
mod saved;
mod search;
mod shadow;
mod trial;

pub use caching::CachingMmu;
pub use defects::Defect;
pub use engine::EngineMmu;
pub use mmu::{GuestMmu, Invpcid, Outcome, Part, RegisterWrite, StoreKind};
pub use ram::{GuestMachine, GuestRam};
pub use registers::*;
pub use runner::{OF_CACHES, USUAL};
pub use saved::SavedMmu;
pub use shadow::ShadowMmu;
pub use trial::{GuestFailure, GuestSubject};

/// The number of vCPUs.
pub const CPUS: usize = 2;
