//! The tasks of an embedder: devices, interrupts, calls, and traps.

use crate::guest::*;
use crate::machine::*;
use slat_a64::{Hint, Leave, Pending, Pstate, Stop, Syndrome};

/// Executes an access to a page without memory. Returns ESR_EL2 and the syndrome.
fn refused(guest: &mut Guest, word: u32) -> (u64, Option<Syndrome>) {
    let Leave::Stage2 { fault, syndrome } = guest.execute(&[word], [0x8877_6655_4433_2211, 0x1008])
    else {
        panic!("{word:08x} is not refused");
    };
    assert_eq!((fault.ipa & !0xff, fault.address & !0xff), (0x5000, 0x1000));
    assert_eq!(guest.cpu.state.pc, guest.code);
    (fault.esr(syndrome, 0x07), syndrome)
}

/// The memory behind other pages may change while an access waits. The machine then makes that access fail.
#[test]
fn an_access_that_fails_leaves_no_page_in_the_tlb() {
    // LDR, STR, LDR Q, STR Q, CAS, LDADD.
    let accesses = [LDR, STR, LDR_Q, 0x3d80_0020, 0xc8a0_7c20, 0xf820_0020];
    for word in accesses {
        let mut guest = Guest::new();
        guest.map(1, 0x5000 | PAGE);
        guest.map(2, 0x6000 | PAGE);
        guest.ram.set(0x6000, 1);
        guest.ram.set(0x7000, 2);
        guest.succeeds(word, [0, 0x1000]);
        assert_eq!(guest.succeeds(LDR, [0, 0x2000]), 1);
        guest.ram.changes = Some([0x5000, 0x6000, 0x7000]);
        guest.succeeds(word, [0, 0x1000]);
        assert_eq!(guest.succeeds(LDR, [0, 0x2000]), 2, "{word:08x}");
    }
}

#[test]
fn accesses_of_devices_are_completed() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE | DEVICE);
    guest.ram.holes.push(5);
    let abort = 0x24 << 26 | 1 << 25 | 7;
    let isv = |size: u64, is_signed: u64, is_64: u64, ordered: u64| {
        abort | 1 << 24 | size << 22 | is_signed << 21 | is_64 << 15 | ordered << 14
    };
    let data = 0xf1f2_f3f4_f5f6_f7f8;
    // LDRB, LDRH, LDR W, LDR X, LDRSB W, LDRSB X, LDRSW, LDAR W, LDUR X, LDTR X: of X0, at X1.
    let loads = [
        (0x3940_0020, isv(0, 0, 0, 0), 0xf8),
        (0x7940_0020, isv(1, 0, 0, 0), 0xf7f8),
        (0xb940_0020, isv(2, 0, 0, 0), 0xf5f6_f7f8),
        (0xf940_0020, isv(3, 0, 1, 0), data),
        (0x39c0_0020, isv(0, 1, 0, 0), 0xffff_fff8),
        (0x3980_0020, isv(0, 1, 1, 0), 0xffff_ffff_ffff_fff8),
        (0xb980_0020, isv(2, 1, 1, 0), 0xffff_ffff_f5f6_f7f8),
        (0x88df_fc20, isv(2, 0, 0, 1), 0xf5f6_f7f8),
        (0xf840_0020, isv(3, 0, 1, 0), data),
        (0xf840_0820, isv(3, 0, 1, 0), data),
    ];
    for (word, esr, value) in loads {
        // LDTR has EL0's rights.
        guest.map(1, 0x5000 | PAGE | DEVICE | EL0);
        let (found, syndrome) = refused(&mut guest, word);
        assert_eq!(found, esr, "{word:08x}");
        syndrome.unwrap().complete(&mut guest.cpu.state, data);
        assert_eq!(
            (guest.cpu.state.x[0], guest.cpu.state.pc),
            (value, guest.code + 4),
            "{word:08x}"
        );
    }
    // STRB, STR X, STLR W: of X0; STR XZR.
    let stores = [
        (0x3900_0020, isv(0, 0, 0, 0), 0x11),
        (0xf900_0020, isv(3, 0, 1, 0), 0x8877_6655_4433_2211),
        (0x889f_fc20, isv(2, 0, 0, 1), 0x4433_2211),
        (0xf900_003f, isv(3, 0, 1, 0) | 31 << 16, 0),
    ];
    for (word, esr, value) in stores {
        let (found, syndrome) = refused(&mut guest, word);
        assert_eq!(found, esr | WNR, "{word:08x}");
        let syndrome = syndrome.unwrap();
        assert_eq!(syndrome.stored(&guest.cpu.state), value);
        syndrome.complete(&mut guest.cpu.state, 0);
        assert_eq!(guest.cpu.state.pc, guest.code + 4);
        assert_eq!(guest.cpu.state.x[0], 0x8877_6655_4433_2211);
    }
    // A load to XZR is completed without a register.
    let (_, syndrome) = refused(&mut guest, 0xf940_003f);
    syndrome.unwrap().complete(&mut guest.cpu.state, data);
    assert_eq!(guest.cpu.state.pc, guest.code + 4);
    // LDP, LDR with writeback, LDR Q, LDXR, LDADD, DC ZVA, LD1: no syndrome.
    for word in [
        LDP,
        0xf840_8420,
        0x3dc0_0420,
        0xc85f_7c20,
        0xf820_0020,
        LD1_4S,
    ] {
        let (esr, syndrome) = refused(&mut guest, word);
        assert_eq!((esr & !WNR, syndrome), (abort, None), "{word:08x}");
    }
    // No device answers the access: EL1 takes an external abort.
    let Leave::Stage2 { fault, .. } = guest.execute(&[STR], [0, 0x1000]) else {
        panic!("STR is not refused");
    };
    guest.cpu.state.take_stop(Stop::Memory(fault.external()));
    assert_eq!(guest.syndrome(), [data_abort(0x10 | WNR), 0x1000]);
    // The machine refuses a fetch, and then the walk of a store. EL1 does not execute what EL0 can write.
    guest.map(1, 0x5000 | PAGE);
    guest.cpu.forget_pages();
    guest.cpu.state.pc = 0x1000;
    let Leave::Stage2 { fault, syndrome } = guest.cpu.run(&mut guest.ram, 1) else {
        panic!("a fetch is not refused");
    };
    assert_eq!(fault.esr(syndrome, 7), 0x20 << 26 | 1 << 25 | 7);
    guest.ram.holes.push(LEVEL_3 >> 12);
    guest.cpu.forget_pages();
    let Leave::Stage2 { fault, syndrome } = guest.execute(&[STR], [0, 0x1000]) else {
        panic!("a walk is not refused");
    };
    assert_eq!(fault.ipa, LEVEL_3 + 8);
    assert_eq!(fault.esr(syndrome, 7), abort | 1 << 7 | WNR);
    assert_eq!(fault.external().status, 0x17);
}

