//! The lock of [`crate::Tlb`]: std's, and where there is no std a spin lock.

#[cfg(feature = "std")]
pub(crate) use hosted::Lock;
#[cfg(not(feature = "std"))]
pub(crate) use spinning::Lock;

#[cfg(feature = "std")]
mod hosted {
    use std::sync::{Mutex, MutexGuard};

    #[derive(Default)]
    pub(crate) struct Lock<T>(Mutex<T>);

    impl<T> Lock<T> {
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
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

    /// For CPUs that nobody takes away from who holds it.
    #[derive(Default)]
    pub(crate) struct Lock<T> {
        held: AtomicBool,
        data: UnsafeCell<T>,
    }

    // SAFETY: the data is reached only through a guard, and there is one guard at a time.
    unsafe impl<T: Send> Sync for Lock<T> {}

    impl<T> Lock<T> {
        pub(crate) fn lock(&self) -> Guard<'_, T> {
            while self.held.swap(true, Acquire) {
                spin_loop();
            }
            Guard(self)
        }
    }

    pub(crate) struct Guard<'a, T>(&'a Lock<T>);

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
