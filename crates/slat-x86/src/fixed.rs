//! The memory of fixed size that a CPU allocates when it is made: its software TLB, the table that finds compiled
//! code, and the queues between an instruction and the device model.
//!
//! All of this memory begins as zeroes, in pages that the host provides at first use, so a CPU that hardly runs uses
//! little memory. Running the guest allocates no other memory, except for blocks that are kept.

#[cfg(feature = "jit")]
use crate::compiled::Targets;
use crate::devices::{Fragments, Input, Output};
use crate::heap::Zeroed;
use crate::tlb::Tlb;

pub(crate) struct Fixed {
    /// The data of the reads that the instruction at RIP makes, in the order of these reads.
    pub(crate) answers: Fragments,
    /// Writes that have not been passed to the device model.
    pub(crate) writes: Fragments,
    /// The data that a string input read.
    pub(crate) input: Input,
    /// The data that a port output (OUT or OUTS) writes.
    pub(crate) output: Output,
    #[cfg(feature = "jit")]
    pub(crate) targets: Targets,
    pub(crate) tlb: Tlb,
}

// SAFETY: zeroes are a value of every field, because each field is `Zeroed`.
unsafe impl Zeroed for Fixed
where
    Fragments: Zeroed,
    Input: Zeroed,
    Output: Zeroed,
    Tlb: Zeroed,
{
}
