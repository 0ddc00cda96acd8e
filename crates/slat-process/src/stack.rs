//! The stack on which slat serves a thread's dispatched system calls, and the free part of that stack.
//!
//! The program makes calls from three places:
//!
//! * Code on the program's own stack makes a call. Then no call is being served, and all of slat's stack is free. (The
//!   stack may hold dead frames, if a handler has left an interrupted call by longjmp.)
//! * A signal handler that runs on slat's stack makes a call. The handler has interrupted slat, and has no alternate
//!   stack. Then the memory below the stack pointer is free.
//! * A signal handler on the alternate stack makes a call. The handler may have interrupted slat, and its stack pointer
//!   does not show at which address of slat's stack. So [`around_handler`] stores that address before it calls a
//!   handler of the program.

pub use crate::arch::handler::RED_ZONE;
use crate::pointers;

/// Gives this thread a stack for slat: the memory from `low` to `high`.
pub fn set(low: usize, high: usize) {
    pointers::set_stack(low, high);
    pointers::set_used_to(high);
}

/// Whether this thread has a stack for slat.
pub fn exists() -> bool {
    pointers::stack_ends().1 != 0
}

/// Whether an address is on this thread's stack for slat.
pub fn contains(address: usize) -> bool {
    let (low, high) = pointers::stack_ends();
    (low..=high).contains(&address)
}

/// Returns the address below which the stack is free, for a call of the program. `sp` is the program's stack pointer at
/// the call; `on_alternate` tells whether `sp` is on the alternate stack.
pub fn free_below(sp: usize, on_alternate: bool) -> usize {
    match contains(sp) {
        true => sp - RED_ZONE,
        false if on_alternate => pointers::used_to(),
        false => pointers::stack_ends().1,
    }
}

/// Records `address` as the lowest address of the stack that is in use. Returns the address recorded before.
pub fn set_used_to(address: usize) -> usize {
    pointers::set_used_to(address)
}

/// Runs a signal handler of the program by calling `run`. The signal has interrupted this thread at the stack pointer
/// `sp`.
pub fn around_handler(sp: usize, run: impl FnOnce()) {
    if !contains(sp) {
        return run();
    }
    let before = set_used_to(sp - RED_ZONE);
    run();
    set_used_to(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_depends_on_who_calls() {
        assert!(!exists());
        set(0x1000, 0x9000);
        assert!(exists() && contains(0x1000) && !contains(0x9001));
        // For a call from the program's own stack, the recorded address has no effect.
        set_used_to(0x5000);
        assert_eq!(free_below(0x10_0000, false), 0x9000);
        // A handler on the alternate stack has interrupted slat at 0x4000, and calls slat. A second handler interrupts
        // slat's work for that call at 0x3000.
        around_handler(0x4000, || {
            assert_eq!(free_below(0x20_0000, true), 0x4000 - RED_ZONE);
            around_handler(0x3000, || {
                assert_eq!(free_below(0x20_0000, true), 0x3000 - RED_ZONE)
            });
            assert_eq!(free_below(0x20_0000, true), 0x4000 - RED_ZONE);
        });
        assert_eq!(free_below(0x20_0000, true), 0x5000);
        // A handler that has interrupted the program, and not slat, does not change the recorded address.
        around_handler(0x10_0000, || {
            assert_eq!(free_below(0x20_0000, true), 0x5000)
        });
        // The handler runs on slat's stack.
        assert_eq!(free_below(0x3800, false), 0x3800 - RED_ZONE);
    }
}
