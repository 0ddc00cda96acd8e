//! Enters compiled code, and continues from one region in another.
//!
//! When a region ends, it returns the set of [`Target`]s in which its successor may be, as the set's offset from the
//! first set. Code that ends with a jump to a constant address always returns the same set, so the host can load the
//! target while the region still runs. This set is that of the address for which the region was compiled
//! ([`set_of`](crate::compiled::set_of)). If the region runs at another address, it is not the set of RIP. This does no
//! harm, because a target is stored in the set in which it was not found
//! ([`Compiled::wanted`](crate::compiled::Compiled)). Code that computes the address of its successor also computes the
//! set. Every other value that a region returns is larger than the offset of any set.
//!
//! A region is called and returns, although it could jump to the next region. Such jumps, with one frame for all
//! regions, were tried. A boot took a tenth longer, and calls in a loop took two thirds longer, because a host predicts
//! the target of a return better than the targets of all those jumps. Regions of several pages, which included called
//! functions and the targets of linkage tables, were tried, too. A shell and apt then changed regions a fifth less
//! often, or a third less often with longer paths, but took the same time.

use super::entries;
use super::window::{BASE, from_base};
use crate::Cpu;
use crate::compiled::{SETS_BYTES, Target};
use crate::snapshot::Snapshot;
use std::arch::naked_asm;
use std::mem::offset_of;

/// Checks whether a target's page is still valid, unless that needs a translation. The target must have the CPU's
/// edition. Returns whether the target may be entered.
extern "C" fn look(cpu: &mut Cpu, target: &Target) -> bool {
    // SAFETY: the page is alive as long as the target's edition equals the CPU's, and nothing else refers to the page
    // while no block is running.
    let page = unsafe { &mut *target.page.cast_mut() };
    cpu.look_again(page, target.rip) && target.edition == cpu.compiled.edition
}

/// Runs the region that is entered at `code`, and then the regions that follow. After each region, runs the one at RIP
/// if there is a [`Target`] for RIP, its page is current, and no other work is pending. Returns the status of the last
/// region.
///
/// # Safety
/// `code` is an entry of a region of this CPU, and the CPU has been prepared.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dispatch(cpu: *mut Cpu, code: *const u8) -> u64 {
    // A region expects that R15 points near the `Cpu`, and preserves only RSP and RBP. At its end it removes its frame
    // and returns.
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "lea r15, [rdi + {base}]",
        // RBP is the guest address at which the running region was entered.
        "mov rbp, [r15 + {rip}]",
        "2:",
        "call 8f",
        "cmp rax, {sets}",
        "jae 3f",
        // Must the run end, or has code changed? Then `attention` is not 0.
        "mov rcx, [r15 + {attention}]",
        "cmp dword ptr [rcx], 0",
        "jne 24f",
        // Does one of the set's two targets belong to RIP?
        "add rax, [r15 + {targets}]",
        "mov rcx, [r15 + {rip}]",
        "cmp rcx, [rax + {target_rip}]",
        "je 4f",
        "add rax, {size}",
        "cmp rcx, [rax + {target_rip}]",
        "jne 9f",
        // Label 4: is the target valid, and its page current?
        "4:",
        "mov esi, [r15 + {cpu_edition}]",
        "cmp esi, [rax + {edition}]",
        "jne 9f",
        "mov rsi, [rax + {page}]",
        "mov rsi, [rsi + {stamp}]",
        "cmp rsi, [r15 + {cpu_stamp}]",
        "jne 6f",
        "7:",
        "inc qword ptr [r15 + {chained}]",
        "mov rsi, [rax + {code}]",
        "mov rbp, [rax + {target_rip}]",
        "jmp 2b",
        // Label 8: makes the frame of the region, and enters it.
        "8:",
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, {frame}",
        "jmp rsi",
        // Label 6: checks the target's page. After the check, the page is current for its other targets, too.
        "6:",
        "mov rbx, rax",
        "lea rdi, [r15 - {base}]",
        "mov rsi, rax",
        "call {look}",
        "test al, al",
        "mov rax, rbx",
        "jnz 7b",
        "jmp 5f",
        "24:",
        "mov [r15 + {ran}], rbp",
        "jmp 5f",
        // Label 9: records the set that had no target for RIP. The new target will be stored in this set.
        "9:",
        "mov [r15 + {wanted}], rax",
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
        base = const BASE,
        attention = const from_base(offset_of!(Cpu, compiled.attention)),
        rip = const from_base(offset_of!(Cpu, state.rip)),
        sets = const SETS_BYTES,
        ran = const from_base(offset_of!(Cpu, compiled.ran)),
        wanted = const from_base(offset_of!(Cpu, compiled.wanted)),
        targets = const from_base(offset_of!(Cpu, compiled.targets)),
        size = const size_of::<Target>(),
        target_rip = const offset_of!(Target, rip),
        page = const offset_of!(Target, page),
        stamp = const offset_of!(Snapshot, stamp),
        cpu_stamp = const from_base(offset_of!(Cpu, code.clock.stamp)),
        cpu_edition = const from_base(offset_of!(Cpu, compiled.edition)),
        edition = const offset_of!(Target, edition),
        look = sym look,
        chained = const from_base(offset_of!(Cpu, counters.regions_chained)),
        code = const offset_of!(Target, code),
        frame = const entries::FRAME,
    )
}
