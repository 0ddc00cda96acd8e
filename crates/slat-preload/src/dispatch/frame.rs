//! The frame of a dispatched system call: the state of the program, which the kernel saves when it sends SIGSYS.
//!
//! The kernel writes the frame to the stack on which it calls the handler: the program's stack or its alternate stack.
//! That stack may be as small as a goroutine's, or the next signal may overwrite it. So the handler first copies the
//! frame to a stack of slat's own ([`place`]), unless the frame is already there. The call is served on slat's stack,
//! and the kernel returns to the state in the copy ([`resume`]).
//!
//! All signals are blocked until slat begins to serve the call. Signals of the program may arrive later, while slat
//! serves the call, for example a `read` that waits. The handlers of these signals make calls of their own. Such calls
//! are served on the same stack, below the first call, at an address that [`stack`] determines.

use super::serve;
pub use crate::arch::frame::Frame;
use crate::arch::frame::{AUDIT_ARCH, dispatched, return_to};
use slat_guard::Section;
use slat_process::stack;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

impl Frame {
    /// Whether the program has made the call on its alternate stack.
    pub fn comes_from_alternate(&self) -> bool {
        self.is_on_alternate(self.sp())
    }

    /// Returns the free part of the alternate stack: the part below the stack pointer at the call.
    pub fn free_alternate(&self) -> libc::stack_t {
        let free = self.sp() - stack::RED_ZONE - self.alternate.ss_sp as usize;
        libc::stack_t {
            ss_size: free,
            ..self.alternate
        }
    }

    /// Whether a stack pointer is on the program's alternate stack.
    fn is_on_alternate(&self, sp: usize) -> bool {
        let start = self.alternate.ss_sp as usize;
        self.alternate.ss_flags & libc::SS_DISABLE == 0
            && (start..=start + self.alternate.ss_size).contains(&sp)
    }

    /// Copies the frame to new memory.
    ///
    /// # Safety
    /// - The kernel or [`copy_below`](Self::copy_below) has filled in the frame.
    pub unsafe fn keep(&self) -> KeptFrame {
        // SAFETY: the frame is filled in, as this function's contract requires.
        unsafe {
            let bytes = self.needed();
            let mut memory = vec![0; bytes];
            let start = memory.as_mut_ptr() as usize;
            let at = self.copy_below(start + bytes) as usize - start;
            KeptFrame { memory, at }
        }
    }
}

/// A copy of a frame outside any stack.
#[derive(Debug)]
pub struct KeptFrame {
    memory: Vec<u8>,
    /// The offset of the copied frame in `memory`.
    at: usize,
}

impl KeptFrame {
    /// Returns the copied frame.
    pub fn frame(&self) -> &Frame {
        // SAFETY: `Frame::keep` has put an aligned frame at this offset. The memory does not move.
        unsafe { &*self.memory.as_ptr().add(self.at).cast() }
    }
}

/// The kernel's information about a dispatched call: its `siginfo_t` for SIGSYS.
#[repr(C)]
struct Sent {
    signal_errno_code: [c_int; 4],
    address: usize,
    number: c_int,
    architecture: u32,
}

/// Copies the frame of a call to slat's stack, and returns the copy. Runs in the handler, with all signals blocked.
unsafe extern "C" fn place(_signal: c_int, info: *const Sent, kernels: *mut Frame) -> *mut Frame {
    if !stack::exists() {
        super::library_threads::make_stack();
    }
    // SAFETY: `kernels` is the kernel's frame, on the stack of this handler. The part of slat's stack that receives
    // the copy is free.
    unsafe {
        let frame = match stack::contains(kernels as usize) {
            true => kernels,
            false => {
                let sp = (*kernels).sp();
                let on_alternate = (*kernels).is_on_alternate(sp);
                (*kernels).copy_below(stack::free_below(sp, on_alternate))
            }
        };
        (*frame).link = stack::set_used_to(frame as usize);
        if (*info).architecture != AUDIT_ARCH {
            // A call by `int 0x80`, with the number of a 32-bit system call, fails as if the call did not exist.
            (*frame).set_unknown();
        }
        frame
    }
}

/// The address of the C library's instructions that call rt_sigreturn(2). [`entry`] makes this address the return
/// address of `serve`, which does not return. Unwinders treat the frame above such an address as the kernel's signal
/// frame, and continue with the interrupted code. So a thread that is cancelled in `serve` unwinds into the program. No
/// memory order is needed, because no other data depends on this value; [`entry`] reads it by a plain load.
static RESTORER: AtomicUsize = AtomicUsize::new(0);

/// Sets the address of the C library's rt_sigreturn(2) call. Call before the first [`entry`].
pub fn set_restorer(address: usize) {
    RESTORER.store(address, Ordering::Relaxed);
}

/// The handler that the kernel calls for SIGSYS. Serves a dispatched call of the program, and passes a call of slat
/// itself to the kernel.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn entry() {
    dispatched!(crate::signals::entry, runs_slat, place, RESTORER, serve)
}

/// Whether this thread is in slat's code, if slat and the program share one thread pointer. Runs in the handler.
unsafe extern "C" fn runs_slat() -> bool {
    // If slat loads the program, this function is called only before the program begins, so all code is slat's. Later,
    // the program has its own thread pointer.
    Section::is_entered() || crate::loaded::is_loaded()
}

/// Returns to the program, to the state in `frame`.
///
/// # Safety
/// - `frame` is a copy on this thread's stack. The caller has no value that has to be dropped.
pub unsafe fn resume(frame: *mut Frame) -> ! {
    // SAFETY: `frame` is a copy on this thread's stack, as this function's contract requires.
    unsafe {
        if (*frame).comes_from_alternate() {
            // The call came from the alternate stack. The call may have interrupted an earlier call, whose frame is at
            // a higher address on slat's stack. The memory below that frame becomes free, so no signal may arrive
            // before the return.
            super::block_all();
            stack::set_used_to((*frame).link);
        }
        return_to(frame)
    }
}

/// Implements rt_sigreturn(2), which a handler of the program calls itself.
///
/// # Safety
/// - `call` is the frame of a handler's call of rt_sigreturn(2), with the handler's stack pointer. The caller has no
///   value that has to be dropped.
pub unsafe fn return_from_handler(call: &Frame) -> ! {
    let frame = call.of_handler();
    // SAFETY: the stack pointer in `call` leads to the kernel's frame of the handler, as this function's contract
    // requires.
    unsafe {
        (*frame).mask = slat_guard::blockable((*frame).mask);
        return_to(frame)
    }
}
