//! Tests alignment checks: which accesses raise #AC, and under which conditions.

use crate::common::*;
use crate::events::as_user;
use slat_x86::state::{control::*, flags};
use slat_x86::*;

/// Instructions with an operand at RSI or RSP, and the alignment that each requires.
const ACCESSES: &[(&[u8], u64)] = &[
    (b"\x8a\x06", 1),                 // mov al, [rsi]
    (b"\x66\x8b\x06", 2),             // mov ax, [rsi]
    (b"\x8b\x06", 4),                 // mov eax, [rsi]
    (b"\x48\x8b\x06", 8),             // mov rax, [rsi]
    (b"\x88\x06", 1),                 // mov [rsi], al
    (b"\x66\x89\x06", 2),             // mov [rsi], ax
    (b"\x89\x06", 4),                 // mov [rsi], eax
    (b"\x48\x89\x06", 8),             // mov [rsi], rax
    (b"\x48\x01\x06", 8),             // add [rsi], rax
    (b"\xf0\xff\x06", 4),             // lock inc dword [rsi]
    (b"\x48\x3b\x06", 8),             // cmp rax, [rsi]
    (b"\x0f\xb7\x06", 2),             // movzx eax, word [rsi]
    (b"\x48\x0f\xab\x06", 8),         // bts [rsi], rax
    (b"\xff\x36", 8),                 // push qword [rsi]
    (b"\x0f\x10\x06", 16),            // movups xmm0, [rsi]
    (b"\x0f\x11\x06", 16),            // movups [rsi], xmm0
    (b"\xf3\x0f\x10\x06", 4),         // movss xmm0, [rsi]
    (b"\xf2\x0f\x11\x06", 8),         // movsd [rsi], xmm0
    (b"\xd9\x06", 4),                 // fld dword [rsi]
    (b"\xdd\x06", 8),                 // fld qword [rsi]
    (b"\xdb\x2e", 8),                 // fld tbyte [rsi]
    (b"\xd9\x36", 4),                 // fnstenv [rsi]
    (b"\x66\xd9\x36", 2),             // fnstenv [rsi], of 14 bytes
    (b"\xdf\x2e", 8),                 // fild qword [rsi]
    (b"\xa5", 4),                     // movsd
    (b"\xf3\x48\xa5", 8),             // rep movsq
    (b"\xf3\x48\xa7", 8),             // repe cmpsq
    (b"\x66\xad", 2),                 // lodsw
    (b"\x0f\x01\x06", 4),             // sgdt [rsi]
    (b"\x0f\xae\x1e", 4),             // stmxcsr [rsi]
    (b"\x48\x89\xf4\x50", 8),         // mov rsp, rsi; push rax
    (b"\x48\x89\xf4\x58", 8),         // mov rsp, rsi; pop rax
    (b"\x48\x89\xf4\xc8\0\0\x02", 8), // mov rsp, rsi; enter 0, 2
];

/// Returns a guest in user mode that executes `code` with RSI misaligned by `offset`, and then HLT, which raises #GP
/// in user mode.
fn user(code: &[u8], offset: u64) -> Guest {
    let mut guest = Guest::new(&[code, b"\xf4"].concat());
    as_user(&mut guest);
    let state = &mut guest.cpu.state;
    state.cr0 |= CR0_AM;
    state.rflags |= flags::AC;
    state.gpr[RSI] = DATA + 0x100 + offset;
    state.gpr[RDI] = DATA + 0x200;
    state.gpr[RBP] = DATA + 0x300;
    state.gpr[RCX] = 5;
    guest
}

#[test]
fn a_users_access_is_aligned_or_raises_ac() {
    for (code, alignment) in ACCESSES {
        for offset in [0, 1, 2, 4, 8, 16, 0xeff] {
            let mut guest = user(code, offset);
            let is_aligned = offset % alignment == 0;
            guest.halt_in_handler(if is_aligned { vector::GP } else { vector::AC });
            if !is_aligned {
                assert_eq!(guest.stack(0), 0, "{code:x?} at {offset}: the error code");
            }
        }
    }
}

#[test]
fn nobody_else_has_to_align() {
    let misaligned = |change: &dyn Fn(&mut State)| {
        for (code, _) in ACCESSES {
            let mut guest = user(code, 1);
            change(&mut guest.cpu.state);
            guest.halt();
            let rip = guest.cpu.state.rip;
            let handler = HANDLERS + 16 * u64::from(vector::AC) + 1;
            assert_ne!(rip, handler, "{code:x?}");
        }
    };
    misaligned(&|state| state.cr0 &= !CR0_AM);
    misaligned(&|state| state.rflags &= !flags::AC);
    misaligned(&|state| {
        long_mode(state);
        state.cr0 |= CR0_AM;
    });
}

/// POPF enables and disables the checks, in a loop that is executed often enough to be compiled.
#[test]
fn popf_turns_them_on_and_off() {
    // mov ecx, 5000; l: mov rax, [rsi]; add [rsi], rax; dec ecx; jnz l; pushfq; or dword [rsp], 1 << 18;
    // popfq; mov rax, [rsi]
    let code = b"\xb9\x88\x13\0\0\x48\x8b\x06\x48\x01\x06\xff\xc9\x75\xf6\x9c\x81\x0c\x24\0\0\x04\0\x9d\x48\x8b\x06";
    let mut guest = user(code, 1);
    guest.cpu.state.rflags &= !flags::AC;
    guest.halt_in_handler(vector::AC);
    assert_eq!(guest.stack(1), CODE + 24);
    // The handler clears AC in the frame, which IRET loads.
    guest.cpu.state.gpr[RSP] += 8;
    let at = guest.cpu.state.gpr[RSP] + 16;
    let saved = guest.memory().read64(at);
    guest.memory().write64(at, saved & !flags::AC);
    guest.memory().write(HANDLERS + 0x800, b"\x48\xcf");
    guest.cpu.state.rip = HANDLERS + 0x800;
    guest.halt_in_handler(vector::GP);
}

/// An access that passes the alignment check is still checked for rights, tracking, and devices.
#[test]
fn a_checked_access_is_one_all_the_same() {
    let mut guest = user(b"\x48\x89\x06", 0);
    guest.machine.track(DATA);
    guest.halt_in_handler(vector::GP);
    let stored: Vec<u64> = (guest.machine.stores.iter())
        .map(|stored| stored.gpa)
        .collect();
    assert_eq!(stored, [DATA + 0x100]);
    let mut guest = user(b"\x48\x89\x06", 0);
    guest.cpu.state.gpr[RSI] = 1 << 63;
    guest.halt_in_handler(vector::GP);
    let mut guest = user(b"\x48\x89\x06", 0);
    guest.cpu.state.gpr[RSI] = (1 << 63) + 1;
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.stack(1), CODE, "not canonical comes first");
}
