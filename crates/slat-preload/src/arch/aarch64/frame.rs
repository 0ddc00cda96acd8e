//! The frame of a system call that arrives at slat. A frame is the saved state of the program. Either the kernel saves
//! the state on the stack when it sends SIGSYS, or the entry from a rewritten call site saves the state. This module
//! also has the SIGSYS handler's first instructions, and the return to the program.

use slat_process::filter::Made;
use slat_process::gate::GATE;
use slat_process::pointers;
use std::arch::naked_asm;
use std::mem::offset_of;

/// The kernel's `struct ucontext` of arm64 (`arch/arm64/include/uapi/asm/ucontext.h`, `sigcontext.h`). More records may
/// follow after the structure, if `records` is too small for all.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct Frame {
    /// The kernel does not use this field. In the frame of a call from a rewritten call site, the field says whether
    /// the entry has blocked all signals.
    pub(super) flags: u64,
    /// The kernel does not use this field. In a frame on slat's stack, the field holds the lowest address of that stack
    /// that was in use before this frame was stored.
    pub link: usize,
    /// The alternate stack, which the kernel sets again when the handler returns.
    pub alternate: libc::stack_t,
    /// The signal mask, which the kernel restores when the handler returns.
    pub mask: u64,
    reserved: [u64; 16],
    /// The kernel does not use this field when it returns. In the frame of a call from a rewritten call site, the field
    /// holds the address of the stub's code that returns to the program.
    leave: usize,
    registers: [usize; 31],
    sp: usize,
    pc: usize,
    processor_flags: u64,
    unused: u64,
    records: [u64; 512],
}

const _: () = assert!(size_of::<Frame>() == size_of::<libc::ucontext_t>());
const _: () = assert!(
    offset_of!(Frame, leave) == offset_of!(libc::ucontext_t, uc_mcontext)
        && offset_of!(Frame, mask) == offset_of!(libc::ucontext_t, uc_sigmask)
        && offset_of!(Frame, registers) == offset_of!(Frame, leave) + 8
        && offset_of!(Frame, records) == 464
);

/// Offset of the general registers in a [`Frame`], for assembly. The field `leave` is right before the registers. The
/// stack pointer, the program counter and the processor's flags follow the registers.
pub const REGISTERS: usize = offset_of!(Frame, registers);
/// Offset of the records in a [`Frame`], for assembly.
pub const RECORDS: usize = offset_of!(Frame, records);
/// Offset of the signal mask in a [`Frame`], for assembly.
pub const MASK: usize = offset_of!(Frame, mask);

/// The size of `siginfo_t`, the kernel's information about a signal. It lies right before a frame, at the beginning of
/// the kernel's `struct rt_sigframe`.
pub const BEFORE: usize = size_of::<libc::siginfo_t>();

/// AUDIT_ARCH_AARCH64, by which the kernel marks a dispatched call of a 64-bit program. Calls of 32-bit programs have
/// another value.
pub const AUDIT_ARCH: u32 = 0xc000_00b7;

/// The index of the register with a call's number, X8.
const NUMBER: usize = 8;

/// The first words of a record: the record's kind, and its size in bytes. Kind 0 ends the list of records.
#[repr(C)]
#[derive(Clone, Copy)]
struct Head {
    magic: u32,
    size: u32,
}

/// `struct extra_context`: refers to further records, right after the frame, if the frame is too small for all
/// records.
#[repr(C)]
struct Extra {
    head: Head,
    data: usize,
    size: u32,
}
const EXTRA: u32 = 0x4558_5401;

impl Frame {
    /// Returns the call, and the address after the instruction that made the call. The program continues at that
    /// address.
    pub fn made(&self) -> Made {
        let (number, arguments) = self.call();
        Made {
            number,
            arguments,
            address: self.pc,
        }
    }

    /// Returns the program's stack pointer.
    pub fn sp(&self) -> usize {
        self.sp
    }

    /// Changes the program's stack pointer.
    pub fn set_sp(&mut self, sp: usize) {
        self.sp = sp;
    }

