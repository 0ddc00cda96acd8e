//! What belongs to this process and not to its forked children.
//!
//! KVM answers `EIO` to a process that uses a VM of another address space. A forked child has the objects' memory, but the
//! threads that may hold their locks are gone: it must not touch any of them. A counter, raised in the child of every fork,
//! tells the two apart without a system call.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

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
    crate::ticker::forget_after_fork();
    crate::notify::forget_after_fork();
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
