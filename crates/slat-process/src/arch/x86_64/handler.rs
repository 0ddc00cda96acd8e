//! Signal handlers: the first instructions of slat's handlers, and the call of the program's handlers.

use super::pointers::SEPARATE;
use crate::to_programs_pointer;
use std::arch::naked_asm;
use std::ffi::c_int;

/// The number of bytes below the stack pointer in which a function may have data (red zone; System V ABI, AMD64
/// supplement, "The Stack Frame").
pub const RED_ZONE: usize = 128;

/// Defines `$name`, which the kernel calls as a signal handler. `$name` sets slat's thread pointer and calls `$inner`.
/// If slat and the program share one thread pointer, `$name` only calls `$inner`, and unwinding can pass through
/// `$name`. Clears the program's flag AC ([`caller`](crate::caller)). Aligns the stack, because qemu-user before 8.1
/// calls handlers with a stack pointer that is aligned as before a call, not as at a function's first instruction. To
/// align the stack, pushes the address of a `ret` as one more return address.
#[macro_export]
macro_rules! handler {
    ($(#[$meta:meta])* $name:ident calls $inner:path) => {
        $(#[$meta])*
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            ::std::arch::naked_asm!(
                $crate::own_flags!(),
                "test spl, 8",
                "jnz 4f",
                "lea rax, [rip + 3f]",
                "push rax",
                "4:",
                "cmp byte ptr [rip + {separate}], 0",
                "jne 2f",
                "jmp {inner}",
                "2:",
                "rdfsbase rax",
                "push rax",
                $crate::to_slats_pointer!(),
                "call {inner}",
                "pop rax",
                "wrfsbase rax",
                "3:",
                "ret",
                separate = sym $crate::pointers::SEPARATE,
                inner = sym $inner,
            )
        }
    };
}

/// Sets the program's thread pointer, and calls `function` with the remaining arguments. Afterwards sets slat's thread
/// pointer again.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn call(
    function: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    naked_asm!(
        "mov r11, rdi",
        "mov edi, esi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "cmp byte ptr [rip + {separate}], 0",
        "jne 2f",
        "jmp r11",
        "2:",
        "sub rsp, 8",
        to_programs_pointer!(),
        "call r11",
        "mov rax, gs:[0]",
        "wrfsbase rax",
        "add rsp, 8",
        "ret",
        separate = sym SEPARATE,
    )
}

#[cfg(test)]
mod tests {
    use std::arch::{asm, naked_asm};

    handler! {
        /// A signal handler for the test, which returns its stack pointer.
        entry calls stack_pointer
    }

    /// Returns the value that the stack pointer has at the first instruction of this function.
    #[unsafe(naked)]
    extern "C-unwind" fn stack_pointer() {
        naked_asm!("mov rax, rsp", "ret")
    }

    #[test]
    fn a_handler_has_an_aligned_stack_however_it_is_called() {
        for moved in [0usize, 8] {
            let seen: usize;
            // SAFETY: both functions change only RAX and memory below the stack pointer, and restore the stack pointer.
            unsafe {
                asm!(
                    "mov r12, rsp",
                    "and rsp, -16",
                    "sub rsp, {moved}",
                    "call {entry}",
                    "mov rsp, r12",
                    moved = in(reg) moved,
                    entry = sym entry,
                    out("rax") seen,
                    out("r12") _,
                    clobber_abi("C"),
                );
            }
            assert_eq!(seen % 16, 8, "moved by {moved}");
        }
    }
}
