//! The entry into slat from a rewritten call site ([`sites`](super::sites)), for all system calls.
//!
//! The kernel preserves the flags, the lower 128 bits of the vectors, and all general registers except X0 over a system
//! call. So this code preserves them, too. The code stores the registers in a [`Frame`], as the kernel would, because
//! some calls need all of the program's state. The frame is on slat's stack ([`stack`](slat_process::stack)). On the
//! program's stack, which may be a goroutine's, this code and the stub use 128 bytes.
//!
//! Signals may arrive between any two instructions. Their handlers find the thread's two thread pointers by the
//! thread's id, and derive from the stack pointer which part of slat's stack is in use. If the program is on its
//! alternate stack, this code blocks all signals before it leaves that stack. Otherwise the kernel would put the next
//! handler's frame over the program's data.

use super::frame::Frame;
use slat_process::filter::Made;

/// The data of a stub, to which X16 points when the stub jumps to the entry. The program's X16 and X17 are on its
/// stack.
#[repr(C)]
#[derive(Debug)]
pub struct Site {
    /// The address where the program continues: the end of its `svc`.
    pub back: usize,
    /// The address of slat's entry code, to which the stub jumps.
    pub entry: usize,
}

/// The distance in bytes from the stub's exit code to the stub's [`Site`]. The entry jumps to the exit code, which
/// restores X16 and X17 and returns to the program.
pub const LEAVE: usize = 24;
/// The distance in bytes from the stub's code that makes the system call to the stub's [`Site`].
pub const PASS: usize = 16;

/// The registers that the entry has stored, as a frame.
#[repr(transparent)]
#[derive(Debug)]
pub struct Saved(Frame);

impl Saved {
    /// Returns the system call that the program has made.
    pub fn made(&self) -> Made {
        self.0.made()
    }

    /// Returns the state of the program. If signals are not [blocked](Self::is_blocked), the state lacks the alternate
    /// stack and the signal mask.
    pub fn frame(&mut self) -> Option<&mut Frame> {
        Some(&mut self.0)
    }

    /// Whether the entry has blocked all signals, and has stored the earlier mask.
    pub fn is_blocked(&self) -> bool {
        self.0.flags != 0
    }
}

/// The signal set with all signals, for assembly.
pub static ALL: u64 = u64::MAX;

/// Does nothing: AArch64 needs no preparation for the first entry through a call site.
pub fn prepare() {}

