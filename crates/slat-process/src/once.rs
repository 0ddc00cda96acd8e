//! Work that is done once in a process, and that cannot make forked children hang.
//!
//! A forked child has one thread. If another thread of the parent was doing work at the moment of the fork, that work
//! stays half done in the child, and a lock that the other thread held stays locked. A `Mutex` has this problem, and so
//! have a `OnceLock` and a `Once` during their first use. A fork may happen at any moment, even by a system call that
//! slat does not see. So the first use of a [`Prepared`] waits only for threads of this process, and the first use of a
//! [`Computed`] waits only while one of these threads moves the value.
//!
//! [`apart_from_forks`] is for the first use of foreign code that has locks of its own: it makes forks wait.

use crate::forks::Birth;
use crate::wait;
use std::cell::UnsafeCell;
use std::convert::Infallible;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value that the first use computes, and that never changes afterwards. Threads that use it first at the same time
/// may all compute a value; all of them get the value that is ready first. The value is stored in the `Computed`
/// itself, so a first use needs no heap memory.
#[derive(Debug)]
pub struct Computed<T: 'static> {
    /// Guards the move of a computed value into `value`.
    stored: Prepared,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: only the thread that does the work of `stored` writes `value`; other threads read `value` only after that
// work is done. Threads share `&T`, and one thread makes the value that others use; T's bounds allow both.
unsafe impl<T: Send + Sync + 'static> Sync for Computed<T> {}

