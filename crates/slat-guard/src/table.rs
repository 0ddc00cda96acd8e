//! The exception table: which instructions may fail, and where to continue when they do.
//!
//! Each guarded instruction adds one entry of two 32-bit offsets to the section
//! `slat_guard_table`. Offsets are relative to the entry's own fields, so the table needs no
//! relocation at run time and is read-only in position-independent code. The section carries the
//! retain flag, so a linker that collects unused sections keeps it.

use std::arch::global_asm;

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    /// The guarded instruction, relative to the address of this field.
    at: i32,
    /// The offset of the address at which to continue, relative to the address of this field.
    fixup: i32,
}

// The section must exist even when nothing in the program uses a guarded access, and the bounds must be those of this
// image: hidden symbols are never bound to those of another copy.
global_asm!(
    ".pushsection slat_guard_table,\"aR\",@progbits",
    ".balign 4",
    ".popsection",
    ".hidden __start_slat_guard_table",
    ".hidden __stop_slat_guard_table",
);

unsafe extern "C" {
    #[link_name = "__start_slat_guard_table"]
    static START: Entry;
    #[link_name = "__stop_slat_guard_table"]
    static STOP: Entry;
}

/// Returns the address at which a thread continues if its guarded instruction at `ip` has failed. `None`: the
/// instruction is not guarded. Async-signal-safe. The look-up is linear: the table has some hundreds of entries, and
/// signals are rare.
pub(crate) fn fixup(ip: usize) -> Option<usize> {
    let mut entry = &raw const START;
    let stop = &raw const STOP;
    while entry < stop {
        // SAFETY: `entry` lies between the bounds that the linker gave the section, which contains only entries; the
        // section is read-only and never unmapped before this code.
        let Entry { at, fixup } = unsafe { *entry };
        let base = entry as usize;
        if base.wrapping_add_signed(at as isize) == ip {
            return Some((base + 4).wrapping_add_signed(fixup as isize));
        }
        entry = entry.wrapping_add(1);
    }
    None
}
