//! Tests faults before and after the commit point of a task switch.

use crate::common::*;
use crate::setup::*;
use slat_x86::*;

/// A fault before the commit point.
struct Refused {
    name: &'static str,
    code: Vec<u8>,
    prepare: fn(&mut Guest),
    vector: u8,
    error: u64,
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
        // The next cases fail the privilege checks.
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
        // The next cases have an invalid gate.
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
        // The next cases have an invalid TSS.
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
        // The next cases are returns by IRET.
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

/// A fault of the new task, and the field of the task's TSS that causes it.
struct Broken {
    name: &'static str,
    fields: Vec<(u64, u16)>,
    vector: u8,
    error: u64,
}

#[test]
fn a_fault_after_the_commit_point_is_the_new_tasks() {
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
            // The handler's task is nested in the new task, which has not executed any instruction.
            assert_eq!(state.tr.selector, handler_task(vector), "{name}");
            assert_eq!(state.rip, HANDLERS + 16 * u64::from(vector) + 1, "{name}");
            // The CPU is AMD's, so no exception counts as external.
            let external = u64::from(way.interrupt);
            let pushed = word(&guest, HANDLER_STACK - 4);
            assert_eq!(pushed, error | external, "{name}: the error code");
            assert_eq!(word(&guest, state.tr.base), TASK.into(), "{name}: the link");
            assert_eq!(word(&guest, TASK_TSS + EIP), TASK_CODE, "{name}");
            let nt = if way.nests { NT } else { 0 };
            assert_eq!(word(&guest, TASK_TSS + EFLAGS), 2 | nt | RF, "{name}");
            assert_eq!(access_of(&guest, TASK), 0x8b, "{name}");
            // The state of the old task is saved.
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
    // #SS or #PF after #PF is a double fault. Its error code is 0, and it occurs in the new task.
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
