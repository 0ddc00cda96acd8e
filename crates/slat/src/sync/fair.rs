//! A lock that is held for long: first come, first served.
//!
//! Its holder may allocate, wait for flushes, and walk through the tables of a whole slot; so a waiter passes
//! time through [`crate::Platform::wait`], which gives the processor away. Nobody overtakes: each takes a
//! ticket, and is served in the order of tickets. Threads that take such a lock all the time hold up
//! another one for one turn of each.
//!
//! A waiter whose turn is next begins a new wait: the lock will be free soon, and until it takes it nobody
//! can.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

use super::held;
use crate::sync::atomic::{AtomicU64, Ordering::*, Watch};

/// Data that one thread at a time has, in the order in which they asked.
pub(crate) struct FairLock<T> {
    /// Tickets given.
    tickets: AtomicU64,
    /// The ticket whose turn it is.
    turn: AtomicU64,
    /// What the lock protects.
    held: Watch,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through a guard, and only one ticket has its turn.
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

    /// Takes the lock; `wait(round)` is called while others have their turn. The caller is in no reader section
    /// and holds no spin lock.
    pub(crate) fn lock(&self, mut wait: impl FnMut(u32)) -> FairGuard<'_, T> {
        held::assert_none("to queue for a lock");
        let mine = self.tickets.fetch_add(1, Relaxed);
        let mut round = 0;
        let mut seen = mine;
        loop {
            // Acquire: with its turn it sees what the one before has done. A waiter can afford the newest value;
            // a model checker would show it old ones for ever.
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
        // Nobody else changes it during this guard's turn.
        let mine = self.lock.turn.load(Relaxed);
        self.lock.turn.store(mine + 1, Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    /// Who has a ticket is overtaken by nobody who comes later, however often the others take the lock.
    #[test]
    fn nobody_is_overtaken() {
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
                    // One turn of each, and one of each that was not counted yet.
                    if after - before > 2 * OTHERS {
                        stop.store(true, SeqCst);
                        panic!("{} turns while it had a ticket", after - before);
                    }
                }
            }
            stop.store(true, SeqCst);
        });
        assert!(waited > 0, "it never had to wait");
        assert!(*lock.lock(|_| unreachable!()) >= waited);
    }
}
