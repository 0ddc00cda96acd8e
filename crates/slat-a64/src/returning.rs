//! The return from an exception (DDI 0487, D1.3.6), and the targets of indirect branches.

use crate::pstate::{Pstate, SS};
use crate::registers::{ELR, SPSR};
use crate::stage1::regime::Regime;
use crate::state::State;

impl State {
    /// Returns from an exception (AArch64.ExceptionReturn). Returns the address where execution continues.
    pub(crate) fn exception_return(&mut self) -> u64 {
        let spsr = self.system.get(SPSR);
        let target = self.system.get(ELR);
        let pstate = match Pstate::returned(spsr) {
            Some(pstate) => pstate,
            None => self.pstate.returned_illegally(spsr),
        };
        let ss = self.returned_step(pstate, spsr & SS != 0);
        self.set_pstate(Pstate { ss, ..pstate });
        self.set_nzcv(spsr as u32);
        self.exclusive = None;
        target
    }

    /// Returns the program counter after a branch to `target`: without the tag, if TBI ignores tags
    /// (AArch64.BranchAddr).
    #[inline(always)]
    pub(crate) fn branch_target(&self, target: u64) -> u64 {
        match (target << 8) as i64 >> 8 == target as i64 {
            true => target,
            false => Regime::of(&self.system).canonical(target),
        }
    }
}
