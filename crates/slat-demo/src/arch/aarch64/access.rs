//! Makes accesses to guest memory as a vCPU's processor would: the engine translates the guest-physical address, and
//! the thread accesses the host memory.

use slat::{Access, Gpa, Stop};
use slat_kvm::engine::EngineVcpu;

use crate::Failure;

/// The engine's object for a vCPU that executes no instructions.
pub struct Accessor(EngineVcpu);

impl Accessor {
    /// Makes an accessor that uses `vcpu`.
    pub fn new(vcpu: EngineVcpu) -> Self {
        Accessor(vcpu)
    }

    /// Translates `gpa` for an access. While the translation is valid, calls `then` with the address of the host's
    /// page, and returns its result. Returns `None` if no memslot contains `gpa`.
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
            // SAFETY: the call only returns the thread's number. The engine uses this number to interrupt a thread that
            // accesses memory which will be unmapped.
            let thread = unsafe { libc::gettid() };
            self.0.enter_unguarded(thread as usize);
            let translated = self.0.translate(Gpa(gpa), access);
            let result = translated.map(|page| then.take().map(|then| then(page.host.0)));
            self.0.leave();
            match result {
                // The tables have changed during the access, so it is tried again. This thread keeps no translations
                // that it would have to drop.
                Err(Stop::Retry) => {}
                Err(Stop::Mmio { .. }) => return Ok(None),
                Err(stop) => return Err(stop.into()),
                Ok(result) => return Ok(result),
            }
        }
    }
}
