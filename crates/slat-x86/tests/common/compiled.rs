//! The tests on compiled code: all of them run with `SLAT_TEST_COMPILED=1`, too.
#![allow(dead_code)]

#[cfg(feature = "jit")]
use slat_x86::Compiler;
use slat_x86::Cpu;
#[cfg(feature = "jit")]
use std::sync::{Arc, OnceLock};

/// Has `cpu` compile all code before it runs, if the environment says so (`SLAT_TEST_COMPILED`).
pub fn compile(cpu: &mut Cpu) {
    #[cfg(feature = "jit")]
    if std::env::var_os("SLAT_TEST_COMPILED").is_some() {
        cpu.set_compiler(compiler()).unwrap();
    }
    #[cfg(not(feature = "jit"))]
    let _ = cpu;
}

#[cfg(feature = "jit")]
/// Returns a compiler that compiles code before it runs. There can be one only in a process.
pub fn compiler() -> Arc<Compiler> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    COMPILER
        .get_or_init(|| Compiler::at_once().unwrap())
        .clone()
}
