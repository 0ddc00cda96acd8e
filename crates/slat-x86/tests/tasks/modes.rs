//! Tests tasks of other privilege levels and modes.

use crate::common::*;
use crate::setup::*;
use slat_x86::*;

#[test]
fn a_conforming_code_segment_runs_at_the_rpl_of_its_selector() {
    let mut guest = guest(&call(TASK));
    set(&guest, TASK_TSS + CS, u64::from(CONFORMING | 3));
    for at in [ES, SS, DS, FS, GS] {
        set(&guest, TASK_TSS + at, USER_DATA.into());
    }
    guest.halt_in_handler(vector::GP);
    // HLT in user code raises #GP, whose frame is on the ring-0 stack of the task's TSS.
    assert_eq!(guest.cpu.state.tr.selector, TASK);
    let at = guest.cpu.state.gpr[RSP];
    assert_eq!(word(&guest, at + 4), TASK_CODE);
    assert_eq!(word(&guest, at + 8), u64::from(CONFORMING | 3));
}

/// Makes a guest that returns to a task in virtual-8086 mode. Its exceptions are handled by tasks.
fn virtual_8086(code: &[u8], iopl: u64) -> Guest {
    let mut guest = guest_with_handler_tasks(&IRET);
    linked(&mut guest, TASK);
    access(&guest, TASK, 0x8b);
    let flags = 2 | VM | iopl << 12;
    let fields = [
        (CS, 0x0600),
        (EIP, 0),
        (EFLAGS, flags),
        (DS, 0x1234),
        (SS, 0),
    ];
    for (at, v) in fields {
        set(&guest, TASK_TSS + at, v);
    }
    guest.memory().write(TASK_CODE, code);
    guest
}

#[test]
fn a_task_in_virtual_8086_mode_has_segments_of_real_mode() {
    // nop; ud2, whose handler returns.
    let mut guest = virtual_8086(b"\x90\x0f\x0b", 0);
    task_gate(&guest, idt(vector::UD), MAIN, 0x85);
    guest.cpu.state.gpr[RAX] = 5;
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!(
        (state.rip, state.tr.selector, state.gpr[RAX]),
        (CODE + 2, MAIN, 5)
    );
    assert_eq!(state.rflags, 2 | NT);
    assert_eq!(word(&guest, TSS) & 0xffff, TASK.into());
    let saved = [EIP, CS, DS, EFLAGS].map(|at| word(&guest, TASK_TSS + at));
    assert_eq!(saved, [1, 0x600, 0x1234, 2 | VM | RF]);
}

#[test]
fn instructions_of_a_virtual_8086_task_follow_its_mode() {
    let (ud, gp) = (vector::UD, vector::GP);
    let end = b"\x0f\x0b";
    let cases: [(&str, &[u8], u64, u8, u64); 10] = [
        ("mov ax,0x700; mov es,ax", b"\xb8\x00\x07\x8e\xc0", 0, ud, 5),
        ("jmp 0x600:5", b"\xea\x05\x00\x00\x06", 0, ud, 5),
        (
            "push cs; push 6; nop; nop; retf",
            b"\x0e\x6a\x06\x90\x90\xcb",
            0,
            ud,
            6,
        ),
        ("pushf; popf", b"\x9c\x9d", 3, ud, 2),
        ("pushf", b"\x9c", 2, gp, 0),
        ("popf", b"\x9d", 2, gp, 0),
        ("int 0x80", b"\xcd\x80", 2, gp, 0),
        ("iret", b"\xcf", 2, gp, 0),
        ("cli", b"\xfa", 2, gp, 0),
        ("sldt ax", b"\x0f\x00\xc0", 3, ud, 0),
    ];
    for (name, code, iopl, vector, eip) in cases {
        let mut guest = virtual_8086(&[code, end].concat(), iopl);
        guest.halt();
        assert_eq!(
            guest.cpu.state.tr.selector,
            handler_task(vector),
            "{name}: another vector came"
        );
        assert_eq!(word(&guest, TASK_TSS + EIP), eip, "{name}");
        assert_eq!(word(&guest, TASK_TSS + CS), 0x600, "{name}");
        if vector == gp {
            assert_eq!(word(&guest, HANDLER_STACK - 4), 0, "{name}");
        }
    }
    // The base of the loaded segment is that of its paragraph: mov ax,0x700; mov es,ax; mov es:[0],al; ud2
    let mut guest = virtual_8086(b"\xb8\x34\x07\x8e\xc0\x26\xa2\x00\x00\x0f\x0b", 0);
    guest.halt();
    assert_eq!(guest.memory().read::<1>(0x7340), [0x34]);
}

#[test]
fn long_mode_has_no_task_switches() {
    // jmp far [rip+0], to a TSS and to a task gate; iretq with NT.
    for (selector, kind) in [(MAIN, 0x89), (MAIN, 0x8b), (GATE, 0x85)] {
        let mut code = b"\xff\x2d\x00\x00\x00\x00\x00\x00\x00\x00".to_vec();
        code.extend(selector.to_le_bytes());
        let mut guest = Guest::new(&code);
        access(&guest, selector, kind);
        guest.halt_in_handler(vector::GP);
        assert_eq!(
            (guest.stack(0), guest.stack(1)),
            (selector.into(), CODE),
            "{kind:#x}"
        );
    }
    let mut guest = Guest::new(b"\x48\xcf");
    guest.cpu.state.rflags |= NT;
    guest.halt_in_handler(vector::GP);
    assert_eq!((guest.stack(0), guest.stack(1)), (0, CODE));
}
