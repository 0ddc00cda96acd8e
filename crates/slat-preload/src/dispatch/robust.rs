//! Marks the robust futexes of a loaded program (`Documentation/locking/robust-futex-ABI.rst`). When a thread ends, the
//! kernel marks the futexes that the thread holds. But a thread of a loaded program runs on a thread of slat's C
//! library, and the program's thread ends first. Other threads of the program may wait for that end, and then read the
//! futexes. So slat marks the futexes when the program's thread ends.

use crate::real::kernel;

/// The maximum number of futexes in a robust list that the kernel visits.
const LIMIT: usize = 2048;

/// Marks the robust futexes that this thread holds, wakes the threads that wait for them, and unregisters the list of
/// these futexes.
pub fn leave() {
    let (mut head, mut bytes) = (0usize, 0usize);
    // SAFETY: the call fills in live variables.
    let asked = unsafe { kernel!(libc::SYS_get_robust_list, 0, &raw mut head, &raw mut bytes) };
    if asked.is_err() || head == 0 {
        return;
    }
    // SAFETY: the loads are guarded, because the list is the program's.
    let load = |address: usize| unsafe { slat_guard::load(address as *const u64) };
    let walk = || {
        let mut next = load(head)? as usize;
        let offset = load(head + 8)? as usize;
        // The lowest bit means that the futex has priority inheritance. That bit is not part of the address.
        let pending = load(head + 16)? as usize & !1;
        for _ in 0..LIMIT {
            let entry = next & !1;
            if entry == head || entry == 0 {
                break;
            }
            next = load(entry)? as usize;
            if entry != pending {
                mark(entry.wrapping_add(offset));
            }
        }
        if pending != 0 {
            mark(pending.wrapping_add(offset));
        }
        Ok::<_, slat_guard::Gone>(())
    };
    // If the list cannot be read, no futexes are marked.
    let _ = walk();
    // SAFETY: the null pointer unregisters the list.
    let _ = unsafe { kernel!(libc::SYS_set_robust_list, 0, bytes) };
}

/// Marks a futex if its owner is this thread, which is ending.
fn mark(address: usize) {
    let futex = address as *mut u32;
    let own = slat_process::thread_id() as u32;
    // SAFETY: the accesses to the program's word are guarded, and the call only wakes the threads that wait for the
    // word.
    unsafe {
        while let Ok(value) = slat_guard::load(futex) {
            if value & libc::FUTEX_TID_MASK != own {
                return;
            }
            let dead = value & libc::FUTEX_WAITERS | libc::FUTEX_OWNER_DIED;
            match slat_guard::compare_exchange(futex, value, dead) {
                Ok(Ok(_)) if value & libc::FUTEX_WAITERS != 0 => {
                    let _ = kernel!(libc::SYS_futex, address, libc::FUTEX_WAKE, 1);
                    return;
                }
                Ok(Err(_)) => {}
                _ => return,
            }
        }
    }
}
