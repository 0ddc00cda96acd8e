//! The compiler for the tests. All tests also run on compiled code with `SLAT_TEST_COMPILED=1`, and on that of the
//! baseline tier with `SLAT_TEST_COMPILED=baseline`.
#![allow(dead_code)]

use slat_x86::Executor;
#[cfg(feature = "jit")]
use slat_x86::{Compile, Compiler, Tier};
#[cfg(feature = "jit")]
use std::sync::{Arc, OnceLock};

/// Makes `cpu` compile all code before it runs, if the environment asks for that (`SLAT_TEST_COMPILED`).
pub fn compile(cpu: &mut Executor) {
    #[cfg(feature = "jit")]
    if std::env::var_os("SLAT_TEST_COMPILED").is_some() {
        always(cpu);
    }
    #[cfg(not(feature = "jit"))]
    let _ = cpu;
}

/// Makes `cpu` compile all code before it runs, by the tier that the environment names.
#[cfg(feature = "jit")]
pub fn always(cpu: &mut Executor) {
    let tier = match std::env::var("SLAT_TEST_COMPILED").as_deref() {
        Ok("baseline") => Tier::Baseline,
        _ => Tier::Full,
    };
    by(cpu, tier);
}

/// Makes `cpu` compile all code before it runs, by `tier`.
#[cfg(feature = "jit")]
pub fn by(cpu: &mut Executor, tier: Tier) {
    cpu.set_compiler(compiler(), Compile::AtOnce(tier)).unwrap();
}

/// Returns the compiler of the process, which can have only one.
#[cfg(feature = "jit")]
pub fn compiler() -> Arc<Compiler> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    let compiler = COMPILER.get_or_init(|| Compiler::try_new().unwrap());
    compiler.clone()
}
