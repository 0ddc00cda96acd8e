//! The frame of a dispatched system call. A frame is the state of the program, which the kernel saves on the stack
//! when it sends SIGSYS. This module also has the SIGSYS handler's first instructions, and the return to the program.

use slat_process::caller::{IDENTIFICATION, NESTED_TASK};
use slat_process::filter::Made;
use slat_process::gate::GATE;
use slat_process::pointers::SEPARATE;
use slat_process::stack::RED_ZONE;
use std::arch::naked_asm;
use std::ffi::c_int;
use std::mem::offset_of;

/// The kernel's `struct ucontext` of x86-64 (`arch/x86/include/uapi/asm/ucontext.h`, `sigcontext.h`).
#[repr(C)]
#[derive(Debug)]
pub struct Frame {
    flags: u64,
    /// The kernel does not use this field. In a frame on slat's stack, the field holds the lowest address of that stack
    /// that was in use before this frame was stored.
    pub link: usize,
    /// The alternate stack, which the kernel sets again when the handler returns.
    pub alternate: libc::stack_t,
    registers: [i64; 23],
    floating: *mut u8,
    reserved: [u64; 8],
    /// The signal mask, which the kernel restores when the handler returns.
    pub mask: u64,
}

const _: () = assert!(size_of::<Frame>() == 304);

/// AUDIT_ARCH_X86_64, by which the kernel marks a dispatched call of a 64-bit program. Calls by `int 0x80`, which use
/// the numbers of 32-bit programs, have another value.
pub const AUDIT_ARCH: u32 = 0xc000_003e;

impl Frame {
    /// Returns a register by its index in glibc's `gregset_t`.
    fn register(&self, index: c_int) -> usize {
        self.registers[index as usize] as usize
    }

    /// Returns the call, and the address after the instruction that made the call. The program continues at that
    /// address.
    pub fn made(&self) -> Made {
        let (number, arguments) = self.call();
        Made {
            number,
            arguments,
            address: self.register(libc::REG_RIP),
        }
    }

    /// Returns the program's stack pointer.
    pub fn sp(&self) -> usize {
        self.register(libc::REG_RSP)
    }

    /// Changes the program's stack pointer.
    pub fn set_sp(&mut self, sp: usize) {
        self.registers[libc::REG_RSP as usize] = sp as i64;
    }

    /// Returns the number of the system call and its arguments.
    pub fn call(&self) -> (i64, [usize; 6]) {
        let arguments = [
            libc::REG_RDI,
            libc::REG_RSI,
            libc::REG_RDX,
            libc::REG_R10,
            libc::REG_R8,
            libc::REG_R9,
        ];
        // The kernel uses only the lower half of RAX as the call's number.
        let number = i64::from(self.registers[libc::REG_RAX as usize] as i32);
        (number, arguments.map(|index| self.register(index)))
    }

    /// Changes the call's number to a number that no system call has.
    pub fn set_unknown(&mut self) {
        self.registers[libc::REG_RAX as usize] = -1;
    }

    /// Sets the call's result, which the program gets.
    pub fn set_result(&mut self, result: isize) {
        self.registers[libc::REG_RAX as usize] = result as i64;
    }

    /// Returns the frame that the kernel stored when it called one of the program's signal handlers. `self` is the
    /// frame of the handler's rt_sigreturn(2) call.
    pub fn of_handler(&self) -> *mut Frame {
        self.sp() as *mut Frame
    }

    /// Returns the bytes of the extended state (XSAVE area). Their number is in the area's `_fpx_sw_bytes`
    /// (`arch/x86/include/uapi/asm/sigcontext.h`).
    ///
    /// # Safety
    /// - The kernel has filled in the frame.
    unsafe fn floating(&self) -> &[u8] {
        const LEGACY: usize = 512;
        const SOFTWARE: usize = 464;
        const MAGIC: u32 = 0x4650_5853;
        if self.floating.is_null() {
            return &[];
        }
        // SAFETY: the kernel has filled in the frame, as this function's contract requires, so `floating` points to
        // extended state in the kernel's layout.
        unsafe {
            let words = self.floating.add(SOFTWARE).cast::<u32>();
            let len = match words.read() {
                MAGIC => words.add(1).read() as usize,
                _ => LEGACY,
            };
            std::slice::from_raw_parts(self.floating, len)
        }
    }

    /// The alignment that XRSTOR demands (Intel SDM, volume 1, section 13.4).
    const ALIGNMENT: usize = 64;

