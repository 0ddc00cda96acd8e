//! The memory of fixed size that a CPU allocates when it is made: its software TLB, the table that finds compiled
//! code, and the queues between an instruction and the device model.
//!
//! All of it begins as zeroes, in pages that the host provides at first use, so a CPU that hardly runs uses little
//! memory. Running the guest allocates nothing else, except for blocks that are kept.

#[cfg(feature = "jit")]
use crate::compiled::Targets;
use crate::devices::{Fragments, Input, Output};
use crate::heap::Zeroed;
use crate::tlb::Tlb;

pub(crate) struct Fixed {
    /// Data of the reads of the instruction at RIP, in the order in which it reads.
    pub(crate) answers: Fragments,
    /// Writes that have not been passed to the device model.
    pub(crate) writes: Fragments,
    /// The data that a string input read.
    pub(crate) input: Input,
    /// The data that an output writes.
    pub(crate) output: Output,
    #[cfg(feature = "jit")]
    pub(crate) targets: Targets,
    pub(crate) tlb: Tlb,
}

// SAFETY: zeroes are a value of every field, as `Zeroed` promises.
unsafe impl Zeroed for Fixed
where
    Fragments: Zeroed,
    Input: Zeroed,
    Output: Zeroed,
    Tlb: Zeroed,
{
}
