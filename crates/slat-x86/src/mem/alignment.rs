//! Alignment checks: if CR0.AM and RFLAGS.AC are set, a user access whose address is not a multiple of its size raises
//! #AC (SDM volume 3, "Alignment Check Exception (#AC)").
//!
//! The checks cost nothing while they are off. While they are on, accesses go through a table of the TLB that stays
//! empty ([`USER_CHECKED`]). So each user access takes the slow path, which checks the alignment, and compiled code
//! leaves the access to the interpreter. Accesses of the CPU itself, to descriptors and frames of events, use other
//! tables and are not checked.

use crate::op::Break;
use crate::tlb::USER_CHECKED;
use crate::{Cpu, vector};

impl Cpu {
    /// Whether alignment is checked now.
    #[inline(always)]
    pub(crate) fn checks_alignment(&self) -> bool {
        self.table == USER_CHECKED
    }

    /// Raises #AC(0) if alignment is checked and `lin` is not a multiple of `alignment`, a power of two. A
    /// non-canonical address raises another exception instead. The check comes before page faults; a processor may
    /// check in either order.
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