/// The body of the function to which a stub jumps. X16 points to the stub's [`Site`]. All other registers except X17
/// are as the program has set them for the call. The function calls `$serve` with the [`Saved`] registers, and returns
/// its result to the program.
///
/// If slat has not given the thread a stack, the stub makes the system call instead.
macro_rules! from_site {
    ($serve:path) => {
        ::std::arch::naked_asm!(
            "stp x0, x1, [sp, -112]!",
            "stp x8, x9, [sp, 16]",
            "stp x10, x11, [sp, 32]",
            "mrs x0, nzcv",
            "stp x30, x0, [sp, 48]",
            "stp x16, x2, [sp, 64]",
            "str x3, [sp, 80]",
            "bl {find}",
            "cbz x0, 5f",
            "ldp x8, x9, [x0, {stack}]",
            "cbz x9, 5f",
            // X9 becomes the address below which slat's stack is free. X17 becomes nonzero if the program is on its
            // alternate stack.
            "mov x17, xzr",
            "add x11, sp, 128",
            "cmp x11, x8",
            "b.lo 2f",
            "cmp x11, x9",
            "b.hi 2f",
            "mov x9, sp",
            "b 3f",
            "2:",
            "ldp x8, x10, [x0, {alternate}]",
            "cmp x11, x8",
            "b.lo 3f",
            "cmp x11, x10",
            "b.hi 3f",
            "ldr x9, [x0, {used_to}]",
            "mov x17, 1",
            "3:",
            // X9 becomes the frame's address, X10 the address of the thread's entry in slat's list of threads.
            "sub x9, x9, {pages}, lsl 12",
            "sub x9, x9, {rest}",
            "and x9, x9, -16",
            "mov x10, x0",
            "str x17, [x9]",
            "cbz x17, 4f",
            "mov x0, {block}",
            "adrp x1, {all}",
            "add x1, x1, :lo12:{all}",
            "add x2, x9, {mask}",
            "mov x3, 8",
            "mov x8, {rt_sigprocmask}",
            "adrp x11, {gate}",
            "ldr x11, [x11, :lo12:{gate}]",
            "blr x11",
            "ldr x2, [sp, 72]",
            "ldr x3, [sp, 80]",
            "4:",
            "add x11, x9, {registers}",
            "stp x2, x3, [x11, 16]",
            "stp x4, x5, [x11, 32]",
            "stp x6, x7, [x11, 48]",
            "stp x12, x13, [x11, 96]",
            "stp x14, x15, [x11, 112]",
            "stp x18, x19, [x11, 144]",
            "stp x20, x21, [x11, 160]",
            "stp x22, x23, [x11, 176]",
            "stp x24, x25, [x11, 192]",
            "stp x26, x27, [x11, 208]",
            "stp x28, x29, [x11, 224]",
            "ldp x0, x1, [sp]",
            "stp x0, x1, [x11]",
            "ldp x0, x1, [sp, 16]",
            "stp x0, x1, [x11, 64]",
            "ldp x0, x1, [sp, 32]",
            "stp x0, x1, [x11, 80]",
            "ldp x0, x1, [sp, 112]",
            "stp x0, x1, [x11, 128]",
            "ldp x0, x1, [sp, 48]",
            "str x0, [x11, 240]",
            "str x1, [x11, 264]",
            "add x0, sp, 128",
            "ldr x1, [x16]",
            "stp x0, x1, [x11, 248]",
            "sub x0, x16, {leave}",
            "str x0, [x11, -8]",
            // Writes the record of floating point and vectors (FPSIMD_MAGIC), and ends the list of records.
            "add x12, x9, {records}",
            "mov w0, 0x8001",
            "movk w0, 0x4650, lsl 16",
            "mov w1, 528",
            "stp w0, w1, [x12]",
            "mrs x0, fpsr",
            "mrs x1, fpcr",
            "stp w0, w1, [x12, 8]",
            "stp q0, q1, [x12, 16]",
            "stp q2, q3, [x12, 48]",
            "stp q4, q5, [x12, 80]",
            "stp q6, q7, [x12, 112]",
            "stp q8, q9, [x12, 144]",
            "stp q10, q11, [x12, 176]",
            "stp q12, q13, [x12, 208]",
            "stp q14, q15, [x12, 240]",
            "stp q16, q17, [x12, 272]",
            "stp q18, q19, [x12, 304]",
            "stp q20, q21, [x12, 336]",
            "stp q22, q23, [x12, 368]",
            "stp q24, q25, [x12, 400]",
            "stp q26, q27, [x12, 432]",
            "stp q28, q29, [x12, 464]",
            "stp q30, q31, [x12, 496]",
            "add x12, x12, 528",
            "stp xzr, xzr, [x12]",
            // Writing FPCR is slow on some processors, and is usually not needed.
            "cbz w1, 6f",
            "msr fpcr, xzr",
            "6:",
            // The called functions preserve X19 and X20. These hold the address of the thread's entry and the address
            // of the frame.
            "mov x19, x10",
            "mov x20, x9",
            "sub x0, x9, {before}",
            "mov sp, x0",
            "ldr x0, [x19, {slats}]",
            "cbz x0, 7f",
            "mrs x1, tpidr_el0",
            "cmp x0, x1",
            "b.eq 7f",
            "str x1, [x19, {programs}]",
            "msr tpidr_el0, x0",
            "7:",
            "mov x0, x20",
            "mov x29, xzr",
            "bl {serve}",
            "str x0, [x20, {registers}]",
            "ldr x0, [x19, {slats}]",
            "cbz x0, 8f",
            "ldr x0, [x19, {programs}]",
            "msr tpidr_el0, x0",
            "8:",
            "add x17, x20, {records}",
            "ldp w0, w1, [x17, 8]",
            "cbz w1, 9f",
            "msr fpcr, x1",
            "9:",
            "mrs x2, fpsr",
            "cmp w2, w0",
            "b.eq 22f",
            "msr fpsr, x0",
            "22:",
            "ldp q0, q1, [x17, 16]",
            "ldp q2, q3, [x17, 48]",
            "ldp q4, q5, [x17, 80]",
            "ldp q6, q7, [x17, 112]",
            "ldp q8, q9, [x17, 144]",
            "ldp q10, q11, [x17, 176]",
            "ldp q12, q13, [x17, 208]",
            "ldp q14, q15, [x17, 240]",
            "ldp q16, q17, [x17, 272]",
            "ldp q18, q19, [x17, 304]",
            "ldp q20, q21, [x17, 336]",
            "ldp q22, q23, [x17, 368]",
            "ldp q24, q25, [x17, 400]",
            "ldp q26, q27, [x17, 432]",
            "ldp q28, q29, [x17, 464]",
            "ldp q30, q31, [x17, 496]",
            "add x16, x20, {registers}",
            "ldr x0, [x16, 264]",
            "msr nzcv, x0",
            // X17 becomes the address from which the stub restores X16 and X17, below the program's stack pointer.
            "ldr x17, [x16, 248]",
            "sub x17, x17, 16",
            "ldp x0, x1, [x16, 128]",
            "stp x0, x1, [x17]",
            "ldp x0, x1, [x16]",
            "ldp x2, x3, [x16, 16]",
            "ldp x4, x5, [x16, 32]",
            "ldp x6, x7, [x16, 48]",
            "ldp x8, x9, [x16, 64]",
            "ldp x10, x11, [x16, 80]",
            "ldp x12, x13, [x16, 96]",
            "ldp x14, x15, [x16, 112]",
            "ldp x18, x19, [x16, 144]",
            "ldp x20, x21, [x16, 160]",
            "ldp x22, x23, [x16, 176]",
            "ldp x24, x25, [x16, 192]",
            "ldp x26, x27, [x16, 208]",
            "ldp x28, x29, [x16, 224]",
            "ldr x30, [x16, 240]",
            // The stack pointer is the program's again: slat's stack is free.
            "ldr x16, [x16, -8]",
            "mov sp, x17",
            "br x16",
            "5:",
            "ldp x30, x0, [sp, 48]",
            "msr nzcv, x0",
            "ldp x8, x9, [sp, 16]",
            "ldp x10, x11, [sp, 32]",
            "ldr x16, [sp, 64]",
            "ldp x0, x1, [sp], 112",
            "sub x16, x16, {pass}",
            "br x16",
            find = sym slat_process::pointers::find,
            stack = const slat_process::pointers::STACK,
            alternate = const slat_process::pointers::ALTERNATE,
            used_to = const slat_process::pointers::USED_TO,
            slats = const slat_process::pointers::SLATS,
            programs = const slat_process::pointers::PROGRAMS,
            pages = const size_of::<$crate::arch::frame::Frame>() >> 12,
            rest = const size_of::<$crate::arch::frame::Frame>() & 4095,
            mask = const $crate::arch::frame::MASK,
            registers = const $crate::arch::frame::REGISTERS,
            records = const $crate::arch::frame::RECORDS,
            before = const $crate::arch::frame::BEFORE,
            block = const libc::SIG_BLOCK,
            rt_sigprocmask = const libc::SYS_rt_sigprocmask,
            all = sym $crate::arch::site_entry::ALL,
            gate = sym slat_process::gate::GATE,
            leave = const $crate::arch::site_entry::LEAVE,
            pass = const $crate::arch::site_entry::PASS,
            serve = sym $serve,
        )
    };
}
pub(crate) use from_site;

