//! System calls by which a loaded program sets its thread pointer.

use slat_process::pointers;

/// Operations of arch_prctl(2) (`arch/x86/include/uapi/asm/prctl.h`).
const ARCH_SET_GS: usize = 0x1001;
const ARCH_SET_FS: usize = 0x1002;
const ARCH_GET_FS: usize = 0x1003;
const ARCH_GET_GS: usize = 0x1004;

/// Serves a call that sets or returns the thread pointer. `store` stores a value at an address of the program.
/// `refuse` refuses the call for a reason. Returns the kernel's result. `None`: the call does not concern the thread
/// pointer.
pub fn serve(
    number: i64,
    [code, address, ..]: [usize; 6],
    store: impl FnOnce(usize, u64) -> isize,
    refuse: impl FnOnce(&str) -> isize,
) -> Option<isize> {
    if number != libc::SYS_arch_prctl {
        return None;
    }
    Some(match code {
        ARCH_SET_FS if address >= 1 << 47 => -(libc::EPERM as isize),
        ARCH_SET_FS => {
            pointers::set_programs(address);
            0
        }
        ARCH_GET_FS => store(address, pointers::programs() as u64),
        ARCH_SET_GS | ARCH_GET_GS => {
            refuse("arch_prctl: in a static program the base of GS is slat's")
        }
        _ => return None,
    })
}
