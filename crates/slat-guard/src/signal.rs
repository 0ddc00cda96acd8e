//! The signal handlers, and what they hand on.
//!
//! Three signals are ours: SIGSEGV, SIGBUS and the kick signal. The handlers are installed by the
//! system call itself, not by the C library's `sigaction`: inside a preloaded library that name is
//! the library's own wrapper, which must see the client's calls only.

use crate::table;
use std::cell::Cell;
use std::io;
use std::mem;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The kernel's `struct sigaction` on x86-64.
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

const SA_RESTORER: u64 = 0x0400_0000;

// The kernel returns from a handler through this; debuggers recognise the two instructions.
std::arch::global_asm!(
    ".pushsection .text.slat_guard_restorer,\"ax\",@progbits",
    ".balign 16",
    "nop",
    "slat_guard_restorer:",
    "mov rax, 15",
    "syscall",
    ".popsection",
);

unsafe extern "C" {
    safe fn slat_guard_restorer();
}

/// The actions to hand foreign signals to, as leaked boxes: a handler may be reading the old one.
static CHAINED: [AtomicPtr<libc::sigaction>; 3] = [const { AtomicPtr::new(ptr::null_mut()) }; 3];
static INSTALLED: Mutex<bool> = Mutex::new(false);

thread_local! {
    /// What ended the last guarded access of this thread that did not happen. No initialisation and no
    /// destructor: the handler may write it.
    static KICKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether the last access of this thread that came back as [`Gone`](crate::Gone) was kicked, in contrast to
/// memory that is not there.
pub fn was_kicked() -> bool {
    KICKED.get()
}

/// The signal that [`kick`] sends: a realtime signal that programs rarely use.
pub fn kick_signal() -> i32 {
    libc::SIGRTMAX() - 3
}

fn slot(sig: i32) -> Option<&'static AtomicPtr<libc::sigaction>> {
    match sig {
        libc::SIGSEGV => Some(&CHAINED[0]),
        libc::SIGBUS => Some(&CHAINED[1]),
        _ if sig == kick_signal() => Some(&CHAINED[2]),
        _ => None,
    }
}

/// Changes the kernel's action for `sig`; both pointers may be null.
unsafe fn rt_sigaction(
    sig: i32,
    new: *const KernelAction,
    old: *mut KernelAction,
) -> io::Result<()> {
    // SAFETY: the caller gives pointers to whole structures or null; 8 is the size of the mask.
    match unsafe { libc::syscall(libc::SYS_rt_sigaction, sig, new, old, 8usize) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn to_libc(action: &KernelAction) -> libc::sigaction {
    // SAFETY: all-zero is a valid `sigaction`.
    let mut out: libc::sigaction = unsafe { mem::zeroed() };
    out.sa_sigaction = action.handler;
    // The restorer is the kernel's business; what is left fits into an int.
    out.sa_flags = (action.flags & !SA_RESTORER) as i32;
    // SAFETY: the kernel's 64-bit mask is the beginning of the C library's larger one.
    unsafe { ptr::write((&raw mut out.sa_mask).cast::<u64>(), action.mask) };
    out
}

/// Installs the handlers for SIGSEGV, SIGBUS and the kick signal, and remembers the actions that
/// were there. Calling it again does nothing.
pub fn install() -> io::Result<()> {
    let mut installed = INSTALLED.lock().unwrap_or_else(|e| e.into_inner());
    if *installed {
        return Ok(());
    }
    let ours = KernelAction {
        handler: handler as *const () as usize,
        flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART) as u64 | SA_RESTORER,
        restorer: slat_guard_restorer as *const () as usize,
        mask: 0,
    };
    for sig in [libc::SIGSEGV, libc::SIGBUS, kick_signal()] {
        let mut old = KernelAction {
            handler: 0,
            flags: 0,
            restorer: 0,
            mask: 0,
        };
        // SAFETY: a local to write to. The old action is put in place before the handler that reads it.
        unsafe { rt_sigaction(sig, ptr::null(), &mut old)? };
        set_chained(sig, Some(&to_libc(&old)));
        // SAFETY: the handler is async-signal-safe and has the signature that SA_SIGINFO asks for.
        unsafe { rt_sigaction(sig, &ours, ptr::null_mut())? };
    }
    *installed = true;
    Ok(())
}

/// Replaces the action to which signals are handed that are not ours, as if by `sigaction`; `None`
/// only asks. Returns the action so far; `None` if `sig` is none of our three signals or no action
/// is known yet.
pub fn set_chained(sig: i32, action: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let slot = slot(sig)?;
    let old = match action {
        // The old box is leaked: a handler on another thread may still be reading it.
        Some(action) => slot.swap(Box::into_raw(Box::new(*action)), Ordering::AcqRel),
        None => slot.load(Ordering::Acquire),
    };
    // SAFETY: what stands in a slot came from a box that is never freed.
    (!old.is_null()).then(|| unsafe { *old })
}

/// Sends the kick signal to a thread of this process. If it is inside a guarded access, also asleep
/// in the kernel's page fault handler, the access returns [`Gone`](crate::Gone).
pub fn kick(tid: libc::pid_t) {
    // SAFETY: plain system calls. A thread that is gone gives ESRCH, which is fine.
    unsafe {
        libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, kick_signal());
    }
}

