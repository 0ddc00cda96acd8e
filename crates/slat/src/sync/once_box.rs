use alloc::boxed::Box;
use core::marker::PhantomData;
use core::ptr;

use crate::heap::OutOfMemory;
use crate::sync::atomic::{AtomicPtr, Ordering::*, const_fn};

/// A value on the heap that is made when a thread first needs it, and then exists until its owner is dropped. So
/// accessing the value needs neither a lock nor a reader section.
///
/// A list that only grows can be a chain of `OnceBox`es, in which each element has a `OnceBox` for the next element.
pub(crate) struct OnceBox<T> {
    value: AtomicPtr<T>,
    /// For `Send` and `Sync`, this counts as owning a `T`: threads share the value, and one thread may make and another
    /// drop it.
    owns: PhantomData<T>,
}

impl<T> OnceBox<T> {
    const_fn! {
        /// Makes a `OnceBox` without a value.
        pub(crate) fn new() -> Self {
            OnceBox {
                value: AtomicPtr::new(ptr::null_mut()),
                owns: PhantomData,
            }
        }
    }

    /// Removes the value and returns it, if there is one.
    pub(crate) fn take(&mut self) -> Option<Box<T>> {
        let value = self.value.swap(ptr::null_mut(), Relaxed);
        // SAFETY: `set` made the pointer by `Box::into_raw`, and `&mut self` proves that there is no other reference.
        (!value.is_null()).then(|| unsafe { Box::from_raw(value) })
    }
}

impl<T: Send + Sync> OnceBox<T> {
    /// Returns the value, if there is one.
    ///
    /// The load is sequentially consistent, as the list of readers requires ([`crate::sync::quiesce`]).
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<&T> {
        // SAFETY: `set` made the pointer by `Box::into_raw` and publishes only whole values; only `take` removes a
        // value, and it borrows `self` mutably.
        unsafe { self.value.load(SeqCst).as_ref() }
    }

    /// Makes `new` the value, if there is none, and returns a reference to it.
    ///
    /// # Errors
    /// Returns `new` if there already is a value.
    pub(crate) fn set(&self, new: Box<T>) -> Result<&T, Box<T>> {
        let new = Box::into_raw(new);
        match (self.value).compare_exchange(ptr::null_mut(), new, SeqCst, Relaxed) {
            // SAFETY: `Box::into_raw` made the pointer above. Only `take` removes the value, and it borrows `self`
            // mutably.
            Ok(_) => Ok(unsafe { &*new }),
            // SAFETY: `Box::into_raw` made the pointer above, and no other thread has got it.
            Err(_) => Err(unsafe { Box::from_raw(new) }),
        }
    }

    /// Returns the value. If there is none yet, makes it by `make`. If several threads do this at the same time, all
    /// get the same value.
    ///
    /// # Errors
    /// [`OutOfMemory`] from `make`.
    pub(crate) fn get_or_make(
        &self,
        make: impl FnOnce() -> Result<Box<T>, OutOfMemory>,
    ) -> Result<&T, OutOfMemory> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        match self.set(make()?) {
            Ok(value) => Ok(value),
            Err(_) => Ok(self.get().expect("another thread has set it")),
        }
    }
}

impl<T> Drop for OnceBox<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}
