//! Which spin locks a thread holds: none, whenever it waits.
//!
//! Who waits for the holder of a spin lock only passes time, so a holder that sleeps, waits for a CPU to flush,
//! or asks the host for a page keeps a processor busy for nothing, or for ever. Builds with debug assertions
//! and the feature `lock-checks` count the spin locks of each thread, and [`assert_none`] looks at the count
//! wherever the engine calls what may wait: [`crate::Platform::wait`], `flush` and `resolve`, and before it
//! queues for a [`super::FairLock`]. (A count for each thread needs `std`, hence the feature; threads of loom
//! share the count of theirs.)

#[cfg(all(debug_assertions, any(test, feature = "lock-checks"), not(loom)))]
mod count {
    use core::cell::Cell;

    std::thread_local! {
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn get() -> u32 {
        HELD.get()
    }

    pub(super) fn add() {
        HELD.set(HELD.get() + 1);
    }

    pub(super) fn sub() {
        HELD.set(HELD.get() - 1);
    }
}

#[cfg(not(all(debug_assertions, any(test, feature = "lock-checks"), not(loom))))]
mod count {
    #[inline(always)]
    pub(super) fn get() -> u32 {
        0
    }

    #[inline(always)]
    pub(super) fn add() {}

    #[inline(always)]
    pub(super) fn sub() {}
}

/// The thread has taken a spin lock.
#[inline(always)]
pub(super) fn taken() {
    count::add();
}

/// The thread releases a spin lock.
#[inline(always)]
pub(super) fn released() {
    count::sub();
}

/// Call before something that may wait; `what` says what.
///
/// # Panics
/// If the thread holds a spin lock, and that is counted.
#[inline(always)]
#[track_caller]
pub(crate) fn assert_none(what: &str) {
    let held = count::get();
    debug_assert!(held == 0, "{what} with {held} spin locks held");
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use crate::sync::SpinLock;

    #[test]
    fn a_lock_that_was_released_is_not_held() {
        let (first, second) = (SpinLock::new(1), SpinLock::new(2));
        let nobody_waits = |_| unreachable!();
        drop(first.lock(nobody_waits));
        super::assert_none("to wait");
        let held = (first.lock(nobody_waits), second.lock(nobody_waits));
        assert_eq!(super::count::get(), 2);
        drop(held);
        super::assert_none("to wait");
    }

    #[test]
    #[should_panic(expected = "to flush with 1 spin locks held")]
    fn who_holds_a_lock_must_not_wait() {
        let lock = SpinLock::new(());
        let _held = lock.lock(|_| unreachable!());
        super::assert_none("to flush");
    }
}
