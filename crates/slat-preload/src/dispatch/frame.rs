//! The frame of a dispatched system call: the state of the program that the kernel saved when it sent SIGSYS.
//!
//! The kernel writes the frame to the stack on which it calls the handler: the program's stack or its alternate stack.
//! That stack may have only a kilobyte, like a goroutine's, or may be reused by the next signal. So the handler first
//! copies the frame to a stack of slat's own ([`place`]), unless the frame is already there. The call is served on
//! slat's stack, and the kernel returns to the state in the copy ([`resume`]).
//!
//! All signals are blocked until slat begins to serve the call. Signals of the program may arrive later, while slat
//! serves the call, for example a `read` that waits. The handlers of these signals make calls of their own. Such calls
//! are served below the first call: [`stack`] knows at which address.

use super::serve;
use slat_guard::Section;
use slat_process::caller::{IDENTIFICATION, NESTED_TASK};
use slat_process::gate::GATE;
use slat_process::pointers::SEPARATE;
use slat_process::stack;
use std::arch::naked_asm;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kernel's `struct ucontext` of x86-64 (`arch/x86/include/uapi/asm/ucontext.h`, `sigcontext.h`).
#[repr(C)]
#[derive(Debug)]
pub struct Frame {
    flags: u64,
    /// The kernel does not use this field. On slat's stack, the field holds the lowest address that was in use on that
    /// stack before.
    link: usize,
    /// The alternate stack, which the kernel sets again when it returns.
    pub alternate: libc::stack_t,
    registers: [i64; 23],
    floating: *mut u8,
    reserved: [u64; 8],
    /// The signal mask that the kernel returns to.
    pub mask: u64,
}

const _: () = assert!(size_of::<Frame>() == 304);

impl Frame {
    /// Returns a register by its index in glibc's `gregset_t`.
    pub fn register(&self, index: c_int) -> usize {
        self.registers[index as usize] as usize
    }

    /// Changes a register.
    pub fn set_register(&mut self, index: c_int, value: usize) {
        self.registers[index as usize] = value as i64;
    }

    /// Whether the program has made the call on its alternate stack.
    pub fn comes_from_alternate(&self) -> bool {
        self.is_on_alternate(self.register(libc::REG_RSP))
    }

    /// Returns the part of the alternate stack below the call. That part is free.
    pub fn free_alternate(&self) -> libc::stack_t {
        let free = self.register(libc::REG_RSP) - stack::RED_ZONE - self.alternate.ss_sp as usize;
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
        // The kernel looks at the lower half of RAX.
        let number = i64::from(self.registers[libc::REG_RAX as usize] as i32);
        (number, arguments.map(|index| self.register(index)))
    }

