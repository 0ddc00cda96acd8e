//! Tests virtual-8086 mode: entering it by IRET, the events that leave it, and its extensions (SDM volume 3, "8086
//! Emulation").

use crate::common::*;
use crate::setup::*;
use slat_x86::state::{control, flags};
use slat_x86::*;

/// The program's segment, which is in memory at [`TASK_CODE`].
const SEGMENT: u16 = (TASK_CODE >> 4) as u16;
const SP: u64 = 0x1000;
const STACK_SEGMENT: u16 = 0x700;
const IOPL3: u64 = 3 << 12;
/// The offset of the TSS's I/O permission bitmap. The bitmap of redirected interrupts is just before it.
const IO_MAP: u64 = 0x88;
/// The segment and offset of a handler of the program itself.
const HANDLER: (u16, u16) = (0x650, 4);

/// Makes a guest that returns to virtual-8086 mode, where it executes `code` with `rflags`. `cr4` enables extensions.
fn program(code: &[u8], rflags: u64, cr4: u64) -> Guest {
    let mut guest = guest(&IRET);
    guest.memory().write(TASK_CODE, code);
    let frame = [
        0,
        SEGMENT.into(),
        2 | VM | rflags,
        SP,
        STACK_SEGMENT.into(),
        0x100,
        0x200,
        0x300,
        0x400,
    ];
    let esp = STACK - 0x100;
    for (n, word) in (0..).zip(frame) {
        set(&guest, esp + 4 * n, word);
    }
    set(&guest, TSS + 4, KERNEL_STACK);
    set(&guest, TSS + 8, KERNEL_DATA.into());
    set16(&guest, TSS + 0x66, IO_MAP);
    let state = &mut guest.cpu.state;
    state.tr.limit = IO_MAP as u32;
    state.gpr[RSP] = esp;
    state.cr4 |= cr4;
    guest
}

/// The monitor's stack after an event: error code if the event has one, EIP, CS, EFLAGS, ESP, SS, ES, DS, FS, GS.
struct Frame {
    error: Option<u64>,
    words: [u64; 9],
}

impl Frame {
    fn flags(&self) -> u64 {
        self.words[2]
    }
}

/// Runs until the handler of `vector`, which is in the monitor. Returns the stack frame of the event.
fn leaves(guest: &mut Guest, vector: u8) -> Frame {
    guest.halt_in_handler(vector);
    let state = &guest.cpu.state;
    assert_eq!((state.cs.selector, state.rflags & VM), (KERNEL_CODE, 0));
    let has_error = matches!(vector, vector::GP);
    let mut at = state.gpr[RSP];
    let error = has_error.then(|| word(guest, at));
    at += if has_error { 4 } else { 0 };
    Frame {
        error,
        words: std::array::from_fn(|n| word(guest, at + 4 * n as u64)),
    }
}

#[test]
fn an_event_saves_all_segments_and_nulls_them() {
    // mov ax, cs; hlt
    let mut guest = program(b"\x8c\xc8\xf4", flags::IF | IOPL3, 0);
    let frame = leaves(&mut guest, vector::GP);
    let rflags = 2 | VM | RF | flags::IF | IOPL3;
    assert_eq!(
        frame.words,
        [
            2,
            SEGMENT.into(),
            rflags,
            SP,
            STACK_SEGMENT.into(),
            0x100,
            0x200,
            0x300,
            0x400
        ]
    );
    assert_eq!(frame.error, Some(0));
    let state = &guest.cpu.state;
    assert_eq!(state.gpr[RAX] & 0xffff, SEGMENT.into());
    assert_eq!(state.gpr[RSP], KERNEL_STACK - 40);
    for segment in [state.es, state.ds, state.fs, state.gs] {
        assert!(!segment.usable() && segment.selector == 0);
    }
}

/// The monitor's IRET continues the program, and loads the program's segments again.
#[test]
fn an_event_comes_back() {
    // int 0x40; hlt
    let mut guest = program(b"\xcd\x40\xf4", IOPL3, 0);
    let gate = guest.memory().read64(idt(0x40));
    guest.memory().write64(idt(0x40), gate | 0x60 << 40);
    // inc eax; iretd
    guest.memory().write(HANDLERS + 16 * 0x40, b"\x40\xcf");
    guest.cpu.state.gpr[RAX] = 5;
    let frame = leaves(&mut guest, vector::GP);
    assert_eq!((frame.words[0], guest.cpu.state.gpr[RAX]), (2, 6));
    assert_eq!(
        frame.words[3..],
        [SP, STACK_SEGMENT.into(), 0x100, 0x200, 0x300, 0x400]
    );
}

/// An instruction, and the flags and extensions with which it runs. The other fields are the results: the vector that
/// ends the case, the address, AX, VIF and IF.
struct Case {
    name: &'static str,
    code: &'static [u8],
    rflags: u64,
    cr4: u64,
    rip: u64,
    ax: u64,
    left: u64,
}

