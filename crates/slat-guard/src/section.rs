//! Sections of code during which the program's signal handlers do not run.
//!
//! slat's code holds locks. If a handler of the program interrupted this code, it might call slat again on the thread
//! that holds a lock (open `/dev/kvm`, map memory, or read the registers of the vCPU that it has interrupted), or leave
//! by `siglongjmp` and never return. With a real KVM neither is a problem, because a handler runs only after the system
//! call has ended. A [`Section`] gives calls of slat the same property.
//!
//! Every handler that is installed for the program calls [`defer`] first. Inside a section, `defer` *defers* the
//! signal: it queues the signal again, for this thread and with its information, and blocks the signal in the signal
//! mask to which the thread returns, and the program's handler does not run. The end of the outermost section unblocks
//! the deferred signals, and the kernel delivers them at that point, where slat's code is not on the stack any more. So
//! the kernel still decides about the order of signals, their masks and their stacks.
//!
//! If several instances of one realtime signal are pending, their order may change: a deferred instance is queued after
//! those that were already queued.
//!
//! # The variables that handlers read
//! Only a thread and the handlers on this thread use the thread's variables `DEPTH` and `WAITING`. A handler runs
//! between two instructions of the thread, and leaves the variables as it found them, unless it leaves by longjmp. In
//! that case the thread was in no section, and [`defer`] has emptied `WAITING`.

use crate::arch::entries;
use crate::queue::queue;
use slat_process::calls::{self, Call};
use slat_process::{errno, set_errno};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

thread_local! {
    // Neither variable has an initialiser or a destructor that runs, because handlers read both.
    /// The number of sections that this thread has entered and not left.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The signals that were deferred, and are blocked until the outermost section ends. Bit 0 is signal 1.
    static WAITING: Cell<u64> = const { Cell::new(0) };
}

/// The address of the function given to [`on_deferral`], or 0.
static ON_DEFERRAL: AtomicUsize = AtomicUsize::new(0);

/// Sets the function that the signal handler calls for every signal that arrives in a section. `call` should make the
/// thread's work in the section end soon, and must be async-signal-safe.
pub fn on_deferral(call: fn()) {
    ON_DEFERRAL.store(call as usize, Ordering::Relaxed);
}

/// The size of the kernel's signal set in bytes.
const SET_BYTES: usize = 8;

/// A section: until it is dropped, this thread is in slat's code. Sections may be nested.
#[derive(Debug)]
#[must_use]
pub struct Section(PhantomData<*const ()>);

impl Section {
    /// Enters a section.
    #[inline]
    pub fn enter() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Section(PhantomData)
    }

    /// Whether this thread is in a section.
    #[inline]
    pub fn is_entered() -> bool {
        DEPTH.get() != 0
    }

    /// Whether a signal was deferred on this thread, and so waits until the thread leaves its outermost section.
    #[inline]
    pub fn delays_a_signal() -> bool {
        WAITING.get() != 0
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 && WAITING.get() != 0 {
            deliver();
        }
    }
}

/// Unblocks the deferred signals. Their handlers run during this call.
#[cold]
fn deliver() {
    // A handler may run at any time now that the depth is 0. It empties `WAITING` itself and unblocks these signals
    // ([`defer`]), so that they are unblocked even if that handler leaves by longjmp.
    let waiting = WAITING.get();
    // SAFETY: the pointer is to a live set of the size that the kernel expects.
    unsafe { entries::change_mask(libc::SIG_UNBLOCK, &waiting, ptr::null_mut(), SET_BYTES) };
    WAITING.set(0);
}

/// The signals that slat never blocks. Bit 0 is signal 1.
static UNBLOCKABLE: AtomicU64 = AtomicU64::new(0);

/// Makes sure that slat never blocks `signal` from now on, on any thread.
pub fn never_block(signal: i32) {
    UNBLOCKABLE.fetch_or(1 << (signal - 1), Ordering::Relaxed);
}

/// Returns the signals of `set` that slat may block.
pub fn blockable(set: u64) -> u64 {
    set & !UNBLOCKABLE.load(Ordering::Relaxed)
}

/// Changes this thread's signal mask by a set in the kernel's form: bit 0 is signal 1. `how` has the same meaning as in
/// `sigprocmask`. Returns the old mask. Signals that [must not be blocked](never_block) are not blocked.
/// Async-signal-safe.
pub fn change_mask(how: i32, set: u64) -> u64 {
    let set = match how {
        libc::SIG_UNBLOCK => set,
        _ => blockable(set),
    };
    let mut before = 0u64;
    let (set, to) = (&raw const set as usize, &raw mut before as usize);
    // SAFETY: both pointers are to live sets of the size that is passed. (The C library's wrapper is not used because
    // it leaves out some signals.)
    unsafe {
        calls::raw(
            libc::SYS_rt_sigprocmask,
            [how as usize, set, to, SET_BYTES, 0, 0],
        )
    };
    before
}

