//! `KVM_SET_SIGNAL_MASK`: which signals are blocked during `KVM_RUN`.
//!
//! KVM swaps the thread's mask for the run, and swaps back before any handler could run: a signal that only the run lets
//! through ends the run and stays pending. User space cannot do that (letting a signal through runs its handler), so such
//! signals stay blocked and are looked for. Signals that only the run blocks are blocked.

use slat_guard::change_mask;
use std::mem::MaybeUninit;

fn raw(set: &libc::sigset_t) -> u64 {
    // SAFETY: the first 64 bits of the C library's set are the kernel's.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}

/// The mask of one run, until it is dropped.
pub(crate) struct Masked {
    wanted: u64,
    before: u64,
}

impl Masked {
    /// Blocks what `wanted` blocks in addition to what is blocked already.
    pub(crate) fn enter(wanted: u64) -> Self {
        Masked {
            wanted,
            before: change_mask(libc::SIG_BLOCK, wanted & !synchronous()),
        }
    }

    /// Whether a signal is pending that the run would let through.
    pub(crate) fn signal_waits(&self) -> bool {
        let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: a set to fill in.
        let pending = unsafe {
            libc::sigpending(pending.as_mut_ptr());
            pending.assume_init()
        };
        raw(&pending) & !self.wanted & self.before != 0
    }
}

/// Signals that guarded accesses and kicks need.
fn synchronous() -> u64 {
    [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()]
        .iter()
        .fold(0, |set, signal| set | 1 << (signal - 1))
}

impl Drop for Masked {
    fn drop(&mut self) {
        change_mask(libc::SIG_SETMASK, self.before);
    }
}
