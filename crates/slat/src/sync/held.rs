//! Debug checks that no thread delays others for long: a thread must hold no spin lock when it waits, and an operation
//! may read only a limited number of page-table entries in one reader section.
//!
//! A waiter for a spin lock spins. So if the holder sleeps, waits for a CPU to flush, or asks the host for a page, it
//! keeps a processor busy in vain, perhaps forever. Flushes and slot changes wait for reader sections. So an operation
//! that reads a whole tree in one section delays everything that the host does with guest memory.
//!
//! Builds with debug assertions and the feature `lock-checks` count, for each thread, the spin locks that it holds, and
//! the entries that it has read in its current reader section. [`assert_none`] checks the first count before the engine
//! calls anything that may wait ([`crate::Platform::wait`], `flush` and `resolve`), and before it queues for a
//! [`super::FairLock`]. [`looked_at`] checks the second count in every walk. (The checks are a feature because counting
//! for each thread needs `std`. Builds for loom do not count.)

/// The number of page-table entries that an operation may read in one reader section. Reading so many takes about
/// 50 us. In builds with the checks, the limit is low, so that operations on the small VMs of tests also need several
/// reader sections.
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
        /// The number of entries read in the current reader section of an operation; `None` outside such a section.
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

/// Call when the reader section of an operation begins on this thread.
#[inline(always)]
pub(crate) fn section_begins() {
    count::set_entries(Some(0));
}

/// Call when the reader section of an operation ends on this thread.
#[inline(always)]
pub(crate) fn section_ends() {
    count::set_entries(None);
}

/// Call before the thread reads `entries` entries.
///
/// # Panics
/// In builds with the checks, if the total is too large for one reader section.
#[inline(always)]
pub(crate) fn looked_at(entries: u32) {
    if let Some(before) = count::entries() {
        let sum = before + entries;
        debug_assert!(
            sum <= MOST_ENTRIES,
            "{sum} entries are read in one reader section"
        );
        count::set_entries(Some(sum));
    }
}

/// Call after the thread has taken a spin lock.
#[inline(always)]
pub(super) fn taken() {
    count::add();
}

/// Call when the thread releases a spin lock.
#[inline(always)]
pub(super) fn released() {
    count::sub();
}

/// Call before a call that may wait; `what` names that call, for the panic message.
///
/// # Panics
/// In builds with the checks, if the thread holds a spin lock.
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
        let never_waits = |_| unreachable!();
        drop(first.lock(never_waits));
        super::assert_none("to wait");
        let held = (first.lock(never_waits), second.lock(never_waits));
        assert_eq!(super::count::get(), 2);
        drop(held);
        super::assert_none("to wait");
    }

    #[test]
    #[should_panic(expected = "41 entries are read in one reader section")]
    fn an_operation_that_reads_too_much_must_end_its_section() {
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
    fn the_holder_of_a_spin_lock_must_not_wait() {
        let lock = SpinLock::new(());
        let _held = lock.lock(|_| unreachable!());
        super::assert_none("to flush");
    }
}
