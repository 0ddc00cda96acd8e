//! The memory of fixed size that a CPU allocates when it is made: its software TLB, the table that finds compiled
//! code, and the queues between an instruction and the device model.
//!
//! All of this memory is initially zero, and the host provides each page at first use. So a CPU that hardly runs uses
//! little memory. While the guest runs, the CPU allocates no other memory, except for kept blocks.

#[cfg(feature = "jit")]
use crate::compiled::Targets;
use crate::devices::{Fragments, Input, Output};
use crate::heap::Zeroed;
use crate::tlb::Tlb;

pub(crate) struct Fixed {
    /// The data that the VMM has provided for the reads of the instruction at RIP, in the order of the reads.
    pub(crate) answers: Fragments,
    /// Writes that the device model has not received yet.
    pub(crate) writes: Fragments,
    /// The data that a string input (INS) has read.
    pub(crate) input: Input,
    /// The data that a port output (OUT or OUTS) writes.
    pub(crate) output: Output,
    #[cfg(feature = "jit")]
    pub(crate) targets: Targets,
    pub(crate) tlb: Tlb,
}

// SAFETY: zeroes are a valid value of every field, because each field's type is `Zeroed`.
unsafe impl Zeroed for Fixed
where
    Fragments: Zeroed,
    Input: Zeroed,
    Output: Zeroed,
    Tlb: Zeroed,
{
}
