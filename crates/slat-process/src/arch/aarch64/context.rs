//! The registers of the code that a signal has interrupted, in the `ucontext_t` that the kernel passes to a handler.

use libc::ucontext_t;

/// Returns the address of the instruction at which the signal arrived.
pub fn ip(context: &ucontext_t) -> usize {
    context.uc_mcontext.pc as usize
}

/// Sets the address at which the interrupted code continues.
pub fn set_ip(context: &mut ucontext_t, address: usize) {
    context.uc_mcontext.pc = address as _;
}

/// Whether the access that caused a page fault is a write. The kernel stores the processor's syndrome (ESR_EL1) among
/// the records that follow the registers.
pub fn is_write(context: &ucontext_t) -> bool {
    /// `ESR_MAGIC` of the kernel's `struct esr_context`.
    const SYNDROME: u32 = 0x4553_5201;
    /// The bit WnR.
    const WRITE: u64 = 1 << 6;
    /// The size of the kernel's `__reserved`, which begins at a multiple of 16 bytes after `pstate`.
    const RECORDS: usize = 4096;
    let end = (&raw const context.uc_mcontext.pstate as usize) + 8;
    let records = end.next_multiple_of(16);
    let mut at = 0;
    while at + 16 <= RECORDS {
        let record = (records + at) as *const u32;
        // SAFETY: the kernel stores a list of records here, each with its number and its size. The list ends with a
        // record of size 0.
        let (magic, size) = unsafe { (record.read(), record.add(1).read() as usize) };
        if magic == SYNDROME {
            // SAFETY: the syndrome follows number and size.
            return unsafe { record.add(2).cast::<u64>().read() } & WRITE != 0;
        }
        if size == 0 {
            return false;
        }
        at += size;
    }
    false
}

/// Returns the stack pointer.
pub fn sp(context: &ucontext_t) -> usize {
    context.uc_mcontext.sp as usize
}

/// Sets the register in which a function returns its result: X0.
pub fn set_result(context: &mut ucontext_t, value: usize) {
    context.uc_mcontext.regs[0] = value as _;
}
