//! The entry into slat from a rewritten call site ([`sites`](super::sites)), for ioctl(2).
//!
//! The kernel preserves all registers except RAX, RCX and R11 over a system call. So this code preserves them, too. The
//! code saves flags, floating point and vectors, and then sets them as slat's code expects
//! ([`caller`](slat_process::caller)). The code writes nothing to the program's stack, which may be a goroutine's.
//! slat's stack ([`stack`](slat_process::stack)) is free if the program is on its own stack. Calls from any other
//! stack, and calls other than ioctl, are made by the `syscall` in the site's stub, and the kernel dispatches them to
//! slat (SIGSYS).
//!
//! Only loaded programs have rewritten sites. In a loaded program, this code finds the thread's stack by the base of
//! GS, before it saves anything. Signals may arrive between any two instructions. Their handlers determine which thread
//! pointer FS holds (slat's or the program's), and derive from the stack pointer which part of slat's stack is in use.

use super::frame::Frame;
use slat_kvm::cpuid::host_leaf;
use slat_process::filter::Made;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The data of a stub, to which RCX points when the stub jumps to the entry.
#[repr(C)]
#[derive(Debug)]
pub struct Site {
    /// The address where the program continues: the end of its `syscall`.
    pub back: usize,
    /// The instruction `syscall`, and a jump to `back`.
    pub call: [u8; 8],
}

/// The registers that the entry has pushed.
#[repr(C)]
#[derive(Debug)]
pub struct Saved {
    rbp: usize,
    r9: usize,
    r8: usize,
    r10: usize,
    rdx: usize,
    rsi: usize,
    rdi: usize,
    /// RFLAGS; the arithmetic flags are in `arithmetic`.
    flags: usize,
    /// The arithmetic flags, as LAHF and SETO store them in RAX.
    arithmetic: usize,
    site: *const Site,
    answer: usize,
    rsp: usize,
}

/// Offset of the result in [`Saved`], for assembly.
pub const ANSWER: usize = std::mem::offset_of!(Saved, answer);

impl Saved {
    /// Returns the system call that the program has made.
    pub fn made(&self) -> Made {
        Made {
            number: libc::SYS_ioctl,
            arguments: [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9],
            // SAFETY: the call site is part of the stub, which is never freed.
            address: unsafe { (*self.site).back },
        }
    }

    /// Returns the complete state of the program. On x86-64 always `None`: this entry does not save the complete state.
    pub fn frame(&mut self) -> Option<&mut Frame> {
        None
    }

    /// Whether the entry has blocked all signals. On x86-64 always false.
    pub fn is_blocked(&self) -> bool {
        false
    }
}

/// The number of bytes that XSAVE writes, with the components that the kernel has enabled. Assembly reads it.
pub static STATE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Sets [`STATE_BYTES`] from CPUID. Call before the first entry through a call site.
pub fn prepare() {
    // Intel SDM, volume 2, CPUID leaf 0DH: EBX of its first subleaf.
    let bytes = host_leaf(0xd, 0).ebx as usize;
    STATE_BYTES.store(bytes, Ordering::Relaxed);
}

/// Offset of the instructions in [`Site`], for assembly.
pub const CALL: usize = std::mem::offset_of!(Site, call);

/// The body of the function to which a stub jumps. RCX points to the stub's [`Site`]; all other registers are as the
/// program has set them for the call. The function that has this body calls `$serve` with the [`Saved`] registers.
///
/// Call [`prepare`] before the first entry. The thread belongs to a loaded program.
macro_rules! from_site {
    ($serve:path) => {
        ::std::arch::naked_asm!(
                // Saves the arithmetic flags in AH and AL.
                "mov r11, rax",
                "lahf",
                "seto al",
                "cmp r11d, {ioctl}",
                "jne 5f",
                "cmp qword ptr gs:[{stack_high}], 0",
                "je 5f",
                "cmp rsp, gs:[{stack_low}]",
                "jb 2f",
                "cmp rsp, gs:[{stack_high}]",
                "jbe 5f",
                "2:",
                "cmp rsp, gs:[{alternate_low}]",
                "jb 3f",
                "cmp rsp, gs:[{alternate_high}]",
                "jbe 5f",
                "3:",
                "mov r11, rsp",
                "mov rsp, gs:[{stack_high}]",
                "push r11",
                "push rax",
                "push rcx",
                "push rax",
                "pushfq",
                "test dword ptr [rsp], {flags}",
                "jz 4f",
                // Clears all flags except bit 1, which is always set. String instructions then go upwards, alignment is
                // not checked, and nothing traps.
                "push 2",
                "popfq",
                "4:",
                "push rdi",
                "push rsi",
                "push rdx",
                "push r10",
                "push r8",
                "push r9",
                "push rbp",
                "mov rbp, rsp",
                "rdfsbase rax",
                slat_process::to_slats_pointer!(),
                "sub rsp, [rip + {state_bytes}]",
                "and rsp, -64",
                // XRSTOR faults if a reserved bit of the header is set (Intel SDM, volume 1, section 13.4.2).
                "xor eax, eax",
                "mov ecx, 8",
                "lea rdi, [rsp + 512]",
                "rep stosq",
                "mov eax, -1",
                "mov edx, -1",
                "xsave64 [rsp]",
                // The floating-point state is usually as in a new process. So the code first compares FCW, FSW, the
                // tags and MXCSR with their initial values (Intel SDM, volume 1, table 10-2).
                "cmp dword ptr [rsp], {x87}",
                "jne 6f",
                "cmp byte ptr [rsp + 4], 0",
                "je 7f",
                "6:",
                "fninit",
                "7:",
                "mov eax, [rip + {mxcsr}]",
                "cmp [rsp + 24], eax",
                "je 8f",
                "ldmxcsr [rip + {mxcsr}]",
                "8:",
                "mov rdi, rbp",
                "call {serve}",
                "mov [rbp + {answer}], rax",
                "mov eax, -1",
                "mov edx, -1",
                "xrstor64 [rsp]",
                "mov rsp, rbp",
                slat_process::to_programs_pointer!(),
                "pop rbp",
                "pop r9",
                "pop r8",
                "pop r10",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "test dword ptr [rsp], {flags}",
                "jz 9f",
                "popfq",
                "jmp 22f",
                "9:",
                "add rsp, 8",
                "22:",
                "pop rax",
                "pop rcx",
                "mov rcx, [rcx]",
                "add al, 127",
                "sahf",
                "pop rax",
                "pop rsp",
                "jmp rcx",
                "5:",
                "add al, 127",
                "sahf",
                "mov rax, r11",
                "lea rcx, [rcx + {call}]",
                "jmp rcx",
                ioctl = const libc::SYS_ioctl,
                stack_low = const slat_process::pointers::STACK_LOW,
                stack_high = const slat_process::pointers::STACK_HIGH,
                alternate_low = const slat_process::pointers::ALTERNATE_LOW,
                alternate_high = const slat_process::pointers::ALTERNATE_HIGH,
                state_bytes = sym $crate::arch::site_entry::STATE_BYTES,
                flags = const slat_process::caller::FLAGS,
                x87 = const slat_process::caller::X87_CONTROL as u32,
                mxcsr = sym slat_process::caller::MXCSR,
                serve = sym $serve,
                answer = const $crate::arch::site_entry::ANSWER,
                call = const $crate::arch::site_entry::CALL,
        )
    };
}
pub(crate) use from_site;
