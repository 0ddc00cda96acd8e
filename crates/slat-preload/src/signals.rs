//! Signal handlers of the program: each is called through [`trampoline`], which first ends the `KVM_RUN` of its thread.
//!
//! The kernel knows only the trampoline; the program's own handler stands in a table here and is what the program gets to
//! see when it asks. Flags and mask are the program's: the kernel does with them what it always does.
//!
//! SIGSEGV, SIGBUS and slat's kick signal have a handler of slat's in front from the first `/dev/kvm` on; what the program
//! sets for them is handed to it ([`slat_guard::set_chained`]).

use crate::files::interpose;
use crate::real::{Next, set_errno};
use libc::{sigaction as Action, sighandler_t};
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Signals are numbered from 1 to 64.
const SIGNALS: usize = 65;

/// The program's handlers: functions only, where the kernel has the trampoline.
static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(libc::SIG_DFL) }; SIGNALS];

/// The handlers of slat are in front.
static TAKEN_OVER: AtomicBool = AtomicBool::new(false);

static NEXT: Next = Next::new(c"sigaction");

extern "C" fn trampoline(signal: c_int, info: usize, context: usize) {
    slat_kvm::signal_arrived();
    let handler = HANDLERS[signal as usize].load(Ordering::Acquire);
    if handler != libc::SIG_DFL && handler != libc::SIG_IGN {
        // SAFETY: the program gave this function for this signal. The kernel passes all three arguments in any case, and a
        // handler of one argument does not look at the others.
        unsafe {
            std::mem::transmute::<usize, extern "C" fn(c_int, usize, usize)>(handler)(
                signal, info, context,
            )
        }
    }
}

fn trampoline_address() -> usize {
    trampoline as *const () as usize
}

fn is_function(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN && handler != libc::SIG_ERR
}

fn is_guarded(signal: c_int) -> bool {
    [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()].contains(&signal)
}

/// The C library's `sigaction`.
unsafe fn next(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    let Some(function) = NEXT.get() else {
        set_errno(libc::ENOSYS);
        return -1;
    };
    type Sigaction = unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int;
    // SAFETY: the C library's function of that name has this signature; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, Sigaction>(function)(signal, new, old) }
}

/// slat's handlers have just been put in front: the actions they hand on to are the program's, not the trampoline.
pub fn take_over() {
    for signal in [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()] {
        if let Some(mut action) = slat_guard::set_chained(signal, None)
            && action.sa_sigaction == trampoline_address()
        {
            action.sa_sigaction = HANDLERS[signal as usize].load(Ordering::Acquire);
            slat_guard::set_chained(signal, Some(&action));
        }
    }
    TAKEN_OVER.store(true, Ordering::Release);
}

/// sigaction.
///
/// # Safety
/// As for `sigaction`.
pub unsafe fn set_action(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if TAKEN_OVER.load(Ordering::Acquire) && is_guarded(signal) {
        // SAFETY: the caller's pointers are valid or null.
        let before = slat_guard::set_chained(signal, unsafe { new.as_ref() });
        // SAFETY: as above.
        if let (Some(old), Some(before)) = (unsafe { old.as_mut() }, before) {
            *old = before;
        }
        return 0;
    }
    let Some(place) = usize::try_from(signal)
        .ok()
        .and_then(|signal| HANDLERS.get(signal))
    else {
        // SAFETY: the caller's.
        return unsafe { next(signal, new, old) };
    };
    let before = place.load(Ordering::Acquire);
    // SAFETY: the caller's pointers are valid or null.
    let mut ours = unsafe { new.as_ref() }.copied();
    if let Some(action) = &mut ours
        && is_function(action.sa_sigaction)
    {
        // First, so that the trampoline finds it when the signal comes at once.
        place.store(action.sa_sigaction, Ordering::Release);
        action.sa_sigaction = trampoline_address();
    }
    // SAFETY: pointers to live values, or null.
    let result = unsafe {
        next(
            signal,
            ours.as_ref().map_or(null(), std::ptr::from_ref),
            old,
        )
    };
    if result != 0 {
        place.store(before, Ordering::Release);
        return result;
    }
    // SAFETY: the caller's pointer is valid or null.
    if let Some(old) = unsafe { old.as_mut() }
        && old.sa_sigaction == trampoline_address()
    {
        old.sa_sigaction = before;
    }
    result
}

/// What `signal` and its older forms come down to.
unsafe fn set_handler(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    // SAFETY: all-zero is a valid action; both are live.
    unsafe {
        let mut new: Action = zeroed();
        let mut old: Action = zeroed();
        new.sa_sigaction = handler;
        new.sa_flags = flags;
        if flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&mut new.sa_mask, signal);
        }
        if handler == libc::SIG_ERR {
            set_errno(libc::EINVAL);
            return libc::SIG_ERR;
        }
        if set_action(signal, &new, &mut old) == 0 {
            old.sa_sigaction
        } else {
            libc::SIG_ERR
        }
    }
}

interpose! {
    /// sigaction(2).
    fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
        // SAFETY: the caller's.
        unsafe { set_action(signal, new, old) }
    }

    /// sigaction(2) under its other name.
    fn __sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
        // SAFETY: the caller's.
        unsafe { set_action(signal, new, old) }
    }

    /// signal(2) as BSD has it: the C library's default.
    fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// signal(2) as BSD has it.
    fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// signal(2) as BSD has it, under an older name.
    fn ssignal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// signal(2) as System V has it.
    fn sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's.
        unsafe { set_handler(number, handler, libc::SA_RESETHAND | libc::SA_NODEFER) }
    }

    /// signal(2) as System V has it: what `signal` becomes with -std=c99.
    fn __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's.
        unsafe { set_handler(number, handler, libc::SA_RESETHAND | libc::SA_NODEFER) }
    }
}
