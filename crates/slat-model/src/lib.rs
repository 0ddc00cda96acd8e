//! What slat's engine is tested with, by its own tests and by whoever embeds it:
//!
//! * [`SimPlatform`]: a machine made of plain memory. Allocations fail when told to, host pages change
//!   under the guest, table frames notice when they are misused, and a [hook](SimPlatform::set_hook)
//!   brings two threads together at the one moment that matters;
//! * [`Tlb`]: what a hardware walker may have cached, and must not meet in the tables;
//! * [`GuestModel`]: guest memory as a few maps, with KVM's rules written a second time;
//! * [`Generator`] and [`Runner`]: random operations, and the comparison of engine and model after each;
//! * [`Subject`]: whole runs on every format, and what a fuzzer's bytes do ([`streams`]);
//! * [`FailingHeap`]: a heap whose n-th allocation fails;
//! * [`Witness`]: what several threads may still use, checked at each use.

mod frames;
mod heap;
mod host;
mod model;
mod ops;
mod platform;
mod rings;
mod rng;
mod runner;
pub mod streams;
mod tlb;
mod trial;
mod witness;

pub use frames::POISON;
pub use heap::FailingHeap;
pub use host::{HostChange, HostMemory};
pub use model::{Expected, GuestModel, LogMode, ModelSlot, capacity};
pub use ops::{Generator, Mix, Op, POLICIES};
pub use platform::{Event, SimPlatform};
pub use rings::{DirtyPage, RingClient};
pub use rng::Rng;
pub use runner::{Runner, SPACES, Tally, VCPUS, space_of};
pub use tlb::Tlb;
pub use trial::{Setup, Subject};
pub use witness::{Harvests, Witness};
