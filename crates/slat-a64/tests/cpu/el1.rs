//! Tests EL1: exceptions and their syndromes, returns, system registers and the levels that may access them.

use crate::memory::{CODE, Failed, Shared, View};
use slat_a64::{Abort, Exception, Exit, Hint, Interrupt, Pstate, State, Stop, SystemName, run};

const SCTLR: SystemName = SystemName::new(3, 0, 1, 0, 0);
const CPACR: SystemName = SystemName::new(3, 0, 1, 0, 2);
const SPSR: SystemName = SystemName::new(3, 0, 4, 0, 0);
const ELR: SystemName = SystemName::new(3, 0, 4, 0, 1);
const ESR: SystemName = SystemName::new(3, 0, 5, 2, 0);
const FAR: SystemName = SystemName::new(3, 0, 6, 0, 0);
const VBAR: SystemName = SystemName::new(3, 0, 12, 0, 0);

const VECTORS: u64 = 0xffff_8000_0000_0800;
/// ESR_EL1.IL.
const IL: u64 = 1 << 25;
const EL0: Pstate = Pstate {
    el1: false,
    own_stack: false,
    daif: 0,
    pan: false,
    dit: false,
    il: false,
    ss: false,
};
const EL1: Pstate = Pstate {
    el1: true,
    own_stack: true,
    ..EL0
};

fn at(pstate: Pstate) -> State {
    let mut state = State::reset();
    state.set_pstate(pstate);
    state.set_system(VBAR, VECTORS);
    state.pc = CODE;
    state
}

fn step(word: u32, state: &mut State) -> Option<Exit<Failed>> {
    let shared = Shared::new(&[word]);
    run::step(state, &mut View::new(&shared))
}

/// Executes an instruction that raises an exception, and lets EL1 take the exception. Returns ESR_EL1.
fn taken(word: u32, state: &mut State) -> u64 {
    let Some(Exit::Stop(Stop::Exception(exception))) = step(word, state) else {
        panic!("{word:08x} raises no exception");
    };
    state.take_exception(exception);
    state.system(ESR).unwrap()
}

#[test]
fn a_system_call_goes_to_el1_and_returns() {
    let mut state = at(EL0);
    state.sp = 0x1000;
    state.set_pstate(EL1);
    state.sp = 0x2000;
    state.set_pstate(Pstate {
        dit: true,
        daif: 3,
        ..EL0
    });
    assert_eq!(state.sp, 0x1000);
    state.set_nzcv(0xa000_0000);
    assert_eq!(
        taken(0xd400_0001 | 0x1234 << 5, &mut state),
        0x15 << 26 | IL | 0x1234
    );
    assert_eq!(state.pc, VECTORS + 0x400);
    assert_eq!(state.system(ELR), Some(CODE + 4));
    assert_eq!(state.system(SPSR), Some(0xa100_00c0));
    assert_eq!(
        state.pstate(),
        Pstate {
            daif: 15,
            dit: true,
            ..EL1
        }
    );
    assert_eq!(state.sp, 0x2000);
    // ERET.
    state.pc = CODE;
    state.set_nzcv(0);
    assert_eq!(step(0xd69f_03e0, &mut state), None);
    assert_eq!(
        (state.pc, state.sp, state.nzcv()),
        (CODE + 4, 0x1000, 0xa000_0000)
    );
    assert_eq!(
        state.pstate(),
        Pstate {
            dit: true,
            daif: 3,
            ..EL0
        }
    );
}

#[test]
fn vectors_depend_on_the_level_and_the_stack_pointer() {
    let shared = Pstate {
        own_stack: false,
        ..EL1
    };
    for (pstate, offset) in [(EL0, 0x400), (shared, 0), (EL1, 0x200)] {
        for (interrupt, kind) in [
            (Interrupt::Irq, 0x80),
            (Interrupt::Fiq, 0x100),
            (Interrupt::SError(5), 0x180),
        ] {
            let mut state = at(pstate);
            assert!(state.take_interrupt(interrupt));
            assert_eq!(state.pc, VECTORS + offset + kind);
            assert_eq!(state.system(ELR), Some(CODE));
            // All interrupts are masked now.
            assert!(!state.take_interrupt(interrupt));
        }
        // BRK.
        let mut state = at(pstate);
        assert_eq!(taken(0xd420_0000 | 7 << 5, &mut state), 0x3c << 26 | IL | 7);
        assert_eq!(
            (state.pc, state.system(ELR)),
            (VECTORS + offset, Some(CODE))
        );
    }
}

