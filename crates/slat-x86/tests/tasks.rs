//! Hardware task switches (SDM volume 3, "Task Management").

mod common;
use common::*;
use slat_x86::*;

// Selectors.
const KERNEL_CODE: u16 = 0x08;
const KERNEL_DATA: u16 = 0x10;
const USER_DATA: u16 = 0x1b;
const USER_CODE: u16 = 0x23;
/// The task that runs first.
const MAIN: u16 = 0x28;
/// The task that is switched to: by its TSS of 32 bits, of 16 bits, or a gate.
const TASK: u16 = 0x30;
const TASK16: u16 = 0x38;
const GATE: u16 = 0x40;
const LDT: u16 = 0x48;
const CONFORMING: u16 = 0x50;
const READ_ONLY: u16 = 0x58;
const EXECUTE_ONLY: u16 = 0x60;
const ABSENT_DATA: u16 = 0x68;
const ABSENT_CODE: u16 = 0x70;
const ABSENT_LDT: u16 = 0x78;
const SMALL_STACK: u16 = 0x80;
const SMALL_CODE: u16 = 0x88;
const BEYOND: u16 = 0xff8;

/// The TSSs of both sizes, each on its page, the task's code and its stack.
const TASK_TSS: u64 = 0x5_3000;
const TASK16_TSS: u64 = 0x5_4000;
const TASK_CODE: u64 = 0x6000;
const TASK_STACK: u64 = 0x9000;
/// One task per vector for exceptions: its handler is where it always is.
const HANDLER_TSS: u64 = 0x5_5000;
const HANDLER_STACK: u64 = 0xa_0000;

fn handler_task(vector: u8) -> u16 {
    0x100 + 8 * u16::from(vector)
}

// Fields of a 32-bit TSS.
const CR3: u64 = 0x1c;
const EIP: u64 = 0x20;
const EFLAGS: u64 = 0x24;
const ESP: u64 = 0x38;
const ES: u64 = 0x48;
const CS: u64 = 0x4c;
const SS: u64 = 0x50;
const DS: u64 = 0x54;
const FS: u64 = 0x58;
const GS: u64 = 0x5c;
const LDTR: u64 = 0x60;
const TRAP: u64 = 0x64;

const NT: u64 = 1 << 14;
const VM: u64 = 1 << 17;
const RF: u64 = 1 << 16;
const TS: u64 = 8;
const INT: u8 = 0x80;

fn word(guest: &Guest, at: u64) -> u64 {
    u32::from_le_bytes(guest.memory().read(at)).into()
}
fn set(guest: &Guest, at: u64, v: u64) {
    guest.memory().write(at, &(v as u32).to_le_bytes());
}
fn set16(guest: &Guest, at: u64, v: u64) {
    guest.memory().write(at, &(v as u16).to_le_bytes());
}
fn descriptor(guest: &Guest, selector: u16, base: u64, limit: u64, access: u64, flags: u64) {
    let v = limit & 0xffff
        | (base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16 & 15) << 48
        | flags << 52
        | (base >> 24 & 0xff) << 56;
    guest.memory().write64(GDT + u64::from(selector & !7), v);
}
/// Changes the access byte of a descriptor.
fn access(guest: &Guest, selector: u16, byte: u8) {
    guest
        .memory()
        .write(GDT + u64::from(selector & !7) + 5, &[byte]);
}
fn access_of(guest: &Guest, selector: u16) -> u8 {
    guest.memory().read::<1>(GDT + u64::from(selector & !7) + 5)[0]
}
fn task_gate(guest: &Guest, at: u64, tss: u16, access: u64) {
    guest
        .memory()
        .write64(at, u64::from(tss) << 16 | access << 40);
}
fn idt(vector: u8) -> u64 {
    IDT + 8 * u64::from(vector)
}
fn segment(selector: u16, rights: u32) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    }
}

