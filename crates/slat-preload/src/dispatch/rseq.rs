//! Restartable sequences (rseq(2)) of a loaded program. The kernel writes to only one area of each thread, and slat's C
//! library has registered its own area. When the program registers an area, slat unregisters the area of its own C
//! library, which only reads the processor's number there, and works without that number.

use crate::arch::threads::{self, RSEQ_SIGNATURE};
use crate::real::{Next, raw};
use std::cell::Cell;

const UNREGISTER: usize = 1;

thread_local! {
    // These variables have neither initialisers nor destructors.
    /// Whether the rseq area of slat's C library was unregistered on this thread.
    static HAS_GIVEN_WAY: Cell<bool> = const { Cell::new(false) };
    /// The program's rseq area: address, size, signature. The address is 0 if there is none.
    static PROGRAMS: Cell<[usize; 3]> = const { Cell::new([0; 3]) };
}

fn rseq(area: usize, bytes: usize, flags: usize, signature: usize) -> isize {
    // SAFETY: the area belongs to the program, which lets the kernel write to the area. Or the area belongs to the C
    // library, and the call unregisters it.
    unsafe { raw(libc::SYS_rseq, [area, bytes, flags, signature, 0, 0]) }
}

/// Unregisters the rseq area of slat's C library, so that the program can register its own area.
fn give_way() {
    /// The area's offset from the thread pointer (glibc manual, "Restartable Sequences").
    static OFFSET: Next = Next::new(c"__rseq_offset");
    /// The area's size in the first version. In later versions the size is a multiple of this size
    /// (`AT_RSEQ_FEATURE_SIZE`).
    const BYTES: usize = 32;
    if HAS_GIVEN_WAY.replace(true) {
        return;
    }
    let Some(offset) = OFFSET.get() else {
        return;
    };
    // SAFETY: the C library's variable is an integer.
    let offset = unsafe { *(offset as *const isize) };
    let area = threads::pointer().wrapping_add_signed(offset);
    for bytes in [BYTES, 2 * BYTES, 3 * BYTES, 4 * BYTES] {
        if rseq(area, bytes, UNREGISTER, RSEQ_SIGNATURE) == 0 {
            return;
        }
    }
}

/// Implements rseq.
pub fn register([area, bytes, flags, signature, ..]: [usize; 6]) -> isize {
    if flags == 0 {
        give_way();
    }
    let answer = rseq(area, bytes, flags, signature);
    match flags {
        _ if answer != 0 => {}
        UNREGISTER => PROGRAMS.set([0; 3]),
        _ => PROGRAMS.set([area, bytes, signature]),
    }
    answer
}

/// Unregisters the program's rseq area when the program's thread ends. The thread of slat's C library continues, but
/// the program may free the memory of the area.
pub fn leave() {
    let [area, bytes, signature] = PROGRAMS.get();
    if area != 0 {
        rseq(area, bytes, UNREGISTER, signature);
    }
}