#[test]
fn sensitive_instructions_use_the_flag_that_iopl_and_the_extensions_say() {
    const VME: u64 = control::CR4_VME;
    let case = |name, code, rflags, cr4, rip, ax, left| Case {
        name,
        code,
        rflags,
        cr4,
        rip,
        ax,
        left,
    };
    let (vif, vip, real) = (flags::VIF, flags::VIP, flags::IF);
    // Each case ends with HLT, or with a #GP of its instruction. A #GP must not have changed the stack pointer.
    let cases = [
        case(
            "sti; pushf; pop ax",
            b"\xfb\x9c\x58\xf4",
            0,
            VME,
            3,
            0x3202,
            vif,
        ),
        case(
            "cli; pushf; pop ax",
            b"\xfa\x9c\x58\xf4",
            vif | real,
            VME,
            3,
            0x3002,
            real,
        ),
        case("sti, one pending", b"\xfb\xf4", vip, VME, 0, 0, 0),
        case("sti without VME", b"\xfb\xf4", 0, 0, 0, 0, 0),
        case("cli without VME", b"\xfa\xf4", vif, 0, 0, 0, vif),
        case("pushf without VME", b"\x9c\xf4", 0, 0, 0, 0, 0),
        case(
            "cli, IOPL 3",
            b"\xfa\xf4",
            vif | real | IOPL3,
            VME,
            1,
            0,
            vif,
        ),
        case(
            "sti, IOPL 3; pushf; pop ax",
            b"\xfb\x9c\x58\xf4",
            IOPL3,
            VME,
            3,
            0x3202,
            real,
        ),
        case(
            "push 0x202; popf",
            b"\x68\x02\x02\x9d\xf4",
            0,
            VME,
            4,
            0,
            vif,
        ),
        case(
            "push 0x2; popf",
            b"\x6a\x02\x9d\xf4",
            vif | vip | real,
            VME,
            3,
            0,
            real,
        ),
        case(
            "push 0x202; popf, one pending",
            b"\x68\x02\x02\x9d\xf4",
            vip,
            VME,
            3,
            0,
            0,
        ),
        case("push 0x102; popf", b"\x68\x02\x01\x9d\xf4", 0, VME, 3, 0, 0),
        case("pushfd", b"\x66\x9c\xf4", vif, VME, 0, 0, vif),
        case("popfd", b"\x66\x9d\xf4", vif, VME, 0, 0, vif),
        case(
            "push 0x202; push cs; push 9; iret",
            b"\x68\x02\x02\x0e\x6a\x09\xcf\xf4\xf4\xf4",
            0,
            VME,
            9,
            0,
            vif,
        ),
        case(
            "push 2; push cs; push 8; iret, IOPL 3",
            b"\x6a\x02\x0e\x6a\x08\xcf\xf4\xf4\xf4",
            real | IOPL3,
            0,
            8,
            0,
            0,
        ),
        case(
            "push 0x202; push cs; push 9; iret, one pending",
            b"\x68\x02\x02\x0e\x6a\x09\xcf\xf4",
            vip,
            VME,
            6,
            0,
            0,
        ),
        case("iret without VME", b"\xcf\xf4", 0, 0, 0, 0, 0),
    ];
    for case in cases {
        let mut guest = program(case.code, case.rflags, case.cr4);
        guest.cpu.state.gpr[RAX] = 0;
        let frame = leaves(&mut guest, vector::GP);
        assert_eq!(frame.words[0], case.rip, "{}", case.name);
        assert_eq!(guest.cpu.state.gpr[RAX] & 0xffff, case.ax, "{}", case.name);
        let left = frame.flags() & (vif | real);
        assert_eq!(left, case.left, "{}", case.name);
        let unchanged = VM | IOPL3 | vip;
        let before = (VM | case.rflags) & unchanged;
        assert_eq!(frame.flags() & unchanged, before, "{}", case.name);
    }
}

/// Makes a program that executes INT 0x21, with its own handler, which halts.
fn interrupts(rflags: u64, cr4: u64, monitor: bool) -> Guest {
    // int 0x21
    let guest = program(b"\xcd\x21\xf4", rflags, cr4);
    let (segment, offset) = HANDLER;
    set16(&guest, 0x21 * 4, offset.into());
    set16(&guest, 0x21 * 4 + 2, segment.into());
    let handler = u64::from(segment) * 16 + u64::from(offset);
    guest.memory().write(handler, b"\xf4");
    let bitmap = TSS + IO_MAP - 32;
    guest.memory().write(bitmap, &[0; 32]);
    let bit = u8::from(monitor) << (0x21 % 8);
    guest.memory().write(bitmap + 0x21 / 8, &[bit]);
    guest
}

