//! A 32-bit guest with tasks, and all methods of switching to them.

use crate::common::*;
use slat_x86::*;

// The selectors of the descriptors.
pub const KERNEL_CODE: u16 = 0x08;
pub const KERNEL_DATA: u16 = 0x10;
pub const USER_DATA: u16 = 0x1b;
pub const USER_CODE: u16 = 0x23;
/// The task that runs first.
pub const MAIN: u16 = 0x28;
/// The selector of the task to which tests switch, by its 32-bit TSS. The next two are by its 16-bit TSS and by a
/// task gate.
pub const TASK: u16 = 0x30;
pub const TASK16: u16 = 0x38;
pub const GATE: u16 = 0x40;
pub const LDT: u16 = 0x48;
pub const CONFORMING: u16 = 0x50;
pub const READ_ONLY: u16 = 0x58;
pub const EXECUTE_ONLY: u16 = 0x60;
pub const ABSENT_DATA: u16 = 0x68;
pub const ABSENT_CODE: u16 = 0x70;
pub const ABSENT_LDT: u16 = 0x78;
pub const SMALL_STACK: u16 = 0x80;
pub const SMALL_CODE: u16 = 0x88;
pub const BEYOND: u16 = 0xff8;

/// The addresses of the task's TSSs of both sizes, each in a page of its own, and of the task's code and stack.
pub const TASK_TSS: u64 = 0x5_3000;
pub const TASK16_TSS: u64 = 0x5_4000;
pub const TASK_CODE: u64 = 0x6000;
pub const TASK_STACK: u64 = 0x9000;
/// The TSSs of exception handlers, one task per vector. Handlers are at their usual addresses.
pub const HANDLER_TSS: u64 = 0x5_5000;
pub const HANDLER_STACK: u64 = 0xa_0000;

pub fn handler_task(vector: u8) -> u16 {
    0x100 + 8 * u16::from(vector)
}

// Fields of a 32-bit TSS.
pub const CR3: u64 = 0x1c;
pub const EIP: u64 = 0x20;
pub const EFLAGS: u64 = 0x24;
pub const ESP: u64 = 0x38;
pub const ES: u64 = 0x48;
pub const CS: u64 = 0x4c;
pub const SS: u64 = 0x50;
pub const DS: u64 = 0x54;
pub const FS: u64 = 0x58;
pub const GS: u64 = 0x5c;
pub const LDTR: u64 = 0x60;
pub const TRAP: u64 = 0x64;

pub const NT: u64 = 1 << 14;
pub const VM: u64 = 1 << 17;
pub const RF: u64 = 1 << 16;
pub const TS: u64 = 8;
pub const INT: u8 = 0x80;

pub fn word(guest: &Guest, at: u64) -> u64 {
    u32::from_le_bytes(guest.memory().read(at)).into()
}
pub fn set(guest: &Guest, at: u64, v: u64) {
    guest.memory().write(at, &(v as u32).to_le_bytes());
}
pub fn set16(guest: &Guest, at: u64, v: u64) {
    guest.memory().write(at, &(v as u16).to_le_bytes());
}
pub fn descriptor(guest: &Guest, selector: u16, base: u64, limit: u64, access: u64, flags: u64) {
    let v = limit & 0xffff
        | (base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16 & 15) << 48
        | flags << 52
        | (base >> 24 & 0xff) << 56;
    guest.memory().write64(GDT + u64::from(selector & !7), v);
}
/// Changes the access byte of a descriptor.
pub fn access(guest: &Guest, selector: u16, byte: u8) {
    guest
        .memory()
        .write(GDT + u64::from(selector & !7) + 5, &[byte]);
}
pub fn access_of(guest: &Guest, selector: u16) -> u8 {
    guest.memory().read::<1>(GDT + u64::from(selector & !7) + 5)[0]
}
pub fn task_gate(guest: &Guest, at: u64, tss: u16, access: u64) {
    guest
        .memory()
        .write64(at, u64::from(tss) << 16 | access << 40);
}
pub fn idt(vector: u8) -> u64 {
    IDT + 8 * u64::from(vector)
}
pub fn segment(selector: u16, rights: u32) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    }
}

