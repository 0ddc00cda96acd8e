//! Signals that end KVM_RUN.

/// Ends this thread's current `KVM_RUN` with `EINTR`. Call in a signal handler, before the handler's own work.
/// Async-signal-safe.
///
/// The kernel's `KVM_RUN` ends for every signal. This library's `KVM_RUN` ends for signals whose handlers call this
/// function, and within a millisecond for signals whose handlers set `immediate_exit` in `struct kvm_run`. The handler
/// calls no other function of this library.
#[unsafe(no_mangle)]
pub extern "C" fn slat_signal_arrived() {
    slat_kvm::signal_arrived();
}
