//! The exception table: the instructions that may fault, and for each the address at which to continue then.
//!
//! Each guarded instruction adds an entry of two 32-bit offsets to the linker section `slat_guard_table`. The offsets
//! are relative to the addresses of the entry's own fields, so in position-independent code, too, the table needs no
//! relocation at run time and can be read-only. The section has the retain flag, so that a linker that removes unused
//! sections keeps it.

use std::arch::global_asm;

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    /// The address of the guarded instruction, relative to the address of this field.
    at: i32,
    /// The address at which to continue, relative to the address of this field.
    fixup: i32,
}

// Makes sure that the section exists even if the program has no guarded access. The symbols of its bounds are hidden,
// so that they are never bound to those of another copy of this crate in the process.
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

/// Returns the address at which to continue if the instruction at `ip` has faulted. `None`: the instruction is not
/// guarded. Async-signal-safe. A linear search suffices, because the table has only hundreds of entries and signals are
/// rare.
pub(crate) fn fixup(ip: usize) -> Option<usize> {
    let mut entry = &raw const START;
    let stop = &raw const STOP;
    while entry < stop {
        // SAFETY: `entry` is between the bounds of the section, which contains only entries. The section is read-only,
        // and is not unmapped before this code.
        let Entry { at, fixup } = unsafe { *entry };
        let base = entry as usize;
        if base.wrapping_add_signed(at as isize) == ip {
            return Some((base + 4).wrapping_add_signed(fixup as isize));
        }
        entry = entry.wrapping_add(1);
    }
    None
}
