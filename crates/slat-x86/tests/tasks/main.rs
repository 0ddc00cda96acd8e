//! Tests hardware task switches (SDM volume 3, "Task Management").

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod modes;
mod setup;
mod v86;

use common::*;
use setup::*;
use slat_x86::*;

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

        // Checks the saved state of the old task.
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

        // Checks the state of the new task.
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
        // The code calls the task twice. The task executes: iret; hlt.
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

        let mut guest = setup::guest(&call(task));
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
    // The task's code is: hlt; iret.
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
    // The old task's TF is kept in its TSS.
    let mut guest = guest_with_handler_tasks(&jmp(TASK));
    guest.cpu.state.rflags |= TF;
    guest.halt();
    assert_eq!(guest.cpu.state.rip, TASK_CODE + 1);
    assert_eq!(word(&guest, TSS + EFLAGS), 2 | TF);
    // The trap of the new task comes after the task's first instruction.
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
    // The new task has another address space: its code is elsewhere, and the GDT there has its LDT, which has DS.
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

    // Without paging, the switch does not change CR3.
    let mut guest = setup::guest(&call(TASK));
    set(&guest, TASK_TSS + CR3, cr3);
    guest.cpu.state.cr0 &= !(1 << 31);
    guest.cpu.state.cr3 = 0x1000;
    guest.halt();
    assert_eq!(guest.cpu.state.cr3, 0x1000);
    // A 16-bit TSS has no CR3.
    let mut guest = setup::guest(&call(TASK16));
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
        // The switch sets accessed bits of descriptors. In one of the tasks, a segment register has an invalid
        // selector.
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
fn a_switch_tells_the_machine_of_its_stores_and_of_the_new_cr3() {
    // The task's code is: hlt
    let mut guest = guest(&call(TASK));
    set(&guest, TASK_TSS + CR3, 0xb_0000);
    guest.machine.track(TSS);
    guest.machine.track(TASK_TSS);
    guest.halt();
    let stores = &guest.machine.stores;
    let all: Vec<_> = (stores.iter()).map(|s| (s.gpa, s.bytes.len())).collect();
    // The stores are: the old task's registers (the GDT is in another page), and the link.
    assert_eq!(all, [(TSS + EIP, 0x40), (TASK_TSS, 2)]);
    assert_eq!(stores[0].bytes[..4], (CODE as u32 + 7).to_le_bytes());
    assert_eq!(stores[1].bytes, MAIN.to_le_bytes());
    let flushes = &guest.machine.flushes;
    assert!(!flushes.is_empty() && flushes.iter().all(|what| *what == GuestFlush::All));
}
