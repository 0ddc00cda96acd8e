//! Signal handlers of the program. The kernel calls slat's [`trampoline`] in place of each handler. The trampoline
//! defers the handler until the thread has left slat's code ([`slat_guard::defer`]). So that the handler need not wait
//! long, the trampoline ends a running `KVM_RUN`.
//!
//! The kernel knows only the trampoline. A table here holds the program's own handler and flags, which `sigaction`
//! returns. The signal mask in the kernel is the program's. Two flags differ from the program's: `SA_SIGINFO` is always
//! set, and in a program that uses KVM, `SA_RESETHAND` is not set, because the trampoline itself resets the handler
//! when the handler really runs.
//!
//! After `/dev/kvm` is opened for the first time, slat handles SIGSEGV, SIGBUS and its kick signal first. Signals that
//! are not meant for slat are passed to the action that the program has set ([`slat_guard::set_chained`]). If system
//! calls are dispatched, SIGSYS is slat's from the start and never blocked, and only the table knows the program's
//! action for SIGSYS.

use crate::files::interpose;
use crate::loaded;
use crate::real::{Next, call, set_errno};
use libc::{sigaction as Action, sighandler_t};
use slat_process::handler::call_program;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// The size of a table indexed by signal: signals have the numbers 1 to 64.
const SIGNALS: usize = 65;

/// The program's action for a signal for which the kernel calls the trampoline: the program's function and flags. If
/// threads set the action of one signal concurrently, the result may have the function of one thread and the flags of
/// another.
struct Handler {
    function: AtomicUsize,
    flags: AtomicI32,
}

static HANDLERS: [Handler; SIGNALS] = [const {
    Handler {
        function: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
    }
}; SIGNALS];

/// Whether slat's handlers for SIGSEGV, SIGBUS and the kick signal are installed.
static TAKEN_OVER: AtomicBool = AtomicBool::new(false);

/// Whether slat handles SIGSYS, because the kernel dispatches system calls.
static DISPATCHED: AtomicBool = AtomicBool::new(false);

/// The mask of the program's action for SIGSYS, if slat handles SIGSYS.
static SIGSYS_MASK: AtomicU64 = AtomicU64::new(0);

static NEXT: Next = Next::new(c"sigaction");

slat_process::handler! {
    /// The handler that the kernel calls.
    entry calls trampoline
}

extern "C-unwind" fn trampoline(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the arguments come from the kernel, because the trampoline is installed with SA_SIGINFO.
    if unsafe { slat_guard::defer(signal, info, context) } {
        return;
    }
    let handler = &HANDLERS[signal as usize];
    let function = handler.function.load(Ordering::Acquire);
    if handler.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0
        && TAKEN_OVER.load(Ordering::Acquire)
    {
        // SAFETY: the call sets the default action, and does not return the old action.
        unsafe {
            let mut default: Action = zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            next(signal, &default, null_mut());
        }
    }
    if signal == libc::SIGSYS && DISPATCHED.load(Ordering::Acquire) {
        // All signals are blocked here, because slat handles SIGSYS with all signals blocked. The program's handler
        // gets the mask that it would have without slat.
        // SAFETY: the context comes from the kernel. The C library's larger set begins with the kernel's set.
        let interrupted = unsafe {
            let context = context.cast::<libc::ucontext_t>();
            (&raw const (*context).uc_sigmask).cast::<u64>().read()
        };
        slat_guard::change_mask(
            libc::SIG_SETMASK,
            interrupted | SIGSYS_MASK.load(Ordering::Relaxed),
        );
        // SAFETY: the information comes from the kernel.
        if function == libc::SIG_IGN && unsafe { (*info).si_code } <= 0 {
            return;
        }
    }
    if is_function(function) {
        // SAFETY: the program has set this function as the handler of this signal.
        unsafe { call_program(function, signal, info, context) }
    } else if signal == libc::SIGSYS {
        // A seccomp filter or a process has sent the signal. As without slat, the signal ends the process when this
        // handler has returned.
        // SAFETY: the calls set the default action, and send a signal to this thread.
        unsafe {
            let mut default: Action = zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            let _ = slat_guard::set_kernels(signal, Some(&default));
            let (process, thread) = slat_process::myself();
            call!(libc::SYS_tgkill, process, thread, signal);
        }
    }
}

