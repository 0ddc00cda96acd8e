//! A lock for short critical sections that never wait: changes of the entries of one table, or of the range of an
//! invalidation.
//!
//! The holder takes no other lock, allocates nothing and waits for nothing ([`super::held`] checks this). So no
//! deadlock is possible, and a waiter may spin.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

use super::held;
use crate::sync::atomic::{AtomicU32, Ordering::*, Watch, const_fn};

/// The bare lock word, without the data it protects.
pub(crate) struct RawSpinLock {
    word: AtomicU32,
    /// Represents the protected data for loom.
    held: Watch,
}

impl RawSpinLock {
    const_fn! {
        pub(crate) fn new() -> Self {
            RawSpinLock {
                word: AtomicU32::new(0),
                held: Watch::new(),
            }
        }
    }

    /// Takes the lock; calls `wait(round)` while another thread holds it.
    #[inline]
    pub(crate) fn lock(&self, mut wait: impl FnMut(u32)) -> RawSpinGuard<'_> {
        if !self.try_lock() {
            self.lock_slowly(&mut wait);
        }
        held::taken();
        self.held.owned();
        RawSpinGuard { lock: self }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.word
            .compare_exchange_weak(0, 1, Acquire, Relaxed)
            .is_ok()
    }

    /// Waits for the lock and takes it.
    ///
    /// Each read of the word takes its cache line from the holder, and that line often contains the data that the
    /// holder is changing. So a waiter reads rarely. The price: the holder may take the lock several times in a row.
    #[cold]
    #[inline(never)]
    fn lock_slowly(&self, wait: &mut dyn FnMut(u32)) {
        let mut round = 0;
        loop {
            for _ in 0..Self::FEWEST_PAUSES << round.min(Self::DOUBLINGS) {
                core::hint::spin_loop();
            }
            // Relaxed would be enough. But a model checker would return old values forever, and for a waiter the newest
            // value costs little.
            if self.word.load(SeqCst) != 0 {
                held::assert_none("to wait for a spin lock");
                wait(round);
                round += 1;
            } else if self.try_lock() {
                return;
            }
        }
    }

    /// The number of pauses before the first read.
    const FEWEST_PAUSES: u32 = 8;
    /// The number of rounds that double the number of pauses.
    const DOUBLINGS: u32 = 3;
}

/// Proof that a [`RawSpinLock`] is held. Dropping it releases the lock.
pub(crate) struct RawSpinGuard<'a> {
    lock: &'a RawSpinLock,
}

impl Drop for RawSpinGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        held::released();
        self.lock.word.store(0, Release);
    }
}

/// Data that a [`RawSpinLock`] protects.
pub(crate) struct SpinLock<T> {
    raw: RawSpinLock,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through a guard, and the lock admits one guard at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(crate) fn new(data: T) -> Self {
        SpinLock {
            raw: RawSpinLock::new(),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock; calls `wait(round)` while another thread holds it.
    pub(crate) fn lock(&self, wait: impl FnMut(u32)) -> SpinGuard<'_, T> {
        SpinGuard {
            _held: self.raw.lock(wait),
            data: &self.data,
        }
    }
}

pub(crate) struct SpinGuard<'a, T> {
    data: &'a UnsafeCell<T>,
    _held: RawSpinGuard<'a>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.data.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and `&mut self` makes the reference the only one.
        unsafe { &mut *self.data.get() }
    }
}
