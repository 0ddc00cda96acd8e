//! Work for the second CPU.

use alloc::boxed::Box;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, Ordering::*};

use crate::Cpu;
use slat_model::Lock;

type Job<C> = Box<dyn FnOnce(&mut C) + Send>;

/// A queue of one job for another CPU.
pub struct Second<C> {
    job: Lock<Option<Job<C>>>,
    /// Whether a job was started and is not done yet.
    busy: AtomicBool,
}

impl<C: Cpu> Second<C> {
    /// Makes an empty queue.
    pub const fn new() -> Self {
        Second {
            job: Lock::new(None),
            busy: AtomicBool::new(false),
        }
    }

    /// Runs jobs for ever, on the second CPU.
    pub fn serve(&self, mut cpu: C) -> ! {
        loop {
            let job = self.job.lock().take();
            match job {
                Some(job) => {
                    job(&mut cpu);
                    self.busy.store(false, Release);
                }
                None => spin_loop(),
            }
        }
    }

    /// Starts a job, when the previous job is done.
    pub(crate) fn start(&self, job: impl FnOnce(&mut C) + Send + 'static) {
        self.wait();
        self.busy.store(true, Relaxed);
        *self.job.lock() = Some(Box::new(job));
    }

    /// Waits until there is no job. Afterwards the effects of all jobs are visible.
    pub(crate) fn wait(&self) {
        while self.busy.load(Acquire) {
            spin_loop();
        }
    }
}

impl<C: Cpu> Default for Second<C> {
    fn default() -> Self {
        Self::new()
    }
}
