//! The compiler for the tests. Tests that make their processors by [`compile`] run on compiled code with
//! `SLAT_TEST_COMPILED=1`.

use slat_a64::Cpu;
#[cfg(feature = "jit")]
use slat_a64::{Compile, Compiler};
#[cfg(feature = "jit")]
use std::sync::{Arc, OnceLock};

/// Makes `cpu` compile all code before it runs, if the environment asks for that.
pub fn compile(cpu: &mut Cpu) {
    #[cfg(feature = "jit")]
    if std::env::var_os("SLAT_TEST_COMPILED").is_some() {
        always(cpu);
    }
    #[cfg(not(feature = "jit"))]
    let _ = cpu;
}

/// Makes `cpu` compile all code before it runs.
#[cfg(feature = "jit")]
pub fn always(cpu: &mut Cpu) {
    cpu.set_compiler(compiler(), Compile::AtOnce);
}

/// Returns the compiler of the process, which can have only one.
#[cfg(feature = "jit")]
pub fn compiler() -> Arc<Compiler> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    let compiler = COMPILER.get_or_init(|| Compiler::try_new().unwrap());
    compiler.clone()
}
