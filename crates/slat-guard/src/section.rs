//! Sections of code in which the program's signal handlers wait.
//!
//! slat's code holds locks, and a handler of the program may call slat again on the thread that holds one: it opens
//! `/dev/kvm`, maps memory, or reads the registers of the vCPU that it has interrupted. It may also leave by
//! `siglongjmp` and never return. The kernel has neither problem, because a handler runs only after the system call has
//! ended. A [`Section`] gives calls to slat the same property.
//!
//! Every handler that is installed for the program calls [`defer`] first. Inside a section, `defer` queues the signal
//! again, for this thread and with its information, and blocks the signal in the mask that the thread returns to; the
//! program's handler does not run. The end of the outermost section unblocks the deferred signals. The kernel then
//! delivers them at that point, where slat has no other frame on the stack. So the kernel decides about the order of
//! signals, their masks and their stacks.
//!
//! Several pending instances of one realtime signal may change their order: a deferred instance is queued after those
//! that were queued already.
//!
//! # What a handler may see
//! The two variables belong to one thread and its handlers. A handler runs as a whole between two of the thread's
//! instructions, and leaves the variables as it found them, unless it leaves by longjmp. When it does, no section is
//! open, and [`defer`] has emptied `WAITING`.

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
    // Neither variable has an initialiser or a destructor, because handlers read both.
    /// Number of sections that this thread has entered and not left.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Signals that are deferred and blocked until the outermost section ends: bit 0 is signal 1.
    static WAITING: Cell<u64> = const { Cell::new(0) };
}

/// The function given to [`on_deferral`], or 0.
static ON_DEFERRAL: AtomicUsize = AtomicUsize::new(0);

/// Sets the function that the signal handler calls for every signal that arrives in a section. The function should make
/// the thread's work in the section end soon. `call` is async-signal-safe.
pub fn on_deferral(call: fn()) {
    ON_DEFERRAL.store(call as usize, Ordering::Relaxed);
}

/// The bytes of the kernel's signal set.
const SET_BYTES: usize = 8;

/// Marks this thread as being in slat's code until it is dropped. Sections nest.
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

    /// Whether a handler of the program is waiting for this thread to leave its sections.
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
    // A handler may run as soon as the depth is 0. The handler empties `WAITING` itself, so that a signal is unblocked
    // even if the handler of another signal never returns, because it calls longjmp.
    let waiting = WAITING.get();
    // SAFETY: the pointer is to a live set of the size that the kernel expects.
    unsafe { entries::change_mask(libc::SIG_UNBLOCK, &waiting, ptr::null_mut(), SET_BYTES) };
    WAITING.set(0);
}

/// Signals that are never blocked.
static UNBLOCKABLE: AtomicU64 = AtomicU64::new(0);

/// Makes slat never block `signal` from now on, on any thread.
pub fn never_block(signal: i32) {
    UNBLOCKABLE.fetch_or(1 << (signal - 1), Ordering::Relaxed);
}

/// Returns the signals of a set that may be blocked.
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
    // SAFETY: both pointers are to live sets of the size that is passed. (The C library's wrapper hides some signals
    // from the caller.)
    unsafe {
        calls::raw(
            libc::SYS_rt_sigprocmask,
            [how as usize, set, to, SET_BYTES, 0, 0],
        )
    };
    before
}

/// Blocks all signals on this thread until dropped: for changes that a handler on the same thread must not see half
/// done.
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

/// Whether the interrupted instruction itself caused the signal, so that the signal would occur again at once.
fn is_synchronous(signal: i32, code: i32) -> bool {
    const FAULTS: [i32; 6] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTRAP,
        // A seccomp filter sends SIGSYS. If SIGSYS were blocked, it would end the process.
        libc::SIGSYS,
    ];
    // Codes above 0 are reserved for the kernel; a process cannot send them.
    code > 0 && FAULTS.contains(&signal)
}

/// A mark in `si_errno` of a disguised signal, besides the signal's code. The kernel's own signals have 0 there.
const DISGUISED: i32 = 0x51a7 << 16;

/// Prepares a signal so that the helper can queue it again. The kernel allows no other thread to send a signal whose
/// code is the kernel's or `tgkill`'s (rt_tgsigqueueinfo(2)). So the signal gets the code of a queued one, and its own
/// code is kept in `si_errno`.
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

/// Call first in a signal handler, before the program's handler runs. Returns true if the program's handler must not
/// run now, because the thread is in a [`Section`]: the signal is then delivered when the thread leaves the section.
/// Async-signal-safe.
///
/// Faults of the interrupted instruction are never deferred. Neither is a signal that the kernel refuses to queue again
/// (`rt_tgsigqueueinfo` fails for a realtime signal beyond RLIMIT_SIGPENDING): its handler runs at once, because a
/// handler at the wrong moment is better than none.
///
/// # Safety
/// `info` and `context` are those that the kernel gave a handler that was installed with `SA_SIGINFO`.
pub unsafe fn defer(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> bool {
    // SAFETY: this handler may change the information that the kernel gave it.
    unsafe { reveal(&mut *info) };
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel has passed the context. The C library's set is larger, and begins with the kernel's set.
    let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
    if !Section::is_entered() {
        // `WAITING` is not empty if the thread has just left its sections and has not yet unblocked the signals.
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
    // With SA_NODEFER the kernel has not blocked the signal, and would deliver it again at once.
    let blocked = change_mask(libc::SIG_BLOCK, bit);
    // SAFETY: this handler may change the information that the kernel gave it.
    let queued = unsafe {
        if !calls::is_allowed(Call::QueueSignal) {
            disguise(&mut *info);
        }
        queue(slat_process::myself(), signal, info)
    };
    set_errno(before);
    if queued.is_err() {
        // SAFETY: this handler may change the information that the kernel gave it.
        unsafe { reveal(&mut *info) };
        change_mask(libc::SIG_SETMASK, blocked);
        return false;
    }
    *mask |= bit;
    WAITING.set(WAITING.get() | bit);
    true
}
