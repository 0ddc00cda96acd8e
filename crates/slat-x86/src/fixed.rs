//! The memory of fixed size that a CPU allocates when it is made: its software TLB, the tables that find blocks, and
//! the queues between an instruction and the device model.
//!
//! All of it begins as zeroes, in pages that the host provides at first use, so a CPU that hardly runs uses little
//! memory. Running the guest allocates nothing else, except for copies of blocks that are kept.

use crate::blocks::{Front, Seen};
use crate::heap::Zeroed;
use crate::mmio::{Fragments, Input, Output};
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
    pub(crate) seen: Seen,
    pub(crate) front: Front,
    #[cfg(feature = "jit")]
    pub(crate) targets: crate::jit::Targets,
    pub(crate) tlb: Tlb,
}

// SAFETY: zeroes are a value of every field, as `Zeroed` promises.
unsafe impl Zeroed for Fixed
where
    Fragments: Zeroed,
    Input: Zeroed,
    Output: Zeroed,
    Seen: Zeroed,
    Front: Zeroed,
    Tlb: Zeroed,
{
}
