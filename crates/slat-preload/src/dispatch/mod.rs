//! Dispatch: the kernel sends system calls that do not come from the C library's text to slat (Syscall User Dispatch,
//! `Documentation/admin-guide/syscall-user-dispatch.rst`). `docs/dispatch.md` has the design and its alternatives.
//!
//! | file | idea |
//! |---|---|
//! | `text` | the range of addresses from which calls pass |
//! | `scan` | whether the program has calls of its own |
//! | `frame` | the program's state at a call, and the stack on which it is served |
//! | `calls` | the calls that concern the thread, its signals or its memory; all others go to `indirect` |
//! | `sites`, `direct` | call sites of `KVM_RUN`, which are rewritten to jump to slat after a while |
//! | `filters` | the program's seccomp filters |
//! | `robust` | robust futexes |
//! | `rseq` | restartable sequences |
//! | `request` | the arguments for making a thread or a process |
//! | `threads` | threads and processes that the program makes itself |
//! | `library_threads` | threads that the C library makes for the program |
//!
//! The kernel keeps the dispatch for each thread. New threads and processes begin without it, and [`arm_thread`]
//! switches it on before they run the program.

mod calls;
mod direct;
pub mod filters;
mod frame;
mod library_threads;
mod request;
mod robust;
mod rseq;
mod scan;
mod sites;
mod text;
pub mod threads;

use crate::real::kernel;
pub use calls::error;
use slat_guard::change_mask;
use std::sync::OnceLock;
use text::Text;

/// `PR_SET_SYSCALL_USER_DISPATCH`, `PR_SYS_DISPATCH_OFF` and `PR_SYS_DISPATCH_ON` of `include/uapi/linux/prctl.h`.
const SET_DISPATCH: usize = 59;
const OFF: usize = 0;
const ON: usize = 1;

static TEXT: OnceLock<Text> = OnceLock::new();

/// Whether calls are dispatched in this process.
pub fn is_armed() -> bool {
    TEXT.get().is_some()
}

/// Makes the kernel dispatch the calls of this thread, and those of the threads and processes it makes. Call while the
/// process has one thread.
///
/// # Errors
/// Why this host cannot do that: the end of a sentence for the user.
pub fn arm() -> Result<(), &'static str> {
    let text = Text::find().ok_or("the C library is not one that slat knows")?;
    let (gate, restorer) = (text.gate, text.restorer);
    let text = TEXT.get_or_init(|| text);
    if !arm_with(text) {
        return Err("this kernel has no Syscall User Dispatch (Linux 5.11, CONFIG_GENERIC_ENTRY)");
    }
    // SAFETY: the instructions are there; the handlers are not installed yet.
    unsafe {
        slat_process::gate::move_to(gate);
        slat_guard::set_restorer(restorer);
        frame::set_restorer(restorer);
    }
    library_threads::prepare();
    library_threads::make_stack();
    slat_guard::never_block(libc::SIGSYS);
    change_mask(libc::SIG_UNBLOCK, 1 << (libc::SIGSYS - 1));
    crate::signals::take_over_dispatch(frame::entry as *const () as usize);
    crate::prepare().map_err(|_| "there is no memory")
}

/// Whether a sanitizer's runtime is part of the program or of a library. A runtime's own calls must reach the kernel.
fn has_sanitizer() -> bool {
    // SAFETY: a string that ends with 0.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__sanitizer_set_report_path".as_ptr()) };
    !found.is_null()
}

/// Arms a program that the dynamic linker has loaded, if the program's own code makes system calls, or if the user asks
/// for it (`SLAT_DISPATCH`, for calls of the program's libraries). Call at the program's start.
pub fn arm_if_needed() {
    let is_asked =
        std::env::var_os("SLAT_DISPATCH").is_some_and(|value| !value.is_empty() && value != "0");
    if (is_asked || text::program_makes_calls() && !has_sanitizer())
        && let Err(why) = arm()
    {
        slat_kvm::messages::say(format_args!(
            "this program makes system calls of its own, which slat does not see: {why}"
        ));
    }
}

fn arm_with(text: &Text) -> bool {
    // SAFETY: a plain call; without a selector.
    let armed = unsafe {
        kernel!(
            libc::SYS_prctl,
            SET_DISPATCH,
            ON,
            text.range.start,
            text.range.len(),
            0
        )
    };
    armed.is_ok()
}

/// Makes the kernel dispatch the calls of this thread, if those of the process are dispatched. Async-signal-safe.
pub fn arm_thread() {
    if let Some(text) = TEXT.get() {
        // This cannot fail, as it has worked for the first thread.
        arm_with(text);
    }
}

/// Stops the dispatch of this thread's calls: they pass to the kernel.
fn disarm_thread() {
    // SAFETY: a plain call.
    let _ = unsafe { kernel!(libc::SYS_prctl, SET_DISPATCH, OFF, 0, 0, 0) };
}

/// Serves a call and returns to the program. Runs on slat's stack. Unwinds if the C library cancels the thread.
///
/// # Safety
/// - `frame` is this thread's copy of the state that the kernel has saved.
unsafe extern "C-unwind" fn serve(frame: *mut frame::Frame) -> ! {
    let before = slat_process::errno();
    // SAFETY: the caller's promise: no other code has the copy.
    unsafe {
        if (*frame).comes_from_alternate() {
            // The kernel sees that the thread runs on another stack, and would put the next handler
            // over this one's frame.
            let free = (*frame).free_alternate();
            let _ = kernel!(libc::SYS_sigaltstack, &raw const free, 0);
        }
        // From here on handlers of the program may run, as they may while the kernel serves a call.
        change_mask(libc::SIG_SETMASK, (*frame).mask);
        let answer = calls::answer(&mut *frame);
        (*frame).set_register(libc::REG_RAX, answer as usize);
        slat_process::set_errno(before);
        frame::resume(frame)
    }
}

/// Blocks all signals of this thread, until it returns to the program.
fn block_all() {
    change_mask(libc::SIG_BLOCK, u64::MAX);
}
