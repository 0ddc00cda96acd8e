//! What belongs to this process and not to its forked children.
//!
//! KVM answers `EIO` to a process that uses a VM of another address space. A forked child has the objects' memory, but the
//! threads that may hold their locks are gone: it must not touch any of them. A counter, raised in the child of every fork,
//! tells the two apart without a system call.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(1);
static WATCHING: Once = Once::new();

/// The process that something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Birth(u64);

impl Birth {
    /// This process.
    pub fn here() -> Self {
        WATCHING.call_once(|| {
            // SAFETY: the handler is async-signal-safe: it stores to atomics.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Birth(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is still the process it was made in.
    pub fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A global that every process has for itself. What a forked child inherits it does not touch: locks in it may be held by
/// threads that the child does not have. It begins with a new one.
#[derive(Debug)]
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Held<T>>,
}

#[derive(Debug)]
struct Held<T> {
    birth: Birth,
    value: T,
}

impl<T: Default + Sync + 'static> PerProcess<T> {
    /// Empty until the first use.
    pub const fn new() -> Self {
        PerProcess {
            current: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// This process's value, if it was used already.
    pub fn peek(&'static self) -> Option<&'static T> {
        // SAFETY: once published, a value is never freed.
        let held = unsafe { self.current.load(Ordering::Acquire).as_ref()? };
        held.birth.is_here().then_some(&held.value)
    }

    /// This process's value.
    pub fn get(&'static self) -> &'static T {
        self.get_or_start(|_| {})
    }

    /// The same; `start` is called with a value that has just been made, by the thread that made it.
    pub fn get_or_start(&'static self, start: impl FnOnce(&'static T)) -> &'static T {
        if let Some(value) = self.peek() {
            return value;
        }
        let birth = Birth::here();
        let old = self.current.load(Ordering::Acquire);
        let new = Box::into_raw(Box::new(Held {
            birth,
            value: T::default(),
        }));
        match self
            .current
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => {
                // SAFETY: published above and never freed.
                let value = unsafe { &(*new).value };
                start(value);
                value
            }
            Err(_) => {
                // SAFETY: `new` was not published.
                drop(unsafe { Box::from_raw(new) });
                self.get_or_start(start)
            }
        }
    }
}

impl<T: Default + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_another_process() {
        let birth = Birth::here();
        assert!(birth.is_here());
        // SAFETY: the child only looks at an atomic and exits.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(birth.is_here()));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(birth.is_here());
    }
}