fn trampoline_address() -> usize {
    entry as *const () as usize
}

fn is_function(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN && handler != libc::SIG_ERR
}

fn is_guarded(signal: c_int) -> bool {
    [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()].contains(&signal)
}

/// Calls the C library's `sigaction`, or for a loaded program the kernel. A loaded program's own C library reserves
/// some signals for itself, and slat's C library would refuse these signals.
unsafe fn next(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if loaded::is_loaded() {
        // SAFETY: `new` and `old` are valid or null, as sigaction(2) requires.
        return unsafe {
            match slat_guard::set_kernels(signal, new.as_ref()) {
                Ok(before) => {
                    if let Some(old) = old.as_mut() {
                        *old = before;
                    }
                    0
                }
                Err(errno) => {
                    set_errno(errno);
                    -1
                }
            }
        };
    }
    let Some(function) = NEXT.get() else {
        set_errno(libc::ENOSYS);
        return -1;
    };
    type Sigaction = unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int;
    // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid for
    // it.
    unsafe { std::mem::transmute::<usize, Sigaction>(function)(signal, new, old) }
}

/// Looks up the C library's functions in advance, so that a signal handler never has to look them up.
pub fn prepare() {
    for next in [&NEXT, &NEXT_SIGPROCMASK, &NEXT_PTHREAD_SIGMASK] {
        next.get();
    }
}

/// Converts an action that the kernel has returned to the action that the program has set. The two differ if the
/// kernel's action is the trampoline.
fn as_set(signal: usize, mut action: Action) -> Action {
    if action.sa_sigaction == trampoline_address() {
        action.sa_sigaction = HANDLERS[signal].function.load(Ordering::Acquire);
        action.sa_flags = HANDLERS[signal].flags.load(Ordering::Relaxed);
    }
    action
}

/// Makes slat's handlers pass signals on to the program's actions, not to the trampoline. Call after installing slat's
/// handlers.
pub fn take_over() {
    for signal in [libc::SIGSEGV, libc::SIGBUS, slat_guard::kick_signal()] {
        if let Some(action) = slat_guard::set_chained(signal, None) {
            slat_guard::set_chained(signal, Some(&as_set(signal as usize, action)));
        }
    }
    // Another thread may set an action at the same time. `SeqCst` ensures that this code finds the flags of the new
    // action, or that the other thread finds `TAKEN_OVER` set.
    TAKEN_OVER.store(true, Ordering::SeqCst);
    for (signal, handler) in HANDLERS.iter().enumerate() {
        if handler.flags.load(Ordering::SeqCst) & libc::SA_RESETHAND != 0 {
            keep_handler(signal as c_int);
        }
    }
}

/// If the trampoline is installed for `signal`, makes the kernel keep the trampoline installed after calling it (no
/// `SA_RESETHAND`).
fn keep_handler(signal: c_int) {
    // SAFETY: all-zero is a valid action, and the actions are live.
    unsafe {
        let mut action: Action = zeroed();
        if next(signal, null(), &mut action) == 0 && action.sa_sigaction == trampoline_address() {
            action.sa_flags &= !libc::SA_RESETHAND;
            next(signal, &action, null_mut());
        }
    }
}

/// Installs `handler`, which serves dispatched calls, for SIGSYS. All signals are blocked when it begins.
pub fn take_over_dispatch(handler: usize) {
    // SAFETY: all-zero is a valid action, and the C library's larger mask begins with the kernel's. `handler`
    // is a signal handler.
    unsafe {
        let mut action: Action = zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        (&raw mut action.sa_mask).cast::<u64>().write(u64::MAX);
        // The kernel refuses only SIGKILL and SIGSTOP.
        let _ = slat_guard::set_kernels(libc::SIGSYS, Some(&action));
    }
    DISPATCHED.store(true, Ordering::Release);
}

