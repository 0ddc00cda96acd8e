//! The threads that compile the guests' hot code, one for each tier. slat starts these threads before the process's
//! first vCPU exists. At that time the client has not yet installed a seccomp filter that could forbid the threads'
//! system calls. A forked child that creates VMs starts threads of its own.

use crate::arch::x86_64::cpu_policies;
use crate::arch::x86_64::perf;
use crate::arch::x86_64::policy::Jit;
use crate::background::{self, Background};
use crate::policy;
use crate::process::PerProcess;
use crate::symbols;
use slat_x86::{Compile, Compiler, Tier};
use std::ffi::CStr;
use std::sync::Arc;

/// The thread of the baseline tier.
struct Baseline(Option<Arc<Compiler>>);

/// Cranelift's thread.
struct Full(Option<Arc<Compiler>>);

struct Compiling {
    compiler: Option<Arc<Compiler>>,
    baseline: Baseline,
    full: Full,
}

static COMPILING: PerProcess<Compiling> = PerProcess::new();

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
            full: Full(compiler.clone()),
            compiler,
        }
    }
}

/// Returns the process's compiler, and the rule that says which code a VM with the policy `jit` compiles. Starts the
/// compiler's threads if they do not run. `None`: no code should be compiled, or there is no address space for code.
/// Then the interpreter runs all code.
pub(crate) fn start(jit: Jit) -> Option<(Arc<Compiler>, Compile)> {
    let compile = match jit {
        Jit::Off => return None,
        Jit::On => Compile::Hot,
        Jit::AtOnce(tier) => Compile::AtOnce(tier),
    };
    let compiling = COMPILING.get_or_start(|compiling| {
        background::start(&compiling.baseline);
        background::start(&compiling.full);
    });
    Some((compiling.compiler.clone()?, compile))
}

/// Starts the compiler's threads, if the policies of this process let code be compiled.
pub(crate) fn prepare() {
    if let Ok(policies) = policy::current() {
        start(policies.cpu.jit);
    }
}

/// Returns the reason why no code is compiled. `None`: code is compiled.
pub(crate) fn why_not() -> Option<&'static str> {
    if !policy::current().is_ok_and(|policies| policies.cpu.jit != Jit::Off) {
        return Some("jit is off");
    }
    // `peek` is used, not `get`, because `get` would create the value without starting the threads.
    match &COMPILING.peek()?.compiler {
        None => Some("the host has no address space for code"),
        Some(compiler) if compiler.is_forbidden() => Some("the host allows no executable memory"),
        Some(_) => None,
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
