//! Enters the kernel, without checking whether a filter allows the call.

use crate::gate;
use std::cell::Cell;

thread_local! {
    // The variable has neither an initialiser nor a destructor, because signal handlers read it.
    /// Whether the thread is slat's own.
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as slat's own, so that it makes all its system calls itself, and does not ask the helper. Call
/// once, when the thread begins. No filter may apply to the thread: it was started before the program's first filter,
/// or together with the helper.
pub fn mark_own_thread() {
    IS_OWN.set(true);
}

/// Whether this thread is slat's own.
pub(crate) fn is_own_thread() -> bool {
    IS_OWN.get()
}

/// Makes a system call with up to six arguments, through the [`gate`] (the instruction by which slat enters the
/// kernel). Returns the result of the kernel: an error is a negative errno. Async-signal-safe.
///
/// # Safety
/// - The caller may use and change the memory, mappings and descriptors that the call uses or changes.
#[inline]
pub unsafe fn raw(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change all that the call uses and changes, as this function's `# Safety` requires.
    unsafe {
        match gate::is_exempted_used() {
            true => raw_by_thread(number, arguments),
            false => gate::call(number, arguments),
        }
    }
}

/// Makes a system call like [`raw`], in a process in which slat's own threads enter the kernel at an instruction of
/// their own. Not inlined, because the compiler could then read the thread-local variable earlier than necessary, even
/// at the program's start, before a preloaded sanitizer's runtime is ready.
///
/// # Safety
/// The requirements of [`raw`].
#[cold]
#[inline(never)]
unsafe fn raw_by_thread(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller may use and change all that the call uses and changes, as `raw` requires.
    unsafe {
        match IS_OWN.get() {
            true => gate::call_exempted(number, arguments),
            false => gate::call(number, arguments),
        }
    }
}

/// Converts the result of [`raw`] to `Ok(value)` or `Err(errno)`.
pub fn result(answer: isize) -> Result<isize, i32> {
    const LOWEST: isize = -4095;
    match answer {
        LOWEST..0 => Err(-answer as i32),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_4095_numbers_are_errors() {
        assert_eq!(result(-1), Err(libc::EPERM));
        assert_eq!(result(-4095), Err(4095));
        for value in [-4096, isize::MIN, 0, isize::MAX] {
            assert_eq!(result(value), Ok(value));
        }
    }
}
