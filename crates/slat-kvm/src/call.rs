//! Calls to a VM and its vCPUs: refused in a forked child, and after a call that panicked.
//!
//! A call that panics has left the VM in a state that nobody has thought of. So the VM is dead from then on, as one is in which
//! KVM finds a bug of its own (`vm_bugged`): all its calls, those of its vCPUs included, answer `EIO` at once, and vCPUs that run
//! come out with it. The objects can be dropped as ever.

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
    /// A call has panicked.
    dead: AtomicBool,
}

impl Life {
    /// A VM made by this process, now.
    pub(crate) fn begin() -> Self {
        Life {
            birth: Birth::here(),
            dead: AtomicBool::new(false),
        }
    }
}

/// A call in progress. If it is dropped by a panic that began meanwhile, the VM is dead.
#[must_use = "the call ends when this is dropped"]
pub(crate) struct Call<'a> {
    vm: &'a VmObject,
    /// The client calls while a panic of its own unwinds.
    was_panicking: bool,
}

impl VmObject {
    /// Begins a call. Every public method of the VM and its vCPUs does.
    ///
    /// # Errors
    /// `EIO`, as [`still_alive`](Self::still_alive).
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

    /// Whether this is a forked child: the object's locks may be held for ever, its threads are gone.
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
        // No lock: this thread may hold any. A vCPU that runs or sleeps attends to the bit, and finds the VM dead.
        (self.vm.engine).visit_attention(&mut |attention| ticker::raise(attention, bits::RETRY));
    }
}