#[test]
fn interrupts_are_taken_when_they_are_not_masked() {
    let mut guest = Guest::new();
    let all = Pending {
        irq: true,
        fiq: true,
        serror: Some(0x55),
    };
    let vectors = guest.code + 0x8000 + 0x200;
    for (pending, mask, vector) in [
        (
            Pending {
                irq: true,
                ..Pending::default()
            },
            2,
            0x80,
        ),
        (
            Pending {
                fiq: true,
                ..Pending::default()
            },
            1,
            0x100,
        ),
        (
            Pending {
                serror: Some(0x55),
                ..Pending::default()
            },
            4,
            0x180,
        ),
        (all, 4, 0x180),
    ] {
        // NOP.
        guest.execute(&[0xd503_201f, 0xd503_201f], [0, 0]);
        for daif in [15, 15 & !mask] {
            let pstate = Pstate {
                el1: true,
                own_stack: true,
                daif,
                ..Pstate::default()
            };
            guest.cpu.state.set_pstate(pstate);
            guest.cpu.state.pc = guest.code;
            guest.cpu.pending = pending;
            assert_eq!(guest.cpu.run(&mut guest.ram, 1), Leave::Limit);
            let expected = if daif == 15 {
                guest.code + 4
            } else {
                vectors + vector
            };
            assert_eq!(guest.cpu.state.pc, expected, "{pending:?}");
        }
        assert_eq!(guest.cpu.pending.serror, None);
        if pending.serror.is_some() {
            assert_eq!(
                guest.cpu.state.system(ESR),
                Some(0x2f << 26 | 1 << 25 | 0x55)
            );
        }
    }
}

#[test]
fn calls_and_waits_leave() {
    let mut guest = Guest::new();
    assert_eq!(
        guest.execute(&[0xd400_0002 | 7 << 5], [0, 0]),
        Leave::Hvc(7)
    );
    assert_eq!(guest.cpu.state.pc, guest.code + 4);
    assert_eq!(
        guest.execute(&[0xd400_0003 | 8 << 5], [0, 0]),
        Leave::Smc(8)
    );
    assert_eq!(guest.cpu.state.pc, guest.code + 4);
    for word in [0xd400_0002, 0xd400_0003] {
        assert_eq!(guest.execute_at(false, &[word], [0, 0]), Leave::Limit);
        assert_eq!(guest.syndrome()[0], 1 << 25, "UNDEFINED at EL0");
    }
    assert_eq!(
        guest.execute(&[0xd503_207f], [0, 0]),
        Leave::Hint(Hint::Wfi)
    );
    assert_eq!(
        guest.execute(&[0xd503_205f], [0, 0]),
        Leave::Hint(Hint::Wfe)
    );
    assert_eq!(guest.cpu.state.pc, guest.code + 4);
}

