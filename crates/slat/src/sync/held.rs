//! What a thread holds others up with: spin locks, of which it has none whenever it waits, and the reader section
//! of an operation, which ends soon.
//!
//! Who waits for the holder of a spin lock only passes time, so a holder that sleeps, waits for a CPU to flush,
//! or asks the host for a page keeps a processor busy for nothing, or for ever. Flushes and slot changes wait for
//! reader sections, so one in which a whole tree is looked at holds up every page that the host wants back.
//!
//! Builds with debug assertions and the feature `lock-checks` count, for each thread, the spin locks it holds, and
//! the entries it has looked at since the section of its operation began. [`assert_none`] looks at the first count
//! wherever the engine calls what may wait: [`crate::Platform::wait`], `flush` and `resolve`, and before it
//! queues for a [`super::FairLock`]; [`looked_at`] at the second in every walk. (A count for each thread needs
//! `std`, hence the feature; threads of loom share the count of theirs.)

/// Entries that an operation may look at in one section: some 50 us. Builds that count have so few that the
/// operations of their tests end and begin many sections, too.
pub(crate) const MOST_ENTRIES: u32 = if COUNTED { 40 } else { 4096 };

const COUNTED: bool = cfg!(all(
    debug_assertions,
    any(test, feature = "lock-checks"),
    not(loom)
));

#[cfg(all(debug_assertions, any(test, feature = "lock-checks"), not(loom)))]
mod count {
    use core::cell::Cell;

    std::thread_local! {
        static HELD: Cell<u32> = const { Cell::new(0) };
        /// `None` outside the sections of operations.
        static ENTRIES: Cell<Option<u32>> = const { Cell::new(None) };
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

    pub(super) fn entries() -> Option<u32> {
        ENTRIES.get()
    }

    pub(super) fn set_entries(entries: Option<u32>) {
        ENTRIES.set(entries);
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

    #[inline(always)]
    pub(super) fn entries() -> Option<u32> {
        None
    }

    #[inline(always)]
    pub(super) fn set_entries(_: Option<u32>) {}
}

/// A section of an operation of this thread begins.
#[inline(always)]
pub(crate) fn section_begins() {
    count::set_entries(Some(0));
}

/// It ends.
#[inline(always)]
pub(crate) fn section_ends() {
    count::set_entries(None);
}

/// The thread looks at so many entries.
///
/// # Panics
/// If they are too many for one section, and that is counted.
#[inline(always)]
pub(crate) fn looked_at(entries: u32) {
    if let Some(before) = count::entries() {
        let sum = before + entries;
        debug_assert!(
            sum <= MOST_ENTRIES,
            "{sum} entries are looked at in one section"
        );
        count::set_entries(Some(sum));
    }
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
    #[should_panic(expected = "41 entries are looked at in one section")]
    fn who_looks_at_too_much_must_pass_a_quiescent_point() {
        super::looked_at(5000);
        super::section_begins();
        super::looked_at(super::MOST_ENTRIES);
        super::section_ends();
        super::section_begins();
        super::looked_at(super::MOST_ENTRIES);
        super::looked_at(1);
    }

    #[test]
    #[should_panic(expected = "to flush with 1 spin locks held")]
    fn who_holds_a_lock_must_not_wait() {
        let lock = SpinLock::new(());
        let _held = lock.lock(|_| unreachable!());
        super::assert_none("to flush");
    }
}