/// A guest with paging in 32-bit code at CPL 0, whose exceptions go through interrupt gates to a HLT each.
fn guest(code: &[u8]) -> Guest {
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
    // The other general registers, so that each is seen to be loaded.
    for (n, at) in (0..).zip((0x28..0x48).step_by(4)) {
        if at != ESP {
            set(&guest, TASK_TSS + at, 0x1111_1111 * n);
        }
    }
    // IP, FLAGS, AX CX DX BX SP BP SI DI, ES CS SS DS.
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

/// The same, where exceptions are tasks.
fn guest_with_handler_tasks(code: &[u8]) -> Guest {
    let guest = guest(code);
    for vector in 0..32 {
        task_gate(&guest, idt(vector), handler_task(vector), 0x85);
    }
    guest
}

fn far(opcode: u8, selector: u16) -> Vec<u8> {
    let [low, high] = selector.to_le_bytes();
    // The offset is not used; HLTs, in case it were.
    vec![opcode, 0xf4, 0xf4, 0xf4, 0xf4, low, high, 0xf4]
}
fn jmp(selector: u16) -> Vec<u8> {
    far(0xea, selector)
}
fn call(selector: u16) -> Vec<u8> {
    far(0x9a, selector)
}
const INT_TASK: [u8; 3] = [0xcd, INT, 0xf4];
const IRET: [u8; 2] = [0xcf, 0xf4];

/// How a switch is made.
struct Way {
    name: &'static str,
    code: Vec<u8>,
    /// An interrupt is injected.
    interrupt: bool,
    /// The selector of the new TSS, and whether the task is nested.
    task: u16,
    nests: bool,
    /// Where the old task goes on, behind CODE; RF in its flags.
    next: u64,
    fault: bool,
}

fn ways() -> Vec<Way> {
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

fn start(way: &Way) -> Guest {
    let mut guest = guest(&way.code);
    task_gate(&guest, idt(vector::UD), TASK, 0x85);
    guest.cpu.state.rflags = 0x8d7 | NT;
    guest.cpu.state.dr7 = 0x7ff;
    if way.interrupt {
        guest.cpu.inject_interrupt(INT);
    }
    guest
}

#[test]
fn every_way_into_a_task_saves_the_old_one_and_loads_the_new_one() {
    for way in ways() {
        let name = way.name;
        let mut guest = start(&way);
        let before = guest.cpu.state.clone();
        guest.halt();
        let state = &guest.cpu.state;
        let wide = way.task == TASK;
        let tss = if wide { TASK_TSS } else { TASK16_TSS };

        // The old task.
        assert_eq!(word(&guest, TSS + EIP), CODE + way.next, "{name}");
        let rf = if way.fault { RF } else { 0 };
        assert_eq!(word(&guest, TSS + EFLAGS), before.rflags | rf, "{name}");
        for n in 0..8 {
            let saved = word(&guest, TSS + 0x28 + 4 * n);
            assert_eq!(saved, before.gpr[n as usize], "{name}: register {n}");
        }
        for at in [ES, SS, DS, FS, GS] {
            assert_eq!(word(&guest, TSS + at), KERNEL_DATA.into(), "{name}");
        }
        assert_eq!(word(&guest, TSS + CS), KERNEL_CODE.into(), "{name}");
        let busy = if way.nests { 0x8b } else { 0x89 };
        assert_eq!(access_of(&guest, MAIN), busy, "{name}");

        // The new one.
        assert_eq!(state.rip, TASK_CODE + 1, "{name}");
        let nt = if way.nests { NT } else { 0 };
        assert_eq!(state.rflags, 2 | nt, "{name}");
        for n in 0..8 {
            let all = match n as usize {
                RSP => TASK_STACK,
                _ => 0x1111_1111 * n,
            };
            let expected = if wide { all } else { all & 0xffff };
            assert_eq!(state.gpr[n as usize], expected, "{name}: register {n}");
        }
        let data = segment(KERNEL_DATA, 0xc093);
        assert_eq!(state.cs, segment(KERNEL_CODE, 0xc09b), "{name}");
        assert_eq!((state.ss, state.ds, state.es), (data, data, data), "{name}");
        match wide {
            true => assert_eq!((state.fs, state.gs), (data, data), "{name}"),
            false => assert!(!state.fs.usable() && !state.gs.usable(), "{name}"),
        }
        assert!(!state.ldtr.usable(), "{name}: a null LDT");
        assert_eq!(
            (state.tr.selector, state.tr.base),
            (way.task, tss),
            "{name}"
        );
        assert_eq!(state.tr.kind(), if wide { 11 } else { 3 }, "{name}");
        let busy = if wide { 0x8b } else { 0x83 };
        assert_eq!(access_of(&guest, way.task), busy, "{name}");
        let link = if way.nests { MAIN } else { 0 };
        assert_eq!(word(&guest, tss), link.into(), "{name}");
        assert_eq!(state.cr0, before.cr0 | TS, "{name}");
        assert_eq!(state.dr7, 0x6aa, "{name}: the global breakpoints stay");
    }
}

#[test]
fn iret_goes_back_and_the_task_goes_on_behind_it() {
    for (task, tss) in [(TASK, TASK_TSS), (TASK16, TASK16_TSS)] {
        // Twice a call; in the task: iret; hlt.
        let mut guest = guest(&[&call(task)[..7], &call(task)].concat());
        guest.memory().write(TASK_CODE, &IRET);
        guest.cpu.state.rflags |= 1;
        guest.halt();
        let state = &guest.cpu.state;
        assert_eq!(
            (state.rip, state.tr.selector, state.rflags),
            (TASK_CODE + 2, task, 2 | NT)
        );
        assert_eq!(word(&guest, TSS + EIP), CODE + 14);
        assert_eq!(word(&guest, TSS + EFLAGS), 3, "the outermost task");
        assert_eq!(word(&guest, tss), MAIN.into());

        let mut guest = crate::guest(&call(task));
        guest.memory().write(TASK_CODE, &IRET);
        guest.cpu.state.rflags |= 1;
        let before = guest.cpu.state.clone();
        guest.halt();
        let state = &guest.cpu.state;
        assert_eq!((state.rip, state.rflags), (CODE + 8, before.rflags));
        assert_eq!((state.tr.selector, state.gpr), (MAIN, before.gpr));
        let available = if task == TASK { 0x89 } else { 0x81 };
        assert_eq!(
            (access_of(&guest, MAIN), access_of(&guest, task)),
            (0x8b, available)
        );
        let saved_flags = match task {
            TASK => word(&guest, tss + EFLAGS),
            _ => word(&guest, tss + 0x10) & 0xffff,
        };
        assert_eq!(saved_flags, 2, "NT is not saved by IRET");
    }
}

#[test]
fn a_task_gets_the_error_code_on_its_stack() {
    // A page fault of: mov eax,[esi].
    for task in [TASK, TASK16] {
        let mut guest = guest(b"\x8b\x06");
        task_gate(&guest, idt(vector::PF), task, 0x85);
        guest.machine.absent(DATA);
        guest.cpu.state.gpr[RSI] = DATA;
        set(&guest, TASK_STACK - 4, 0xffff_ffff);
        guest.halt();
        let (bytes, pushed) = match task {
            TASK => (4, 0),
            _ => (2, 0xffff),
        };
        assert_eq!(guest.cpu.state.gpr[RSP], TASK_STACK - bytes);
        assert_eq!(word(&guest, TASK_STACK - 4), pushed);
        assert_eq!((guest.cpu.state.cr2, guest.cpu.cpl()), (DATA, 0));
        assert_eq!(word(&guest, TSS + EIP), CODE);
    }
}

#[test]
fn an_nmi_task_holds_nmis_back_until_it_returns() {
    // In the task: hlt; iret.
    let mut guest = guest(b"\x90\xf4");
    task_gate(&guest, idt(vector::NMI), TASK, 0x85);
    guest.memory().write(TASK_CODE, b"\xf4\xcf\xeb\xfc");
    for _ in 0..2 {
        guest.cpu.inject_nmis(1);
        guest.halt();
        assert_eq!(guest.cpu.state.rip, TASK_CODE + 1);
        assert_eq!(word(&guest, TSS + EIP), CODE);
        assert_eq!(guest.cpu.state.tr.selector, TASK);
    }
}

/// A fault before the commit point.
struct Refused {
    name: &'static str,
    code: Vec<u8>,
    prepare: fn(&mut Guest),
    vector: u8,
    error: u64,
}

fn as_user(guest: &mut Guest) {
    guest.cpu.state.cs = segment(USER_CODE, 0xc0fb);
    guest.cpu.state.ss = segment(USER_DATA, 0xc0f3);
    set(guest, TSS + 4, STACK);
    set(guest, TSS + 8, KERNEL_DATA.into());
}
/// NT is set, and the link is to another task.
fn linked(guest: &mut Guest, link: u16) {
    guest.cpu.state.rflags |= NT;
    set16(guest, TSS, link.into());
}

#[test]
fn a_fault_before_the_commit_point_leaves_the_old_task_as_it_was() {
    let case = |name, code: Vec<u8>, vector, error: u16, prepare: fn(&mut Guest)| Refused {
        name,
        code,
        prepare,
        vector,
        error: error.into(),
    };
    let (ts, np, gp, pf) = (vector::TS, vector::NP, vector::GP, vector::PF);
    let nothing: fn(&mut Guest) = |_| ();
    let cases = [
        // The privilege.
        case("RPL above DPL", jmp(TASK | 1), gp, TASK, nothing),
        case("CPL above DPL", call(TASK), gp, TASK, as_user),
        case("RPL above a gate's DPL", jmp(GATE | 3), gp, GATE, nothing),
        case("CPL above a gate's DPL", call(GATE), gp, GATE, as_user),
        case(
            "INT n at CPL above DPL",
            INT_TASK.to_vec(),
            gp,
            8 * u16::from(INT) + 2,
            as_user,
        ),
        // The gate.
        case("an absent gate", jmp(GATE), np, GATE, |g| {
            access(g, GATE, 0x05)
        }),
        case(
            "an absent gate of the IDT",
            INT_TASK.to_vec(),
            np,
            8 * u16::from(INT) + 2,
            |g| task_gate(g, idt(INT), TASK, 0x05),
        ),
        case("a gate to a TSS in the LDT", jmp(GATE), gp, TASK | 4, |g| {
            g.cpu.state.ldtr = Segment {
                selector: LDT,
                base: GDT,
                limit: 0xff,
                rights: 0x82,
            };
            task_gate(g, GDT + u64::from(GATE), TASK | 4, 0x85);
        }),
        case("a gate to nowhere", call(GATE), gp, BEYOND, |g| {
            task_gate(g, GDT + u64::from(GATE), BEYOND, 0x85)
        }),
        case("a gate to code", call(GATE), gp, KERNEL_CODE, |g| {
            task_gate(g, GDT + u64::from(GATE), KERNEL_CODE, 0x85)
        }),
        case("INT n to a null selector", INT_TASK.to_vec(), gp, 0, |g| {
            task_gate(g, idt(INT), 0, 0x85)
        }),
        // The TSS.
        case("a TSS in the LDT", jmp(TASK | 4), gp, TASK | 4, |g| {
            g.cpu.state.ldtr = Segment {
                selector: LDT,
                base: GDT,
                limit: 0xff,
                rights: 0x82,
            };
        }),
        case("a busy TSS", jmp(TASK), gp, TASK, |g| access(g, TASK, 0x8b)),
        case("a busy 16-bit TSS", call(TASK16), gp, TASK16, |g| {
            access(g, TASK16, 0x83)
        }),
        case("the current TSS", jmp(MAIN), gp, MAIN, nothing),
        case("busy for INT n", INT_TASK.to_vec(), gp, TASK, |g| {
            access(g, TASK, 0x8b)
        }),
        case("busy before absent", jmp(TASK), gp, TASK, |g| {
            access(g, TASK, 0x0b)
        }),
        case("an absent TSS", call(TASK), np, TASK, |g| {
            access(g, TASK, 0x09)
        }),
        case("absent for INT n", INT_TASK.to_vec(), np, TASK, |g| {
            access(g, TASK, 0x09)
        }),
        case("a small TSS", jmp(TASK), ts, TASK, |g| {
            descriptor(g, TASK, TASK_TSS, 0x66, 0x89, 0)
        }),
        case("a small 16-bit TSS", jmp(TASK16), ts, TASK16, |g| {
            descriptor(g, TASK16, TASK16_TSS, 0x2a, 0x81, 0)
        }),
        case("an unmapped TSS", jmp(TASK), pf, 0, |g| {
            g.machine.absent(TASK_TSS)
        }),
        case("a TSS that cannot be linked", call(TASK), pf, 3, |g| {
            g.machine.read_only(TASK_TSS)
        }),
        case("an old TSS that is too small", jmp(TASK), ts, MAIN, |g| {
            g.cpu.state.tr.limit = 0x5e
        }),
        case("an old TSS that is read-only", jmp(TASK), pf, 3, |g| {
            g.machine.read_only(TSS)
        }),
        case("page-directory pointers", jmp(TASK), gp, 0, |g| {
            g.cpu.state.cr4 |= 1 << 5;
            set(g, TASK_TSS + CR3, DATA);
            g.memory().write64(DATA, 0x1007);
        }),
        // IRET.
        case("a link to an available TSS", IRET.to_vec(), ts, TASK, |g| {
            linked(g, TASK)
        }),
        case("a link to the LDT", IRET.to_vec(), ts, TASK | 4, |g| {
            linked(g, TASK | 4)
        }),
        case("a link to nowhere", IRET.to_vec(), ts, BEYOND, |g| {
            linked(g, BEYOND)
        }),
        case("a link to data", IRET.to_vec(), ts, KERNEL_DATA, |g| {
            linked(g, KERNEL_DATA)
        }),
        case("a link to an absent TSS", IRET.to_vec(), np, TASK, |g| {
            linked(g, TASK);
            access(g, TASK, 0x0b);
        }),
        case("a link to a small TSS", IRET.to_vec(), ts, TASK, |g| {
            linked(g, TASK);
            descriptor(g, TASK, TASK_TSS, 0x66, 0x8b, 0);
        }),
    ];
    for Refused {
        name,
        code,
        prepare,
        vector,
        error,
    } in cases
    {
        let mut guest = guest(&code);
        prepare(&mut guest);
        let tables = |g: &Guest| -> [[u8; 0x800]; 4] {
            [GDT, TSS, TASK_TSS, TASK16_TSS].map(|at| g.memory().read(at))
        };
        let (before, memory) = (guest.cpu.state.clone(), tables(&guest));
        guest.halt();
        let state = &guest.cpu.state;
        let handler = HANDLERS + 16 * u64::from(vector) + 1;
        assert_eq!(state.rip, handler, "{name}: another vector came");
        let at = state.gpr[RSP];
        assert_eq!(word(&guest, at), error, "{name}: the error code");
        assert_eq!(word(&guest, at + 4), CODE, "{name}: the old task's fault");
        assert_eq!(word(&guest, at + 8), before.cs.selector.into(), "{name}");
        assert_eq!(word(&guest, at + 12), before.rflags | RF, "{name}");
        assert!(tables(&guest) == memory, "{name}: memory changed");
        let kept = |s: &State| (s.tr, s.cr0, s.cr3, s.ldtr, s.dr7, s.ds, s.gpr[RAX]);
        assert_eq!(kept(state), kept(&before), "{name}");
    }
}

/// A fault of the new task: the field of its TSS that causes it.
struct Broken {
    name: &'static str,
    fields: Vec<(u64, u16)>,
    vector: u8,
    error: u64,
}

#[test]
fn a_fault_behind_the_commit_point_is_the_new_tasks() {
    let case = |name, fields: &[(u64, u16)], vector, error: u16| Broken {
        name,
        fields: fields.to_vec(),
        vector,
        error: error.into(),
    };
    let (ts, np, ss, gp) = (vector::TS, vector::NP, vector::SS, vector::GP);
    let cases = [
        case("an LDT in the LDT", &[(LDTR, LDT | 4)], ts, LDT | 4),
        case("an LDT beyond the GDT", &[(LDTR, BEYOND)], ts, BEYOND),
        case("data as LDT", &[(LDTR, USER_DATA)], ts, 0x18),
        case("an absent LDT", &[(LDTR, ABSENT_LDT)], ts, ABSENT_LDT),
        case("a null CS", &[(CS, 3)], ts, 0),
        case("CS beyond the GDT", &[(CS, BEYOND)], ts, BEYOND),
        case("CS in a null LDT", &[(CS, 0x0c)], ts, 0x0c),
        case("data as CS", &[(CS, KERNEL_DATA)], ts, KERNEL_DATA),
        case("CS of DPL 0 and RPL 3", &[(CS, 0x0b)], ts, KERNEL_CODE),
        case("CS of DPL 3 and RPL 0", &[(CS, 0x20)], ts, 0x20),
        case("an absent CS", &[(CS, ABSENT_CODE)], np, ABSENT_CODE),
        case("a null SS", &[(SS, 0)], ts, 0),
        case("SS beyond the GDT", &[(SS, BEYOND)], ts, BEYOND),
        case("a read-only SS", &[(SS, READ_ONLY)], ts, READ_ONLY),
        case("code as SS", &[(SS, KERNEL_CODE)], ts, KERNEL_CODE),
        case("SS of RPL 3", &[(SS, 0x13)], ts, KERNEL_DATA),
        case("SS of DPL 3", &[(SS, 0x18)], ts, 0x18),
        case("an absent SS", &[(SS, ABSENT_DATA)], ss, ABSENT_DATA),
        case("DS beyond the GDT", &[(DS, BEYOND)], ts, BEYOND),
        case("an unreadable ES", &[(ES, EXECUTE_ONLY)], ts, EXECUTE_ONLY),
        case("a TSS as FS", &[(FS, MAIN)], ts, MAIN),
        case("GS of DPL 0 and RPL 3", &[(GS, 0x13)], ts, KERNEL_DATA),
        case("an absent DS", &[(DS, ABSENT_DATA)], np, ABSENT_DATA),
        case("EIP beyond CS", &[(CS, SMALL_CODE)], gp, 0),
        case(
            "data of the kernel in a user task",
            &[(CS, USER_CODE), (SS, USER_DATA)],
            ts,
            KERNEL_DATA,
        ),
        case("LDT before CS", &[(LDTR, MAIN), (CS, 0)], ts, MAIN),
        case("CS before SS", &[(CS, 0), (SS, MAIN)], ts, 0),
        case("SS before DS", &[(SS, MAIN), (DS, BEYOND)], ts, MAIN),
    ];
    for Broken {
        name,
        fields,
        vector,
        error,
    } in cases
    {
        for way in ways().iter().filter(|way| way.task == TASK) {
            let mut guest = guest_with_handler_tasks(&way.code);
            let name = format!("{name}, {}", way.name);
            if way.interrupt {
                guest.cpu.inject_interrupt(INT);
            }
            task_gate(&guest, idt(vector::UD), TASK, 0x85);
            for &(at, v) in &fields {
                set(&guest, TASK_TSS + at, v.into());
            }
            guest.halt();
            let state = &guest.cpu.state;
            // The handler's task is nested in the new one, which has not executed anything.
            assert_eq!(state.tr.selector, handler_task(vector), "{name}");
            assert_eq!(state.rip, HANDLERS + 16 * u64::from(vector) + 1, "{name}");
            let external = u64::from(way.interrupt || way.fault);
            let pushed = word(&guest, HANDLER_STACK - 4);
            assert_eq!(pushed, error | external, "{name}: the error code");
            assert_eq!(word(&guest, state.tr.base), TASK.into(), "{name}: the link");
            assert_eq!(word(&guest, TASK_TSS + EIP), TASK_CODE, "{name}");
            let nt = if way.nests { NT } else { 0 };
            assert_eq!(word(&guest, TASK_TSS + EFLAGS), 2 | nt | RF, "{name}");
            assert_eq!(access_of(&guest, TASK), 0x8b, "{name}");
            // The old one is saved.
            assert_eq!(word(&guest, TSS + EIP), CODE + way.next, "{name}");
            let busy = if way.nests { 0x8b } else { 0x89 };
            assert_eq!(access_of(&guest, MAIN), busy, "{name}");
        }
    }
}

#[test]
fn an_error_code_that_cannot_be_pushed_is_the_new_tasks_fault() {
    // mov eax,[esi]
    let page_fault = || {
        let mut guest = guest_with_handler_tasks(b"\x8b\x06");
        task_gate(&guest, idt(vector::PF), TASK, 0x85);
        guest.machine.absent(DATA);
        guest.cpu.state.gpr[RSI] = DATA;
        guest
    };
    // Either is a double fault: #SS and #PF after #PF. Its error code is 0, and it comes in the new task.
    let mut small = page_fault();
    set(&small, TASK_TSS + SS, SMALL_STACK.into());
    let mut unmapped = page_fault();
    unmapped.machine.absent(TASK_STACK - 4);
    for guest in [&mut small, &mut unmapped] {
        guest.halt();
        assert_eq!(guest.cpu.state.tr.selector, handler_task(vector::DF));
        assert_eq!(word(guest, HANDLER_STACK - 4), 0);
        assert_eq!(word(guest, guest.cpu.state.tr.base), TASK.into());
        assert_eq!(word(guest, TASK_TSS + EIP), TASK_CODE);
        assert_eq!(word(guest, TASK_TSS + ESP), TASK_STACK);
    }
    assert_eq!(unmapped.cpu.state.cr2, TASK_STACK - 4);
}

#[test]
fn a_conforming_code_segment_runs_at_the_rpl_of_its_selector() {
    let mut guest = guest(&call(TASK));
    set(&guest, TASK_TSS + CS, u64::from(CONFORMING | 3));
    for at in [ES, SS, DS, FS, GS] {
        set(&guest, TASK_TSS + at, USER_DATA.into());
    }
    guest.halt_in_handler(vector::GP);
    // HLT of user code: pushed on the stack of ring 0 in the task's TSS.
    assert_eq!(guest.cpu.state.tr.selector, TASK);
    let at = guest.cpu.state.gpr[RSP];
    assert_eq!(word(&guest, at + 4), TASK_CODE);
    assert_eq!(word(&guest, at + 8), u64::from(CONFORMING | 3));
}

#[test]
fn the_trap_flag_of_a_tss_is_a_debug_exception_before_the_first_instruction() {
    let mut guest = guest_with_handler_tasks(&call(TASK));
    set(&guest, TASK_TSS + TRAP, 1);
    guest.halt();
    assert_eq!(guest.cpu.state.tr.selector, handler_task(vector::DB));
    assert_eq!(guest.cpu.state.dr6, 0xffff_0ff0 | 1 << 15);
    assert_eq!(word(&guest, TASK_TSS + EIP), TASK_CODE);
    assert_eq!(word(&guest, TASK_TSS + EFLAGS), 2 | NT);
}

#[test]
fn a_single_step_is_of_the_task_that_has_tf() {
    const TF: u64 = 0x100;
    // The old task's TF waits in its TSS.
    let mut guest = guest_with_handler_tasks(&jmp(TASK));
    guest.cpu.state.rflags |= TF;
    guest.halt();
    assert_eq!(guest.cpu.state.rip, TASK_CODE + 1);
    assert_eq!(word(&guest, TSS + EFLAGS), 2 | TF);
    // The new task's comes after its first instruction.
    let mut guest = guest_with_handler_tasks(&jmp(TASK));
    guest.memory().write(TASK_CODE, b"\x90\xf4");
    set(&guest, TASK_TSS + EFLAGS, 2 | TF);
    guest.halt();
    assert_eq!(guest.cpu.state.tr.selector, handler_task(vector::DB));
    assert_eq!(word(&guest, TASK_TSS + EIP), TASK_CODE + 1);
}

#[test]
fn a_task_has_its_own_address_space_and_ldt() {
    let mut guest = guest(&call(TASK));
    let cr3 = 0xb_0000;
    set(&guest, TASK_TSS + CR3, cr3);
    // Its code is elsewhere; DS is in its LDT, which the GDT of its address space has.
    guest.memory().write(0xc_0000, b"\x90\x90\xf4");
    guest
        .machine
        .spaces
        .insert((cr3, TASK_CODE >> 12), 0xc_0000 >> 12);
    set(&guest, TASK_TSS + LDTR, LDT.into());
    set(&guest, TASK_TSS + DS, u64::from(KERNEL_DATA | 4));
    guest.halt();
    let state = &guest.cpu.state;
    assert_eq!((state.rip, state.cr3), (TASK_CODE + 3, cr3));
    assert_eq!(state.ds, segment(KERNEL_DATA | 4, 0xc093));
    assert_eq!((state.ldtr.selector, state.ldtr.base), (LDT, GDT));

    // Without paging CR3 stays.
    let mut guest = crate::guest(&call(TASK));
    set(&guest, TASK_TSS + CR3, cr3);
    guest.cpu.state.cr0 &= !(1 << 31);
    guest.cpu.state.cr3 = 0x1000;
    guest.halt();
    assert_eq!(guest.cpu.state.cr3, 0x1000);
    // A 16-bit TSS has none.
    let mut guest = crate::guest(&call(TASK16));
    guest.cpu.state.cr3 = 0x1000;
    guest.halt();
    assert_eq!(guest.cpu.state.cr3, 0x1000);
}

#[test]
fn pae_paging_loads_its_pointers_when_cr3_changes() {
    for (cr3, pointers) in [(DATA, [0x1001, 0x2001, 0, 0x3001]), (0, [9, 0, 0, 0])] {
        let mut guest = guest(&call(TASK));
        guest.cpu.state.cr4 |= 1 << 5;
        guest.cpu.state.pdptes = [9, 0, 0, 0];
        set(&guest, TASK_TSS + CR3, cr3);
        for (at, v) in (DATA..).step_by(8).zip([0x1001, 0x2001, 0, 0x3001]) {
            guest.memory().write64(at, v);
        }
        guest.halt();
        assert_eq!(
            (guest.cpu.state.cr3, guest.cpu.state.pdptes),
            (cr3, pointers)
        );
    }
}

#[test]
fn a_switch_that_breaks_off_anywhere_begins_again() {
    let what = |guest: &Guest| -> (State, [[u8; 0x400]; 4]) {
        let memory = [GDT, TSS, TASK_TSS, TASK16_TSS].map(|at| guest.memory().read(at));
        (guest.cpu.state.clone(), memory)
    };
    let mut points = 0;
    for way in ways() {
        // Accessed bits are written, and a segment register is refused in one of the tasks.
        for ds in [KERNEL_DATA, BEYOND] {
            let run = |retry_at| {
                let mut guest = start(&way);
                for vector in [vector::TS, vector::NP] {
                    task_gate(&guest, idt(vector), handler_task(vector), 0x85);
                }
                access(&guest, KERNEL_DATA, 0x92);
                set(&guest, TASK_TSS + CR3, 0xb_0000);
                set(&guest, TASK_TSS + DS, ds.into());
                set16(&guest, TASK16_TSS + 0x28, ds.into());
                guest.machine.retry_at = retry_at;
                guest.halt();
                guest
            };
            let (expected, translations) = {
                let guest = run(None);
                (what(&guest), guest.machine.translations.len())
            };
            for n in 0..translations {
                assert!(what(&run(Some(n))) == expected, "{}: {n}", way.name);
            }
            points += translations;
        }
    }
    assert!(points > 100, "{points}");
}

#[test]
fn a_task_in_virtual_8086_mode_has_segments_of_real_mode() {
    // iret to the task, where ud2 comes back.
    let mut guest = guest(&IRET);
    linked(&mut guest, TASK);
    access(&guest, TASK, 0x8b);
    task_gate(&guest, idt(vector::UD), MAIN, 0x85);
    for (at, v) in [
        (CS, 0x0600),
        (EIP, 0),
        (EFLAGS, 2 | VM),
        (DS, 0x1234),
        (SS, 0),
    ] {
        set(&guest, TASK_TSS + at, v);
    }
    guest.memory().write(TASK_CODE, b"\x90\x0f\x0b");
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
