//! How compiled code is entered, and how a region continues in another one.

use super::cpu::{SETS, Target};
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
        "jnz 3f",
        // Does anybody want something of the CPU, or has code changed?
        "mov rcx, [r15 + {attention}]",
        "cmp dword ptr [rcx], 0",
        "jne 3f",
        // Is the region at RIP known?
        "mov rcx, [r15 + {rip}]",
        "mov rdx, rcx",
        "shr rdx, 12",
        "xor edx, ecx",
        "and edx, {mask}",
        "shl edx, {shift}",
        "add rdx, [r15 + {targets}]",
        "cmp rcx, [rdx + {target_rip}]",
        "je 4f",
        "add rdx, {size}",
        "cmp rcx, [rdx + {target_rip}]",
        "jne 3f",
        // Is it good?
        "4:",
        "mov rsi, [r15 + {cpu_stamp}]",
        "cmp rsi, [rdx + {stamp}]",
        "jne 3f",
        "mov esi, [r15 + {cpu_edition}]",
        "cmp esi, [rdx + {edition}]",
        "jne 3f",
        "inc qword ptr [r15 + {chained}]",
        "mov edi, [rdx + {entry}]",
        "mov rax, [rdx + {code}]",
        "jmp 2b",
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
        mask = const SETS - 1,
        shift = const size_of::<[Target; 2]>().trailing_zeros(),
        size = const size_of::<Target>(),
        targets = const offset_of!(Cpu, compiled.targets),
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