extern "C" fn handler(sig: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let ucontext = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives an SA_SIGINFO handler its own context.
    let ip = unsafe { &mut (*ucontext).uc_mcontext.gregs[libc::REG_RIP as usize] };
    if let Some(fixup) = table::fixup(*ip as usize) {
        KICKED.set(sig == kick_signal());
        // A SIGSEGV or SIGBUS that another process sent lands here too when it hits the very
        // instruction. It is treated as a fault: the access is tried again.
        *ip = fixup as i64;
        return;
    }
    // SAFETY: these are the arguments that the kernel gave us.
    unsafe { chain(sig, info, context) }
}

/// Does what the kernel would have done, had the chained action been installed.
unsafe fn chain(sig: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(slot) = slot(sig) else { return };
    let action = slot.load(Ordering::Acquire);
    // SAFETY: boxes in the slots are never freed; `info` is the kernel's.
    let (action, code) = unsafe { (action.as_ref(), (*info).si_code) };
    // Sent by someone (kill, tgkill, sigqueue), in contrast to a fault that would come again.
    let sent = code <= 0;
    let Some(action) = action else { return };
    match action.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            if sig == kick_signal() {
                // Our own kick that found nothing to interrupt. The kernel would end the process
                // for anyone else's, and so does this.
                // SAFETY: a sent signal carries the sender.
                if code == libc::SI_TKILL && unsafe { (*info).si_pid() == libc::getpid() } {
                    return;
                }
            }
            let default = KernelAction {
                handler: libc::SIG_DFL,
                flags: 0,
                restorer: 0,
                mask: 0,
            };
            // SAFETY: the default action; the fault comes again when the handler returns, a signal
            // that was sent has to be sent again. It stays blocked until then.
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
            if action.sa_flags & libc::SA_RESETHAND != 0 {
                static DEFAULT: libc::sigaction =
                    // SAFETY: all-zero is a valid `sigaction`: the default action.
                    unsafe { mem::transmute([0u8; size_of::<libc::sigaction>()]) };
                slot.store((&raw const DEFAULT).cast_mut(), Ordering::Release);
            }
            // SAFETY: the client's handler runs with its own mask, which the kernel undoes when our
            // handler returns; the signature follows its flags.
            unsafe {
                let set = &raw const action.sa_mask;
                libc::syscall(
                    libc::SYS_rt_sigprocmask,
                    libc::SIG_BLOCK,
                    set,
                    0usize,
                    8usize,
                );
                if action.sa_flags & libc::SA_NODEFER != 0 {
                    let own = 1u64 << (sig - 1);
                    let how = libc::SIG_UNBLOCK;
                    libc::syscall(libc::SYS_rt_sigprocmask, how, &own, 0usize, 8usize);
                }
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    type Full = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
                    mem::transmute::<usize, Full>(function)(sig, info, context);
                } else {
                    mem::transmute::<usize, extern "C" fn(i32)>(function)(sig);
                }
            }
        }
    }
}
