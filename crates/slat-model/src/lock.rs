//! A lock that needs no std. With the feature `std`, it is std's mutex, otherwise a spin lock.

#[cfg(feature = "std")]
pub use hosted::Lock;
#[cfg(not(feature = "std"))]
pub use spinning::Lock;

#[cfg(feature = "std")]
mod hosted {
    use std::sync::{Mutex, MutexGuard};

    /// Data under a lock, which is std's mutex.
    #[derive(Default)]
    pub struct Lock<T>(Mutex<T>);

    impl<T> Lock<T> {
        /// Makes a lock that no thread holds.
        pub const fn new(data: T) -> Self {
            Lock(Mutex::new(data))
        }

        /// Waits for the lock, and holds it until the guard is dropped.
        ///
        /// # Panics
        /// If a thread has panicked while it held the lock.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }
}

#[cfg(not(feature = "std"))]
mod spinning {
    use core::cell::UnsafeCell;
    use core::hint::spin_loop;
    use core::ops::{Deref, DerefMut};
    use core::sync::atomic::{AtomicBool, Ordering::*};

    /// Data under a spin lock. A CPU holds the lock for a few instructions only, and is not preempted while it holds
    /// the lock.
    #[derive(Default)]
    pub struct Lock<T> {
        held: AtomicBool,
        data: UnsafeCell<T>,
    }

    // SAFETY: the data is accessed only through a guard, and at most one guard exists at a time.
    unsafe impl<T: Send> Sync for Lock<T> {}

    impl<T> Lock<T> {
        /// Makes a lock that no CPU holds.
        pub const fn new(data: T) -> Self {
            Lock {
                held: AtomicBool::new(false),
                data: UnsafeCell::new(data),
            }
        }

        /// Waits for the lock, and holds it until the guard is dropped.
        pub fn lock(&self) -> Guard<'_, T> {
            while self.held.swap(true, Acquire) {
                spin_loop();
            }
            Guard(self)
        }
    }

    /// The right to use the data of a [`Lock`].
    pub struct Guard<'a, T>(&'a Lock<T>);

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            // SAFETY: this guard holds the lock.
            unsafe { &*self.0.data.get() }
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: this guard holds the lock, and `&mut self` makes the reference the only one.
            unsafe { &mut *self.0.data.get() }
        }
    }

    impl<T> Drop for Guard<'_, T> {
        fn drop(&mut self) {
            self.0.held.store(false, Release);
        }
    }
}
