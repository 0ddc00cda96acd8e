//! Guarded accesses in code that is made at run time.
//!
//! Such code has no entries in the exception table. It has a table of its own, with one bit per byte of code: 1 where a
//! guarded access begins, the lowest bit of a byte first. If an access cannot be executed, the thread continues at the
//! code's *exit*, with the address of the access in the register of a function's result: RAX, or X0.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static TABLE: AtomicUsize = AtomicUsize::new(0);
static EXIT: AtomicUsize = AtomicUsize::new(0);

/// Registers code that is made at run time with the signal handlers: the addresses `code`, the address of its `table`,
/// and that of its `exit`. Replaces earlier registered code.
///
/// # Safety
/// - As long as any thread executes in `code`, its table is readable.
/// - At each guarded access, the code may continue at `exit`, with the address of the access in RAX (X0) and all
///   other registers unchanged.
/// - No thread executes the code that was registered before.
pub unsafe fn set_generated(code: Range<usize>, table: usize, exit: usize) {
    // Store an empty range in between, so that a handler on another thread does not combine an old bound with a new
    // table.
    END.store(0, Ordering::SeqCst);
    START.store(code.start, Ordering::SeqCst);
    TABLE.store(table, Ordering::SeqCst);
    EXIT.store(exit, Ordering::SeqCst);
    END.store(code.end, Ordering::SeqCst);
}

/// Returns the exit if the instruction at `ip` is a guarded access of code made at run time. Async-signal-safe.
pub(crate) fn exit(ip: usize) -> Option<usize> {
    let (start, end) = (START.load(Ordering::SeqCst), END.load(Ordering::SeqCst));
    if !(start..end).contains(&ip) {
        return None;
    }
    let offset = ip - start;
    // SAFETY: the table has a bit for each byte of code (`set_generated`).
    let bits = unsafe { *(TABLE.load(Ordering::SeqCst) as *const u8).add(offset / 8) };
    (bits >> (offset % 8) & 1 != 0).then(|| EXIT.load(Ordering::SeqCst))
}
