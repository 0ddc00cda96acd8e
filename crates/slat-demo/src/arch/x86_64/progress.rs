//! If the program takes longer than a second, prints on standard error what the guest is doing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::arch::x86_64::guest::VCPUS;

/// Texts that say what a vCPU is doing. The index is the number of phases that the vCPU has ended.
const DOING: [&str; 5] = [
    "the guest writes its memory",
    "the guest reads its memory back",
    "the guest writes functions and calls them",
    "the guest uses a device register",
    "a memslot is taken away and given back while the guest writes to it",
];

/// The number of phases that each vCPU has ended.
#[derive(Default)]
pub struct Progress([AtomicUsize; VCPUS]);

impl Progress {
    /// Records that a vCPU has ended a phase.
    pub fn ended_phase(&self, vcpu: usize) {
        self.0[vcpu].fetch_add(1, Ordering::Relaxed);
    }

    /// Runs `work`. After 1 s, 2 s, 4 s and so on, prints what the slowest vCPU is doing.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let (end, ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || self.tell(&ended));
            let result = work();
            drop(end);
            result
        })
    }

    fn tell(&self, ended: &mpsc::Receiver<()>) {
        let began = Instant::now();
        let mut pause = Duration::from_secs(1);
        while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            let phases = self.0.iter().map(|phases| phases.load(Ordering::Relaxed));
            let doing = DOING[phases.min().unwrap_or(0).min(DOING.len() - 1)];
            eprintln!("slat: {} s: {doing}", began.elapsed().as_secs());
            pause = began.elapsed();
        }
    }
}
