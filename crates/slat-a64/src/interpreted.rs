//! Replaces module `jit` in builds without a compiler: there is no compiled code.

use crate::caches::Caches;
use crate::hypervisor::Hypervisor;
use crate::ran::Ran;
use crate::state::State;

/// A processor's compiled code: there is none.
pub(crate) struct Compiled {
    /// The number of instructions that compiled code has executed.
    pub(crate) instructions: u64,
}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self { instructions: 0 }
    }

    /// Whether the processor has a compiler: never, in a build without one.
    #[inline(always)]
    pub(crate) fn is_attached(&self) -> bool {
        false
    }

    /// Runs no compiled code, because there is none in a build without a compiler.
    pub(crate) fn run<H: Hypervisor>(
        &mut self,
        _: &mut State,
        _: &mut Caches,
        _: &mut H,
        _: u64,
    ) -> Ran {
        Ran::default()
    }
}
