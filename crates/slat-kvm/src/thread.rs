//! Tells a signal handler which vCPU its thread runs.
//!
//! A signal handler needs to know whether its thread is in `KVM_RUN`, and of which vCPU. This module keeps this
//! information in a thread-local cell. The cell needs no initialisation and has no destructor, so a signal handler may
//! read it.

use slat::Attention;
use std::cell::Cell;
use std::ptr::null;

/// The bits of the attention word that this crate uses. The lower bits belong to the engine ([`Attention::FLUSH`]) and
/// to the CPU.
pub mod bits {
    /// A signal was delivered to the thread: `KVM_RUN` ends with `EINTR`.
    pub const SIGNAL: u32 = 1 << 8;
    /// The vCPU has to check for an interrupt that it can deliver.
    pub const IRQ: u32 = 1 << 9;
    /// The deadline of one of the vCPU's timers has passed, or a synthetic timer of Hyper-V's interface was changed.
    pub const TIMER: u32 = 1 << 10;
    /// The vCPU has to check events that raise no bit: `immediate_exit`, signals that are pending under a signal mask,
    /// changes of the guest's code in memory.
    pub const POLL: u32 = 1 << 11;
    /// The vCPU must pass a quiescent point. It must also update the pages that it shares with the guest, if their
    /// contents have changed.
    pub const RETRY: u32 = 1 << 12;
    /// A write found the dirty ring full: the client has to collect the ring's entries.
    pub const RING_FULL: u32 = 1 << 13;
    /// Another vCPU of the guest has flushed this vCPU's translations of virtual addresses.
    pub const GUEST_FLUSH: u32 = 1 << 14;
    /// The vCPU must take a sample of the code that it executes, for a profile.
    pub const SAMPLE: u32 = 1 << 15;
    /// A debugger holds the vCPU, or has orders for it.
    pub const HOLD: u32 = 1 << 16;
}

thread_local! {
    /// The attention word of the vCPU that this thread runs, or null.
    static RUNNING: Cell<*const Attention> = const { Cell::new(null()) };
}

/// A guard that marks this thread as running a vCPU until the guard is dropped.
pub(crate) struct Running<'a> {
    before: *const Attention,
    _attention: std::marker::PhantomData<&'a Attention>,
}

impl<'a> Running<'a> {
    pub(crate) fn enter(attention: &'a Attention) -> Self {
        Running {
            before: RUNNING.replace(attention),
            _attention: std::marker::PhantomData,
        }
    }
}

/// Begins a call of `KVM_RUN`, which a signal can end early. Forgets signals of earlier calls, but not a signal that
/// arrived between the client's call and this moment. Keep the guards until the call ends.
pub(crate) fn begin(attention: &Attention) -> (Running<'_>, Section) {
    attention.take(bits::SIGNAL);
    let section = Section::enter();
    let running = Running::enter(attention);
    if Section::delays_a_signal() {
        attention.raise(bits::SIGNAL);
    }
    (running, section)
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        RUNNING.set(self.before);
    }
}

/// If this thread is in `KVM_RUN`, makes `KVM_RUN` return `EINTR`, even if it waits for host memory. Call in each
/// signal handler of the client, before the handler's own work. Async-signal-safe.
///
/// The client's handler must not use slat itself, because the signal may have interrupted slat's code. A handler that
/// calls [`slat_guard::defer`] first may use slat.
pub fn signal_arrived() {
    let attention = RUNNING.get();
    // SAFETY: `Running` keeps the attention borrowed while its address is stored in this thread's cell.
    if let Some(attention) = unsafe { attention.as_ref() } {
        attention.raise(bits::SIGNAL);
        // The kick has to arrive when the client's handler has returned to the interrupted code. So the kick is blocked
        // now. It is delivered when the handler's return restores the thread's mask. A guarded access that the signal
        // interrupted then fails.
        slat_guard::change_mask(libc::SIG_BLOCK, 1 << (slat_guard::kick_signal() - 1));
        slat_guard::kick(slat_process::thread_id());
    }
}

/// Whether this thread runs a vCPU.
pub fn is_running() -> bool {
    !RUNNING.get().is_null()
}

/// Marks this thread as being in slat's code while the guard lives. Meanwhile the thread's system calls are slat's own,
/// and the program's signal handlers are delayed.
pub use slat_guard::Section;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_reaches_the_vcpu_this_thread_runs() {
        slat_guard::install().unwrap();
        let attention = Attention::new().unwrap();
        signal_arrived();
        {
            let _running = Running::enter(&attention);
            assert!(is_running());
            signal_arrived();
        }
        assert!(!is_running());
        assert_eq!(attention.take(u32::MAX), bits::SIGNAL);
    }
}
