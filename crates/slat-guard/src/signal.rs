//! The signal handlers of slat, and how they pass signals on to the program.
//!
//! slat uses three signals: SIGSEGV, SIGBUS and the kick signal. The handlers are installed directly by the system
//! call, not by the C library's `sigaction`: slat's preload library wraps that function, and the wrapper must see only
//! the program's calls.
//!
//! A signal that is not meant for slat is passed on to the action that the client (the program) has set. If the signal
//! was sent by a process, not caused by a fault, it is deferred until the thread leaves slat's code ([`defer`]).

use crate::arch::entries;
use crate::queue::queue;
use crate::section::{AllBlocked, change_mask, defer};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, const_fn, fence, global, spin_loop};
use crate::{generated, table};
use slat_process::calls;
use slat_process::context::{ip, is_write, set_ip, set_result};
use slat_process::forks;
use slat_process::handler::call_program;
use slat_process::once::Prepared;
use std::cell::Cell;
use std::io;
use std::mem;
use std::ptr;
use std::sync::atomic::Ordering;

/// The kernel's `struct sigaction`, which is the same on each architecture that slat supports.
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

const SA_RESTORER: u64 = 0x0400_0000;

/// The address of the code by which handlers return to the kernel (the *restorer*), or 0 for slat's own code. Relaxed
/// accesses suffice, because no other memory belongs to the value.
static RESTORER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Makes slat's handlers return to the kernel through the code at `address`. Call before [`install`].
///
/// # Safety
/// - The code at `address` calls rt_sigreturn(2), and is never removed.
pub unsafe fn set_restorer(address: usize) {
    RESTORER.store(address, Ordering::Relaxed);
}

/// Returns the address of the code through which handlers return to the kernel. Debuggers and unwinders recognise this
/// code.
pub fn restorer() -> usize {
    match RESTORER.load(Ordering::Relaxed) {
        0 => entries::before_restorer as *const () as usize + entries::NOP,
        address => address,
    }
}

global! {
    /// The actions that the program has set for SIGSEGV, SIGBUS and the kick signal.
    static CHAINED: [Chained; 3] = [Chained::new(), Chained::new(), Chained::new()];
}
static INSTALLED: Prepared = Prepared::new();

/// An action that any thread may change while handlers read it, protected by a sequence lock. It needs no allocation,
/// because the client may call `sigaction` in a handler or in its `malloc`.
struct Chained {
    /// 0 before the first change; odd during a change.
    version: AtomicU32,
    handler: AtomicUsize,
    flags: AtomicU64,
    mask: AtomicU64,
}

impl Chained {
    const_fn! {
        fn new() -> Self {
            Chained {
                version: AtomicU32::new(0),
                handler: AtomicUsize::new(libc::SIG_DFL),
                flags: AtomicU64::new(0),
                mask: AtomicU64::new(0),
            }
        }
    }

    /// Returns the action's fields. During a change, the result may be a mixture of two actions.
    fn fields(&self) -> KernelAction {
        KernelAction {
            handler: self.handler.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
            restorer: 0,
            mask: self.mask.load(Ordering::Relaxed),
        }
    }

    /// Returns the action, if an action was ever set. Async-signal-safe, because a thread blocks all its signals while
    /// it changes the action.
    fn get(&self) -> Option<KernelAction> {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let action = self.fields();
            // Orders the reads of the fields before the second read of the version.
            fence(Ordering::Acquire);
            if version & 1 == 0 && self.version.load(Ordering::Relaxed) == version {
                return (version != 0).then_some(action);
            }
            spin_loop();
        }
    }

    /// Replaces the action. Returns the old action, if an action was ever set. Async-signal-safe.
    fn set(&self, action: &KernelAction) -> Option<KernelAction> {
        let _blocked = AllBlocked::enter();
        let even = loop {
            let version = self.version.load(Ordering::Relaxed) & !1;
            let odd = version | 1;
            if (self.version)
                .compare_exchange_weak(version, odd, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                break version;
            }
            spin_loop();
        };
        let old = self.fields();
        // Orders the odd version before the new fields. So a handler that has read a new field finds that the version
        // has changed, and reads all fields again.
        fence(Ordering::Release);
        self.handler.store(action.handler, Ordering::Relaxed);
        self.flags.store(action.flags, Ordering::Relaxed);
        self.mask.store(action.mask, Ordering::Relaxed);
        self.version.store(even.wrapping_add(2), Ordering::Release);
        (even != 0).then_some(old)
    }
}

