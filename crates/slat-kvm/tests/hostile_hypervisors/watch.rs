//! What sees to it that runs end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ends the calling thread's runs after a millisecond or two, as a guest may loop for ever; and the process, when there
/// is no progress. To be joined when `progress` is dropped, before that thread ends.
#[must_use]
pub fn watch(progress: &Arc<AtomicU64>) -> JoinHandle<()> {
    extern "C" fn announce(_signal: libc::c_int) {
        slat_kvm::signal_arrived();
    }
    // SAFETY: a handler that only stores.
    unsafe { libc::signal(libc::SIGUSR2, announce as *const () as libc::sighandler_t) };
    // SAFETY: plain call.
    let watched = unsafe { libc::pthread_self() } as usize;
    let progress = Arc::downgrade(progress);
    std::thread::spawn(move || {
        let mut last = (0, Instant::now());
        while let Some(progress) = progress.upgrade() {
            let now = progress.load(Relaxed);
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() > Duration::from_secs(60) {
                eprintln!("round {now} does not end");
                std::process::abort();
            }
            // SAFETY: the thread joins this one.
            unsafe { libc::pthread_kill(watched as libc::pthread_t, libc::SIGUSR2) };
            drop(progress);
            std::thread::sleep(Duration::from_millis(1));
        }
    })
}
