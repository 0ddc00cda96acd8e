//! The parts of which the protocol of [`helper`](crate::helper) is made: the standard library's atomics and cells, and
//! the kernel's sleeps. In this crate's own tests with `cfg(loom)`, they are the model checker's. (The models of other
//! crates use this crate with the standard library's.)

#[cfg(all(test, loom))]
pub(crate) use model::*;
#[cfg(not(all(test, loom)))]
pub(crate) use plain::*;

#[cfg(not(all(test, loom)))]
mod plain {
    pub(crate) use crate::wait::{sleep, wake, yield_now};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32};

    /// A cell without a lock. Its user needs a protocol that says which thread may use the value at which time.
    #[derive(Default)]
    pub(crate) struct Cell<T>(std::cell::UnsafeCell<T>);

    impl<T: Copy> Cell<T> {
        /// Returns the value.
        ///
        /// # Safety
        /// - No thread writes the value at the same time.
        pub(crate) unsafe fn get(&self) -> T {
            // SAFETY: no thread writes the value at the same time, as this function's `# Safety` asks of its caller.
            unsafe { *self.0.get() }
        }

        /// Changes the value.
        ///
        /// # Safety
        /// - No other thread uses the value at the same time.
        pub(crate) unsafe fn set(&self, value: T) {
            // SAFETY: no other thread uses the value at the same time, as this function's `# Safety` asks of its
            // caller.
            unsafe { *self.0.get() = value };
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::atomic::fence;
    use std::ops::Deref;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    pub(crate) use loom::thread::yield_now;

    /// Like the plain cell, but loom reports a use that is concurrent with a change.
    pub(crate) struct Cell<T>(loom::cell::UnsafeCell<T>);

    impl<T: Default> Default for Cell<T> {
        fn default() -> Self {
            Cell(loom::cell::UnsafeCell::new(T::default()))
        }
    }

    impl<T: Copy> Cell<T> {
        #[track_caller]
        pub(crate) unsafe fn get(&self) -> T {
            // SAFETY: no thread writes the value at the same time, or loom reports it.
            self.0.with(|value| unsafe { *value })
        }

        #[track_caller]
        pub(crate) unsafe fn set(&self, value: T) {
            // SAFETY: no other thread uses the value at the same time, or loom reports it.
            self.0.with_mut(|to| unsafe { *to = value });
        }
    }

    loom::thread_local! {
        /// Whether a sequentially consistent store is the last one that a fence has to order before the next
        /// sequentially consistent load.
        static STORED: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }

    /// Call before a sequentially consistent load.
    fn before_load() {
        if STORED.with(|stored| stored.take()) {
            fence(Ordering::SeqCst);
        }
    }

    /// Call after a sequentially consistent store.
    fn after_store() {
        STORED.with(|stored| stored.set(true));
    }

    /// Defines an atomic that differs from loom's in its sequentially consistent loads and stores, which loom takes for
    /// acquiring and releasing ones. Here a fence is between such a store and the next such load of the thread. If
    /// either access is weaker, there is no fence: then a thread may miss what another has stored, while the other
    /// misses what this one has stored. Sequentially consistent operations that are not defined here are loom's.
    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            #[derive(Default)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    $name(loom::sync::atomic::$name::new(value))
                }

                #[track_caller]
                pub(crate) fn load(&self, order: Ordering) -> $value {
                    if order == Ordering::SeqCst {
                        before_load();
                    }
                    self.0.load(order)
                }

                #[track_caller]
                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    self.0.store(value, order);
                    if order == Ordering::SeqCst {
                        after_store();
                    }
                }
            }

            impl Deref for $name {
                type Target = loom::sync::atomic::$name;

                fn deref(&self) -> &Self::Target {
                    &self.0
                }
            }
        };
    }

    atomic!(AtomicBool, bool);
    atomic!(AtomicU32, u32);

    impl AtomicU32 {
        #[track_caller]
        pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            if order != Ordering::SeqCst {
                return self.0.fetch_add(value, order);
            }
            before_load();
            let old = self.0.fetch_add(value, order);
            after_store();
            old
        }
    }

    loom::lazy_static! {
        /// A lock and a condition for all sleeping threads. They replace the lock that the kernel uses for futexes.
        static ref SLEEPERS: (loom::sync::Mutex<()>, loom::sync::Condvar) = Default::default();
    }

    /// Does what [`wait::sleep`](crate::wait::sleep) does: looks at the word and joins the sleepers as one step.
    pub(crate) fn sleep(word: &AtomicU32, value: u32, _longest: Option<Duration>) -> bool {
        let sleepers = SLEEPERS.0.lock().unwrap();
        if word.load(Ordering::Relaxed) == value {
            drop(SLEEPERS.1.wait(sleepers).unwrap());
        }
        false
    }

    /// Does what [`wait::wake`](crate::wait::wake) does, but wakes the sleepers of all words.
    pub(crate) fn wake(_word: &AtomicU32) {
        let _sleepers = SLEEPERS.0.lock().unwrap();
        SLEEPERS.1.notify_all();
    }
}
