//! How the embedder sets up a processor's compiler.

use crate::cpu::Cpu;
use crate::jit::{Compile, Compiler};
use std::sync::Arc;

impl Cpu {
    /// Sets the compiler that compiles this processor's code from now on.
    pub fn set_compiler(&mut self, compiler: Arc<Compiler>, compile: Compile) {
        self.compiled.attach(compiler, compile);
    }

    /// Lets compiled code access memory itself, instead of calling the [`Hypervisor`](crate::Hypervisor).
    ///
    /// # Safety
    /// - [`Page::base`](crate::Page::base) of each page that a [`Hypervisor`](crate::Hypervisor) gives this processor
    ///   is an address of the host. Until [`forget_pages`](Self::forget_pages) is called, compiled code makes guarded
    ///   accesses to the page at this address (`slat_guard`): loads, and stores if the page may be written. So no Rust
    ///   object is in that memory, and its other users expect such accesses at any time.
    /// - `slat_guard::install` was called.
    pub unsafe fn access_directly(&mut self) {
        self.compiled.is_direct = true;
    }
}
