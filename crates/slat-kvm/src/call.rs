//! Calls to a VM and its vCPUs. Calls are refused in a forked child, and after a call that panicked.
//!
//! A call that panics leaves the VM in an unknown state. After that the VM is dead: all calls of the VM and of its
//! vCPUs return `EIO` at once, and so does a `KVM_RUN` in progress. The objects can still be dropped. KVM does the same
//! with a VM in which KVM finds a bug of its own (`vm_bugged`), and with a VM whose guest state is lost (`vm_dead`).

use crate::engine::EngineVm;
use crate::errno::{Result, fail};
use crate::process::Birth;
use crate::thread::bits;
use crate::ticker;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether calls of a VM are allowed: not in a forked child, and not after a call that has panicked or lost the guest's
/// state.
#[derive(Debug)]
pub(crate) struct Life {
    birth: Birth,
    /// Whether a call has panicked, or lost the guest's state. A running vCPU notices the change through its attention
    /// word, which also orders this store before the vCPU's load.
    dead: AtomicBool,
}

impl Life {
    /// Begins the life of a new VM. The VM belongs to this process.
    pub(crate) fn begin() -> Self {
        Life {
            birth: Birth::here(),
            dead: AtomicBool::new(false),
        }
    }

    /// Begins a call of this VM.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn call<'a>(&'a self, engine: &'a EngineVm) -> Result<Call<'a>> {
        self.check()?;
        Ok(Call {
            life: self,
            engine,
            was_panicking: std::thread::panicking(),
        })
    }

    /// Checks that the VM may be called.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_foreign() || self.dead.load(Ordering::Relaxed) {
            return fail(libc::EIO);
        }
        Ok(())
    }

    /// Ends the life of the VM: KVM's `kvm_vm_dead`. Takes no lock. A vCPU that runs or sleeps sees the attention bit,
    /// and finds the VM dead.
    pub(crate) fn end(&self, engine: &EngineVm) {
        self.dead.store(true, Ordering::Relaxed);
        engine.visit_attention(&mut |attention| ticker::raise(attention, bits::RETRY));
    }

    /// Whether this is a forked child. In a child the VM's locks may be held forever, and the VM's threads do not
    /// exist.
    pub(crate) fn is_foreign(&self) -> bool {
        !self.birth.is_here()
    }
}

/// A call in progress. If the call panics, dropping this value makes the VM dead.
#[must_use = "the call ends when this is dropped"]
pub(crate) struct Call<'a> {
    life: &'a Life,
    engine: &'a EngineVm,
    /// Whether the calling thread was already unwinding from a panic of the client when the call began.
    was_panicking: bool,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.was_panicking || !std::thread::panicking() {
            return;
        }
        // `end` takes no lock, so this destructor may call it although the thread may hold any lock.
        self.life.end(self.engine);
    }
}
