//! The threads that compile the guests' hot code, one for each tier.

use crate::arch::x86_64::cpu_policies;
use crate::arch::x86_64::perf;
use crate::background::{self, Background};
use crate::symbols;
use crate::words::Jit;
use slat_x86::{Compile, Compiler, Tier};
use std::ffi::CStr;
use std::sync::Arc;

/// The compiler of the baseline tier, with its thread.
struct Baseline(Option<Arc<Compiler>>);

/// The compiler of Cranelift's tier, with its thread.
struct Full(Option<Arc<Compiler>>);

/// The compiler of a process.
pub(crate) struct Compiling {
    baseline: Baseline,
    full: Full,
}

impl Default for Compiling {
    fn default() -> Self {
        let compiler = Compiler::try_new().ok();
        let observer = perf::observer(cpu_policies::current().jit_map);
        if let (Some(compiler), Some(observer)) = (&compiler, observer) {
            symbols::of_guests();
            compiler.observe(observer);
        }
        Self {
            baseline: Baseline(compiler.clone()),
            full: Full(compiler),
        }
    }
}

impl Compiling {
    /// The reason why a process may have no compiler.
    pub(crate) const WHY_NONE: &str = "the host has no address space for code";

    /// Returns the rule by which the policy `jit` chooses code to compile. `None`: no code is compiled.
    pub(crate) fn rule(jit: Jit) -> Option<Compile> {
        match jit {
            Jit::Off => None,
            Jit::On => Some(Compile::Hot),
            Jit::AtOnce(tier) => Some(Compile::AtOnce(tier)),
        }
    }

    /// Starts the threads.
    pub(crate) fn start(&'static self) {
        background::start(&self.baseline);
        background::start(&self.full);
    }

    /// Returns the compiler. `None`: this host cannot have a compiler.
    pub(crate) fn compiler(&self) -> Option<&Arc<Compiler>> {
        self.full.0.as_ref()
    }
}

impl Background for Baseline {
    const NAME: &CStr = c"slat-compiler";
    const WITHOUT: &str = "the guests' code is interpreted";
    /// The stack is large because this thread also runs Cranelift, which recurses, for code that the baseline compiler
    /// cannot compile.
    const STACK: usize = 8 << 20;

    fn run(&'static self) {
        if let Some(compiler) = &self.0 {
            compiler.work(Tier::Baseline)
        }
    }
}

impl Background for Full {
    const NAME: &CStr = c"slat-cranelift";
    const WITHOUT: &str = "the guests' code is not optimised";
    /// The stack is large because Cranelift recurses.
    const STACK: usize = 8 << 20;

    fn run(&'static self) {
        if let Some(compiler) = &self.0 {
            compiler.work(Tier::Full)
        }
    }
}