#[test]
fn an_interrupt_by_instruction_goes_where_the_bitmap_says() {
    const VME: u64 = control::CR4_VME;
    let (segment, offset) = HANDLER;
    for (rflags, image, left) in [
        (flags::VIF, 0x3202, 0),
        (flags::VIF | flags::IF | IOPL3, 0x3202, flags::VIF),
        (0, 0x3002, 0),
        (flags::IF, 0x3002, flags::IF),
    ] {
        let mut guest = interrupts(rflags, VME, false);
        let frame = leaves(&mut guest, vector::GP);
        let handler = [offset.into(), u64::from(segment)];
        assert_eq!(frame.words[..2], handler, "{rflags:#x}: the program's");
        assert_eq!(frame.words[3], SP - 6);
        let stack = u64::from(STACK_SEGMENT) * 16 + SP - 6;
        let pushed = guest.memory().read::<6>(stack);
        let expected = [2u16, SEGMENT, image].map(u16::to_le_bytes).concat();
        assert_eq!(pushed[..], expected, "{rflags:#x}");
        let enabled = flags::VIF | flags::IF;
        assert_eq!(frame.flags() & enabled, left, "{rflags:#x}");
    }
    // The monitor handles the interrupt: by the handler of #GP if IOPL is below 3, otherwise by the gate of the vector.
    for (cr4, monitor) in [(VME, true), (0, false)] {
        let frame = leaves(&mut interrupts(0, cr4, monitor), vector::GP);
        assert_eq!((frame.words[0], frame.error), (0, Some(0)));
        let mut guest = interrupts(IOPL3, cr4, monitor);
        let gate = guest.memory().read64(idt(0x21));
        guest.memory().write64(idt(0x21), gate | 0x60 << 40);
        assert_eq!(leaves(&mut guest, 0x21).words[0], 2);
    }
    // The TSS ends before the bit of the interrupt.
    let mut guest = interrupts(0, VME, false);
    guest.cpu.state.tr.limit = 0x67;
    assert_eq!(leaves(&mut guest, vector::GP).words[0], 0);
}

/// INT3 is not sensitive, and no bit redirects it.
#[test]
fn int3_always_goes_to_the_monitor() {
    let mut guest = program(b"\xcc", 0, control::CR4_VME);
    let gate = guest.memory().read64(idt(vector::BP));
    guest.memory().write64(idt(vector::BP), gate | 0x60 << 40);
    assert_eq!(leaves(&mut guest, vector::BP).words[0], 1);
}

#[test]
fn only_privilege_level_0_enters_and_receives() {
    // A monitor in ring 3 cannot enter the mode: VM is not loaded.
    let mut user = program(b"\xf4", 0, 0);
    as_user(&mut user);
    set(&user, user.cpu.state.gpr[RSP] + 4, USER_CODE.into());
    set(&user, user.cpu.state.gpr[RSP], CODE + 1);
    user.halt_in_handler(vector::GP);
    assert_eq!(word(&user, user.cpu.state.gpr[RSP] + 12) & VM, 0);
    // RIP beyond 64 KiB is a fault of the IRET, in the monitor.
    let mut guest = program(b"\xf4", 0, 0);
    set(&guest, guest.cpu.state.gpr[RSP], 0x1_0000);
    guest.halt_in_handler(vector::GP);
    assert_eq!(word(&guest, guest.cpu.state.gpr[RSP] + 4), CODE);
    // A handler in a conforming segment would run at level 3.
    let mut guest = program(b"\x0f\x0b", 0, 0);
    let gate = guest.memory().read64(idt(vector::UD));
    let conforming = gate & !(0xffff << 16) | u64::from(CONFORMING) << 16;
    guest.memory().write64(idt(vector::UD), conforming);
    let frame = leaves(&mut guest, vector::GP);
    // The CPU is AMD's, so no exception counts as external.
    assert_eq!(frame.error, Some(u64::from(CONFORMING)));
}

#[test]
fn users_of_protected_mode_have_a_virtual_interrupt_flag_by_pvi() {
    const PVI: u64 = control::CR4_PVI;
    // sti; pushf; pop ax; hlt
    let code = b"\xfb\x66\x9c\x66\x58\xf4";
    for (cr4, rflags, rip, left) in [
        (PVI, 0, 5, flags::VIF),
        (PVI, flags::VIP, 0, 0),
        (0, 0, 0, 0),
        (PVI, IOPL3, 5, flags::IF),
        (control::CR4_VME, 0, 0, 0),
    ] {
        let mut guest = guest(code);
        as_user(&mut guest);
        guest.cpu.state.cr4 |= cr4;
        guest.cpu.state.rflags = 2 | rflags;
        guest.cpu.state.gpr[RAX] = 0;
        guest.halt_in_handler(vector::GP);
        let at = guest.cpu.state.gpr[RSP];
        assert_eq!(word(&guest, at + 4), CODE + rip, "{rflags:#x}");
        let enabled = flags::VIF | flags::IF;
        assert_eq!(word(&guest, at + 12) & enabled, left, "{rflags:#x}");
        // PUSHF stores the real IF, as without the extension.
        if rip != 0 {
            let real = if rflags & IOPL3 != 0 { flags::IF } else { 0 };
            let image = guest.cpu.state.gpr[RAX] & 0xffff;
            assert_eq!(image, 2 | rflags & IOPL3 | real);
        }
    }
}