impl<T: Send + Sync + 'static> Computed<T> {
    /// Makes a `Computed` without a value.
    pub const fn new() -> Self {
        Computed {
            stored: Prepared::new(),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Returns the value. The first use computes it.
    pub fn get_or_init(&'static self, compute: impl FnOnce() -> T) -> &'static T {
        self.get_or_init_then(compute, |_| {})
    }

    /// Returns the value like [`get_or_init`](Self::get_or_init). The thread that has made the value also calls `first`
    /// with it.
    pub fn get_or_init_then(
        &'static self,
        compute: impl FnOnce() -> T,
        first: impl FnOnce(&'static T),
    ) -> &'static T {
        if !self.stored.is_done() {
            let new = compute();
            let mut fastest = false;
            let store = || {
                fastest = true;
                // SAFETY: nothing else refers to the value: this thread alone does the work, and no thread reads the
                // value before the work is done. In a forked child, a thread of the parent may have begun the work, but
                // that thread does not exist in the child.
                unsafe { (*self.value.get()).write(new) };
                Ok(())
            };
            let Ok(()) = self.stored.once::<Infallible>(store);
            if fastest {
                first(self.get());
            }
        }
        self.get()
    }

    /// Returns the value, which a thread has already stored.
    fn get(&'static self) -> &'static T {
        assert!(self.stored.is_done());
        // SAFETY: a value was stored, and is never changed.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}

impl<T: Send + Sync + 'static> Default for Computed<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Work that is done once, at its first use, and whose effect lasts in the process and its forked children.
#[derive(Debug)]
pub struct Prepared {
    /// 0 before the work begins. Then the [`Birth`] of the process whose thread does the work. Finally
    /// [`DONE`](Self::DONE).
    state: AtomicU64,
}

impl Prepared {
    const DONE: u64 = u64::MAX;

    /// Makes a `Prepared` whose work is not done.
    pub const fn new() -> Self {
        Prepared {
            state: AtomicU64::new(0),
        }
    }

    /// Whether the work is done.
    pub fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) == Self::DONE
    }

    /// Does the work, unless it is done. Waits while another thread of this process does the work. In a forked child,
    /// the parent's thread may have done only half of the work; the child then does the work again, so half-done work
    /// must do no harm.
    ///
    /// # Errors
    /// The errors of `work`. The next use then tries the work again.
    pub fn once<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        const PAUSE: Duration = Duration::from_micros(50);
        let here = Birth::here().number();
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state == Self::DONE {
                return Ok(());
            }
            if state == here {
                wait::pause(PAUSE);
                continue;
            }
            let begun =
                (self.state).compare_exchange(state, here, Ordering::Acquire, Ordering::Relaxed);
            if begun.is_ok() {
                let result = work();
                let end = if result.is_ok() { Self::DONE } else { 0 };
                self.state.store(end, Ordering::Release);
                return result;
            }
        }
    }
}

impl Default for Prepared {
    fn default() -> Self {
        Self::new()
    }
}

static APART: Mutex<()> = Mutex::new(());

/// Makes announced forks of the program (those that slat sees) wait as long as the guard lives ([`apart_from_forks`]).
pub fn keep_forks_out() -> MutexGuard<'static, ()> {
    APART.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` while no thread forks by the C library. `work` is foreign code that computes something once; it is
/// short, and calls no code of the program. A thread that forks takes the same lock before the fork
/// ([`keep_forks_out`]).
pub fn apart_from_forks<R>(work: impl FnOnce() -> R) -> R {
    let _held = keep_forks_out();
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Forks without the C library while another thread is executing `begin`. Returns whether `child` returns
    /// `true` in the child.
    fn forked_in_the_midst(begin: impl Fn(&dyn Fn()) + Sync, child: impl FnOnce() -> bool) -> bool {
        let (begun, forked) = (AtomicU32::new(0), AtomicU32::new(0));
        let until = |word: &AtomicU32| {
            while word.load(Ordering::Acquire) == 0 {
                crate::wait::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begin(&|| {
                    begun.store(1, Ordering::Release);
                    until(&forked);
                })
            });
            until(&begun);
            // SAFETY: the child only makes system calls and uses atomics; it does not use the C library's state.
            unsafe {
                let id = crate::arch::calls::fork();
                if id == 0 {
                    libc::alarm(10);
                    libc::_exit(i32::from(!child()));
                }
                let mut status = -1;
                libc::waitpid(id, &mut status, 0);
                forked.store(1, Ordering::Release);
                status == 0
            }
        })
    }

    #[test]
    fn a_child_whose_parent_was_computing_computes_itself() {
        if crate::forks::ignores_advice() {
            return eprintln!("skipped: this kernel does not wipe pages of forked children");
        }
        static VALUE: Computed<u32> = Computed::new();
        // The result is in a static variable, because a forked child must not use the heap.
        static STORED: AtomicU32 = AtomicU32::new(0);
        let begin = |midst: &dyn Fn()| {
            let value = VALUE.get_or_init(|| {
                midst();
                7
            });
            STORED.store(*value, Ordering::Relaxed);
        };
        assert!(forked_in_the_midst(begin, || { !VALUE.stored.is_done() }));
        assert_eq!(STORED.load(Ordering::Relaxed), 7);
        assert_eq!(*VALUE.get_or_init(|| 8), 7);
    }

    #[test]
    fn a_child_whose_parent_was_preparing_prepares_again() {
        if crate::forks::ignores_advice() {
            return eprintln!("skipped: this kernel does not wipe pages of forked children");
        }
        static READY: Prepared = Prepared::new();
        static DONE: AtomicU32 = AtomicU32::new(0);
        let begin = |midst: &dyn Fn()| {
            let _: Result<(), ()> = READY.once(|| {
                midst();
                DONE.fetch_add(1, Ordering::Relaxed);
                Ok(())
            });
        };
        assert!(forked_in_the_midst(begin, || {
            let mut again = false;
            let _: Result<(), ()> = READY.once(|| {
                again = true;
                Ok(())
            });
            again && READY.is_done()
        }));
        begin(&|| panic!("it is done"));
        assert_eq!(DONE.load(Ordering::Relaxed), 1);
        assert!(READY.is_done());
    }

    #[test]
    fn work_that_fails_is_tried_again() {
        static READY: Prepared = Prepared::new();
        assert_eq!(READY.once(|| Err(1)), Err(1));
        assert!(!READY.is_done());
        assert_eq!(READY.once(|| Ok::<(), i32>(())), Ok(()));
        assert!(READY.is_done());
    }
}