#[cfg(test)]
mod tests {
    use super::super::sites::Plan;
    use super::*;
    use slat_guard::change_mask;
    use slat_process::{pointers, stack};
    use std::arch::naked_asm;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The values of the registers before or after a call.
    #[repr(C, align(16))]
    #[derive(Clone, Debug, PartialEq)]
    struct Registers {
        general: [u64; 30],
        flags: u64,
        floating_control: u64,
        vectors: [u128; 32],
        floating_status: u64,
    }

    /// Loads all registers except X30 from `registers`, calls `code`, and stores the registers in `registers`.
    #[unsafe(naked)]
    unsafe extern "C" fn call(registers: *mut Registers, code: usize) {
        naked_asm!(
            "stp x29, x30, [sp, -192]!",
            "stp x19, x20, [sp, 16]",
            "stp x21, x22, [sp, 32]",
            "stp x23, x24, [sp, 48]",
            "stp x25, x26, [sp, 64]",
            "stp x27, x28, [sp, 80]",
            "stp d8, d9, [sp, 96]",
            "stp d10, d11, [sp, 112]",
            "stp d12, d13, [sp, 128]",
            "stp d14, d15, [sp, 144]",
            "stp x0, x1, [sp, 160]",
            "mov x30, x0",
            "ldr x0, [x30, 240]",
            "msr nzcv, x0",
            "ldr x0, [x30, 248]",
            "msr fpcr, x0",
            "ldr x0, [x30, 768]",
            "msr fpsr, x0",
            ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
            "ldr q\\n, [x30, 256 + 16 * \\n]",
            ".endr",
            ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29",
            "ldr x\\n, [x30, 8 * \\n]",
            ".endr",
            "ldr x30, [sp, 168]",
            "blr x30",
            "ldr x30, [sp, 160]",
            ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29",
            "str x\\n, [x30, 8 * \\n]",
            ".endr",
            ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
            "str q\\n, [x30, 256 + 16 * \\n]",
            ".endr",
            "mrs x0, nzcv",
            "str x0, [x30, 240]",
            "mrs x0, fpcr",
            "str x0, [x30, 248]",
            "mrs x0, fpsr",
            "str x0, [x30, 768]",
            "msr fpcr, xzr",
            "ldp x19, x20, [sp, 16]",
            "ldp x21, x22, [sp, 32]",
            "ldp x23, x24, [sp, 48]",
            "ldp x25, x26, [sp, 64]",
            "ldp x27, x28, [sp, 80]",
            "ldp d8, d9, [sp, 96]",
            "ldp d10, d11, [sp, 112]",
            "ldp d12, d13, [sp, 128]",
            "ldp d14, d15, [sp, 144]",
            "ldp x29, x30, [sp], 192",
            "ret",
        )
    }

