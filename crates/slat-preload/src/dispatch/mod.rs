//! Makes those system calls arrive at slat that the program makes outside the C library's text. Either the kernel sends
//! a signal for the call (Syscall User Dispatch, `Documentation/admin-guide/syscall-user-dispatch.rst`), or slat has
//! rewritten the call site. `docs/dispatch.md` has the design and its alternatives.
//!
//! | file | idea |
//! |---|---|
//! | `text` | the range of addresses from which calls pass, and the program's own code |
//! | `frame` | the program's state at a call, and the stack on which it is served |
//! | `calls` | the calls that concern the thread, its signals or its memory |
//! | `others` | all other calls, which go to `indirect` |
//! | `sites`, `direct` | call sites that are rewritten to jump to slat |
//! | `filters` | the program's seccomp filters |
//! | `robust` | robust futexes |
//! | `rseq` | restartable sequences |
//! | `request` | the arguments for making a thread or a process |
//! | `threads` | threads and processes that the program makes itself |
//! | `library_threads` | threads that the C library makes for the program |

mod calls;
mod direct;
mod filters;
mod frame;
mod library_threads;
mod others;
mod request;
mod robust;
mod rseq;
mod sites;
mod text;
mod threads;

use crate::real::kernel;
use crate::user_dispatch;
use slat_guard::change_mask;
use slat_kvm::abi::KVM_RUN;
use std::ops::Range;
use text::Text;

/// Makes the system calls of this thread arrive at slat, and also the system calls of the threads and processes that
/// this thread creates later. If all of `texts`, the program's code, can be read, slat rewrites the call sites in it.
/// Otherwise the kernel dispatches the calls. Call while the process has one thread.
///
/// # Errors
/// The reason why this host cannot do that, as the end of a sentence for the user.
pub fn arm(texts: Option<&[Range<usize>]>) -> Result<(), &'static str> {
    let text = Text::find().ok_or("the C library is not one that slat knows")?;
    user_dispatch::let_pass(text.range);
    // Returns of handlers (rt_sigreturn) are dispatched, too, unless they come from the C library's text.
    let is_dispatched = text.restorer.is_some() && user_dispatch::arm();
    // SAFETY: `Text::find` has found the instructions at these addresses. The handlers are not installed yet.
    unsafe {
        slat_process::gate::move_to(text.gate);
        if let Some(restorer) = text.restorer {
            slat_guard::set_restorer(restorer);
        }
        frame::set_restorer(slat_guard::restorer());
    }
    if !sites::rewrite_all(texts) && !is_dispatched {
        return Err(
            "this kernel has no Syscall User Dispatch (Linux 5.11, CONFIG_GENERIC_ENTRY), nor can all call sites be rewritten",
        );
    }
    library_threads::prepare();
    library_threads::make_stack();
    slat_guard::never_block(libc::SIGSYS);
    change_mask(libc::SIG_UNBLOCK, 1 << (libc::SIGSYS - 1));
    crate::signals::take_over_dispatch(frame::entry as *const () as usize);
    crate::prepare().map_err(|_| "there is no memory")
}

/// Whether a sanitizer's runtime is part of the program or of a library. The system calls of such a runtime must reach
/// the kernel.
fn has_sanitizer() -> bool {
    // SAFETY: the name ends with 0.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__sanitizer_set_report_path".as_ptr()) };
    !found.is_null()
}

/// Makes the system calls of a program that the dynamic linker has loaded arrive at slat, if the program's own code
/// makes system calls, or if the user asks for it (`SLAT_DISPATCH`, for calls of the program's libraries). Call when
/// the program starts.
pub fn arm_if_needed() {
    let is_asked =
        std::env::var_os("SLAT_DISPATCH").is_some_and(|value| !value.is_empty() && value != "0");
    if (is_asked || text::program_makes_calls() && !has_sanitizer())
        && let Err(why) = arm(Some(&text::programs()))
    {
        slat_kvm::messages::say(format_args!(
            "this program makes system calls of its own, which slat does not see: {why}"
        ));
    }
}

/// Serves a call and returns to the program. Runs on slat's stack. Unwinds if the C library cancels the thread.
///
/// # Safety
/// - `frame` is this thread's copy of the state that the kernel has saved.
unsafe extern "C-unwind" fn serve(frame: *mut frame::Frame) -> ! {
    let before = slat_process::errno();
    // SAFETY: `frame` is this thread's copy, which no other code uses, as this function's contract requires.
    unsafe {
        if (*frame).comes_from_alternate() {
            // The thread has left the alternate stack, so the kernel would put the next handler's frame over this
            // frame.
            let free = (*frame).free_alternate();
            let _ = kernel!(libc::SYS_sigaltstack, &raw const free, 0);
        }
        // From here on, handlers of the program may run, as they may while the kernel serves a call.
        change_mask(libc::SIG_SETMASK, (*frame).mask);
        let made = (*frame).made();
        if made.number == libc::SYS_ioctl && made.arguments[1] == KVM_RUN as usize {
            sites::count(made.address);
        }
        let answer = calls::answer(&mut *frame, &made);
        (*frame).set_result(answer);
        slat_process::set_errno(before);
        frame::resume(frame)
    }
}

/// Blocks all signals of this thread, until it returns to the program.
fn block_all() {
    change_mask(libc::SIG_BLOCK, u64::MAX);
}
