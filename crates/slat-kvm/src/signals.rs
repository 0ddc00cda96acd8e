//! `KVM_SET_SIGNAL_MASK`: the signals that are blocked during `KVM_RUN`.
//!
//! KVM replaces the thread's mask during the run, and restores it before any handler can run. So if a signal is
//! unblocked only during the run, it ends the run and stays pending. User space cannot do that, because unblocking a
//! pending signal runs its handler. So slat leaves such signals blocked and polls for them. If a signal is blocked only
//! during the run, slat blocks it.

use slat_guard::change_mask;
use std::mem::MaybeUninit;

fn raw(set: &libc::sigset_t) -> u64 {
    // SAFETY: the first 64 bits of the C library's set are the kernel's.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}

/// The mask of one run. Dropping this value restores the thread's own mask.
pub(crate) struct Masked {
    wanted: u64,
    before: u64,
}

impl Masked {
    /// Blocks the signals in `wanted`, in addition to those that are blocked already.
    pub(crate) fn enter(wanted: u64) -> Self {
        Masked {
            wanted,
            before: change_mask(libc::SIG_BLOCK, wanted & !synchronous()),
        }
    }

    /// Whether a signal is pending that KVM would unblock for the run.
    pub(crate) fn signal_waits(&self) -> bool {
        let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the call fills in a live set.
        let pending = unsafe {
            libc::sigpending(pending.as_mut_ptr());
            pending.assume_init()
        };
        raw(&pending) & !self.wanted & self.before != 0
    }
}

/// Returns the signals that must stay unblocked: guarded accesses and kicks use them.
pub(crate) fn synchronous() -> u64 {
    [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()]
        .iter()
        .fold(0, |set, signal| set | 1 << (signal - 1))
}

impl Drop for Masked {
    fn drop(&mut self) {
        change_mask(libc::SIG_SETMASK, self.before);
    }
}
