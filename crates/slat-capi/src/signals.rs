//! Signals that end KVM_RUN.

/// Ends with `EINTR` the `KVM_RUN` that this thread is in. Call in a signal handler, before its own
/// work. Async-signal-safe.
///
/// The kernel's `KVM_RUN` ends for every signal; this library's for signals whose handlers call this, and within a
/// millisecond if they set `immediate_exit` in `struct kvm_run`. The handler calls no other function of this library.
#[unsafe(no_mangle)]
pub extern "C" fn slat_signal_arrived() {
    slat_kvm::signal_arrived();
}