/// Sets and returns the program's action for SIGSYS in the table. The kernel's action is slat's handler.
///
/// # Safety
/// - The pointers are valid or null.
unsafe fn set_dispatched(new: *const Action, old: *mut Action) -> c_int {
    let handler = &HANDLERS[libc::SIGSYS as usize];
    // SAFETY: the pointers are valid or null, as this function's contract requires. All-zero is a valid action.
    unsafe {
        let mut before: Action = zeroed();
        before.sa_sigaction = handler.function.load(Ordering::Acquire);
        before.sa_flags = handler.flags.load(Ordering::Relaxed);
        // The C library's set is larger, and begins with the kernel's set.
        let kernels = (&raw mut before.sa_mask).cast::<u64>();
        kernels.write(SIGSYS_MASK.load(Ordering::Relaxed));
        if let Some(new) = new.as_ref() {
            let mask = (&raw const new.sa_mask).cast::<u64>().read();
            kernels.write(SIGSYS_MASK.swap(mask, Ordering::Relaxed));
            handler.flags.store(new.sa_flags, Ordering::Relaxed);
            (handler.function).store(new.sa_sigaction, Ordering::Release);
        }
        if let Some(old) = old.as_mut() {
            *old = before;
        }
    }
    0
}

/// Removes the signals that slat must not block from `set`.
fn keep_unblocked(set: &mut libc::sigset_t) {
    // SAFETY: the C library's signal set is larger, and begins with the kernel's set.
    unsafe {
        let kernels = std::ptr::from_mut(set).cast::<u64>();
        kernels.write(slat_guard::blockable(kernels.read()));
    }
}

/// Implements sigaction in a child of `vfork`. In the kernel, the child has its own actions, but it shares this
/// library's table with its parent. So slat does not change the table. The child runs no vCPU, so its handlers need not
/// wait. In the child, `sigaction` returns the parent's actions.
unsafe fn set_borrowed(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
    let result = unsafe { next(signal, new, old) };
    // SAFETY: the caller's pointer is valid or null.
    if let (0, Some(old)) = (result, unsafe { old.as_mut() }) {
        *old = match slat_guard::set_chained(signal, None) {
            Some(parents) => parents,
            None => as_set(signal as usize, *old),
        };
    }
    result
}

/// Implements sigaction.
///
/// # Safety
/// The conditions are those of sigaction(2).
pub unsafe fn set_action(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if signal == libc::SIGSYS && DISPATCHED.load(Ordering::Acquire) {
        // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
        return unsafe { set_dispatched(new, old) };
    }
    if TAKEN_OVER.load(Ordering::Acquire) && crate::is_borrowed() {
        // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
        return unsafe { set_borrowed(signal, new, old) };
    }
    if TAKEN_OVER.load(Ordering::Acquire) && is_guarded(signal) {
        // SAFETY: the caller's pointers are valid or null.
        let before = slat_guard::set_chained(signal, unsafe { new.as_ref() });
        // SAFETY: the caller's pointer is valid or null.
        if let (Some(old), Some(before)) = (unsafe { old.as_mut() }, before) {
            *old = before;
        }
        return 0;
    }
    let Some(handler) = usize::try_from(signal)
        .ok()
        .and_then(|signal| HANDLERS.get(signal))
    else {
        // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
        return unsafe { next(signal, new, old) };
    };
    let before = (
        handler.function.load(Ordering::Acquire),
        handler.flags.load(Ordering::Relaxed),
    );
    // SAFETY: the caller's pointers are valid or null.
    let mut ours = unsafe { new.as_ref() }.copied();
    if let Some(action) = &mut ours
        && is_function(action.sa_sigaction)
        // A program that calls the kernel directly may have got the trampoline as the old action, and may set it again.
        && action.sa_sigaction != trampoline_address()
    {
        // The handler is stored before the kernel's action is set, so that the trampoline finds the handler if the
        // signal arrives at once.
        handler.flags.store(action.sa_flags, Ordering::SeqCst);
        (handler.function).store(action.sa_sigaction, Ordering::Release);
        action.sa_sigaction = trampoline_address();
        action.sa_flags |= libc::SA_SIGINFO;
        if TAKEN_OVER.load(Ordering::Acquire) {
            action.sa_flags &= !libc::SA_RESETHAND;
        }
        keep_unblocked(&mut action.sa_mask);
    }
    // SAFETY: all-zero is a valid action.
    let mut kernels: Action = unsafe { zeroed() };
    // SAFETY: the pointers refer to live values, or are null.
    let result = unsafe {
        next(
            signal,
            ours.as_ref().map_or(null(), std::ptr::from_ref),
            &mut kernels,
        )
    };
    if result != 0 {
        handler.flags.store(before.1, Ordering::Relaxed);
        handler.function.store(before.0, Ordering::Release);
        return result;
    }
    let resets = |action: Action| action.sa_flags & libc::SA_RESETHAND != 0;
    if ours.is_some_and(resets) && TAKEN_OVER.load(Ordering::SeqCst) {
        // If `take_over` ran before the kernel had the trampoline, it has not changed the trampoline's flags.
        keep_handler(signal);
    }
    if kernels.sa_sigaction == trampoline_address() {
        (kernels.sa_sigaction, kernels.sa_flags) = before;
    }
    // SAFETY: the caller's pointer is valid or null.
    if let Some(old) = unsafe { old.as_mut() } {
        *old = kernels;
    }
    result
}

