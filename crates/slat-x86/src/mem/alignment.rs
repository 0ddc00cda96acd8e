//! Alignment checks: with CR0.AM and RFLAGS.AC set, a user's access to an address that is not a multiple of its size
//! raises #AC (SDM volume 3, "Alignment Check Exception (#AC)").
//!
//! They cost nothing while they are off. While they are on, accesses go through a table of the TLB that stays
//! empty ([`USER_CHECKED`]): so each of the user's takes the slow path, which asks here, and compiled code leaves
//! it to the interpreter. What the CPU itself accesses, descriptors and the frames of events, goes through other
//! tables, and is not checked.

use crate::op::Break;
use crate::tlb::{USER, USER_CHECKED};
use crate::{Cpu, vector};

impl Cpu {
    /// Whether the accesses that are made now have to be aligned.
    #[inline(always)]
    pub(crate) fn checks_alignment(&self) -> bool {
        self.table == USER_CHECKED
    }

    /// Returns the TLB table that has the translations of the accesses that are made now.
    #[inline(always)]
    pub(crate) fn filled_table(&self) -> usize {
        match self.table {
            USER_CHECKED => USER,
            table => table,
        }
    }

    /// Raises #AC(0) if alignment is checked and `lin` is not a multiple of `alignment`, a power of two. Not
    /// for an address that is not canonical: that raises another exception. Before a page fault, which a
    /// processor may do or not.
    #[inline(always)]
    pub(crate) fn check_alignment(&mut self, lin: u64, alignment: usize) -> Result<(), Break> {
        match self.checks_alignment() {
            false => Ok(()),
            true => self.check_aligned(lin, alignment),
        }
    }

    #[cold]
    #[inline(never)]
    fn check_aligned(&mut self, lin: u64, alignment: usize) -> Result<(), Break> {
        match lin & (alignment as u64 - 1) != 0 && self.canonical(lin) {
            true => Err(self.raise(vector::AC, Some(0))),
            false => Ok(()),
        }
    }
}
