//! The compiler of the guests' hot code: the VMs that use it, and the start of its threads. A process has one compiler.
//!
//! slat starts the compiler's threads before a process's first vCPU exists. At that time the client has not yet
//! installed a seccomp filter that could forbid the threads' system calls. A forked child that creates VMs starts
//! threads of its own.

use crate::arch::{Compile, Compiler, Compiling};
use crate::policy;
use crate::process::PerProcess;
use crate::words::Jit;
use std::sync::Arc;

static COMPILING: PerProcess<Compiling> = PerProcess::new();

/// Returns the process's compiler, and the rule that says which code a VM with the policy `jit` compiles. Starts the
/// compiler's threads if they do not run. `None`: no code should be compiled, or there can be no compiler. Then the
/// interpreter runs all code.
pub(crate) fn start(jit: Jit) -> Option<(Arc<Compiler>, Compile)> {
    let compile = Compiling::rule(jit)?;
    let compiling = COMPILING.get_or_start(Compiling::start);
    Some((compiling.compiler()?.clone(), compile))
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
    match COMPILING.peek()?.compiler() {
        None => Some(Compiling::WHY_NONE),
        Some(compiler) if compiler.is_forbidden() => Some("the host allows no executable memory"),
        Some(_) => None,
    }
}