    /// The number of served calls, and the number of calls that were served with signals blocked.
    static SERVED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    const RESULT: isize = 4321;

    #[unsafe(naked)]
    unsafe extern "C" fn entry() {
        from_site!(serve)
    }

    unsafe extern "C" fn serve(saved: &mut Saved) -> isize {
        let is_blocked = saved.is_blocked();
        SERVED[usize::from(is_blocked)].fetch_add(1, Ordering::Relaxed);
        let made = saved.made();
        let frame = saved.frame().unwrap();
        assert!(stack::contains(std::ptr::from_ref(frame) as usize));
        assert_eq!(
            (made.number, made.arguments),
            (libc::SYS_getpid, [100, 101, 102, 103, 104, 105])
        );
        if is_blocked {
            let mask = frame.mask;
            assert_ne!(change_mask(libc::SIG_SETMASK, mask), mask);
        }
        // Sets the rounding mode of a new process, with which a division at run time gives the same result as at
        // compile time.
        let third = std::hint::black_box(1.0f64) / std::hint::black_box(3.0);
        assert_eq!(third, 1.0 / 3.0);
        RESULT
    }

    /// Writes the instructions `svc #0` and `ret`, and rewrites `svc #0` so that it leads to `entry`. Returns the
    /// address of the first instruction.
    fn rewritten() -> usize {
        const PAGE: usize = 1 << 16;
        const CODE: [u8; 8] = [0x01, 0, 0, 0xd4, 0xc0, 0x03, 0x5f, 0xd6];
        // SAFETY: new memory, which is written before it becomes executable.
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 2 * PAGE, access, flags, -1, 0) as usize;
            let memory = std::slice::from_raw_parts_mut(at as *mut u8, 2 * PAGE);
            memory[..CODE.len()].copy_from_slice(&CODE);
            let plan = Plan::of_site(&CODE, at, at + 4).unwrap();
            let stub = plan.stub(entry as *const () as usize, at + PAGE).unwrap();
            memory[PAGE..][..Plan::STUB].copy_from_slice(&stub);
            plan.change(memory, at, at + PAGE).unwrap();
            libc::mprotect(at as *mut _, 2 * PAGE, libc::PROT_READ | libc::PROT_EXEC);
            at
        }
    }

    #[test]
    fn a_call_keeps_all_registers_but_its_result() {
        const DOWNWARDS: u64 = 2 << 22;
        const INEXACT: u64 = 1 << 4;
        let code = rewritten();
        let before = Registers {
            general: std::array::from_fn(|index| match index {
                8 => libc::SYS_getpid as u64,
                _ => 100 + index as u64,
            }),
            flags: 0xa000_0000,
            floating_control: DOWNWARDS,
            vectors: std::array::from_fn(|index| u128::MAX / (index as u128 + 3)),
            floating_status: INEXACT,
        };
        let results = |expected: u64| {
            let mut after = before.clone();
            // SAFETY: `code` is the address of a function that preserves all registers.
            unsafe { call(&mut after, code) };
            assert_eq!(after.general[0], expected);
            after.general[0] = before.general[0];
            assert_eq!(after, before);
            let served = SERVED.each_ref().map(|count| count.load(Ordering::Relaxed));
            (served[0], served[1])
        };
        // The thread has no stack of slat's, so the stub makes the call.
        assert_eq!(results(u64::from(std::process::id())), (0, 0));
        let mut memory = vec![0u8; 256 << 10];
        let low = memory.as_mut_ptr() as usize;
        stack::set(low, low + memory.len());
        assert_eq!(results(RESULT as u64), (1, 0));
        // The alternate stack is the stack on which this function runs.
        let here = &raw const memory as usize;
        let mut alternate = libc::stack_t {
            ss_sp: (here - (64 << 10)) as *mut _,
            ss_flags: 0,
            ss_size: 128 << 10,
        };
        pointers::set_alternate(&alternate);
        assert_eq!(results(RESULT as u64), (1, 1));
        alternate.ss_flags = libc::SS_DISABLE;
        pointers::set_alternate(&alternate);
        assert_eq!(results(RESULT as u64), (2, 1));
        stack::set(0, 0);
        assert_eq!(results(u64::from(std::process::id())), (2, 1));
    }
}
