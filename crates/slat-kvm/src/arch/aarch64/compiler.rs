//! The thread that compiles the guests' hot code. slat starts it before a process's first vCPU exists. So the client
//! cannot yet have installed a seccomp filter that forbids the thread's system calls. A forked child that creates VMs
//! starts a thread of its own.

use crate::arch::aarch64::policy::Jit;
use crate::background::{self, Background};
use crate::policy;
use crate::process::PerProcess;
use slat_a64::{Compile, Compiler};
use std::ffi::CStr;
use std::sync::Arc;

/// The compiler of a process. `None`: there is no address space for code, or the host cannot make all threads see new
/// code.
struct Compiling(Option<Arc<Compiler>>);

static COMPILING: PerProcess<Compiling> = PerProcess::new();

impl Default for Compiling {
    fn default() -> Self {
        Self(Compiler::try_new())
    }
}

/// Returns the process's compiler, and the rule by which a VM with `jit` compiles code. Starts the compiler's thread if
/// it does not run. `None`: no code should be compiled, or there can be no compiler. Then the interpreter runs all
/// code.
pub(crate) fn start(jit: Jit) -> Option<(Arc<Compiler>, Compile)> {
    let compile = match jit {
        Jit::Off => return None,
        Jit::On => Compile::Hot,
        Jit::AtOnce => Compile::AtOnce,
    };
    let compiling = COMPILING.get_or_start(|compiling| {
        background::start(compiling);
    });
    Some((compiling.0.clone()?, compile))
}

/// Starts the compiler's thread, if the policies of this process let code be compiled.
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
    // `peek` is used because `get` would make the value, and no thread would be started for that value.
    match &COMPILING.peek()?.0 {
        None => Some("the host has no address space for code, or no membarrier"),
        Some(compiler) if compiler.is_forbidden() => Some("the host allows no executable memory"),
        Some(_) => None,
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