    /// Returns the bytes of the extended state; their number is in `_fpx_sw_bytes`
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
        // SAFETY: the kernel's promise about the state's layout.
        unsafe {
            let words = self.floating.add(SOFTWARE).cast::<u32>();
            let len = match words.read() {
                MAGIC => words.add(1).read() as usize,
                _ => LEGACY,
            };
            std::slice::from_raw_parts(self.floating, len)
        }
    }

    /// Copies the frame to new memory.
    ///
    /// # Safety
    /// - The kernel or [`copy_below`](Self::copy_below) has filled in the frame.
    pub unsafe fn keep(&self) -> KeptFrame {
        // SAFETY: the caller's promise. The memory suffices for both parts, each aligned.
        unsafe {
            let bytes = self.floating().len() + size_of::<Frame>() + 2 * Self::ALIGNMENT;
            let mut memory = vec![0; bytes];
            let start = memory.as_mut_ptr() as usize;
            let at = self.copy_below(start + bytes) as usize - start;
            KeptFrame { memory, at }
        }
    }

    /// The alignment that XRSTOR demands (Intel SDM, volume 1, section 13.4).
    const ALIGNMENT: usize = 64;

    /// Copies the frame to the end of the memory below `top`, so that a thread can return from another
    /// stack. Returns the copy.
    ///
    /// # Safety
    /// - The kernel or this function has filled in the frame.
    /// - Below `top` there is space for the frame, which nothing else uses.
    pub unsafe fn copy_below(&self, top: usize) -> *mut Frame {
        // SAFETY: the caller's promise, for both parts.
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

/// A copy of a frame outside any stack.
#[derive(Debug)]
pub struct KeptFrame {
    memory: Vec<u8>,
    /// The offset of the frame in `memory`.
    at: usize,
}

impl KeptFrame {
    /// Returns the frame.
    pub fn frame(&self) -> &Frame {
        // SAFETY: `Frame::keep` has put it there, aligned; the memory does not move.
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

/// `include/uapi/linux/audit.h`.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// Puts the frame of a call on slat's stack. Runs in the handler, with all signals blocked.
unsafe extern "C" fn place(_signal: c_int, info: *const Sent, kernels: *mut Frame) -> *mut Frame {
    if !stack::exists() {
        super::library_threads::make_stack();
    }
    // SAFETY: the kernel's frame, which is on the stack of this handler; and the free part of slat's stack.
    unsafe {
        let frame = match stack::contains(kernels as usize) {
            true => kernels,
            false => {
                let sp = (*kernels).register(libc::REG_RSP);
                let on_alternate = (*kernels).is_on_alternate(sp);
                (*kernels).copy_below(stack::free_below(sp, on_alternate))
            }
        };
        (*frame).link = stack::set_used_to(frame as usize);
        if (*info).architecture != AUDIT_ARCH_X86_64 {
            // A call by `int 0x80`, with the numbers of 32-bit programs, fails as if it did not exist.
            (*frame).set_register(libc::REG_RAX, usize::MAX);
        }
        frame
    }
}

/// The address of the C library's call of rt_sigreturn(2). [`entry`] pushes this address as the return address of
/// `serve`, which does not return. Unwinders treat the frame above such an address as the kernel's signal frame, and
/// continue with the interrupted code. So a thread that is cancelled in `serve` unwinds into the program.
static RESTORER: AtomicUsize = AtomicUsize::new(0);

/// Call before the first [`entry`].
pub fn set_restorer(address: usize) {
    RESTORER.store(address, Ordering::Release);
}

/// The handler that the kernel calls for SIGSYS. The handler serves a dispatched call of the program (`si_code` 2,
/// SYS_USER_DISPATCH), and [passes](pass_through_gate) a call of slat itself. All other SIGSYS signals come from
/// seccomp filters; the handler passes them to the program's handler.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn entry() {
    naked_asm!(
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
        others = sym crate::signals::entry,
        separate = sym SEPARATE,
        pass = sym pass_through_gate,
        runs_slat = sym runs_slat,
        place = sym place,
        restorer = sym RESTORER,
        serve = sym serve,
    )
}

/// Whether this thread is in slat's code, in a process with one thread pointer. Runs in the handler.
unsafe extern "C" fn runs_slat() -> bool {
    // If slat loads the program, this function is called only before the program begins, while all code is slat's.
    // Afterwards the program has its own thread pointer.
    Section::is_entered() || crate::loaded::is_loaded()
}

/// Repeats a call of slat itself at the gate, from where calls pass: the second half of [`entry`], with the kernel's
/// frame in RDX. slat enters the kernel not only by the C library's code: the vDSO's functions make a call if they
/// cannot compute the result, and so does the dynamic linker.
///
/// The call is not made here, but at the address to which the handler returns, with the stack, the signal mask and all
/// registers of the code that makes the call. So the call may wait, be interrupted and restarted, or change the mask.
/// (A thread that begins on a stack of its own would not find the code after the gate; but only the C library's text
/// makes threads.) Three words lead back to the interrupted code. The words are stored below all memory in use on the
/// interrupted stack: the red zone, and this handler's frame if the frame is on the same stack.
#[unsafe(naked)]
unsafe extern "C" fn pass_through_gate() {
    naked_asm!(
        "mov rax, [rdx + {rsp}]",
        "mov r8, [rdx + {alternate}]",
        "mov r9, [rdx + {alternate_size}]",
        // Checks which stack pointers are on the alternate stack. If only the handler's is, the frame is not on
        // the interrupted stack.
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
        // The gate returns here, with the registers that the call has left. Any system call changes RCX.
        "3:",
        "mov rcx, [rsp]",
        "mov rsp, [rsp + 8]",
        "jmp rcx",
        rsp = const std::mem::offset_of!(Frame, registers) + 8 * libc::REG_RSP as usize,
        rip = const std::mem::offset_of!(Frame, registers) + 8 * libc::REG_RIP as usize,
        alternate = const std::mem::offset_of!(Frame, alternate) + std::mem::offset_of!(libc::stack_t, ss_sp),
        alternate_size = const std::mem::offset_of!(Frame, alternate) + std::mem::offset_of!(libc::stack_t, ss_size),
        red_zone = const stack::RED_ZONE,
        gate = sym GATE,
    )
}

/// The flags that neither rt_sigreturn(2) nor a system call changes. (`FIX_EFLAGS` of `arch/x86/kernel/signal.c` has
/// all other flags.)
const LEFT_ALONE: u64 = NESTED_TASK | IDENTIFICATION;

/// Returns to the program.
///
/// # Safety
/// - The frame is on a stack below which nothing is needed any more, and says where the program continues.
#[unsafe(naked)]
unsafe extern "C" fn return_to(frame: *mut Frame) -> ! {
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
        flags = const std::mem::offset_of!(Frame, registers) + 8 * libc::REG_EFL as usize,
        left_alone = const LEFT_ALONE,
        others = const !(LEFT_ALONE as i32),
        rt_sigreturn = const libc::SYS_rt_sigreturn,
        gate = sym GATE,
    )
}

/// Returns to the program, to the state in `frame`.
///
/// # Safety
/// - `frame` is a copy on this thread's stack. The caller has no value that has to be dropped.
pub unsafe fn resume(frame: *mut Frame) -> ! {
    // SAFETY: the caller keeps this function's contract.
    unsafe {
        if (*frame).comes_from_alternate() {
            // The call came from the alternate stack, and may have interrupted another call that is served above it.
            // The memory below the other call becomes free again, once no signal can arrive before the return.
            super::block_all();
            stack::set_used_to((*frame).link);
        }
        return_to(frame)
    }
}

/// Implements rt_sigreturn(2) for a handler that has called it itself.
///
/// # Safety
/// - The kernel's frame of that handler is at `sp`. The caller has no value that has to be dropped.
pub unsafe fn return_from_handler(sp: usize) -> ! {
    let frame = sp as *mut Frame;
    // SAFETY: the caller keeps this function's contract.
    unsafe {
        (*frame).mask = slat_guard::blockable((*frame).mask);
        return_to(frame)
    }
}