    /// Returns the number of bytes that [`copy_below`](Self::copy_below) needs.
    ///
    /// # Safety
    /// - The kernel or `copy_below` has filled in the frame.
    pub unsafe fn needed(&self) -> usize {
        // SAFETY: the frame is filled in, as this function's contract requires. Both parts are aligned.
        unsafe { self.floating().len() + size_of::<Frame>() + 2 * Self::ALIGNMENT }
    }

    /// Copies the frame to the end of the memory below `top`, so that a thread can return from another
    /// stack. Returns the copy.
    ///
    /// # Safety
    /// - The kernel or this function has filled in the frame.
    /// - Below `top` there is space for the frame ([`needed`](Self::needed)), which nothing else uses.
    pub unsafe fn copy_below(&self, top: usize) -> *mut Frame {
        // SAFETY: the frame is filled in, and nothing else uses the memory below `top`, as this function's own
        // contract requires.
        unsafe {
            let state = self.floating();
            let to = (top - state.len()) & !(Self::ALIGNMENT - 1);
            std::ptr::copy_nonoverlapping(state.as_ptr(), to as *mut u8, state.len());
            let copy = ((to - size_of::<Frame>()) & !(Self::ALIGNMENT - 1)) as *mut Frame;
            std::ptr::copy_nonoverlapping(self, copy, 1);
            if !state.is_empty() {
                (*copy).floating = to as *mut u8;
            }
            copy
        }
    }
}

/// The body of the handler that the kernel calls for SIGSYS. For a dispatched call of the program (`si_code` 2,
/// SYS_USER_DISPATCH), the handler calls `$place` with the kernel's arguments, and then `$serve` with the result of
/// `$place`, which is also the new stack pointer. A call of slat itself is [passed](pass_through_gate) to the kernel.
/// If slat and the program share one thread pointer, the function `$runs_slat` tells whose call it is; otherwise the
/// current thread pointer tells. All other SIGSYS signals come from seccomp filters, and go to the handler `$others`.
///
/// `$serve` does not return. Its return address, for unwinders, is the address in the variable `$restorer`.
macro_rules! dispatched {
    ($others:path, $runs_slat:path, $place:path, $restorer:path, $serve:path) => {
        ::std::arch::naked_asm!(
            slat_process::own_flags!(),
            "cmp dword ptr [rsi + 8], 2",
            "jne {others}",
            "cmp byte ptr [rip + {separate}], 0",
            "je 2f",
            "rdfsbase rax",
            "cmp rax, gs:[0]",
            "je {pass}",
            slat_process::to_slats_pointer!(),
            "jmp 3f",
            "2:",
            "push rsi",
            "push rdx",
            "sub rsp, 8",
            "call {runs_slat}",
            "add rsp, 8",
            "pop rdx",
            "pop rsi",
            "test al, al",
            "jnz {pass}",
            "3:",
            "sub rsp, 8",
            "call {place}",
            "mov rsp, rax",
            "mov rdi, rax",
            "push [rip + {restorer}]",
            "jmp {serve}",
            others = sym $others,
            separate = sym slat_process::pointers::SEPARATE,
            pass = sym $crate::arch::frame::pass_through_gate,
            runs_slat = sym $runs_slat,
            place = sym $place,
            restorer = sym $restorer,
            serve = sym $serve,
        )
    };
}
pub(crate) use dispatched;

