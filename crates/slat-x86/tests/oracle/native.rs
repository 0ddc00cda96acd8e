//! Runs instruction bytes on the host CPU from a given state, and returns the resulting state, or the fault.

use std::arch::global_asm;
use std::mem::offset_of;
use std::sync::{Mutex, MutexGuard, Once, OnceLock};

/// Registers before and after an instruction, in the order of the machine encoding. `fx` is an FXSAVE64 image.
#[repr(C, align(64))]
#[derive(Clone)]
pub struct Regs {
    pub fx: [u8; 512],
    /// The upper halves of the YMM registers. They are zero if the host has no AVX.
    pub high: [u8; 256],
    pub gpr: [u64; 16],
    pub rflags: u64,
    pub rip: u64,
}

impl Regs {
    /// Returns the two halves of a YMM register.
    pub fn ymm_mut(&mut self, n: usize) -> [&mut [u8]; 2] {
        [
            &mut self.fx[160 + 16 * n..][..16],
            &mut self.high[16 * n..][..16],
        ]
    }
}

/// A fault of the instruction: the vector, the error code the CPU pushed and CR2 (meaningful for #PF).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub vector: u8,
    pub error: u64,
    pub cr2: u64,
}

#[repr(C, align(64))]
struct Frame {
    regs: Regs,
    host_rsp: u64,
    /// Whether native code is executing, between `slat_oracle_enter` and its return. Each fault in this time is a
    /// fault of the native code.
    running: bool,
    faulted: bool,
    trapno: u64,
    error: u64,
    cr2: u64,
    host_mxcsr: u32,
    has_avx: bool,
}

static mut FRAME: Frame = Frame {
    regs: Regs {
        fx: [0; 512],
        high: [0; 256],
        gpr: [0; 16],
        rflags: 0,
        rip: 0,
    },
    host_rsp: 0,
    running: false,
    faulted: false,
    trapno: 0,
    error: 0,
    cr2: 0,
    host_mxcsr: 0,
    has_avx: false,
};

// The frame is addressed relative to RIP, so that no register is needed while all registers hold the state under test.
global_asm!(
    ".macro oracle_gprs move",
    "\\move rcx, 1", "\\move rdx, 2", "\\move rbx, 3", "\\move rsp, 4", "\\move rbp, 5", "\\move rsi, 6",
    "\\move rdi, 7", "\\move r8, 8", "\\move r9, 9", "\\move r10, 10", "\\move r11, 11", "\\move r12, 12",
    "\\move r13, 13", "\\move r14, 14", "\\move r15, 15", "\\move rax, 0",
    ".endm",
    ".macro oracle_load reg, n",
    "mov \\reg, [rip + {frame} + {gpr} + \\n * 8]",
    ".endm",
    ".macro oracle_save reg, n",
    "mov [rip + {frame} + {gpr} + \\n * 8], \\reg",
    ".endm",
    ".macro oracle_load_high n",
    "vinsertf128 ymm\\n, ymm\\n, [rip + {frame} + {high} + \\n * 16], 1",
    ".endm",
    ".macro oracle_save_high n",
    "vextractf128 [rip + {frame} + {high} + \\n * 16], ymm\\n, 1",
    ".endm",
    ".macro oracle_highs move",
    ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "\\move \\n",
    ".endr",
    ".endm",
    ".globl slat_oracle_enter",
    "slat_oracle_enter:",
    "push rbx", "push rbp", "push r12", "push r13", "push r14", "push r15",
    "stmxcsr [rip + {frame} + {host_mxcsr}]",
    "mov [rip + {frame} + {host_rsp}], rsp",
    "fxrstor64 [rip + {frame} + {fx}]",
    "cmp byte ptr [rip + {frame} + {has_avx}], 0",
    "je 2f",
    "oracle_highs oracle_load_high",
    "2:",
    "push qword ptr [rip + {frame} + {rflags}]",
    "popfq",
    "oracle_gprs oracle_load",
    "jmp [rip + {frame} + {rip_slot}]",
    // A jump to this address follows the instruction's own bytes.
    ".globl slat_oracle_exit",
    "slat_oracle_exit:",
    "oracle_gprs oracle_save",
    "mov rsp, [rip + {frame} + {host_rsp}]",
    "pushfq",
    "pop qword ptr [rip + {frame} + {rflags}]",
    "fxsave64 [rip + {frame} + {fx}]",
    "cmp byte ptr [rip + {frame} + {has_avx}], 0",
    "je slat_oracle_leave",
    "oracle_highs oracle_save_high",
    // The signal handler resumes here after a fault.
    ".globl slat_oracle_leave",
    "slat_oracle_leave:",
    "mov rsp, [rip + {frame} + {host_rsp}]",
    "cld", "fninit",
    "cmp byte ptr [rip + {frame} + {has_avx}], 0",
    "je 2f",
    "vzeroupper",
    "2:",
    "ldmxcsr [rip + {frame} + {host_mxcsr}]",
    "pop r15", "pop r14", "pop r13", "pop r12", "pop rbp", "pop rbx",
    "ret",
    frame = sym FRAME,
    gpr = const offset_of!(Frame, regs) + offset_of!(Regs, gpr),
    fx = const offset_of!(Frame, regs) + offset_of!(Regs, fx),
    high = const offset_of!(Frame, regs) + offset_of!(Regs, high),
    has_avx = const offset_of!(Frame, has_avx),
    rflags = const offset_of!(Frame, regs) + offset_of!(Regs, rflags),
    rip_slot = const offset_of!(Frame, regs) + offset_of!(Regs, rip),
    host_rsp = const offset_of!(Frame, host_rsp),
    host_mxcsr = const offset_of!(Frame, host_mxcsr),
);

