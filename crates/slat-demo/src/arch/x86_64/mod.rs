//! The demonstration on x86-64, which runs a guest.
//!
//! | file | idea |
//! |---|---|
//! | `long_mode` | long mode without firmware; `slat bench` uses it, too |
//! | `guest` | the guest's code, its memory, and its phases |
//! | `machine` | the KVM program: memslots, vCPUs, threads |
//! | `progress` | messages that say what the guest is doing, if the program takes long |
//! | `program` | running the program, and the report about it |

mod guest;
pub mod long_mode;
mod machine;
pub(crate) mod program;
mod progress;

/// The items that slat's other crates use.
pub mod for_other_crates {
    pub use super::long_mode;
}