/// A guest whose vectors cannot be fetched takes exceptions without end, and must not keep its embedder waiting.
#[test]
fn attention_ends_each_run() {
    let mut guest = Guest::new();
    guest.ram.attention = true;
    // B .; and SVC with vectors that are not mapped.
    for word in [0x1400_0000, 0xd400_0001] {
        guest.cpu.set_system(VBAR, 0x10_0000);
        guest.execute(&[word], [0, 0]);
        assert_eq!(
            guest.cpu.run(&mut guest.ram, 1000),
            Leave::Attention,
            "{word:08x}"
        );
    }
}

/// An instruction of the processor may have ended the interrupt. Only the embedder knows whether it has.
#[test]
fn no_interrupt_is_taken_before_its_machine_has_attention() {
    let mut guest = Guest::new();
    guest.execute(&[0xd503_201f], [0, 0]);
    guest.cpu.state.set_pstate(Pstate {
        el1: true,
        own_stack: true,
        ..Pstate::default()
    });
    guest.cpu.state.pc = guest.code;
    guest.cpu.pending.irq = true;
    guest.ram.attention = true;
    assert_eq!(guest.cpu.run(&mut guest.ram, 9), Leave::Attention);
    assert_eq!(guest.cpu.state.pc, guest.code);
    guest.ram.attention = false;
    assert_eq!(guest.cpu.run(&mut guest.ram, 1), Leave::Limit);
    assert_eq!(guest.cpu.state.pc, guest.code + 0x8000 + 0x280);
}

/// EL0 reads the counter if CNTKCTL_EL1 says so. The machine of these tests has none, so that the access is UNDEFINED.
#[test]
fn el0_has_the_timers_that_it_is_given() {
    let mut guest = Guest::new();
    let control = slat_a64::SystemName::new(3, 0, 14, 1, 0);
    // MRS X3 of CNTFRQ, CNTPCT, CNTVCT, CNTP_CTL, CNTV_CTL.
    let cases = [
        ([3, 3, 14, 0, 0], 3),
        ([3, 3, 14, 0, 1], 1),
        ([3, 3, 14, 0, 2], 2),
        ([3, 3, 14, 2, 1], 1 << 9),
        ([3, 3, 14, 3, 1], 1 << 8),
    ];
    for ([op0, op1, crn, crm, op2], permission) in cases {
        let name = slat_a64::SystemName::new(op0, op1, crn, crm, op2);
        let word = 0xd520_0003 | u32::from(name.0) << 5;
        let [op0, op1, crn, crm, op2] = [op0, op1, crn, crm, op2].map(u64::from);
        let iss = op0 << 20 | op2 << 17 | op1 << 14 | crn << 10 | 3 << 5 | crm << 1 | 1;
        guest.cpu.set_system(control, 0x3ff & !permission);
        guest.execute_at(false, &[word], [0, 0]);
        assert_eq!(guest.syndrome()[0], 0x18 << 26 | 1 << 25 | iss, "{name:?}");
        guest.cpu.set_system(control, permission);
        guest.execute_at(false, &[word], [0, 0]);
        assert_eq!(guest.syndrome()[0], 1 << 25, "{name:?}");
    }
}

/// ISR_EL1 shows all pending interrupts, also those that PSTATE masks.
#[test]
fn a_guest_sees_what_is_pending() {
    // MRS X0, ISR_EL1.
    const READ: u32 = 0xd538_c100;
    let mut guest = Guest::new();
    assert_eq!(guest.succeeds(READ, [7, 0]), 0);
    for (pending, isr) in [
        (
            Pending {
                irq: true,
                ..Pending::default()
            },
            1 << 7,
        ),
        (
            Pending {
                fiq: true,
                ..Pending::default()
            },
            1 << 6,
        ),
        (
            Pending {
                serror: Some(5),
                ..Pending::default()
            },
            1 << 8,
        ),
    ] {
        guest.cpu.pending = pending;
        assert_eq!(guest.succeeds(READ, [7, 0]), isr);
    }
    guest.cpu.pending = Pending::default();
    guest.execute_at(false, &[READ], [0, 0]);
    assert_eq!(guest.syndrome()[0], 1 << 25, "EL0 has no such register");
}
