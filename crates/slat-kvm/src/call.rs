//! Calls to a VM and its vCPUs: refused in a forked child, and after a call that panicked.
//!
//! A call that panics leaves the VM in an unknown state. So the VM is dead from then on, like a VM in which KVM finds a bug of
//! its own (`vm_bugged`): all its calls, those of its vCPUs included, return `EIO` at once, and so does a `KVM_RUN` in progress.
//! The objects can still be dropped.

use crate::errno::{Result, fail};
use crate::process::Birth;
use crate::thread::bits;
use crate::ticker;
use crate::vm::VmObject;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a VM may be called.
#[derive(Debug)]
pub(crate) struct Life {
    birth: Birth,
    /// Whether a call has panicked.
    dead: AtomicBool,
}

impl Life {
    /// Begins the life of a VM that this process creates.
    pub(crate) fn begin() -> Self {
        Life {
            birth: Birth::here(),
            dead: AtomicBool::new(false),
        }
    }
}

/// A call in progress. If a panic that began during the call drops this, the VM is dead.
#[must_use = "the call ends when this is dropped"]
pub(crate) struct Call<'a> {
    vm: &'a VmObject,
    /// Whether the client called while a panic of its own unwinds.
    was_panicking: bool,
}

impl VmObject {
    /// Begins a call. Call in every public method of the VM and its vCPUs.
    ///
    /// # Errors
    /// As for [`still_alive`](Self::still_alive).
    pub(crate) fn begin(&self) -> Result<Call<'_>> {
        self.still_alive()?;
        Ok(Call {
            vm: self,
            was_panicking: std::thread::panicking(),
        })
    }

    /// Checks again what [`begin`](Self::begin) checked: after a wait, another call may have panicked.
    ///
    /// # Errors
    /// `EIO` in a forked child, and after a call that panicked.
    pub(crate) fn still_alive(&self) -> Result<()> {
        if self.is_foreign() || self.life.dead.load(Ordering::SeqCst) {
            return fail(libc::EIO);
        }
        Ok(())
    }

    /// Whether this is a forked child: here the VM's locks may be held for ever, and its threads do not exist.
    pub fn is_foreign(&self) -> bool {
        !self.life.birth.is_here()
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.was_panicking || !std::thread::panicking() {
            return;
        }
        self.vm.life.dead.store(true, Ordering::SeqCst);
        // Takes no lock: this thread may hold any. A vCPU that runs or sleeps sees the bit, and finds the VM dead.
        (self.vm.engine).visit_attention(&mut |attention| ticker::raise(attention, bits::RETRY));
    }
}