unsafe extern "C" {
    fn slat_oracle_enter();
    fn slat_oracle_exit();
    fn slat_oracle_leave();
}

pub const PAGE: usize = 4096;
/// The layout of the arena: two pages of code, two of data, an inaccessible page, and two pages of stack. All are below
/// 2 GiB, so that 32-bit addresses and RIP-relative operands reach them.
pub const CODE_LEN: usize = 2 * PAGE;
pub const DATA: usize = CODE_LEN;
pub const DATA_LEN: usize = 2 * PAGE;
pub const HOLE: usize = 4 * PAGE;
pub const STACK: usize = 5 * PAGE;
pub const STACK_LEN: usize = 2 * PAGE;
/// Pages that only the guest uses: descriptor tables, handlers and their stack.
pub const SYSTEM: usize = 7 * PAGE;
pub const ARENA_LEN: usize = 10 * PAGE;
/// The offset of an instruction in the code pages, and the target of its branches.
pub const AT: usize = 0x400;
pub const BRANCH_TARGET: usize = 0x440;

/// The bytes to execute, their offset in the code pages, and the two offsets where they end.
#[derive(Clone, Copy)]
pub struct Placed<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    pub ends: [usize; 2],
}

impl<'a> Placed<'a> {
    /// Makes the placement of one instruction or a few. They end after their last byte, or at the target of their
    /// branch.
    pub fn short(bytes: &'a [u8]) -> Self {
        Placed {
            bytes,
            at: AT,
            ends: [AT + bytes.len(), BRANCH_TARGET],
        }
    }

    /// Makes the placement of a program, which ends after its last byte.
    pub fn program(bytes: &'a [u8], at: usize) -> Self {
        let end = at + bytes.len();
        assert!(at >= AT && end + END_LEN <= CODE_LEN);
        Placed {
            bytes,
            at,
            ends: [end; 2],
        }
    }
}

/// The base of GS, which nothing else uses in a Linux program.
pub const GS_BASE: u64 = 0x1230;

/// The memory that both CPUs use, and the right to use the only frame.
pub struct Arena {
    pub base: usize,
    _lock: MutexGuard<'static, ()>,
}

static LOCK: Mutex<()> = Mutex::new(());

