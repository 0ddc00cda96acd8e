//! Guarded accesses in code that is made at run time.
//!
//! Such code has no place in the exception table. It keeps a table of its own: one byte per byte of code, the length of the guarded
//! access that begins there. An access that cannot be executed is skipped, and a word is set that the code looks at next: R15 holds
//! the address of the object that the word lies in.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static TABLE: AtomicUsize = AtomicUsize::new(0);
static WORD: AtomicUsize = AtomicUsize::new(0);

/// Tells the signal handlers of code that is made at run time, in `code`. `table`: the address of its table. `word`: the offset
/// from the address in R15 of the 32-bit word to set. Replaces what was told before.
///
/// # Safety
/// - As long as any thread executes in `code`, its table is readable, and R15 holds the address of an object with that word at each
///   guarded access.
/// - No thread executes in the code that was told before.
pub unsafe fn set_generated(code: Range<usize>, table: usize, word: usize) {
    // An empty range in between: a handler on another thread takes no old bound with a new table.
    END.store(0, Ordering::SeqCst);
    START.store(code.start, Ordering::SeqCst);
    TABLE.store(table, Ordering::SeqCst);
    WORD.store(word, Ordering::SeqCst);
    END.store(code.end, Ordering::SeqCst);
}

/// If the instruction at `ip` is a guarded access of code made at run time, sets the word and returns the address of the next
/// instruction. Async-signal-safe.
///
/// # Safety
/// `r15` is the register at `ip`.
pub(crate) unsafe fn skip(ip: usize, r15: usize) -> Option<usize> {
    let (start, end) = (START.load(Ordering::SeqCst), END.load(Ordering::SeqCst));
    if !(start..end).contains(&ip) {
        return None;
    }
    // SAFETY: the table has a byte for each byte of code (`set_generated`).
    let length = unsafe { *(TABLE.load(Ordering::SeqCst) as *const u8).add(ip - start) };
    if length == 0 {
        return None;
    }
    let word = (r15 + WORD.load(Ordering::SeqCst)) as *mut u32;
    // SAFETY: at a guarded access, R15 holds the address of the object that the word lies in.
    unsafe { word.write_volatile(1) };
    Some(ip + usize::from(length))
}
