//! The parts of a compiler of guest code that do not depend on the guest's instruction set.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | `memory` | memory for compiled code, and its table of guarded accesses |
//! | `guarded` | which instructions of a function are guarded accesses |
//! | `jobs` | the queue of a compiling thread |
//! | `host` | Cranelift, set up for the host |
//! | `floats` | the host's floating-point unit while compiled code computes |
//! | `entry` | how a thread enters compiled code that keeps a pointer in a register, and how it leaves |
//! | `frame` | the data that compiled code uses, and the values that it returns |
//! | `arch/` | the host's processor: its features, the code of `entry`, and its instruction cache |

mod arch;
mod entry;
pub mod floats;
mod frame;
mod guarded;
mod host;
mod jobs;
mod memory;

pub use entry::{enter, failed_access};
pub use frame::{FAILED, Frame, LEAST_CODE};
pub use guarded::{GUARDED, Guarded};
pub use host::{HELPERS, has_fused_multiply_add, isa};
pub use jobs::Jobs;
pub use memory::{Arena, Chunk, Refused, lock};
