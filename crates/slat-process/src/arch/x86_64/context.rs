//! The registers of the code that a signal has interrupted, in the `ucontext_t` that the kernel passes to a handler.

use libc::ucontext_t;

/// Returns the address of the instruction at which the signal arrived.
pub fn ip(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize
}

/// Sets the address at which the interrupted code continues.
pub fn set_ip(context: &mut ucontext_t, address: usize) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = address as i64;
}

/// Whether the access that caused a page fault is a write.
pub fn is_write(context: &ucontext_t) -> bool {
    const WRITE: i64 = 1 << 1;
    context.uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0
}

/// Returns the stack pointer.
pub fn sp(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
}

/// Sets the register in which a function returns its result: RAX.
pub fn set_result(context: &mut ucontext_t, value: usize) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = value as i64;
}
