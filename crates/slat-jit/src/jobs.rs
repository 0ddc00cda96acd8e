//! The queue of jobs for a compiling thread.

use crate::memory::lock;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

/// The number of waiting jobs from which on callers should add no more ([`Jobs::has_room`]).
const JOBS: usize = 64;

/// The jobs of a compiling thread, first in, first out.
#[derive(Debug)]
pub struct Jobs<J> {
    waiting: Mutex<VecDeque<J>>,
    added: Condvar,
}

impl<J> Default for Jobs<J> {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            added: Condvar::new(),
        }
    }
}

impl<J> Jobs<J> {
    /// Removes the first job. Waits if there is none.
    pub fn take(&self) -> J {
        let mut waiting = lock(&self.waiting);
        loop {
            match waiting.pop_front() {
                Some(job) => return job,
                None => {
                    waiting = (self.added.wait(waiting)).unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    }

    /// Adds a job. Returns `false` if there is no memory for it.
    pub fn add(&self, job: J) -> bool {
        let mut waiting = lock(&self.waiting);
        let has_memory = waiting.try_reserve(1).is_ok();
        if has_memory {
            waiting.push_back(job);
        }
        drop(waiting);
        self.added.notify_one();
        has_memory
    }

    /// Whether so few jobs wait that another one may be added.
    pub fn has_room(&self) -> bool {
        lock(&self.waiting).len() < JOBS
    }
}
