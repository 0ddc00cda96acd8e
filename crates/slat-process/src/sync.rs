//! The atomics, cells and sleeps of the protocol of [`helper`](crate::helper). Normally these are the standard
//! library's atomics and cells, and the kernel's sleeps. In this crate's own tests with `cfg(loom)`, they are loom's,
//! for the model checker. (The models of other crates use this crate with the standard library's atomics.)

#[cfg(all(test, loom))]
pub(crate) use model::*;
#[cfg(not(all(test, loom)))]
pub(crate) use plain::*;

#[cfg(not(all(test, loom)))]
mod plain {
    pub(crate) use crate::wait::{sleep, wake, yield_now};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32};

    /// A cell without a lock. A protocol must determine which thread may use the value at which time.
    #[derive(Default)]
    pub(crate) struct Cell<T>(std::cell::UnsafeCell<T>);

    impl<T: Copy> Cell<T> {
        /// Returns the value.
        ///
        /// # Safety
        /// - No thread writes the value at the same time.
        pub(crate) unsafe fn get(&self) -> T {
            // SAFETY: no thread writes the value at the same time, as this function's `# Safety` requires.
            unsafe { *self.0.get() }
        }

        /// Changes the value.
        ///
        /// # Safety
        /// - No other thread uses the value at the same time.
        pub(crate) unsafe fn set(&self, value: T) {
            // SAFETY: no other thread uses the value at the same time, as this function's `# Safety` requires.
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

    /// Like the plain cell, but loom reports concurrent use of the value.
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
        /// Whether this thread's last sequentially consistent access was a store, so that a fence is needed before its
        /// next sequentially consistent load.
        static STORED: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }

    /// Inserts the fence if it is needed. Call before a sequentially consistent load.
    fn before_load() {
        if STORED.with(|stored| stored.take()) {
            fence(Ordering::SeqCst);
        }
    }

    /// Records the store. Call after a sequentially consistent store.
    fn after_store() {
        STORED.with(|stored| stored.set(true));
    }

    /// Defines an atomic type with sequentially consistent loads and stores. loom treats such loads and stores only as
    /// acquire and release. So these types add a fence between such a store and the thread's next such load. If either
    /// access is weaker, no fence is added: then two threads may each miss the value that the other has stored, as on
    /// hardware. Sequentially consistent operations that are not defined here are loom's.
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
        /// A lock and a condition variable for all sleeping threads. They model the lock that the kernel uses for
        /// futexes.
        static ref SLEEPERS: (loom::sync::Mutex<()>, loom::sync::Condvar) = Default::default();
    }

    /// Models [`wait::sleep`](crate::wait::sleep): compares the word with `value` and joins the sleepers, in one step.
    pub(crate) fn sleep(word: &AtomicU32, value: u32, _longest: Option<Duration>) -> bool {
        let sleepers = SLEEPERS.0.lock().unwrap();
        if word.load(Ordering::Relaxed) == value {
            drop(SLEEPERS.1.wait(sleepers).unwrap());
        }
        false
    }

    /// Models [`wait::wake`](crate::wait::wake), but wakes the sleepers of all words.
    pub(crate) fn wake(_word: &AtomicU32) {
        let _sleepers = SLEEPERS.0.lock().unwrap();
        SLEEPERS.1.notify_all();
    }
}