    /// Returns the number of the system call and its arguments.
    pub fn call(&self) -> (i64, [usize; 6]) {
        let [a, b, c, d, e, f, ..] = self.registers;
        // The kernel uses only the lower half of X8 as the call's number.
        (i64::from(self.registers[NUMBER] as i32), [a, b, c, d, e, f])
    }

    /// Changes the call's number to a number that no system call has.
    pub fn set_unknown(&mut self) {
        self.registers[NUMBER] = usize::MAX;
    }

    /// Sets the call's result, which the program gets.
    pub fn set_result(&mut self, result: isize) {
        self.registers[0] = result as usize;
    }

    /// Returns the frame that the kernel stored when it called one of the program's signal handlers. `self` is the
    /// frame of the handler's rt_sigreturn(2) call.
    pub fn of_handler(&self) -> *mut Frame {
        (self.sp + BEFORE) as *mut Frame
    }

    /// Returns the size in bytes of the frame with all its records, and the `Extra` record, if there is one.
    ///
    /// # Safety
    /// - The kernel or this module has filled in the frame.
    unsafe fn len(&self) -> (usize, Option<*const Extra>) {
        const TERMINATOR: usize = 16;
        let start = std::ptr::from_ref(self) as usize;
        let mut at = (&raw const self.records) as usize;
        loop {
            // SAFETY: `at` is the address of a record. The kernel stores records one after another, each with a
            // `Head`.
            let head = unsafe { *(at as *const Head) };
            match head.magic {
                0 => return (at + TERMINATOR - start, None),
                EXTRA => {
                    let extra = at as *const Extra;
                    // SAFETY: a record of this kind is an `Extra`. The list of further records ends with a record of
                    // kind 0.
                    let end = unsafe { (*extra).data + (*extra).size as usize };
                    return (end - start, Some(extra));
                }
                _ => at += head.size as usize,
            }
        }
    }

    /// The alignment of the stack.
    const ALIGNMENT: usize = 16;

    /// Returns the number of bytes that [`copy_below`](Self::copy_below) needs.
    ///
    /// # Safety
    /// - The kernel or `copy_below` has filled in the frame.
    pub unsafe fn needed(&self) -> usize {
        // SAFETY: the kernel or `copy_below` has filled in the frame, as this function's contract requires.
        unsafe { BEFORE + self.len().0 + Self::ALIGNMENT }
    }

    /// Copies the frame to the end of the memory below `top`, so that a thread can return from another
    /// stack. Returns the copy.
    ///
    /// # Safety
    /// - The kernel or this function has filled in the frame.
    /// - Below `top` there is space for the frame ([`needed`](Self::needed)), which nothing else uses.
    pub unsafe fn copy_below(&self, top: usize) -> *mut Frame {
        // SAFETY: the frame is filled in, and nothing else uses the memory below `top`, as this function's own
        // contract requires. The signal's information is right before the frame, and the records are right after it.
        unsafe {
            let (len, extra) = self.len();
            let from = std::ptr::from_ref(self) as usize;
            let to = (top - len) & !(Self::ALIGNMENT - 1);
            let bytes = (from - BEFORE) as *const u8;
            std::ptr::copy_nonoverlapping(bytes, (to - BEFORE) as *mut u8, BEFORE + len);
            if let Some(extra) = extra {
                let copy = (extra as usize - from + to) as *mut Extra;
                (*copy).data = (*copy).data - from + to;
            }
            to as *mut Frame
        }
    }
}

