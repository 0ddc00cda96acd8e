//! Replaces module `jit` in builds without a compiler: there is no compiled code.

use crate::caches::Caches;
use crate::hypervisor::Hypervisor;
use crate::ran::Ran;
use crate::state::State;

/// The place of a processor's compiled code in a build without a compiler. Contains no code.
pub(crate) struct Compiled {
    /// The number of instructions that compiled code has executed: always 0 in this build.
    pub(crate) instructions: u64,
}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self { instructions: 0 }
    }

    /// Returns `false`: in this build, no processor has a compiler.
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