thread_local! {
    /// Whether the last guarded access of this thread that failed was ended by a kick. The variable has neither an
    /// initialiser nor a destructor that runs, because handlers write it.
    static KICKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a kick ended this thread's last guarded access that returned [`Gone`](crate::Gone). If not, memory was not
/// accessible.
pub fn was_kicked() -> bool {
    KICKED.get()
}

/// Makes [`was_kicked`] return `false` until a kick ends a later access.
pub fn forget_kick() {
    KICKED.set(false);
}

/// Returns the signal that [`kick`] sends: a realtime signal that programs rarely use.
pub fn kick_signal() -> i32 {
    libc::SIGRTMAX() - 3
}

fn chained(sig: i32) -> Option<&'static Chained> {
    match sig {
        libc::SIGSEGV => Some(&CHAINED[0]),
        libc::SIGBUS => Some(&CHAINED[1]),
        _ if sig == kick_signal() => Some(&CHAINED[2]),
        _ => None,
    }
}

/// Changes the kernel's action for `sig`; both pointers may be null.
///
/// # Safety
/// - `new` and `old` are null or point to an action. The handler of `new` can run on any thread at any time.
unsafe fn rt_sigaction(
    sig: i32,
    new: *const KernelAction,
    old: *mut KernelAction,
) -> io::Result<()> {
    // The fourth argument, 8, is the size of the kernel's signal set in bytes.
    let arguments = [sig as usize, new as usize, old as usize, 8, 0, 0];
    // SAFETY: the pointers are null or point to actions, as this function's `# Safety` asks of its caller.
    let answer = calls::result(unsafe { calls::raw(libc::SYS_rt_sigaction, arguments) });
    answer.map(drop).map_err(io::Error::from_raw_os_error)
}

/// Changes the kernel's action for a signal, even for a signal that the C library reserves for itself. The action gets
/// slat's restorer.
///
/// # Errors
/// The kernel's errno.
///
/// # Safety
/// - The handler of `new` can run on any thread at any time.
pub unsafe fn set_kernels(
    signal: i32,
    new: Option<&libc::sigaction>,
) -> Result<libc::sigaction, i32> {
    let new = new.map(|action| KernelAction {
        flags: u64::from(action.sa_flags as u32) | SA_RESTORER,
        restorer: restorer(),
        ..to_kernel(action)
    });
    let mut old = KernelAction {
        handler: libc::SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    let new = new.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `new` is null or points to a local variable, and `old` is a local variable. The handler of `new` can run
    // at any time, as this function's `# Safety` asks of its caller.
    unsafe { rt_sigaction(signal, new, &mut old) }
        .map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))?;
    Ok(to_libc(&old))
}

fn to_kernel(action: &libc::sigaction) -> KernelAction {
    KernelAction {
        handler: action.sa_sigaction,
        flags: action.sa_flags as u32 as u64,
        restorer: 0,
        // SAFETY: the C library's signal set is larger, and begins with the kernel's 64 bits.
        mask: unsafe { ptr::read((&raw const action.sa_mask).cast::<u64>()) },
    }
}

fn to_libc(action: &KernelAction) -> libc::sigaction {
    // SAFETY: all-zero is a valid `sigaction`.
    let mut out: libc::sigaction = unsafe { mem::zeroed() };
    out.sa_sigaction = action.handler;
    // Leave out SA_RESTORER, because the C library's `sigaction` never returns this flag. All other flags fit into an
    // `int`.
    out.sa_flags = (action.flags & !SA_RESTORER) as i32;
    // SAFETY: the C library's signal set is larger, and begins with the kernel's 64 bits.
    unsafe { ptr::write((&raw mut out.sa_mask).cast::<u64>(), action.mask) };
    out
}

/// Installs the handlers for SIGSEGV, SIGBUS and the kick signal, and remembers the actions that were set before. Later
/// calls do nothing.
pub fn install() -> io::Result<()> {
    INSTALLED.once(install_all)
}

/// Installs the handlers that are not installed yet.
fn install_all() -> io::Result<()> {
    let ours = KernelAction {
        handler: entry as *const () as usize,
        flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART) as u64 | SA_RESTORER,
        restorer: restorer(),
        mask: 0,
    };
    for sig in [libc::SIGSEGV, libc::SIGBUS, kick_signal()] {
        let mut old = KernelAction {
            handler: 0,
            flags: 0,
            restorer: 0,
            mask: 0,
        };
        // SAFETY: the call writes to a local variable. The old action is read before slat's handler, which uses it, is
        // installed.
        unsafe { rt_sigaction(sig, ptr::null(), &mut old)? };
        if old.handler == ours.handler {
            // The handler is already installed: this is a forked child, and its parent has installed it.
            continue;
        }
        if let Some(chained) = chained(sig) {
            chained.set(&old);
        }
        // SAFETY: the handler is async-signal-safe and has the signature that SA_SIGINFO requires.
        unsafe { rt_sigaction(sig, &ours, ptr::null_mut())? };
    }
    Ok(())
}

