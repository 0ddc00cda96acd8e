//! The memory of fixed size that a CPU gets when it is made: its software TLB, the tables that find blocks, and the
//! queues between an instruction and the device model.
//!
//! All of it begins as zeroes, in pages that the host provides when they are used: a CPU that hardly runs takes little
//! of it. Nothing that runs the guest allocates more, except the copies of blocks that are kept.

use crate::blocks::{Front, Seen};
use crate::heap::Zeroed;
use crate::mmio::{Fragments, Input, Output};
use crate::tlb::Tlb;

pub(crate) struct Fixed {
    /// Answered reads of the instruction at RIP, in the order in which it makes them.
    pub(crate) answers: Fragments,
    /// Writes that the device model has not seen.
    pub(crate) writes: Fragments,
    /// What a string input read.
    pub(crate) input: Input,
    /// What an output writes.
    pub(crate) output: Output,
    pub(crate) seen: Seen,
    pub(crate) front: Front,
    pub(crate) tlb: Tlb,
}

// SAFETY: so it is of every field.
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
