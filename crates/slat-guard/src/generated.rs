//! Guarded accesses in code that is generated at run time.
//!
//! Such code has no entries in the exception table. It has its own table, with one bit per byte of code (beginning with
//! the lowest bit of each byte of the table), which is 1 if a guarded access begins at this byte. If an access faults,
//! the thread continues at the code's *exit*, with the address of the faulting instruction in the register for a
//! function's result: RAX, or X0.
//!
//! # Concurrency
//! Handlers read the registration on any thread, at any time. So the registration is protected by a sequence lock. But
//! a handler does not wait until a change is complete, because the change may be in progress on the thread that the
//! handler has interrupted. Instead the handler treats the interrupted instruction as not registered, which is correct
//! because no thread executes registered code during a change.

use crate::sync::{AtomicU32, AtomicUsize, const_fn, fence, global};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A registration: the generated code, its table of guarded accesses, and its exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Registered {
    /// The first address of the code, and the address after the last one.
    start: usize,
    /// The address after the code's last byte.
    end: usize,
    table: usize,
    exit: usize,
}

/// The registration of generated code, as signal handlers read it.
#[derive(Debug)]
struct Generated {
    /// Odd while the registration is being changed. It stays odd in a forked child if another thread of the parent was
    /// changing the registration at the fork.
    version: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    table: AtomicUsize,
    exit: AtomicUsize,
}

impl Generated {
    const_fn! {
        fn new() -> Self {
            Generated {
                version: AtomicU32::new(0),
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                table: AtomicUsize::new(0),
                exit: AtomicUsize::new(0),
            }
        }
    }

    /// Replaces the registration. The caller must not call this from several threads at once.
    fn set(&self, new: Registered) {
        let odd = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(odd, Ordering::Relaxed);
        // Orders the odd version before the new values: a handler that reads one of these values also sees that the
        // version has changed.
        fence(Ordering::Release);
        self.start.store(new.start, Ordering::Relaxed);
        self.end.store(new.end, Ordering::Relaxed);
        self.table.store(new.table, Ordering::Relaxed);
        self.exit.store(new.exit, Ordering::Relaxed);
        self.version.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// Returns the current registration. `None`: the registration is being changed. Async-signal-safe.
    fn get(&self) -> Option<Registered> {
        let version = self.version.load(Ordering::Acquire);
        let registered = Registered {
            start: self.start.load(Ordering::Relaxed),
            end: self.end.load(Ordering::Relaxed),
            table: self.table.load(Ordering::Relaxed),
            exit: self.exit.load(Ordering::Relaxed),
        };
        // Orders the reads of the values before the second read of the version.
        fence(Ordering::Acquire);
        let is_whole = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        is_whole.then_some(registered)
    }
}

global! {
    static GENERATED: Generated = Generated::new();
}

/// Registers generated code with the signal handlers, in place of the code that was registered before: its addresses
/// `code`, the address of its `table` of guarded accesses, and the address of its `exit`.
///
/// # Safety
/// - As long as any thread executes in `code`, its table is readable.
/// - At each guarded access, the code allows that the thread continues at `exit`, with the address of the access in RAX
///   (on arm64: X0) and all other registers unchanged.
/// - No thread executes the code that was registered before, and no thread executes `code` before this function
///   returns.
/// - No other call of this function runs at the same time.
pub unsafe fn set_generated(code: Range<usize>, table: usize, exit: usize) {
    GENERATED.set(Registered {
        start: code.start,
        end: code.end,
        table,
        exit,
    });
}

/// Returns the address of the generated code's exit if the instruction at `ip` is a guarded access of the registered
/// code. Async-signal-safe.
pub(crate) fn exit(ip: usize) -> Option<usize> {
    let registered = GENERATED.get()?;
    if !(registered.start..registered.end).contains(&ip) {
        return None;
    }
    let offset = ip - registered.start;
    // SAFETY: this thread executes the registered code, so the table is readable, and has a bit for each byte of code
    // (`set_generated`).
    let bits = unsafe { *(registered.table as *const u8).add(offset / 8) };
    (bits >> (offset % 8) & 1 != 0).then_some(registered.exit)
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn code(number: usize) -> Registered {
        Registered {
            start: number,
            end: number + 10,
            table: number + 20,
            exit: number + 30,
        }
    }

    /// A handler must see one registration or none, but never values of two registrations, in whatever order these
    /// become visible. [`crate::sync`] explains why the main thread makes the change.
    #[test]
    fn a_handler_sees_no_mixture() {
        loom::model(|| {
            let generated = Arc::new(Generated::new());
            generated.set(code(100));
            let handler = {
                let generated = generated.clone();
                thread::spawn(move || {
                    if let Some(seen) = generated.get() {
                        assert!([code(100), code(200)].contains(&seen), "{seen:?}");
                    }
                })
            };
            generated.set(code(200));
            handler.join().unwrap();
            assert_eq!(generated.get(), Some(code(200)));
        });
    }
}