/// Makes a guest with paging in 32-bit code at CPL 0. Each exception goes through an interrupt gate to a HLT.
pub fn guest(code: &[u8]) -> Guest {
    let mut guest = Guest::new(code);
    for vector in 0..=255 {
        let at = HANDLERS + 16 * u64::from(vector);
        let gate = at & 0xffff | 8 << 16 | 0x8e << 40 | (at >> 16) << 48;
        guest.memory().write64(idt(vector), gate);
    }
    task_gate(&guest, idt(INT), TASK, 0x85);
    let flat = |selector, access| descriptor(&guest, selector, 0, 0xf_ffff, access, 0xc);
    flat(KERNEL_CODE, 0x9b);
    flat(USER_CODE, 0xfb);
    flat(CONFORMING, 0x9f);
    flat(READ_ONLY, 0x91);
    flat(EXECUTE_ONLY, 0x99);
    flat(ABSENT_DATA, 0x13);
    flat(ABSENT_CODE, 0x1b);
    descriptor(&guest, MAIN, TSS, 0x67, 0x8b, 0);
    descriptor(&guest, TASK, TASK_TSS, 0x67, 0x89, 0);
    descriptor(&guest, TASK16, TASK16_TSS, 0x2b, 0x81, 0);
    descriptor(&guest, LDT, GDT, 0x7f, 0x82, 0);
    descriptor(&guest, ABSENT_LDT, GDT, 0x7f, 0x02, 0);
    descriptor(&guest, SMALL_STACK, 0, 0x1fff, 0x93, 4);
    descriptor(&guest, SMALL_CODE, 0, 0x5fff, 0x9b, 4);
    task_gate(&guest, GDT + u64::from(GATE), TASK, 0x85);

    guest.memory().write(TASK_CODE, &[0xf4, 0xf4]);
    let flat_task = |tss, eip, esp| {
        set(&guest, tss + EIP, eip);
        set(&guest, tss + EFLAGS, 2);
        set(&guest, tss + ESP, esp);
        for at in [ES, SS, DS, FS, GS] {
            set(&guest, tss + at, KERNEL_DATA.into());
        }
        set(&guest, tss + CS, KERNEL_CODE.into());
    };
    for vector in 0..32 {
        let (tss, selector) = (HANDLER_TSS + 0x80 * u64::from(vector), handler_task(vector));
        flat_task(tss, HANDLERS + 16 * u64::from(vector), HANDLER_STACK);
        descriptor(&guest, selector, tss, 0x67, 0x89, 0);
    }
    flat_task(TASK_TSS, TASK_CODE, TASK_STACK);
    // The other general registers have different values, so that a test sees each of them loaded.
    for (n, at) in (0..).zip((0x28..0x48).step_by(4)) {
        if at != ESP {
            set(&guest, TASK_TSS + at, 0x1111_1111 * n);
        }
    }
    // The fields of a 16-bit TSS: IP, FLAGS, AX CX DX BX SP BP SI DI, ES CS SS DS.
    let (cs, ds) = (u64::from(KERNEL_CODE), u64::from(KERNEL_DATA));
    let words = [TASK_CODE, 2].into_iter();
    let words = words.chain([
        0, 0x1111, 0x2222, 0x3333, TASK_STACK, 0x5555, 0x6666, 0x7777,
    ]);
    for (n, v) in (0..).zip(words.chain([ds, cs, ds, ds])) {
        set16(&guest, TASK16_TSS + 0x0e + 2 * n, v);
    }

    let state = &mut guest.cpu.state;
    (state.cr0, state.cr4, state.efer) = (0x8005_0033, 0x600, 0);
    state.gdtr.limit = 0x7ff;
    state.cs.rights = 0xc09b;
    state.idtr.limit = 0x7ff;
    state.dr7 = 0x400;
    for (n, register) in state.gpr[..8].iter_mut().enumerate() {
        if n != RSP {
            *register = 0xabcd_0000 + n as u64;
        }
    }
    guest
}

/// Like [`guest`], but exceptions are handled by tasks.
pub fn guest_with_handler_tasks(code: &[u8]) -> Guest {
    let guest = guest(code);
    for vector in 0..32 {
        task_gate(&guest, idt(vector), handler_task(vector), 0x85);
    }
    guest
}

pub fn far(opcode: u8, selector: u16) -> Vec<u8> {
    let [low, high] = selector.to_le_bytes();
    // A task switch ignores the offset. It consists of HLTs, which end the test if the CPU executes them.
    vec![opcode, 0xf4, 0xf4, 0xf4, 0xf4, low, high, 0xf4]
}
pub fn jmp(selector: u16) -> Vec<u8> {
    far(0xea, selector)
}
pub fn call(selector: u16) -> Vec<u8> {
    far(0x9a, selector)
}
pub const INT_TASK: [u8; 3] = [0xcd, INT, 0xf4];
pub const IRET: [u8; 2] = [0xcf, 0xf4];

/// A way to switch to another task, and the expected effects of the switch.
pub struct Way {
    pub name: &'static str,
    pub code: Vec<u8>,
    /// Whether an interrupt is injected.
    pub interrupt: bool,
    /// The selector of the new TSS, and whether the task is nested.
    pub task: u16,
    pub nests: bool,
    /// The offset from `CODE` at which the old task continues.
    pub next: u64,
    /// Whether RF is set in the flags that the switch saves.
    pub fault: bool,
}

pub fn ways() -> Vec<Way> {
    let way = |name, code: Vec<u8>, task, nests, next| Way {
        name,
        code,
        interrupt: false,
        task,
        nests,
        next,
        fault: false,
    };
    vec![
        way("JMP to a TSS", jmp(TASK), TASK, false, 7),
        way("JMP to a gate", jmp(GATE), TASK, false, 7),
        way("CALL to a TSS", call(TASK), TASK, true, 7),
        way("CALL to a gate", call(GATE), TASK, true, 7),
        way("JMP to a 16-bit TSS", jmp(TASK16), TASK16, false, 7),
        way("CALL to a 16-bit TSS", call(TASK16), TASK16, true, 7),
        way("INT n", INT_TASK.to_vec(), TASK, true, 2),
        Way {
            interrupt: true,
            // jmp to itself
            ..way("an interrupt", vec![0xeb, 0xfe], TASK, true, 0)
        },
        Way {
            fault: true,
            // ud2
            ..way("an exception", vec![0x0f, 0x0b], TASK, true, 0)
        },
    ]
}

pub fn start(way: &Way) -> Guest {
    let mut guest = guest(&way.code);
    task_gate(&guest, idt(vector::UD), TASK, 0x85);
    guest.cpu.state.rflags = 0x8d7 | NT;
    guest.cpu.state.dr7 = 0x7ff;
    if way.interrupt {
        guest.cpu.inject_interrupt(INT);
    }
    guest
}

pub fn as_user(guest: &mut Guest) {
    guest.cpu.state.cs = segment(USER_CODE, 0xc0fb);
    guest.cpu.state.ss = segment(USER_DATA, 0xc0f3);
    set(guest, TSS + 4, STACK);
    set(guest, TSS + 8, KERNEL_DATA.into());
}
/// Sets NT, and links the current TSS to another task.
pub fn linked(guest: &mut Guest, link: u16) {
    guest.cpu.state.rflags |= NT;
    set16(guest, TSS, link.into());
}
