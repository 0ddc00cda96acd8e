//! Serves calls from rewritten call sites ([`sites`](super::sites)). A rewritten site jumps to slat instead of causing
//! a signal.

use super::frame::Frame;
use super::{calls, others};
use crate::arch::site_entry::{Saved, from_site};
use crate::real::kernel;
use slat_guard::change_mask;
use slat_process::stack;

/// The function to which the stubs of rewritten call sites jump.
///
/// # Safety
/// - Only a site's stub jumps here, on a thread of a program whose calls arrive at slat.
#[unsafe(naked)]
pub unsafe extern "C" fn entry() {
    from_site!(serve)
}

/// Serves the system call whose registers are `saved`. Returns the result that the kernel would return.
unsafe extern "C-unwind" fn serve(saved: &mut Saved) -> isize {
    let before = slat_process::errno();
    let made = saved.made();
    let is_blocked = saved.is_blocked();
    let answer = match saved.frame() {
        None => others::from_site(&made),
        Some(frame) if is_blocked || calls::needs_state(made.number) => {
            complete(frame, is_blocked);
            // SAFETY: the frame is on slat's stack, and has all of the program's state.
            unsafe { super::serve(frame) }
        }
        Some(frame) => calls::answer(frame, &made),
    };
    slat_process::set_errno(before);
    answer
}

/// Completes a frame with the state that the kernel would have saved: the alternate stack and, unless signals
/// `are_blocked`, the signal mask. Blocks all signals.
fn complete(frame: &mut Frame, are_blocked: bool) {
    if !are_blocked {
        frame.mask = change_mask(libc::SIG_BLOCK, u64::MAX);
    }
    // SAFETY: the call fills in a live structure.
    let _ = unsafe { kernel!(libc::SYS_sigaltstack, 0, &raw mut frame.alternate) };
    frame.link = stack::set_used_to(std::ptr::from_ref(frame) as usize);
}
