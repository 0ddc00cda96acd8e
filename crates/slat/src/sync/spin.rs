//! A lock for short critical sections that never wait: changes of the entries of one table, or of the hull of
//! invalidations in progress.
//!
//! The holder takes no other lock, allocates nothing and waits for nothing ([`super::held`] checks this). So no
//! deadlock is possible, and a waiter may spin.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};

use super::held;
use crate::sync::atomic::{AtomicU32, Ordering::*, Watch, const_fn};

/// A spin lock without the data that it protects.
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

    /// Takes the lock. As long as another thread holds it, calls `wait(round)`.
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
    /// Each read of the lock word takes its cache line away from the holder, and that line often contains the data that
    /// the holder is changing. So a waiter reads the word rarely. The price is that one thread may take the lock
    /// several times before a waiter gets it.
    #[cold]
    #[inline(never)]
    fn lock_slowly(&self, wait: &mut dyn FnMut(u32)) {
        let mut round = 0;
        loop {
            for _ in 0..Self::FEWEST_PAUSES << round.min(Self::DOUBLINGS) {
                core::hint::spin_loop();
            }
            // Relaxed would be enough. But in the model checker loom, such a load may return an old value forever. A
            // sequentially consistent load does not, and costs little.
            if self.word.load(SeqCst) != 0 {
                held::assert_none("to wait for a spin lock");
                wait(round);
                round += 1;
            } else if self.try_lock() {
                return;
            }
        }
    }

    /// The number of spin-loop pauses before the first read of the lock word.
    const FEWEST_PAUSES: u32 = 8;
    /// The number of rounds in which the number of pauses doubles.
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

// SAFETY: the data is accessed only through a guard, and only one guard exists at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(crate) fn new(data: T) -> Self {
        SpinLock {
            raw: RawSpinLock::new(),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock. As long as another thread holds it, calls `wait(round)`.
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