#[test]
fn each_mask_holds_back_its_interrupt() {
    for (interrupt, mask) in [
        (Interrupt::Irq, 2),
        (Interrupt::Fiq, 1),
        (Interrupt::SError(0), 4),
    ] {
        assert!(!at(Pstate { daif: mask, ..EL0 }).take_interrupt(interrupt));
        assert!(
            at(Pstate {
                daif: 15 & !mask,
                ..EL0
            })
            .take_interrupt(interrupt)
        );
    }
    // MSR DAIFSet, #2; MSR DAIFClr, #3.
    let mut state = at(Pstate { daif: 1, ..EL1 });
    step(0xd503_42df, &mut state);
    assert_eq!(state.pstate().daif, 3);
    state.pc = CODE;
    step(0xd503_43ff, &mut state);
    assert_eq!(state.pstate().daif, 0);
}

#[test]
fn aborts_have_the_address_and_the_kind_of_access() {
    for (pstate, same) in [(EL0, 0), (EL1, 1)] {
        for is_write in [false, true] {
            let abort = Abort {
                address: 0x1238,
                status: 0x07,
                is_write,
                is_maintenance: false,
            };
            let mut state = at(pstate);
            state.take_stop(Stop::Memory(abort));
            let syndrome = (0x24 + same) << 26 | IL | u64::from(is_write) << 6 | 7;
            assert_eq!(state.system(ESR), Some(syndrome));
            assert_eq!(
                (state.system(FAR), state.system(ELR)),
                (Some(0x1238), Some(CODE))
            );
            let mut state = at(pstate);
            state.take_fetch_abort(abort);
            assert_eq!(state.system(ESR), Some((0x20 + same) << 26 | IL | 7));
        }
        let mut state = at(pstate);
        state.take_exception(Exception::Alignment {
            address: 3,
            is_write: true,
        });
        assert_eq!(
            state.system(ESR),
            Some((0x24 + same) << 26 | IL | 1 << 6 | 0x21)
        );
        let mut state = at(pstate);
        state.pc = CODE + 2;
        assert_eq!(step(0, &mut state), Some(Exit::MisalignedFetch));
        state.take_misaligned_fetch();
        assert_eq!(state.system(ESR), Some(0x22 << 26 | IL));
        assert_eq!(state.system(FAR), Some(CODE + 2));
    }
}

#[test]
fn exceptions_set_pan_unless_span_is_set() {
    let mut state = at(EL0);
    state.set_system(SCTLR, 0);
    taken(0xd400_0001, &mut state);
    assert!(state.pstate().pan);
    let mut state = at(EL0);
    state.set_system(SCTLR, 1 << 23);
    taken(0xd400_0001, &mut state);
    assert!(!state.pstate().pan);
}

#[test]
fn el1_traps_what_sctlr_and_cpacr_do_not_permit() {
    // MRS X5, CTR_EL0; MSR DAIFSet, #2; DC ZVA, X6; DC CVAU, X7; WFI; WFE; FADD V0.4S; LDR Q0, [X0]; MRS X8, FPCR.
    let iss = |[op0, op1, crn, crm, op2]: [u64; 5], rt: u64, reads: u64| {
        op0 << 20 | op2 << 17 | op1 << 14 | crn << 10 | rt << 5 | crm << 1 | reads
    };
    let system = 0x18 << 26 | IL;
    let condition = 0x1e << 20;
    let trapped = [
        (0xd53b_0025, system | iss([3, 3, 0, 0, 1], 5, 1), 1 << 15),
        (0xd503_42df, system | iss([0, 3, 4, 2, 6], 31, 0), 1 << 9),
        (0xd50b_7426, system | iss([1, 3, 7, 4, 1], 6, 0), 1 << 14),
        (0xd50b_7b27, system | iss([1, 3, 7, 11, 1], 7, 0), 1 << 26),
        (0xd503_207f, 1 << 26 | IL | condition, 1 << 16),
        (0xd503_205f, 1 << 26 | IL | condition | 1, 1 << 18),
    ];
    for (word, syndrome, permission) in trapped {
        assert_eq!(taken(word, &mut at(EL0)), syndrome, "{word:08x}");
        let mut state = at(EL0);
        state.set_system(SCTLR, permission);
        let exit = step(word, &mut state);
        match word {
            0xd503_207f => assert_eq!(exit, Some(Exit::Hint(Hint::Wfi))),
            0xd503_205f => assert_eq!(exit, Some(Exit::Hint(Hint::Wfe))),
            _ => assert_eq!(exit, None, "{word:08x}"),
        }
    }
    for word in [0x4e20_d400, 0x3dc0_0000, 0xd53b_4408] {
        for (pstate, enabled, traps) in [
            (EL0, 0, true),
            (EL1, 0, true),
            (EL0, 1, true),
            (EL1, 1, false),
            (EL0, 3, false),
            (EL1, 3, false),
        ] {
            let mut state = at(pstate);
            state.set_system(CPACR, enabled << 20);
            if traps {
                assert_eq!(taken(word, &mut state), 7 << 26 | IL | condition);
            } else {
                assert_eq!(step(word, &mut state), None);
            }
        }
    }
}

