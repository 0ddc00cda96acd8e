//! Heap allocations that return an error. `Box::new` and `Arc::new` abort if there is no memory; these
//! return [`OutOfMemory`].

use alloc::alloc::{Layout, alloc, alloc_zeroed};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr::NonNull;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicUsize, Ordering::*, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicUsize, Ordering::*, fence};

/// There was no memory for a table, or for other data of the engine. The failed call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no memory for another page table or memslot; nothing was changed")
    }
}

impl core::error::Error for OutOfMemory {}

/// Allocates memory for a `T`, whose size is not 0.
pub(crate) fn room<T>() -> Result<Box<MaybeUninit<T>>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the size of the layout is not 0.
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<MaybeUninit<T>>();
    let memory = NonNull::new(memory).ok_or(OutOfMemory)?;
    // SAFETY: `alloc` has returned the memory just now, for the layout with which the box will free it. A
    // `MaybeUninit` need not be initialized.
    Ok(unsafe { Box::from_raw(memory.as_ptr()) })
}

/// Allocates memory for a `T`, whose size is not 0. All its bytes are zero. An allocator that gets zeroed memory from
/// its operating system does not zero it again.
pub(crate) fn zeroed<T>() -> Result<Box<MaybeUninit<T>>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the size of the layout is not 0.
    let memory = unsafe { alloc_zeroed(Layout::new::<T>()) }.cast::<MaybeUninit<T>>();
    let memory = NonNull::new(memory).ok_or(OutOfMemory)?;
    // SAFETY: `alloc_zeroed` has returned the memory just now, for the layout with which the box will free it. A
    // `MaybeUninit` need not be initialized.
    Ok(unsafe { Box::from_raw(memory.as_ptr()) })
}

/// Allocates a box for `value`. Unlike `Box::new`, returns an error if there is no memory.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    Ok(Box::write(room()?, value))
}

/// Allocates `count` elements, all with their default value, 0.
pub(crate) fn zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut elements = Vec::new();
    (elements.try_reserve_exact(count)).map_err(|_| OutOfMemory)?;
    elements.resize(count, T::default());
    Ok(elements)
}

/// A value and an array, on the heap. The array may be too large for the stack of a kernel, so neither is made on the
/// stack.
pub(crate) struct Large<V, T, const N: usize> {
    value: V,
    pub(crate) array: [T; N],
}

impl<V, T, const N: usize> Large<V, T, N> {
    /// Makes the value and the array in their heap memory, without a copy on the stack.
    pub(crate) fn new(value: V, element: impl Fn() -> T) -> Result<Box<Self>, OutOfMemory> {
        let mut memory = room::<Self>()?;
        let at = memory.as_mut_ptr();
        // SAFETY: the memory is for this type, both fields are written, and no value is overwritten that would have to
        // be dropped.
        unsafe {
            (&raw mut (*at).value).write(value);
            let first = (&raw mut (*at).array).cast::<T>();
            (0..N).for_each(|i| first.add(i).write(element()));
            Ok(memory.assume_init())
        }
    }
}

impl<V, T, const N: usize> Deref for Large<V, T, N> {
    type Target = V;
    fn deref(&self) -> &V {
        &self.value
    }
}

/// A value with several owners: the part of `Arc` that the engine needs, with errors instead of aborts.
pub struct Shared<T>(NonNull<Counted<T>>);

struct Counted<T> {
    owners: AtomicUsize,
    value: T,
}

// SAFETY: any thread that has an owner may access the value, and the thread that drops the last owner drops the value.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: any thread that has an owner may access the value, and the thread that drops the last owner drops the value.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Makes the first owner of `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(value: T) -> Result<Self, OutOfMemory> {
        let owners = AtomicUsize::new(1);
        let counted = boxed(Counted { owners, value })?;
        Ok(Shared(NonNull::from(Box::leak(counted))))
    }

    /// Returns a pointer that does not count as an owner, for code that knows that another owner exists.
    pub(crate) fn uncounted(&self) -> Uncounted<T> {
        Uncounted(self.0)
    }

    /// Returns the value if this is its only owner.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        // Acquire: all accesses to the value through owners that were dropped happen before those of the caller.
        let is_only = self.counted().owners.load(Acquire) == 1;
        // SAFETY: no other owner exists, and `&mut self` lets none be made while the reference is used. Whoever uses an
        // uncounted pointer ensures that this method is not called meanwhile.
        is_only.then(|| unsafe { &mut (*self.0.as_ptr()).value })
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: only the last owner frees the value, and `self` is an owner.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        // Relaxed suffices: the thread already has an owner, so it already sees the value.
        let owners = self.counted().owners.fetch_add(1, Relaxed);
        assert!(owners < usize::MAX / 2, "owners are leaked without end");
        Shared(self.0)
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Acquire: all accesses to the value through other owners happen before the value is dropped.
        if self.counted().owners.fetch_sub(1, Release) == 1 {
            fence(Acquire);
            // SAFETY: `Box::leak` made the pointer, and this was the last owner.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A pointer to a [`Shared`] value that does not count as an owner ([`Shared::uncounted`]).
pub(crate) struct Uncounted<T>(NonNull<Counted<T>>);

impl<T> Clone for Uncounted<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Uncounted<T> {}

impl<T> Uncounted<T> {
    /// Returns a reference to the value.
    ///
    /// # Safety
    /// - An owner of the value exists until `'a` ends.
    /// - Until then, no owner calls [`Shared::get_mut`].
    pub(crate) unsafe fn get<'a>(self) -> &'a T {
        // SAFETY: an owner of the value exists until `'a` ends, and there is no exclusive reference to the value, as this
        // function's `# Safety` asks of its caller.
        unsafe { &(*self.0.as_ptr()).value }
    }

    /// Makes another owner of the value.
    ///
    /// # Safety
    /// - An owner of the value exists, and uses no reference from [`Shared::get_mut`].
    pub(crate) unsafe fn share(self) -> Shared<T> {
        let owner = core::mem::ManuallyDrop::new(Shared(self.0));
        Shared::clone(&owner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn the_last_owner_on_any_thread_drops_the_value_once() {
        struct Dropped<'a>(&'a Mutex<u32>);
        impl Drop for Dropped<'_> {
            fn drop(&mut self) {
                *self.0.lock().unwrap() += 1;
            }
        }
        let drops = Mutex::new(0);
        let first = Shared::try_new(Dropped(&drops)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let mine = first.clone();
                scope.spawn(move || {
                    for _ in 0..1000 {
                        // SAFETY: `mine` is an owner of the value.
                        let other = unsafe { mine.uncounted().share() };
                        assert_eq!(*(*other).0.lock().unwrap(), 0);
                    }
                });
            }
        });
        assert_eq!(*drops.lock().unwrap(), 0);
        drop(first);
        assert_eq!(*drops.lock().unwrap(), 1);
    }
}
