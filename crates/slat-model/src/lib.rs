//! Tests for the [engine](slat) and for the [platforms](slat::Platform) under it: random operations, compared with a
//! plain model of guest memory and with a model of the entries that TLBs may have cached.
//!
//! # Your platform under these tests
//! Implement [`Machine`] for a machine that has your platform, and choose a page-table format:
//!
//! ```
//! # mod my_platform {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/own/mod.rs"));
//! #     pub type MyPlatform = Own;
//! # }
//! # use my_platform::{BACKING, MyPlatform};
//! use std::{ops::Range, sync::Arc};
//! use slat::{Ept, HostPage, Hva};
//! use slat_model::{HostChange, Machine, Subject, Tlb};
//!
//! struct Rig(Arc<MyPlatform>);
//!
//! impl Machine for Rig {
//!     type Platform = MyPlatform;
//!     fn new(pages: u64, tlb: Arc<Tlb>) -> Self { Rig(Arc::new(MyPlatform::new(pages, tlb))) }
//!     fn platform(&self) -> &Arc<MyPlatform> { &self.0 }
//!     // The memory that may back memslots: where it is, and what the platform must resolve each page of it to.
//!     fn backing(&self) -> Hva { BACKING }
//!     fn pages(&self) -> u64 { self.0.pages() }
//!     fn page(&self, page: u64) -> Option<HostPage> { self.0.page(page) }
//!     fn change(&self, pages: &Range<u64>, change: HostChange) { self.0.change(pages, change) }
//! }
//!
//! // In a test:
//! Subject::of::<Rig, Ept>("my platform, EPT").run_seeds(0..16, 500);
//! ```
//!
//! Operations create, move and delete memslots, and change the memory under them. Three vCPUs access the memslots in
//! two address spaces, and switch between these. Other operations change policies, collect dirty logs and rings, clone
//! the VM and continue with both VMs, and make allocations fail. Each result of the engine is compared with the
//! model's. After each operation, no TLB may hold an entry that is no longer in the tables. Every 500 operations the
//! engine's invariants are checked ([`slat::Vm::audit`]). [`Machine`] lists what this tests of the platform.
//!
//! If a run fails, the message ends with a short sequence of its operations that fails, too ([`Failure`]).
//!
//! # Your page-table format under these tests
//! Implement [`Format`](slat::Format), which is an `unsafe trait`: its documentation lists your promises. Then:
//!
//! ```
//! # use slat::Ept as MyFormat;
//! use slat_model::{Simulated, Subject, format_promises};
//!
//! format_promises::<MyFormat>();
//! Subject::of::<Simulated, MyFormat>("my format").run_seeds(0..2, 500);
//! ```
//!
//! `tests/own_format.rs` has a complete format, for Intel's IOMMU, and shows how these tests find a defect in each of
//! its functions.
//!
//! # The parts
//! * [`SimPlatform`]: a machine made of plain memory. Allocations fail on request, host pages change while the guest
//!   runs, and table frames detect misuse. A [hook](SimMachine::set_hook) lets a test run code at a chosen moment, for
//!   example to make two threads meet;
//! * [`Tlb`]: the entries that a hardware walker may have cached, and that must not conflict with the tables;
//! * [`Subject`]: whole runs on every format; [`streams`] runs operations from a fuzzer's bytes;
//! * [`FailingHeap`]: a heap whose n-th allocation fails;
//! * [`guest`]: a guest that writes its own page tables, for an MMU that shadows them, and the judge of that MMU's
//!   results;
//! * [`Witness`]: the translations that several threads may still use, checked at each use.
//!
//! Without the feature `std`, the crate has only [`Tlb`], by which the monitors in `metal` check their page walkers,
//! and [`Lock`].
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

mod lock;
mod tlb;

pub use lock::Lock;
pub use tlb::Tlb;

#[cfg(feature = "std")]
mod clones;
#[cfg(feature = "std")]
mod frames;
#[cfg(feature = "std")]
mod generator;
#[cfg(feature = "std")]
pub mod guest;
#[cfg(feature = "std")]
mod heap;
#[cfg(feature = "std")]
mod host;
#[cfg(feature = "std")]
mod machine;
#[cfg(feature = "std")]
mod model;
#[cfg(feature = "std")]
mod ops;
#[cfg(feature = "std")]
mod platform;
#[cfg(feature = "std")]
mod promises;
#[cfg(feature = "std")]
mod region;
#[cfg(feature = "std")]
mod rings;
#[cfg(feature = "std")]
mod rng;
#[cfg(feature = "std")]
mod runner;
#[cfg(feature = "std")]
mod setup;
#[cfg(feature = "std")]
mod sharing;
#[cfg(feature = "std")]
mod shrink;
#[cfg(feature = "std")]
pub mod streams;
#[cfg(feature = "std")]
mod tally;
#[cfg(feature = "std")]
mod trial;
#[cfg(feature = "std")]
mod violations;
#[cfg(feature = "std")]
mod walker_buffers;
#[cfg(feature = "std")]
mod watched;
#[cfg(feature = "std")]
mod witness;

#[cfg(feature = "std")]
pub use {
    clones::Simulated,
    frames::POISON,
    heap::FailingHeap,
    host::{HostChange, HostMemory, PageKind},
    machine::{Invalidate, Machine},
    model::capacity,
    ops::{Mix, Op, POLICIES},
    platform::{Event, SimMachine, SimPlatform},
    promises::format_promises,
    region::set_region,
    rings::{DirtyPage, RingClient},
    rng::Rng,
    setup::Setup,
    shrink::Failure,
    tally::Tally,
    trial::Subject,
    watched::Watched,
    witness::{Harvests, Witness},
};