#[test]
fn an_illegal_return_stays_at_el1_and_then_raises_an_exception() {
    // Illegal returns: to AArch32, to EL2, to EL0 with EL1's stack pointer.
    for mode in [0x10, 0x8, 0x9, 0x1] {
        let mut state = at(EL1);
        state.set_system(SPSR, mode | 0x240);
        state.set_system(ELR, CODE);
        assert_eq!(step(0xd69f_03e0, &mut state), None);
        assert_eq!(
            state.pstate(),
            Pstate {
                il: true,
                daif: 9,
                ..EL1
            }
        );
        assert_eq!(state.pc, CODE);
        let exit = step(0, &mut state);
        assert_eq!(exit, Some(Exit::Stop(Exception::Illegal.into())));
        state.take_exception(Exception::Illegal);
        assert_eq!(state.system(ESR), Some(0x0e << 26 | IL));
        assert!(!state.pstate().il);
        assert_eq!(state.system(SPSR).unwrap() >> 20 & 1, 1);
    }
}

#[test]
fn stack_pointers_are_banked() {
    let mut state = at(EL1);
    state.sp = 0x10;
    state.x[1] = 0x20;
    // MSR SP_EL0, X1; MSR SPSel, #0; MRS X2, SPSel; MRS X3, CurrentEL.
    let code = [0xd518_4101, 0xd500_40bf, 0xd538_4202, 0xd538_4243];
    let shared = Shared::new(&code);
    assert_eq!(
        run::run(&mut state, &mut View::new(&shared), 4),
        Exit::Limit
    );
    assert_eq!((state.sp, state.x[2], state.x[3]), (0x20, 0, 4));
    // An access to SP_EL0 is UNDEFINED while SP_EL0 is the stack pointer.
    state.pc = CODE;
    assert_eq!(taken(0xd518_4101, &mut state), IL);
    assert_eq!(state.sp, 0x10);
}

/// MRS X1 and MSR X1 of each register in the table: writes change the writable bits, and EL0 is refused.
#[test]
fn registers_have_their_rights() {
    let mut found = 0;
    for n in 0..1u16 << 14 {
        let name = SystemName(0b11 << 14 | n);
        let Some(reset) = State::reset().system(name) else {
            continue;
        };
        found += 1;
        let (read, write) = (
            0xd520_0001 | u32::from(name.0) << 5,
            0xd500_0001 | u32::from(name.0) << 5,
        );
        let mut state = at(EL1);
        state.set_system(VBAR, 0);
        assert_eq!(step(read, &mut state), None, "{name:?}");
        assert_eq!(state.x[1], reset, "{name:?}");
        state.pc = CODE;
        state.x[1] = u64::MAX;
        // The identification: op0 3 and CRn 0, by op1 (0: ID_*, 3: CTR_EL0, DCZID_EL0).
        let is_identification = matches!(name.parts(), [3, 0 | 3, 0, ..]);
        if is_identification {
            assert_eq!(taken(write, &mut state), IL, "{name:?}");
        } else {
            assert_eq!(step(write, &mut state), None, "{name:?}");
            let written = state.system(name).unwrap();
            assert_eq!(written & reset, reset, "{name:?}");
            state.pc = CODE;
            state.x[1] = 0;
            assert_eq!(step(write, &mut state), None);
            assert_eq!(state.system(name).unwrap() & !reset, 0, "{name:?}");
        }
        let [_, op1, ..] = name.parts();
        let mut state = at(EL0);
        // SCTLR_EL1.UCT lets EL0 read CTR_EL0.
        state.set_system(SCTLR, 1 << 15);
        match op1 {
            0 => assert_eq!(taken(read, &mut state), IL, "{name:?}"),
            _ => assert_eq!(step(read, &mut state), None, "{name:?}"),
        }
    }
    assert!(found > 25, "{found}");
}
