//! The test tools for slat's engine, for its own tests and for those of programs that embed it:
//!
//! * [`SimPlatform`]: a machine made of plain memory. Allocations fail when told to, host pages change under the guest, table
//!   frames detect misuse, and a [hook](SimPlatform::set_hook) makes two threads meet at the one moment that matters;
//! * [`Tlb`]: the entries that a hardware walker may have cached, and must not conflict with the tables;
//! * [`GuestModel`]: guest memory as a few maps, with KVM's rules written a second time;
//! * [`Generator`] and [`Runner`]: random operations, and the comparison of engine and model after each;
//! * [`Subject`]: whole runs on every format, and the operations of a fuzzer's bytes ([`streams`]);
//! * [`FailingHeap`]: a heap whose n-th allocation fails;
//! * [`Witness`]: the translations that several threads may still use, checked at each use.
//!
//! Without the feature `std` there are only [`Tlb`], with which the monitors in `metal` watch their walkers, and [`Lock`].
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

mod lock;
mod tlb;

pub use lock::Lock;
pub use tlb::Tlb;

#[cfg(feature = "std")]
mod frames;
#[cfg(feature = "std")]
mod generator;
#[cfg(feature = "std")]
mod heap;
#[cfg(feature = "std")]
mod host;
#[cfg(feature = "std")]
mod model;
#[cfg(feature = "std")]
mod ops;
#[cfg(feature = "std")]
mod platform;
#[cfg(feature = "std")]
mod rings;
#[cfg(feature = "std")]
mod rng;
#[cfg(feature = "std")]
mod runner;
#[cfg(feature = "std")]
mod setup;
#[cfg(feature = "std")]
pub mod streams;
#[cfg(feature = "std")]
mod tally;
#[cfg(feature = "std")]
mod trial;
#[cfg(feature = "std")]
mod witness;

#[cfg(feature = "std")]
pub use {
    frames::POISON,
    generator::Generator,
    heap::FailingHeap,
    host::{HostChange, HostMemory},
    model::{Expected, GuestModel, LogMode, ModelSlot, capacity},
    ops::{Mix, Op, POLICIES},
    platform::{Event, SimPlatform},
    rings::{DirtyPage, RingClient},
    rng::Rng,
    runner::Runner,
    setup::{SPACES, Setup, VCPUS, space_of},
    tally::Tally,
    trial::Subject,
    witness::{Harvests, Witness},
};