/// Implements `signal` and its variants.
unsafe fn set_handler(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    // SAFETY: all-zero is a valid action. Both actions are live.
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

static NEXT_SIGPROCMASK: Next = Next::new(c"sigprocmask");
static NEXT_PTHREAD_SIGMASK: Next = Next::new(c"pthread_sigmask");

/// Implements sigprocmask. `next` is the C library's function that the program has called.
///
/// # Safety
/// The conditions are those of sigprocmask(2).
unsafe fn change_mask(
    next: &Next,
    how: c_int,
    set: *const libc::sigset_t,
    old: *mut libc::sigset_t,
) -> c_int {
    let Some(function) = next.get() else {
        set_errno(libc::ENOSYS);
        return -1;
    };
    type Change =
        unsafe extern "C-unwind" fn(c_int, *const libc::sigset_t, *mut libc::sigset_t) -> c_int;
    // SAFETY: `function` is the C library's function, which has this signature. The caller's arguments are valid for
    // it.
    unsafe {
        let next = std::mem::transmute::<usize, Change>(function);
        match set.as_ref() {
            Some(set) if how != libc::SIG_UNBLOCK && DISPATCHED.load(Ordering::Acquire) => {
                let mut set = *set;
                keep_unblocked(&mut set);
                next(how, &set, old)
            }
            _ => next(how, set, old),
        }
    }
}

interpose! {
    /// Replaces sigaction(2).
    fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
        // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
        unsafe { set_action(signal, new, old) }
    }

    /// Replaces `__sigaction`, another name of sigaction(2).
    fn __sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
        // SAFETY: the arguments are valid for sigaction(2), as this function's contract requires.
        unsafe { set_action(signal, new, old) }
    }

    /// Replaces sigprocmask(2).
    fn sigprocmask(how: c_int, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int {
        // SAFETY: the arguments are valid for sigprocmask(2), as this function's contract requires.
        unsafe { change_mask(&NEXT_SIGPROCMASK, how, set, old) }
    }

    /// Replaces pthread_sigmask(3).
    fn pthread_sigmask(how: c_int, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int {
        // SAFETY: the arguments are valid for pthread_sigmask(3), as this function's contract requires.
        unsafe { change_mask(&NEXT_PTHREAD_SIGMASK, how, set, old) }
    }

    /// Replaces signal(2), with BSD's behaviour, which is the C library's default.
    fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the arguments are valid for signal(2), as this function's contract requires.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// Replaces signal(2) with BSD's behaviour.
    fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the arguments are valid for signal(2), as this function's contract requires.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// Replaces ssignal, an older name of signal(2) with BSD's behaviour.
    fn ssignal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the arguments are valid for signal(2), as this function's contract requires.
        unsafe { set_handler(number, handler, libc::SA_RESTART) }
    }

    /// Replaces signal(2) with System V's behaviour.
    fn sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the arguments are valid for signal(2), as this function's contract requires.
        unsafe { set_handler(number, handler, libc::SA_RESETHAND | libc::SA_NODEFER) }
    }

    /// Replaces signal(2) with System V's behaviour. Programs compiled with -std=c99 call this function as `signal`.
    fn __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the arguments are valid for signal(2), as this function's contract requires.
        unsafe { set_handler(number, handler, libc::SA_RESETHAND | libc::SA_NODEFER) }
    }
}