/// The body of the handler that the kernel calls for SIGSYS. For a dispatched call of the program (`si_code` 2,
/// SYS_USER_DISPATCH), the handler calls `$place` with the kernel's arguments, and then `$serve` with the result of
/// `$place`, below which the stack is free. A call of slat itself is [passed](pass_through_gate) to the kernel. If slat
/// and the program share one thread pointer, the function `$runs_slat` tells whose call it is; otherwise the current
/// thread pointer tells. All other SIGSYS signals come from seccomp filters, and go to the handler `$others`.
///
/// `$serve` does not return. Its return address, for unwinders, is the address in the variable `$restorer`.
macro_rules! dispatched {
    ($others:path, $runs_slat:path, $place:path, $restorer:path, $serve:path) => {
        ::std::arch::naked_asm!(
            "ldr w9, [x1, 8]",
            "cmp w9, 2",
            "b.eq 2f",
            "b {others}",
            "2:",
            "stp x29, x30, [sp, -48]!",
            "mov x29, sp",
            "stp x0, x1, [sp, 16]",
            "str x2, [sp, 32]",
            "adrp x9, {separate}",
            "ldrb w9, [x9, :lo12:{separate}]",
            "cbz w9, 3f",
            "bl {enter}",
            "mrs x9, tpidr_el0",
            "cmp x0, x9",
            "cset w0, eq",
            "b 4f",
            "3:",
            "bl {runs_slat}",
            "4:",
            "and w9, w0, 255",
            "ldp x0, x1, [sp, 16]",
            "ldr x2, [sp, 32]",
            "cbz w9, 5f",
            "ldp x29, x30, [sp], 48",
            "b {pass}",
            "5:",
            "msr fpcr, xzr",
            "bl {place}",
            "sub x9, x0, {before}",
            "mov sp, x9",
            "adrp x30, {restorer}",
            "ldr x30, [x30, :lo12:{restorer}]",
            "b {serve}",
            others = sym $others,
            separate = sym slat_process::pointers::SEPARATE,
            enter = sym slat_process::pointers::enter,
            pass = sym $crate::arch::frame::pass_through_gate,
            runs_slat = sym $runs_slat,
            place = sym $place,
            before = const $crate::arch::frame::BEFORE,
            restorer = sym $restorer,
            serve = sym $serve,
        )
    };
}
pub(crate) use dispatched;

/// Repeats a system call of slat itself at the gate, the address from which the kernel does not dispatch calls. This
/// function is the second half of [`dispatched!`], with the kernel's frame in X2. Some of slat's calls do not come
/// from the C library's code: the vDSO's functions make a call if they cannot compute the result, and the dynamic
/// linker makes calls.
///
/// The handler does not make the call itself. It returns to the gate, which makes the call with the signal mask and all
/// registers of the interrupted code, except X30 and the stack pointer. So the call may wait, be interrupted and
/// restarted, or change the mask. A second frame leads back to the interrupted code, because no instruction jumps
/// without changing a register. The second frame lies below all memory in use on the interrupted stack. A new thread,
/// which begins on its own stack, would not find the second frame there. But only the C library's text starts threads,
/// and its calls do not come here.
pub unsafe extern "C" fn pass_through_gate(_signal: i32, _info: usize, frame: *mut Frame) {
    // SAFETY: `frame` is the kernel's frame. The handler runs below the frame on the same stack, or on the alternate
    // stack.
    unsafe {
        let frame = &mut *frame;
        let handlers = std::ptr::from_ref(frame) as usize - BEFORE;
        let start = frame.alternate.ss_sp as usize;
        let is_on_alternate = |sp: usize| sp.wrapping_sub(start) <= frame.alternate.ss_size;
        let is_elsewhere = is_on_alternate(handlers) && !is_on_alternate(frame.sp);
        // The memory right below the kernel's frame holds the stack frames of this handler.
        const HANDLER: usize = 4096;
        let top = match is_elsewhere {
            true => frame.sp,
            false => handlers - HANDLER,
        };
        let copy = frame.copy_below(top);
        frame.registers[30] = passed as *const () as usize;
        frame.pc = GATE.load(std::sync::atomic::Ordering::Relaxed) as usize;
        frame.sp = copy as usize - BEFORE;
    }
}

/// Returns to the interrupted code, with the call's result and the present signal mask. The gate (an `svc` and a `ret`
/// in the C library's text) returns here from a call that [`pass_through_gate`] has made, with the stack pointer at the
/// frame of the interrupted code.
#[unsafe(naked)]
unsafe extern "C" fn passed() {
    naked_asm!(
        "str x0, [sp, {result}]",
        "mov x0, {block}",
        "mov x1, xzr",
        "add x2, sp, {mask}",
        "mov x3, 8",
        "mov x8, {rt_sigprocmask}",
        "adrp x16, {gate}",
        "ldr x16, [x16, :lo12:{gate}]",
        "blr x16",
        "mov x8, {rt_sigreturn}",
        "br x16",
        result = const BEFORE + offset_of!(Frame, registers),
        mask = const BEFORE + offset_of!(Frame, mask),
        block = const libc::SIG_BLOCK,
        rt_sigprocmask = const libc::SYS_rt_sigprocmask,
        rt_sigreturn = const libc::SYS_rt_sigreturn,
        gate = sym GATE,
    )
}

