//! How compiled code is entered, and how a region continues in another one.
//!
//! A region that leaves for RIP returns where a [`Target`] for it would be, as a number below 0: its complement. The address of most of
//! them is known when the region is compiled, so the host loads the target while the region still runs. What else ends a region is 0 or
//! above.

use super::cpu::Target;
use crate::Cpu;
use std::arch::naked_asm;
use std::mem::offset_of;

/// Runs a region from its block `entry` on, and then those that follow it: the region that [`Target`]s have for RIP, as long as its page
/// is good and nothing else is to be done, for which this looks each time. Returns the status of the last one.
///
/// # Safety
/// `code` is the function of a region of this CPU's, which has been prepared.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn dispatch(cpu: *mut Cpu, code: *const u8, entry: u64) -> u64 {
    // A region wants the CPU in R15 and its entry in RDI, and keeps no other register than RSP and RBP.
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov r15, rdi",
        "mov rdi, rdx",
        "mov rax, rsi",
        "2:",
        "call rax",
        "test rax, rax",
        "jns 3f",
        // Does anybody want something of the CPU, or has code changed?
        "mov rcx, [r15 + {attention}]",
        "cmp dword ptr [rcx], 0",
        "jne 5f",
        // Is the region at RIP known?
        "not rax",
        "mov rcx, [r15 + {rip}]",
        "cmp rcx, [rax + {target_rip}]",
        "je 4f",
        "add rax, {size}",
        "cmp rcx, [rax + {target_rip}]",
        "jne 5f",
        // Is it good?
        "4:",
        "mov rsi, [r15 + {cpu_stamp}]",
        "cmp rsi, [rax + {stamp}]",
        "jne 5f",
        "mov esi, [r15 + {cpu_edition}]",
        "cmp esi, [rax + {edition}]",
        "jne 5f",
        "inc qword ptr [r15 + {chained}]",
        "mov edi, [rax + {entry}]",
        "mov rax, [rax + {code}]",
        "jmp 2b",
        "5:",
        "xor eax, eax",
        "3:",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        attention = const offset_of!(Cpu, compiled.attention),
        rip = const offset_of!(Cpu, state.rip),
        size = const size_of::<Target>(),
        target_rip = const offset_of!(Target, rip),
        cpu_stamp = const offset_of!(Cpu, stamp),
        stamp = const offset_of!(Target, stamp),
        cpu_edition = const offset_of!(Cpu, compiled.edition),
        edition = const offset_of!(Target, edition),
        chained = const offset_of!(Cpu, counters.regions_chained),
        entry = const offset_of!(Target, entry),
        code = const offset_of!(Target, code),
    )
}
