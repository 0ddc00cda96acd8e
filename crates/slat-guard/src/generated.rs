//! Guarded accesses in code that is made at run time.
//!
//! Such code has no place in the exception table. It keeps a table of its own: one bit per byte of code, 1 where a
//! guarded access begins, the lowest bit of a byte first. If one cannot be executed, the thread continues at the code's
//! *exit*, with the address of the access in RAX.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static TABLE: AtomicUsize = AtomicUsize::new(0);
static EXIT: AtomicUsize = AtomicUsize::new(0);

/// Tells the signal handlers of code that is made at run time, in `code`. `table`: the address of its table. `exit`:
/// the address of its exit. Replaces what was told before.
///
/// # Safety
/// - As long as any thread executes in `code`, its table is readable.
/// - At each guarded access, the code is right to continue at `exit`, with the address of the access in RAX and all
///   other registers as they are.
/// - No thread executes in the code that was told before.
pub unsafe fn set_generated(code: Range<usize>, table: usize, exit: usize) {
    // An empty range in between: a handler on another thread takes no old bound with a new table.
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
