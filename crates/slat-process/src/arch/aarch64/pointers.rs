//! The ends of a thread's stack on which slat serves calls. There is only one thread pointer, that of the C library.
//!
//! Processors have a single register for a thread pointer that a program may write (TPIDR_EL0; X18 belongs to compiled
//! code). So a handler that starts with the program's pointer could not find slat's pointer. Therefore a program with
//! its own C library, and with that library's pointer, cannot be loaded beside slat.

use std::cell::Cell;

thread_local! {
    // This variable has neither an initialiser nor a destructor, because handlers use it.
    /// The ends of slat's stack ([`stack`](crate::stack)); both are 0 if there is no such stack.
    static STACK: [Cell<usize>; 2] = const { [const { Cell::new(0) }; 2] };
}

/// Stores the ends of slat's stack of this thread.
pub(crate) fn set_stack(low: usize, high: usize) {
    STACK.with(|stack| {
        stack[0].set(low);
        stack[1].set(high);
    });
}

/// Returns the ends of slat's stack of this thread; 0 if there is none.
pub(crate) fn stack_ends() -> (usize, usize) {
    STACK.with(|stack| (stack[0].get(), stack[1].get()))
}

/// Whether the program's thread pointer differs from slat's: never.
pub fn are_separate() -> bool {
    false
}

/// Whether a program with a thread pointer of its own can run: it cannot.
pub fn can_be_separate() -> bool {
    false
}