/// Repeats a system call of slat itself at the gate, the address from which the kernel does not dispatch calls. This
/// function is the second half of [`dispatched!`], with the kernel's frame in RDX. Some of slat's calls do not come
/// from the C library's code: the vDSO's functions make a call if they cannot compute the result, and the dynamic
/// linker makes calls.
///
/// The handler does not make the call itself. It returns to the gate, which makes the call with the stack, the signal
/// mask and all registers of the interrupted code. So the call may wait, be interrupted and restarted, or change the
/// mask. A new thread, which begins on its own stack, would not find there how to return from the gate. But only the C
/// library's text starts threads, and its calls do not come here.
///
/// Three words lead back to the interrupted code. The words are stored below all memory in use on the interrupted
/// stack. That memory includes the red zone, and this handler's stack frame if the handler runs on the same stack.
#[unsafe(naked)]
pub unsafe extern "C" fn pass_through_gate() {
    naked_asm!(
        "mov rax, [rdx + {rsp}]",
        "mov r8, [rdx + {alternate}]",
        "mov r9, [rdx + {alternate_size}]",
        // Checks whether the interrupted stack pointer and the handler's stack pointer are on the alternate stack. If
        // only the handler's stack pointer is on it, the frame is not on the interrupted stack.
        "mov r10, rsp",
        "mov rcx, rsp",
        "sub rcx, r8",
        "cmp rcx, r9",
        "ja 2f",
        "mov rcx, rax",
        "sub rcx, r8",
        "cmp rcx, r9",
        "cmova r10, rax",
        "2:",
        "sub r10, {red_zone} + 24",
        "and r10, -16",
        "lea rcx, [rip + 3f]",
        "mov [r10], rcx",
        "mov rcx, [rdx + {rip}]",
        "mov [r10 + 8], rcx",
        "mov [r10 + 16], rax",
        "mov rcx, [rip + {gate}]",
        "mov [rdx + {rip}], rcx",
        "mov [rdx + {rsp}], r10",
        "ret",
        // The gate (the instruction that enters the kernel) returns to this label. The registers are as the call has
        // left them. RCX is free, because every system call changes it.
        "3:",
        "mov rcx, [rsp]",
        "mov rsp, [rsp + 8]",
        "jmp rcx",
        rsp = const offset_of!(Frame, registers) + 8 * libc::REG_RSP as usize,
        rip = const offset_of!(Frame, registers) + 8 * libc::REG_RIP as usize,
        alternate = const offset_of!(Frame, alternate) + offset_of!(libc::stack_t, ss_sp),
        alternate_size = const offset_of!(Frame, alternate) + offset_of!(libc::stack_t, ss_size),
        red_zone = const RED_ZONE,
        gate = sym GATE,
    )
}

/// The flags that rt_sigreturn(2) does not restore, because `FIX_EFLAGS` in the kernel's `arch/x86/kernel/signal.c`
/// does not contain them. No system call changes these flags.
const LEFT_ALONE: u64 = NESTED_TASK | IDENTIFICATION;

/// Sets the program's thread pointer, and returns to the program.
///
/// # Safety
/// - Nothing below the frame on its stack is needed any more. The frame says where the program continues.
#[unsafe(naked)]
pub unsafe extern "C" fn return_to(frame: *mut Frame) -> ! {
    naked_asm!(
        "mov rsp, rdi",
        "mov eax, [rdi + {flags}]",
        "and eax, {left_alone}",
        "pushfq",
        "and dword ptr [rsp], {others}",
        "or [rsp], eax",
        "popfq",
        "cmp byte ptr [rip + {separate}], 0",
        "je 2f",
        slat_process::to_programs_pointer!(),
        "2:",
        "mov eax, {rt_sigreturn}",
        "jmp qword ptr [rip + {gate}]",
        separate = sym SEPARATE,
        flags = const offset_of!(Frame, registers) + 8 * libc::REG_EFL as usize,
        left_alone = const LEFT_ALONE,
        others = const !(LEFT_ALONE as i32),
        rt_sigreturn = const libc::SYS_rt_sigreturn,
        gate = sym GATE,
    )
}

/// Makes the call `clone` with `arguments`. This function sets the second argument, the stack. The new process begins
/// with the state in `frame`. Returns the kernel's result in the caller.
///
/// # Safety
/// - The frame is on the new process's stack, which nothing else uses below the frame. The flags make a process that
///   does not need the caller's stack.
pub unsafe fn begin_process(frame: *mut Frame, mut arguments: [usize; 6]) -> isize {
    /// The first code of the new process. The gate (a `syscall` and a `ret` in the C library's text) makes the call,
    /// and its `ret` leads here. The stack pointer is then at the frame, as rt_sigreturn(2) expects.
    #[unsafe(naked)]
    unsafe extern "C" fn begin() {
        naked_asm!(
            "mov eax, {rt_sigreturn}",
            "jmp qword ptr [rip + {gate}]",
            rt_sigreturn = const libc::SYS_rt_sigreturn,
            gate = sym GATE,
        )
    }
    // SAFETY: the frame is on the new process's own stack, which nothing else uses below the frame, as this function's
    // contract requires. The parent continues here.
    unsafe {
        let sp = frame.cast::<usize>().sub(1);
        *sp = begin as *const () as usize;
        arguments[1] = sp as usize;
        slat_process::calls::raw(libc::SYS_clone, arguments)
    }
}