/// Sets the program's thread pointer, and returns to the program.
///
/// # Safety
/// - Nothing below the frame on its stack is needed any more. The frame says where the program continues.
pub unsafe fn return_to(frame: *mut Frame) -> ! {
    /// Sets the thread pointer, and returns to the state in the frame.
    #[unsafe(naked)]
    unsafe extern "C" fn leave(frame: *mut Frame, pointer: usize) -> ! {
        naked_asm!(
            "sub x9, x0, {before}",
            "mov sp, x9",
            "msr tpidr_el0, x1",
            "mov x8, {rt_sigreturn}",
            "adrp x16, {gate}",
            "ldr x16, [x16, :lo12:{gate}]",
            "br x16",
            before = const BEFORE,
            rt_sigreturn = const libc::SYS_rt_sigreturn,
            gate = sym GATE,
        )
    }
    let pointer = match pointers::are_separate() {
        true => pointers::programs(),
        false => super::threads::pointer(),
    };
    // SAFETY: nothing below the frame is needed any more, as this function's contract requires.
    unsafe { leave(frame, pointer) }
}

/// Makes the call `clone` with `arguments`. This function sets the second argument, the stack. The new process begins
/// with the state in `frame`. Returns the kernel's result in the caller.
///
/// # Safety
/// - The frame is on the new process's stack, which nothing else uses below the frame. The flags make a process that
///   does not need the caller's stack.
pub unsafe fn begin_process(frame: *mut Frame, mut arguments: [usize; 6]) -> isize {
    /// Makes the call. The return address is on the creator's stack. The stack pointer of the new process is at the
    /// frame, as rt_sigreturn(2) expects.
    #[unsafe(naked)]
    unsafe extern "C" fn clone(_arguments: *const [usize; 6]) -> isize {
        naked_asm!(
            "stp x29, x30, [sp, -16]!",
            "mov x9, x0",
            "ldp x0, x1, [x9]",
            "ldp x2, x3, [x9, 16]",
            "ldr x4, [x9, 32]",
            "mov x8, {clone}",
            "adrp x16, {gate}",
            "ldr x16, [x16, :lo12:{gate}]",
            "blr x16",
            "cbz x0, 2f",
            "ldp x29, x30, [sp], 16",
            "ret",
            "2:",
            "mov x8, {rt_sigreturn}",
            "br x16",
            clone = const libc::SYS_clone,
            rt_sigreturn = const libc::SYS_rt_sigreturn,
            gate = sym GATE,
        )
    }
    arguments[1] = frame as usize - BEFORE;
    // SAFETY: the frame is on the new process's own stack, as this function's contract requires. The parent continues
    // here.
    unsafe { clone(&arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a frame, with a signal's information before it. `records` has indices and values of words of the
    /// frame's records.
    fn frame(records: &[(usize, u64)]) -> Box<[Frame; 3]> {
        // SAFETY: the fields are integers and pointers, all of which may be 0.
        let mut frames: Box<[Frame; 3]> = unsafe { Box::new(std::mem::zeroed()) };
        for (index, word) in records {
            frames[1].records[*index] = *word;
        }
        frames[1].registers = std::array::from_fn(|index| index + 100);
        frames
    }

    fn head(magic: u32, size: u32) -> u64 {
        u64::from(magic) | u64::from(size) << 32
    }

    #[test]
    fn a_call_is_read_from_the_registers() {
        let mut frames = frame(&[]);
        let frame = &mut frames[1];
        assert_eq!(frame.call(), (108, [100, 101, 102, 103, 104, 105]));
        frame.set_result(-5);
        assert_eq!(frame.call().1[0] as isize, -5);
        frame.set_unknown();
        assert_eq!(frame.call().0, -1);
    }

    #[test]
    fn a_copy_has_all_records() {
        const FLOATING: u32 = 0x4650_8001;
        // The last record in the frame refers to the memory after the frame.
        let mut frames = frame(&[
            (0, head(FLOATING, 528)),
            (5, 55),
            (66, head(EXTRA, 32)),
            (68, 64),
        ]);
        let end = &raw const frames[1].records[72] as usize;
        frames[1].records[67] = end as u64;
        frames[1].records[72 + 3] = 33;
        let mut memory = vec![0u8; 3 * size_of::<Frame>()];
        let top = memory.as_mut_ptr() as usize + memory.len();
        // SAFETY: the frame is filled in, and the memory suffices.
        let copy = unsafe {
            assert!(frames[1].needed() < memory.len());
            &*frames[1].copy_below(top)
        };
        assert_eq!(std::ptr::from_ref(copy) as usize % 16, 0);
        assert_eq!(copy.registers, frames[1].registers);
        assert_eq!((copy.records[5], copy.records[75]), (55, 33));
        assert_eq!(
            copy.records[67] as usize,
            &raw const copy.records[72] as usize
        );
        assert_eq!(frames[1].records[67] as usize, end);
    }

    /// Tests the handler with a signal like the signal that the kernel sends for a dispatched call.
    mod handler {
        use super::super::*;
        use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

        const STACK: usize = 64 << 10;
        #[repr(align(16))]
        struct Stack([u8; STACK]);
        static mut SLATS: Stack = Stack([0; STACK]);
        static RESTORER: AtomicUsize = AtomicUsize::new(0);
        static IS_SLATS: AtomicBool = AtomicBool::new(false);
        const RESULT: isize = 1234;

        unsafe extern "C" fn runs_slat() -> bool {
            IS_SLATS.load(Ordering::Relaxed)
        }

        unsafe extern "C" fn place(_: i32, _: usize, frame: *mut Frame) -> *mut Frame {
            // SAFETY: the kernel has filled in the frame. One thread at a time uses the stack.
            unsafe { (*frame).copy_below(&raw mut SLATS as usize + STACK) }
        }

        unsafe extern "C" fn serve(frame: *mut Frame) -> ! {
            // SAFETY: `place` has returned this frame.
            unsafe {
                (*frame).set_result(RESULT);
                return_to(frame)
            }
        }

        unsafe extern "C" fn others() {}

        #[unsafe(naked)]
        unsafe extern "C" fn entry() {
            dispatched!(others, runs_slat, place, RESTORER, serve)
        }

        /// Sends SIGSYS with `code` to this thread. Returns the value in the result register after the sending call,
        /// and a floating-point number that was computed before the call.
        fn send(code: i32) -> (isize, f64) {
            let mut info = [0u32; 32];
            (info[0], info[2]) = (libc::SIGSYS as u32, code as u32);
            let (process, thread) = slat_process::myself();
            let arguments = [
                process as usize,
                thread as usize,
                libc::SIGSYS as usize,
                info.as_ptr() as usize,
                0,
                0,
            ];
            let half = std::hint::black_box(1.0f64) / std::hint::black_box(2.0);
            // SAFETY: the signal is for this thread, which has a handler.
            let result =
                unsafe { slat_process::calls::raw(libc::SYS_rt_tgsigqueueinfo, arguments) };
            (result, half)
        }

        #[test]
        fn a_dispatched_call_is_served_on_another_stack_and_a_call_of_slats_is_made_again() {
            // SAFETY: installs a handler for a signal that nothing else uses.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = entry as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                libc::sigfillset(&mut action.sa_mask);
                assert_eq!(
                    libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()),
                    0
                );
            }
            // A SIGSYS with another code goes to the other handler. The call keeps its own result.
            assert_eq!(send(1), (0, 0.5));
            assert_eq!(send(2), (RESULT, 0.5));
            // The gate, slat's instruction for system calls, makes the call once more. X0 then holds the result of the
            // first call, 0, which is the first argument of the second call; 0 is not a process id.
            IS_SLATS.store(true, Ordering::Relaxed);
            assert_eq!(send(2), (-(libc::EINVAL as isize), 0.5));
            IS_SLATS.store(false, Ordering::Relaxed);
            assert_eq!(send(2), (RESULT, 0.5));
        }
    }
}
