//! A lock for short sections that never wait: a few entries of one table, a list of ranges.
//!
//! Its holder takes no other [`Lock`] of the same kind, allocates nothing and waits for nobody, so
//! a waiter needs to do nothing but pass time: there is no cycle to break.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

use crate::sync::atomic::{AtomicU32, Ordering::*, Watch, const_fn};

/// The bare lock word, without the data it protects.
pub(crate) struct RawLock {
    word: AtomicU32,
    /// What the lock protects.
    held: Watch,
}

impl RawLock {
    const_fn! {
        pub(crate) fn new() -> Self {
            RawLock {
                word: AtomicU32::new(0),
                held: Watch::new(),
            }
        }
    }

    /// Takes the lock; `wait(round)` is called while somebody else holds it.
    #[inline]
    pub(crate) fn lock(&self, mut wait: impl FnMut(u32)) {
        if !self.try_lock() {
            self.lock_slowly(&mut wait);
        }
        self.held.owned();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.word
            .compare_exchange_weak(0, 1, Acquire, Relaxed)
            .is_ok()
    }

    /// Each look at the word takes its cache line away from the holder, and with it, mostly, the lines of
    /// what it is changing. So a waiter looks seldom, and lets the other do several sections in a row.
    #[cold]
    #[inline(never)]
    fn lock_slowly(&self, wait: &mut dyn FnMut(u32)) {
        let mut round = 0;
        loop {
            for _ in 0..Self::FEWEST_PAUSES << round.min(Self::DOUBLINGS) {
                core::hint::spin_loop();
            }
            // Whoever waits can afford the newest value; a model checker would show it old ones for ever.
            if self.word.load(SeqCst) != 0 {
                wait(round);
                round += 1;
            } else if self.try_lock() {
                return;
            }
        }
    }

    const FEWEST_PAUSES: u32 = 8;
    const DOUBLINGS: u32 = 3;

    /// # Safety
    /// - the caller holds the lock.
    #[inline]
    pub(crate) unsafe fn unlock(&self) {
        self.word.store(0, Release);
    }
}

/// Data behind a [`RawLock`].
pub(crate) struct Lock<T> {
    raw: RawLock,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through a guard, and the lock admits one guard at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) fn new(data: T) -> Self {
        Lock {
            raw: RawLock::new(),
            data: UnsafeCell::new(data),
        }
    }

    pub(crate) fn lock(&self, wait: impl FnMut(u32)) -> Guard<'_, T> {
        self.raw.lock(wait);
        Guard { lock: self }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.data.get_mut()
    }
}

pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and `&mut self` makes the reference the only one.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this guard holds the lock.
        unsafe { self.lock.raw.unlock() }
    }
}