impl Arena {
    pub fn new() -> Arena {
        let lock = LOCK.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                ARENA_LEN,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED, "no memory below 2 GiB");
        // SAFETY: the page belongs to the mapping just made.
        let hole = unsafe { libc::mprotect(base.byte_add(HOLE), PAGE, libc::PROT_NONE) };
        assert_eq!(hole, 0);
        install_handlers();
        const ARCH_SET_GS: i32 = 0x1001;
        // SAFETY: the call changes only the base of GS, which nothing in the process uses.
        let gs = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, GS_BASE) };
        assert_eq!(gs, 0);
        Arena {
            base: base as usize,
            _lock: lock,
        }
    }

    /// Returns the bytes at `offset`, which is not in the hole.
    pub fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= ARENA_LEN && (offset + len <= HOLE || offset >= STACK));
        // SAFETY: the range is inside the mapping and outside of the hole, and no code runs on the arena while the
        // slice is used.
        unsafe { std::slice::from_raw_parts((self.base + offset) as *const u8, len) }
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "the mapping, not the struct, is what changes"
    )]
    pub fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= ARENA_LEN && (offset + len <= HOLE || offset >= STACK));
        // SAFETY: the range is inside the mapping and outside of the hole, no code runs on the arena, and callers
        // keep no other slice.
        unsafe { std::slice::from_raw_parts_mut((self.base + offset) as *mut u8, len) }
    }

    /// Fills the code pages. Returns them.
    pub fn place(&self, code: Placed<'_>) -> &mut [u8] {
        let pages = self.bytes_mut(0, CODE_LEN);
        pages.fill(0x90);
        pages[code.at..][..code.bytes.len()].copy_from_slice(code.bytes);
        pages
    }

    /// Executes `code`, beginning with `regs`. In the result RIP is that of the next instruction, or
    /// of the faulting one.
    pub fn run(&self, code: Placed<'_>, regs: &Regs) -> (Regs, Option<Fault>) {
        let pages = self.place(code);
        // The exit code needs no register and changes no flag; a byte that it writes tells which of the
        // two ends was reached.
        for (number, end) in code.ends.into_iter().enumerate() {
            pages[end..end + END_LEN].copy_from_slice(&self.exit_sequence(number, end));
        }
        // SAFETY: the lock in `self` makes this the only user of the frame. The code page holds the instruction
        // followed by exit code, and faults return through the handler.
        unsafe {
            let frame = &raw mut FRAME;
            (*frame).regs = regs.clone();
            (*frame).faulted = false;
            (*frame).has_avx = is_x86_feature_detected!("avx");
            (*frame).running = true;
            slat_oracle_enter();
            (*frame).running = false;
            let mut after = (*frame).regs.clone();
            let fault = (*frame).faulted.then(|| Fault {
                vector: (*frame).trapno as u8,
                error: (*frame).error,
                cr2: (*frame).cr2,
            });
            if fault.is_none() {
                let number = self.bytes(MARKER, 1)[0];
                after.rip = (self.base + code.ends[usize::from(number)]) as u64;
            }
            (after, fault)
        }
    }

    /// Returns a `jmp` to a tail in the code pages. The tail records which end was reached, and leaves.
    fn exit_sequence(&self, number: usize, end: usize) -> [u8; END_LEN] {
        let tail = TAILS + 0x40 * number;
        let pages = self.bytes_mut(tail, 0x40);
        // mov byte [rip + MARKER], number
        pages[..2].copy_from_slice(&[0xc6, 0x05]);
        pages[2..6].copy_from_slice(&((MARKER as i32) - (tail as i32 + 7)).to_le_bytes());
        pages[6] = number as u8;
        // jmp [rip + 0]
        pages[7..13].copy_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
        pages[13..21].copy_from_slice(&(slat_oracle_exit as *const () as u64).to_le_bytes());
        let mut bytes = [0x90; END_LEN];
        bytes[0] = 0xe9;
        bytes[1..5].copy_from_slice(&((tail as i32) - (end as i32 + 5)).to_le_bytes());
        bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `new` has made this mapping, and nothing else refers to it.
        unsafe { libc::munmap(self.base as *mut _, ARENA_LEN) };
    }
}

/// The size in bytes of the code by which the tested code exits at one of its ends.
const END_LEN: usize = 14;
/// The offset in the code pages of the tails: the code to which an end jumps to exit.
const TAILS: usize = 0x100;
/// The offset of the byte in the code pages where a tail stores the number of its end.
const MARKER: usize = 0x1f0;

