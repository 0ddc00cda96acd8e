//! A thread that makes runs end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts a thread that ends runs of the calling thread after a millisecond or two, because a guest may loop for
/// ever. The thread also aborts the process if `progress` does not change for a minute. The caller drops `progress`
/// and then joins the thread, before the caller ends.
#[must_use]
pub fn watch(progress: &Arc<AtomicU64>) -> JoinHandle<()> {
    extern "C" fn announce(_signal: libc::c_int) {
        slat_kvm::signal_arrived();
    }
    // SAFETY: the handler only stores.
    unsafe { libc::signal(libc::SIGUSR2, announce as *const () as libc::sighandler_t) };
    // SAFETY: the call takes no pointer.
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
            // SAFETY: the watched thread joins this thread before it ends.
            unsafe { libc::pthread_kill(watched as libc::pthread_t, libc::SIGUSR2) };
            drop(progress);
            std::thread::sleep(Duration::from_millis(1));
        }
    })
}