/// Blocks all signals on this thread until it is dropped: for changes that handlers on this thread must not see
/// incomplete.
#[derive(Debug)]
pub(crate) struct AllBlocked(u64);

impl AllBlocked {
    pub(crate) fn enter() -> Self {
        AllBlocked(change_mask(libc::SIG_BLOCK, u64::MAX))
    }
}

impl Drop for AllBlocked {
    fn drop(&mut self) {
        change_mask(libc::SIG_SETMASK, self.0);
    }
}

/// Whether the interrupted instruction itself has caused the signal. (If it were executed again, the signal would occur
/// again.)
fn is_synchronous(signal: i32, code: i32) -> bool {
    const FAULTS: [i32; 6] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTRAP,
        // A seccomp filter causes SIGSYS. If SIGSYS is blocked then, the kernel ends the process.
        libc::SIGSYS,
    ];
    // A code above 0 is from the kernel: a process cannot send a signal with such a code.
    code > 0 && FAULTS.contains(&signal)
}

/// The mark of a disguised signal ([`disguise`]), in the upper half of `si_errno`. In the kernel's own signals,
/// `si_errno` is 0.
const DISGUISED: i32 = 0x51a7 << 16;

/// Changes the information of a signal so that the helper thread can queue the signal again. The kernel refuses signals
/// from another thread whose code is one of the kernel's own or `tgkill`'s (rt_tgsigqueueinfo(2)). So this function
/// gives the signal the code of a queued signal, and stores its own code in `si_errno`.
fn disguise(info: &mut libc::siginfo_t) {
    if info.si_code >= 0 || info.si_code == libc::SI_TKILL {
        info.si_errno = DISGUISED | info.si_code & 0xffff;
        info.si_code = libc::SI_QUEUE;
    }
}

/// Undoes [`disguise`].
fn reveal(info: &mut libc::siginfo_t) {
    if info.si_code == libc::SI_QUEUE && info.si_errno & !0xffff == DISGUISED {
        info.si_code = i32::from(info.si_errno as i16);
        info.si_errno = 0;
    }
}

/// Call first in a signal handler, before the program's handler runs. Returns `true` if the program's handler must not
/// run now, because the thread is in a [`Section`]: then the signal will be delivered when the thread leaves the
/// section. Async-signal-safe.
///
/// Two kinds of signals are never deferred: faults of the interrupted instruction, and signals that the kernel refuses
/// to queue again (`rt_tgsigqueueinfo` fails for a realtime signal beyond RLIMIT_SIGPENDING). For the latter the
/// handler runs at once, because that is better than if it never ran.
///
/// # Safety
/// `info` and `context` are the arguments that the kernel has passed to a handler that was installed with `SA_SIGINFO`.
pub unsafe fn defer(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> bool {
    // SAFETY: a handler may change the information that the kernel has passed to it.
    unsafe { reveal(&mut *info) };
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel has passed the context. The C library's signal set is larger, and begins with the kernel's.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    if !Section::is_entered() {
        // If the thread has just left its outermost section and not yet unblocked the deferred signals, `WAITING` is
        // not empty. Unblock them now.
        *mask &= !WAITING.replace(0);
        return false;
    }
    // SAFETY: the kernel has filled in `info`.
    if is_synchronous(signal, unsafe { (*info).si_code }) {
        return false;
    }
    let before = errno();
    let call = ON_DEFERRAL.load(Ordering::Relaxed);
    if call != 0 {
        // SAFETY: only `on_deferral` stores here.
        unsafe { mem::transmute::<usize, fn()>(call)() };
    }
    let bit = 1u64 << (signal - 1);
    // Block the signal before queueing it again: if the action has SA_NODEFER, the kernel has not blocked it, and would
    // deliver it at once.
    let blocked = change_mask(libc::SIG_BLOCK, bit);
    // SAFETY: a handler may change the information that the kernel has passed to it.
    let queued = unsafe {
        if !calls::is_allowed(Call::QueueSignal) {
            disguise(&mut *info);
        }
        queue(slat_process::myself(), signal, info)
    };
    set_errno(before);
    if queued.is_err() {
        // SAFETY: a handler may change the information that the kernel has passed to it.
        unsafe { reveal(&mut *info) };
        change_mask(libc::SIG_SETMASK, blocked);
        return false;
    }
    *mask |= bit;
    WAITING.set(WAITING.get() | bit);
    true
}
