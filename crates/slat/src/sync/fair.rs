//! A fair lock, for long operations: first come, first served.
//!
//! The holder may allocate memory, wait for flushes, and walk over all tables of a slot. So a waiter calls
//! [`crate::Platform::wait`], which yields the processor. Each thread takes a ticket, and the lock is granted in the
//! order of tickets. So a thread that takes the lock again and again delays another waiter by at most one turn.
//!
//! When a waiter becomes the next in turn, it restarts at round 0, so that it waits for shorter times: no other thread
//! can take the lock before this waiter.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

use super::held;
use crate::sync::atomic::{AtomicU64, Ordering::*, Watch};

/// Data that one thread at a time uses. Threads get the lock in the order in which they requested it.
pub(crate) struct FairLock<T> {
    /// The number of tickets given so far, which is also the next ticket.
    tickets: AtomicU64,
    /// The ticket whose thread holds the lock or may take it next.
    turn: AtomicU64,
    /// Stands for the protected data in models of loom.
    held: Watch,
    data: UnsafeCell<T>,
}

// SAFETY: the data is accessed only through a guard, and a guard exists only for the one ticket that is equal to
// `turn`.
unsafe impl<T: Send> Sync for FairLock<T> {}

impl<T> FairLock<T> {
    pub(crate) fn new(data: T) -> Self {
        FairLock {
            tickets: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            held: Watch::new(),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock. As long as it is not this thread's turn, calls `wait(round)`. The caller is in no reader section
    /// and holds no spin lock.
    pub(crate) fn lock(&self, mut wait: impl FnMut(u32)) -> FairGuard<'_, T> {
        held::assert_none("to queue for a lock");
        let mine = self.tickets.fetch_add(1, Relaxed);
        let mut round = 0;
        let mut seen = mine;
        loop {
            // Acquire would be enough to see the stores of the last holder. But in the model checker loom, such a load
            // may return an old value forever. A sequentially consistent load does not, and costs little.
            let turn = self.turn.load(SeqCst);
            if turn == mine {
                break;
            }
            if turn != seen && turn + 1 == mine {
                round = 0;
            }
            seen = turn;
            wait(round);
            round += 1;
        }
        self.held.owned();
        FairGuard { lock: self }
    }
}

pub(crate) struct FairGuard<'a, T> {
    lock: &'a FairLock<T>,
}

impl<T> Deref for FairGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: it is this guard's turn.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for FairGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: it is this guard's turn, and `&mut self` makes the reference the only one.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for FairGuard<'_, T> {
    fn drop(&mut self) {
        // Only the thread that holds the lock changes `turn`.
        let mine = self.lock.turn.load(Relaxed);
        self.lock.turn.store(mine + 1, Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    /// A waiting thread gets the lock before threads that request it later, even if these take it again and again.
    #[test]
    fn no_thread_is_overtaken() {
        const OTHERS: u64 = 4;
        let lock = FairLock::new(0);
        let turns = std::sync::atomic::AtomicU64::new(0);
        let stop = AtomicBool::new(false);
        let begin = Instant::now();
        let mut waited = 0;
        std::thread::scope(|scope| {
            for _ in 0..OTHERS {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        *lock.lock(|_| std::thread::yield_now()) += 1;
                        turns.fetch_add(1, SeqCst);
                    }
                });
            }
            while waited < 200 && begin.elapsed() < Duration::from_secs(10) {
                let mut before = None;
                let guard = lock.lock(|_| {
                    before.get_or_insert_with(|| turns.load(SeqCst));
                    std::thread::yield_now();
                });
                let after = turns.load(SeqCst);
                drop(guard);
                if let Some(before) = before {
                    waited += 1;
                    // Allow two turns for each other thread: one that it had requested before this thread, and one that
                    // was over but not yet counted when `before` was read.
                    if after - before > 2 * OTHERS {
                        stop.store(true, SeqCst);
                        panic!(
                            "{} turns of others while this thread had a ticket",
                            after - before
                        );
                    }
                }
            }
            stop.store(true, SeqCst);
        });
        assert!(waited > 0, "this thread never had to wait");
        assert!(*lock.lock(|_| unreachable!()) >= waited);
    }
}
