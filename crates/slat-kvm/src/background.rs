//! slat's own threads, which serve all vCPUs of a process. Starting such a thread does not use the heap, because
//! `KVM_RUN` may start such a thread. The threads are started before the client installs a seccomp filter
//! ([`crate::filters`]).
//!
//! A new thread runs code of the client before it runs slat's: a sanitizer's `pthread_create`, which allocates. If the
//! client forks at this moment, the child finds the allocator's lock held by a thread that does not exist in the child.
//! The client can avoid that for its own threads, but it does not know of slat's threads. So a thread that starts one
//! of slat's threads waits until the new thread runs slat's code.

use crate::messages;
use crate::process::PerProcess;
use crate::thread::Section;
use slat_process::{calls, wait};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

/// The work of a background thread.
pub trait Background: Sync + 'static {
    /// The thread's name, of at most 15 bytes.
    const NAME: &'static CStr;
    /// The end of the message that is printed if the thread cannot be started: it names the feature that does not work
    /// without the thread.
    const WITHOUT: &'static str;

    /// The number of bytes of the thread's stack.
    const STACK: usize = 64 << 10;

    /// Runs on the thread until the process ends.
    fn run(&'static self);

    /// Runs on the thread if [`run`](Self::run) has returned, outside slat's [`Section`].
    fn has_run(&'static self) {}
}

/// The number of threads of this process that [`start`] has started.
#[derive(Default)]
struct Count(AtomicUsize);

static COUNT: PerProcess<Count> = PerProcess::new();

/// Returns the number of slat's threads in this process.
pub(crate) fn count() -> usize {
    COUNT.peek().map_or(0, |count| count.0.load(SeqCst))
}

/// Gives this thread a separate, empty descriptor table, so that the thread's descriptors are not among the client's.
/// Returns `false` if this thread keeps the client's table.
pub(crate) fn leave_descriptors() -> bool {
    const CLOSE_RANGE_UNSHARE: usize = 2;
    let arguments = [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0];
    // SAFETY: the call unshares the descriptor table first, so the call closes no descriptor in the table that other
    // threads use.
    unsafe { calls::raw(libc::SYS_close_range, arguments) == 0 }
}

/// The work of the background thread that was the last to begin. Stored with release and loaded with acquire. So when
/// the starting thread goes on and perhaps forks, all earlier stores of the new thread are visible, for example those
/// in the allocator.
static BEGUN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Waits until the new thread runs its `work`, but at most 20 ms. The limit is necessary for two reasons. The new
/// thread may need a lock that this thread holds. And another new thread may have overwritten [`BEGUN`] with its own
/// work.
fn wait_for(work: *mut c_void) {
    const LONGEST: Duration = Duration::from_millis(20);
    let end = Instant::now() + LONGEST;
    while BEGUN.load(Acquire) != work && Instant::now() < end {
        wait::pause(Duration::from_micros(20));
    }
}

/// Starts the thread of `work`, which runs in a [`Section`] and blocks all signals. Returns `false`, and prints a
/// message, if the thread cannot be started.
pub fn start<T: Background>(work: &'static T) -> bool {
    extern "C" fn main<T: Background>(work: *mut c_void) -> *mut c_void {
        BEGUN.store(work, Release);
        calls::mark_own_thread();
        slat_trace::name_thread(T::NAME);
        // SAFETY: `work` is the argument of `start`, which lives as long as the process.
        let work = unsafe { &*work.cast::<T>() };
        {
            let _section = Section::enter();
            work.run();
            COUNT.get().0.fetch_sub(1, SeqCst);
        }
        work.has_run();
        std::ptr::null_mut()
    }
    COUNT.get().0.fetch_add(1, SeqCst);
    // SAFETY: the attributes and signal sets are on the stack, and this thread's signal mask is restored. The new
    // thread may use `work`, which lives as long as the process and may be shared by threads. The new thread's id is
    // not used after the thread was detached.
    let error = unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let mut attributes = std::mem::zeroed();
        let mut thread = std::mem::zeroed();
        let mut error = libc::pthread_attr_init(&mut attributes);
        if error == 0 {
            libc::pthread_attr_setstacksize(&mut attributes, T::STACK);
            let work = std::ptr::from_ref(work).cast_mut().cast();
            BEGUN.store(std::ptr::null_mut(), Relaxed);
            error = libc::pthread_create(&mut thread, &attributes, main::<T>, work);
            if error == 0 {
                wait_for(work);
            }
            libc::pthread_attr_destroy(&mut attributes);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        if error == 0 {
            // The thread may have ended already. These calls are safe all the same: the C library keeps an ended
            // thread's data until the thread is detached.
            libc::pthread_setname_np(thread, T::NAME.as_ptr());
            libc::pthread_detach(thread);
        }
        error
    };
    if error != 0 {
        COUNT.get().0.fetch_sub(1, SeqCst);
        let name = T::NAME.to_str().unwrap_or_default();
        let error = std::io::Error::from_raw_os_error(error);
        messages::say(format_args!(
            "the thread {name} cannot be started ({error}): {}",
            T::WITHOUT
        ));
    }
    error == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A background thread whose work ends at once, as if the host had forbidden the work.
    struct EndsAtOnce;

    impl Background for EndsAtOnce {
        const NAME: &'static CStr = c"slat-test";
        const WITHOUT: &'static str = "the test fails";

        fn run(&'static self) {}
    }

    /// The thread may end before `start` names and detaches it. If the C library has then freed the thread's data,
    /// `start` must still work.
    #[test]
    fn a_thread_may_end_before_it_is_named() {
        static ENDS_AT_ONCE: EndsAtOnce = EndsAtOnce;
        assert!((0..200).all(|_| start(&ENDS_AT_ONCE)));
    }
}
