//! What compiled code depends on besides the guest's instructions.

use crate::mmu::accessor;
use crate::registers::{SCTLR, SCTLR_SA, SCTLR_SA0};
use crate::simd::float;
use crate::stage1::Accessor;
use crate::state::State;
use crate::system::vectors_are_trapped;
use crate::tier::Kind;

/// The parts of a processor's state that are fixed in compiled code. Only instructions that are interpreted change
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Context {
    pub(super) accessor: Accessor,
    /// The stack pointer must be aligned when it is a base.
    pub(super) checks_stack: bool,
    pub(super) traps_vectors: bool,
    /// Floating-point results are rounded to nearest, and denormals are not flushed. This is the usual mode.
    pub(super) has_usual_floats: bool,
    /// Accesses are made to the host's memory ([`Cpu::access_directly`](crate::Cpu::access_directly)).
    pub(super) is_direct: bool,
}

/// The number of bits of [`Context::bits`].
pub(super) const CONTEXT_BITS: u32 = 6;

impl Context {
    pub(super) fn of(state: &State, is_direct: bool) -> Self {
        let check = match state.pstate.el1 {
            true => SCTLR_SA,
            false => SCTLR_SA0,
        };
        Self {
            accessor: accessor(state, Kind::Ordinary),
            checks_stack: state.system.get(SCTLR) & check != 0,
            traps_vectors: vectors_are_trapped(state),
            has_usual_floats: float::is_usual(state.fpcr),
            is_direct,
        }
    }

    /// Returns the context as a number.
    pub(super) fn bits(self) -> u64 {
        self.accessor as u64
            | u64::from(self.checks_stack) << 2
            | u64::from(self.traps_vectors) << 3
            | u64::from(self.is_direct) << 4
            | u64::from(self.has_usual_floats) << 5
    }

    /// Returns whose rights an access has.
    pub(super) fn accessor(self, kind: Kind) -> Accessor {
        match kind {
            Kind::Unprivileged => Accessor::El0,
            _ => self.accessor,
        }
    }
}