fn install_handlers() {
    const ALT_STACK: usize = 1 << 16;
    // SAFETY: the alternate stack is leaked, so it outlives every signal of this thread.
    unsafe {
        let mut current: libc::stack_t = std::mem::zeroed();
        libc::sigaltstack(std::ptr::null(), &mut current);
        if current.ss_flags & libc::SS_DISABLE != 0 || current.ss_size < ALT_STACK {
            let stack = libc::stack_t {
                ss_sp: Box::leak(vec![0u8; ALT_STACK].into_boxed_slice())
                    .as_mut_ptr()
                    .cast(),
                ss_flags: 0,
                ss_size: ALT_STACK,
            };
            assert_eq!(libc::sigaltstack(&stack, std::ptr::null_mut()), 0);
        }
    }
    // The handlers are installed once in a process, and before the software CPU installs the handlers for its guarded
    // accesses. Those handlers pass on faults that are not their own.
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
            // SAFETY: the calls only set signal actions, and a `sigaction` of zeros is valid.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handler as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
                let mut old: libc::sigaction = std::mem::zeroed();
                assert_eq!(libc::sigaction(signal, &action, &mut old), 0);
                let _ = previous.set(old);
            }
        }
    });
}

const SIGNALS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGBUS,
    libc::SIGTRAP,
];

/// The actions that were set before the handlers were installed.
static PREVIOUS: [OnceLock<libc::sigaction>; 5] = [const { OnceLock::new() }; 5];

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context. While native code runs, the frame belongs to this thread, because
    // `Arena` holds the lock. The previous action is called as the kernel would have called it.
    unsafe {
        let uc = &mut *context.cast::<libc::ucontext_t>();
        let gregs = &mut uc.uc_mcontext.gregs;
        let frame = &raw mut FRAME;
        let rip = gregs[libc::REG_RIP as usize] as u64;
        // A branch may have left the code page, so RIP does not tell whether native code has caused the fault.
        if !(*frame).running {
            return chain(signal, info, context);
        }
        const ORDER: [i32; 16] = [
            libc::REG_RAX,
            libc::REG_RCX,
            libc::REG_RDX,
            libc::REG_RBX,
            libc::REG_RSP,
            libc::REG_RBP,
            libc::REG_RSI,
            libc::REG_RDI,
            libc::REG_R8,
            libc::REG_R9,
            libc::REG_R10,
            libc::REG_R11,
            libc::REG_R12,
            libc::REG_R13,
            libc::REG_R14,
            libc::REG_R15,
        ];
        for (n, reg) in ORDER.into_iter().enumerate() {
            (*frame).regs.gpr[n] = gregs[reg as usize] as u64;
        }
        (*frame).regs.rip = rip;
        (*frame).regs.rflags = gregs[libc::REG_EFL as usize] as u64;
        (*frame).regs.fx = *uc.uc_mcontext.fpregs.cast::<[u8; 512]>();
        (*frame).regs.high = high_halves(uc.uc_mcontext.fpregs.cast());
        (*frame).running = false;
        (*frame).faulted = true;
        (*frame).trapno = gregs[libc::REG_TRAPNO as usize] as u64;
        (*frame).error = gregs[libc::REG_ERR as usize] as u64;
        (*frame).cr2 = gregs[libc::REG_CR2 as usize] as u64;
        gregs[libc::REG_RIP as usize] = slat_oracle_leave as *const () as i64;
        gregs[libc::REG_EFL as usize] = 0x202;
    }
}

/// Returns the upper halves of the YMM registers in the XSAVE area of a signal frame.
///
/// # Safety
/// `area` is the XSAVE area in the frame of a signal handler that is running.
unsafe fn high_halves(area: *const u8) -> [u8; 256] {
    const XSTATE_BV: usize = 512;
    const AVX: u64 = 4;
    const HIGH: usize = 576;
    // The bytes for software in the legacy region tell whether there is more than that region, and which components
    // there are.
    const MAGIC: usize = 464;
    const MAGIC_VALUE: u32 = 0x4650_5853;
    // SAFETY: the legacy region always exists. The rest exists if the magic number is there, which is checked first.
    unsafe {
        let extended = area.add(MAGIC).cast::<u32>().read_unaligned() == MAGIC_VALUE;
        if extended && area.add(XSTATE_BV).cast::<u64>().read_unaligned() & AVX != 0 {
            area.add(HIGH).cast::<[u8; 256]>().read_unaligned()
        } else {
            [0; 256]
        }
    }
}

/// # Safety
/// The arguments are those of a signal handler that is running.
unsafe fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: handlers were installed before any signal could come; an action with SA_SIGINFO takes three arguments.
    unsafe {
        let index = SIGNALS.iter().position(|&s| s == signal).unwrap();
        match PREVIOUS[index].get() {
            Some(old) if old.sa_sigaction > 1 => {
                let f: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(old.sa_sigaction);
                f(signal, info, context);
            }
            _ => {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
}
