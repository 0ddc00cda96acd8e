//! The seccomp filters of a loaded program, which has a C library other than slat's.
//!
//! slat's own system calls, and the program's calls that slat passes on, come from one range of addresses. slat puts a
//! few instructions at the beginning of each filter, which allow every call from this range. So slat works even if the
//! program's filter forbids the calls that slat needs. Before slat serves a call of the program, this module runs the
//! program's filters on the call, with the address at which the program has made the call. If a filter does not simply
//! allow the call, slat makes the call from an address outside the range. Then the kernel itself carries out the
//! filter's action: it returns an error, sends a signal, or ends the process.
//!
//! In a program that loads libraries, the range also contains the program's C library. In such a program slat does not
//! change filters, and `slat_kvm::filters` finds out which calls the filters forbid.

use crate::real::error;
use crate::seccomp::{prefixed, read_filter};
use crate::user_dispatch::{arm_thread, disarm_thread};
use libc::sock_filter;
use slat_process::filter::{self, Made};
use slat_process::gate;
use std::cell::Cell;
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A filter, with a pointer to the filter that was installed before it.
struct Filter {
    program: Vec<sock_filter>,
    before: *const Filter,
}

thread_local! {
    // This variable has neither an initialiser nor a destructor.
    /// The filters of this thread, the last one first.
    static OF_THREAD: Cell<*const Filter> = const { Cell::new(null()) };
}

/// The filters that were installed on all threads at the same time (`SECCOMP_FILTER_FLAG_TSYNC`).
static OF_ALL: AtomicPtr<Filter> = AtomicPtr::new(null_mut());

/// The filters of a thread. The threads that this thread makes inherit the filters.
#[derive(Clone, Copy, Debug)]
pub struct Inherited(*const Filter);

// SAFETY: a filter is neither changed nor freed once it is installed.
unsafe impl Send for Inherited {}
// SAFETY: a filter is neither changed nor freed once it is installed.
unsafe impl Sync for Inherited {}

/// Returns this thread's filters.
pub fn of_this_thread() -> Inherited {
    Inherited(OF_THREAD.get())
}

/// Gives this thread the filters of the thread that created it.
pub fn inherit(Inherited(filters): Inherited) {
    OF_THREAD.set(filters);
}

/// Whether all of this thread's filters allow a call.
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

/// If this thread's filters do not allow a call, makes the call at an address at which the filters apply, and returns
/// the result. `None`: the filters allow the call.
pub fn judged(call: &Made) -> Option<isize> {
    if let_pass(call) {
        return None;
    }
    disarm_thread();
    // SAFETY: the call is the program's own. If the filter sends a signal, the signal ends the program, or a handler of
    // the program runs.
    let answer = unsafe { gate::call_own(call.number, call.arguments) };
    arm_thread();
    Some(answer)
}

/// Installs a filter, a `sock_fprog` at `program`, for this thread or for all threads. Calls `install` with the address
/// of a filter that also allows calls from `range`. Returns the kernel's result.
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
