//! An access to guest memory, as the processor of a vCPU makes it: the engine translates the guest-physical address,
//! and the thread uses the host memory.

use slat::{Access, Gpa, Stop};
use slat_kvm::engine::EngineVcpu;

use crate::Failure;

/// The engine's side of a vCPU. Nothing executes on it.
pub struct Accessor(EngineVcpu);

impl Accessor {
    /// Makes an accessor of the vCPU of an engine.
    pub fn new(vcpu: EngineVcpu) -> Self {
        Accessor(vcpu)
    }

    /// Translates `gpa` for an access. Calls `then` with the address of the host's page while the translation is valid.
    /// Returns its result. Returns `None` if no memslot contains `gpa`.
    ///
    /// # Errors
    /// If the engine cannot map the page.
    pub fn access<T>(
        &mut self,
        gpa: u64,
        access: Access,
        then: impl FnOnce(u64) -> T,
    ) -> Result<Option<T>, Failure> {
        let mut then = Some(then);
        loop {
            // SAFETY: the call only returns a number. By this number the engine interrupts a thread that accesses
            // memory which is going to be unmapped.
            let thread = unsafe { libc::gettid() };
            self.0.enter_unguarded(thread as usize);
            let translated = self.0.translate(Gpa(gpa), access);
            let result = translated.map(|page| then.take().map(|then| then(page.host.0)));
            self.0.leave();
            match result {
                // The tables were changed meanwhile. No translation is kept, so there is nothing to drop.
                Err(Stop::Retry) => {}
                Err(Stop::Mmio { .. }) => return Ok(None),
                Err(stop) => return Err(stop.into()),
                Ok(result) => return Ok(result),
            }
        }
    }
}
