//! Queues a signal with its `siginfo_t`.

use slat_process::calls::{self, Call};

/// Queues a signal for the thread with the given process and thread ids. Returns an errno if the kernel refuses this.
/// Async-signal-safe.
///
/// # Safety
/// - `info` points to a complete `siginfo_t`.
pub(crate) unsafe fn queue(
    (process, thread): (libc::pid_t, libc::pid_t),
    signal: i32,
    info: *const libc::siginfo_t,
) -> Result<isize, i32> {
    let arguments = [
        process as usize,
        thread as usize,
        signal as usize,
        info as usize,
        0,
        0,
    ];
    // SAFETY: the kernel reads the `siginfo_t` at `info`, which is complete, as this function's `# Safety` asks of its
    // caller.
    unsafe { calls::make(Call::QueueSignal, arguments) }
}