/// Call in a forked child: ends the changes of actions that other threads of the parent were making at the fork.
/// Async-signal-safe.
pub fn after_fork_in_child() {
    for chained in CHAINED.iter() {
        let version = chained.version.load(Ordering::Relaxed);
        if version & 1 != 0 {
            // Relaxed suffices: the child has one thread, whose handlers see its stores, and threads that it makes
            // later see them, too.
            (chained.version).store(version.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

/// Sets the client's action for `sig`, like `sigaction`: slat passes signals that are not meant for slat on to this
/// action. If `action` is `None`, only reads the client's action. Returns the old action, or `None` if `sig` is not one
/// of slat's three signals, or no action is known yet. Async-signal-safe.
pub fn set_chained(sig: i32, action: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let chained = chained(sig)?;
    let old = match action {
        Some(action) => chained.set(&to_kernel(action)),
        None => chained.get(),
    };
    old.as_ref().map(to_libc)
}

/// A kick's `si_value` is the address of this variable. So it differs from a signal of the client, and from a kick of
/// another copy of this crate.
static KICK: u8 = 0;

/// The function given to [`on_fault`], or 0.
static ON_FAULT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Sets the function that the handler calls for an access of the program to inaccessible memory: with the address, and
/// whether the access is a write. If it returns `true`, the access is made again. The function is async-signal-safe. It
/// may wait: meanwhile the thread has the signal mask of the interrupted code.
pub fn on_fault(call: fn(usize, bool) -> bool) {
    ON_FAULT.store(call as usize, Ordering::Release);
}

/// Calls the function that [`on_fault`] has set. Returns whether the access is to be made again.
///
/// # Safety
/// - `info` and `context` are those that the kernel gave the handler of a fault.
unsafe fn is_handled(sig: i32, info: *const libc::siginfo_t, context: &libc::ucontext_t) -> bool {
    /// `SEGV_ACCERR`: the address is mapped, and its protection forbids the access.
    const FORBIDDEN: i32 = 2;
    let call = ON_FAULT.load(Ordering::Acquire);
    // SAFETY: the kernel has filled in the information.
    if call == 0 || sig != libc::SIGSEGV || unsafe { (*info).si_code } != FORBIDDEN {
        return false;
    }
    // SAFETY: the kernel has filled in the address. The C library's larger mask begins with the kernel's 64 bits. Only
    // `on_fault` stores here.
    let (address, mask, call) = unsafe {
        let mask = ptr::read((&raw const context.uc_sigmask).cast::<u64>());
        let call = mem::transmute::<usize, fn(usize, bool) -> bool>(call);
        ((*info).si_addr() as usize, mask, call)
    };
    let before = change_mask(libc::SIG_SETMASK, mask);
    let handled = call(address, is_write(context));
    change_mask(libc::SIG_SETMASK, before);
    handled
}

/// The part of the kernel's `siginfo_t` that is filled in for a queued signal.
#[repr(C)]
struct Queued {
    signo: i32,
    errno: i32,
    code: i32,
    _align: i32,
    pid: i32,
    uid: u32,
    value: usize,
    _rest: [u64; 12],
}

const _: () = assert!(size_of::<Queued>() == size_of::<libc::siginfo_t>());

/// Sends the kick signal to a thread of this process. If the thread is in a guarded access, also if it sleeps in the
/// kernel's page fault handler, the access returns [`Gone`](crate::Gone).
pub fn kick(tid: libc::pid_t) {
    let info = Queued {
        signo: kick_signal(),
        errno: 0,
        code: libc::SI_QUEUE,
        _align: 0,
        pid: forks::owner(),
        uid: 0,
        value: &raw const KICK as usize,
        _rest: [0; 12],
    };
    // SAFETY: `info` has the size of a `siginfo_t`, as is asserted above. (If the thread has ended, the call returns
    // ESRCH, which can be ignored.)
    let _ = unsafe { queue((info.pid, tid), kick_signal(), (&raw const info).cast()) };
}

/// Whether a signal is a kick of this copy of the crate.
///
/// # Safety
/// `info` is the argument that the kernel has passed to the handler.
unsafe fn is_kick(sig: i32, info: *const libc::siginfo_t) -> bool {
    // SAFETY: the kernel fills in the fields that belong to the signal's code. Only this copy of the crate uses the
    // address of `KICK`.
    sig == kick_signal()
        && unsafe {
            (*info).si_code == libc::SI_QUEUE
                && ptr::eq((*info).si_value().sival_ptr.cast(), &raw const KICK)
        }
}

slat_process::handler! {
    /// The signal handler that the kernel calls for SIGSEGV, SIGBUS and the kick signal.
    entry calls handler
}

extern "C-unwind" fn handler(sig: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context and the information to a handler with SA_SIGINFO, for its own use.
    let (registers, kicked, sent) = unsafe {
        let registers = &mut *context.cast::<libc::ucontext_t>();
        // `si_code` is not positive if a process has sent the signal (kill, tgkill, sigqueue). Otherwise it is a fault,
        // which would occur again.
        (registers, is_kick(sig, info), (*info).si_code <= 0)
    };
    if kicked || !sent {
        let at = ip(registers);
        let fixup = table::fixup(at).or_else(|| {
            let exit = generated::exit(at)?;
            set_result(registers, at);
            Some(exit)
        });
        if let Some(fixup) = fixup {
            KICKED.set(kicked);
            set_ip(registers, fixup);
            return;
        }
        // SAFETY: these are the arguments that the kernel gave this handler.
        if !kicked && unsafe { is_handled(sig, info, registers) } {
            return;
        }
    }
    // SAFETY: these are the arguments that the kernel has passed to this handler.
    if !kicked && !unsafe { defer(sig, info, context) } {
        // SAFETY: these are the arguments that the kernel has passed to this handler.
        unsafe { chain(sig, sent, info, context) }
    }
}

/// Does what the kernel would have done if the client's action were installed instead of slat's handler.
///
/// # Safety
/// - `info` and `context` are the arguments that the kernel has passed to the handler of `sig`.
unsafe fn chain(sig: i32, sent: bool, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(chained) = chained(sig) else { return };
    let Some(action) = chained.get() else { return };
    let default = KernelAction {
        handler: libc::SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    match action.handler {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: these calls only set the default action and send the signal. A fault occurs again when the
            // handler returns, but a signal that was sent must be sent again. It stays blocked until the handler
            // returns.
            unsafe {
                let _ = rt_sigaction(sig, &default, ptr::null_mut());
                if sent {
                    libc::syscall(
                        libc::SYS_tgkill,
                        libc::getpid(),
                        libc::syscall(libc::SYS_gettid),
                        sig,
                    );
                }
            }
        }
        function => {
            let has = |flag: i32| action.flags & u64::from(flag as u32) != 0;
            if has(libc::SA_RESETHAND) {
                chained.set(&default);
            }
            // Block the signals that the client's action requires during its handler. The kernel restores the old mask
            // when slat's handler returns.
            change_mask(libc::SIG_BLOCK, action.mask);
            if has(libc::SA_NODEFER) {
                change_mask(libc::SIG_UNBLOCK, 1 << (sig - 1));
            }
            // SAFETY: the program has installed this function for this signal.
            unsafe { call_program(function, sig, info, context) };
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn action(number: usize) -> KernelAction {
        KernelAction {
            handler: number,
            flags: number as u64 + 1,
            restorer: 0,
            mask: number as u64 + 2,
        }
    }

    fn parts(action: KernelAction) -> (usize, u64, u64) {
        (action.handler, action.flags, action.mask)
    }

    /// A handler must never see a mixture of two actions, in whatever order their fields become visible.
    /// [`crate::sync`] explains why the main thread makes the change.
    #[test]
    fn a_handler_sees_no_mixture() {
        loom::model(|| {
            let chained = Arc::new(Chained::new());
            chained.set(&action(100));
            let handler = {
                let chained = chained.clone();
                thread::spawn(move || chained.get().map(parts))
            };
            let before = chained.set(&action(200)).map(parts);
            let [first, second] = [action(100), action(200)].map(parts).map(Some);
            assert_eq!(before, first);
            assert!([first, second].contains(&handler.join().unwrap()));
        });
    }

    /// Two threads each replace the action. Each thread must get, with all its fields, the action that was in force
    /// directly before its own, even if the other thread has set that action.
    #[test]
    fn each_of_two_threads_gets_the_action_that_it_has_replaced() {
        loom::model(|| {
            let chained = Arc::new(Chained::new());
            let setter = {
                let chained = chained.clone();
                thread::spawn(move || chained.set(&action(100)).map(parts))
            };
            let before = chained.set(&action(200)).map(parts);
            let others = setter.join().unwrap();
            let [first, second] = [action(100), action(200)].map(parts).map(Some);
            assert!([(None, second), (first, None)].contains(&(before, others)));
            let last = if others.is_none() { second } else { first };
            assert_eq!(chained.get().map(parts), last);
        });
    }
}
