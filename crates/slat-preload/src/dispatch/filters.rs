//! The seccomp filters of a program whose C library is not slat's.
//!
//! slat's own system calls, and the program's calls that slat passes on, come from one range of addresses. A few
//! instructions are put before each filter that allow everything from this range. So slat works whatever the
//! program forbids itself. A call of the program is judged here before slat serves it, by the filter that the
//! program has written, with the address at which the program has made the call. If the filter does not simply
//! allow the call, slat makes it outside the range, so that the kernel itself does what the filter says: an error,
//! a signal, or the end of the process.
//!
//! (In a program that loads libraries, the range is also that of the program's C library. There filters are not
//! changed, and `slat_kvm::filters` finds out what they forbid.)

use super::calls::error;
use crate::indirect::read_filter;
use libc::sock_filter;
use slat_process::filter::{self, Made};
use slat_process::gate;
use std::cell::Cell;
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A filter, and the filters that were installed before it.
struct Filter {
    program: Vec<sock_filter>,
    before: *const Filter,
}

thread_local! {
    // This variable has neither an initialiser nor a destructor.
    /// The filters of this thread, the last one first.
    static OF_THREAD: Cell<*const Filter> = const { Cell::new(null()) };
}

/// The filters that were installed on all threads at once (`SECCOMP_FILTER_FLAG_TSYNC`).
static OF_ALL: AtomicPtr<Filter> = AtomicPtr::new(null_mut());

/// The filters of a thread, for a thread that it makes.
#[derive(Clone, Copy, Debug)]
pub struct Inherited(*const Filter);

// SAFETY: a filter is neither changed nor freed once it is installed.
unsafe impl Send for Inherited {}
// SAFETY: as above.
unsafe impl Sync for Inherited {}

/// Returns this thread's filters.
pub fn of_this_thread() -> Inherited {
    Inherited(OF_THREAD.get())
}

/// Gives this thread the filters of its maker.
pub fn inherit(Inherited(filters): Inherited) {
    OF_THREAD.set(filters);
}

/// Whether this thread's filters let a call pass.
fn let_pass(call: &Made) -> bool {
    let each = [OF_THREAD.get(), OF_ALL.load(Ordering::Acquire)];
    each.into_iter().all(|mut next| {
        // SAFETY: filters are never freed.
        while let Some(filter) = unsafe { next.as_ref() } {
            if !filter::lets_pass(&filter.program, call) {
                return false;
            }
            next = filter.before;
        }
        true
    })
}

/// If this thread's filters do not allow a call, makes the call where they judge it. `None`: they allow the call.
pub fn judged(call: &Made) -> Option<isize> {
    if let_pass(call) {
        return None;
    }
    super::disarm_thread();
    // SAFETY: the program's own call. If the program's filter answers by a signal, that ends the program or is handled.
    let answer = unsafe { gate::call_own(call.number, call.arguments) };
    super::arm_thread();
    Some(answer)
}

/// Returns instructions that allow calls from `range`, followed by the filter `own`, which judges all other calls.
/// `None`: they are too many.
pub fn prefixed(range: &Range<usize>, own: &[sock_filter]) -> Option<(u16, Vec<sock_filter>)> {
    let mut prefixed = allow(range);
    prefixed.extend_from_slice(own);
    Some((u16::try_from(prefixed.len()).ok()?, prefixed))
}

/// Returns instructions that allow calls from `range`. All other calls reach the instructions that follow.
fn allow(range: &Range<usize>) -> Vec<sock_filter> {
    const ADDRESS: u32 = 8;
    let instruction = |code: u32, jt, jf, k| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let compare = |condition| libc::BPF_JMP | condition | libc::BPF_K;
    let (first, last) = (range.start, range.end - 1);
    let high = |address: usize| (address >> 32) as u32;
    let mut code = Vec::new();
    // The filter machine has words of 32 bits, so there is a part for each upper half of an address.
    for half in high(first)..=high(last) {
        let low = if half == high(first) { first as u32 } else { 0 };
        let end = if half == high(last) {
            last as u32
        } else {
            u32::MAX
        };
        code.extend([
            instruction(load, 0, 0, ADDRESS + 4),
            instruction(compare(libc::BPF_JEQ), 0, 4, half),
            instruction(load, 0, 0, ADDRESS),
            instruction(compare(libc::BPF_JGE), 0, 2, low),
            instruction(compare(libc::BPF_JGT), 1, 0, end),
            instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }
    // The accumulator is 0 when a filter begins.
    code.push(instruction(libc::BPF_LD | libc::BPF_IMM, 0, 0, 0));
    code
}

/// Installs a filter, a `sock_fprog` at `program`, for this thread or for all. Calls `install` with the address of a
/// filter that also allows calls from `range`. Returns the kernel's result.
pub fn install(
    range: &Range<usize>,
    program: usize,
    on_all: bool,
    install: impl FnOnce(usize) -> isize,
) -> isize {
    let Ok(own) = read_filter(program as u64) else {
        return error(libc::EFAULT);
    };
    let Some((len, mut prefixed)) = prefixed(range, &own) else {
        return error(libc::EINVAL);
    };
    let given = libc::sock_fprog {
        len,
        filter: prefixed.as_mut_ptr(),
    };
    let answer = install(&raw const given as usize);
    if answer < 0 {
        return answer;
    }
    let filter = Box::into_raw(Box::new(Filter {
        program: own,
        before: match on_all {
            true => OF_ALL.load(Ordering::Acquire),
            false => OF_THREAD.get(),
        },
    }));
    match on_all {
        true => OF_ALL.store(filter, Ordering::Release),
        false => OF_THREAD.set(filter),
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_the_range_passes_and_the_rest_is_the_filters() {
        let forbid = sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_KILL_PROCESS,
        };
        // A range within four gigabytes, one that crosses a boundary, and one that ends at it.
        for range in [
            0x7f12_3456_7000..0x7f12_3466_0000,
            0x7f12_fff0_0000..0x7f13_0010_0000,
            0x7f12_fff0_0000..0x7f13_0000_0000,
        ] {
            let mut program = allow(&range);
            program.push(forbid);
            let passes = |address| {
                let made = Made {
                    number: libc::SYS_read,
                    arguments: [0; 6],
                    address,
                };
                filter::lets_pass(&program, &made)
            };
            for address in [range.start, range.start + 0x8_0000, range.end - 1] {
                assert!(passes(address), "{address:#x} of {range:#x?}");
            }
            for address in [
                0,
                range.start - 1,
                range.end,
                range.start & 0xffff_ffff,
                range.start + (1 << 32),
            ] {
                assert!(!passes(address), "{address:#x}, not of {range:#x?}");
            }
        }
    }
}
