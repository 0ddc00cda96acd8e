//! The processor state on which compiled code depends.

use crate::mmu::accessor;
use crate::registers::{SCTLR, SCTLR_SA, SCTLR_SA0};
use crate::simd::float;
use crate::stage1::Accessor;
use crate::state::State;
use crate::system::vectors_are_trapped;
use crate::tier::Kind;

/// The parts of a processor's state that compiled code assumes not to change: only instructions that the interpreter
/// executes change them. Code that was compiled for other values cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Context {
    pub(super) accessor: Accessor,
    /// An access with the stack pointer as base must find it aligned.
    pub(super) checks_stack: bool,
    pub(super) traps_vectors: bool,
    /// FPCR has its usual mode: floating-point results are rounded to nearest, and denormals are not flushed to zero.
    pub(super) has_usual_floats: bool,
    /// Compiled code accesses the host's memory itself ([`Cpu::access_directly`](crate::Cpu::access_directly)).
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

    /// Returns the exception level whose rights an access of this kind has.
    pub(super) fn accessor(self, kind: Kind) -> Accessor {
        match kind {
            Kind::Unprivileged => Accessor::El0,
            _ => self.accessor,
        }
    }
}
