//! The thread that compiles the guests' hot code.

use crate::arch::aarch64::cpu::Tier;
use crate::background::{self, Background};
use crate::words::Jit;
use slat_a64::{Compile, Compiler};
use std::ffi::CStr;
use std::sync::Arc;

/// The compiler of a process. `None`: the process cannot have one ([`Compiling::WHY_NONE`]).
pub(crate) struct Compiling(Option<Arc<Compiler>>);

impl Default for Compiling {
    fn default() -> Self {
        Self(Compiler::try_new())
    }
}

impl Compiling {
    /// The reason why a process may have no compiler.
    pub(crate) const WHY_NONE: &str = "the host has no address space for code, or no membarrier";

    /// Returns the rule by which the policy `jit` chooses code to compile. `None`: no code is compiled.
    pub(crate) fn rule(jit: Jit) -> Option<Compile> {
        match jit {
            Jit::Off => None,
            Jit::On => Some(Compile::Hot),
            Jit::AtOnce(Tier::Full) => Some(Compile::AtOnce),
        }
    }

    /// Starts the compiler's thread.
    pub(crate) fn start(&'static self) {
        background::start(self);
    }

    /// Returns the compiler. `None`: this host cannot have a compiler.
    pub(crate) fn compiler(&self) -> Option<&Arc<Compiler>> {
        self.0.as_ref()
    }
}

impl Background for Compiling {
    const NAME: &CStr = c"slat-cranelift";
    const WITHOUT: &str = "the guests' code is interpreted";
    /// The stack is large because Cranelift recurses.
    const STACK: usize = 8 << 20;

    fn run(&'static self) {
        if let Some(compiler) = &self.0 {
            compiler.work()
        }
    }
}
