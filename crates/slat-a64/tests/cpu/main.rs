//! Tests behaviour that an oracle does not show: exceptions, alignment, system registers, processors on several
//! threads, and accesses that are made to fail.

mod el1;
mod memory;
#[allow(dead_code)]
#[path = "../oracle/spec.rs"]
mod spec;

use memory::{CODE, Failed, Shared, View};
use slat_a64::{Block, Exception, Exit, Hint, State, Stop, SystemName, run};
use std::sync::atomic::Ordering;

const NOP: u32 = 0xd503_201f;

fn state() -> State {
    let mut state = State::default();
    state.pc = CODE;
    state
}

/// Executes one instruction in this state.
fn step(word: u32, state: &mut State) -> (Option<Exit<Failed>>, Shared) {
    let shared = Shared::new(&[word]);
    let exit = run::step(state, &mut View::new(&shared));
    (exit, shared)
}

fn exception(word: u32) -> Exception {
    let mut after = state();
    let before = after.clone();
    let Some(Exit::Stop(Stop::Exception(exception))) = step(word, &mut after).0 else {
        panic!("{word:08x} raises no exception");
    };
    assert_eq!(before, after);
    exception
}

#[test]
fn calls_raise_exceptions_with_their_immediate() {
    assert_eq!(exception(0xd400_0001 | 0x1234 << 5), Exception::Svc(0x1234));
    assert_eq!(exception(0xd400_0002 | 5 << 5), Exception::Hvc(5));
    assert_eq!(exception(0xd400_0003 | 6 << 5), Exception::Smc(6));
    assert_eq!(exception(0xd420_0000 | 7 << 5), Exception::Brk(7));
    assert_eq!(exception(0xd440_0000 | 8 << 5), Exception::Hlt(8));
    // UDF, ERET at EL0, MSR SPSel at EL0, PACIA, and SVE's ADD.
    for word in [0, 0xd69f_03e0, 0xd500_41bf, 0xdac1_0000, 0x0420_0000] {
        assert_eq!(exception(word), Exception::Undefined, "{word:08x}");
    }
}

#[test]
fn ordered_accesses_are_aligned() {
    // LDAR, STLR, LDXR, STXR, LDADD, CAS, CASP, LDAPR, LDXP: of X0, at X1.
    let accesses = [
        (0xc8df_fc20, 8, false),
        (0xc89f_fc20, 8, true),
        (0xc85f_7c20, 8, false),
        (0xc802_7c20, 8, true),
        (0xf822_0020, 8, false),
        (0xc8a2_7c20, 8, false),
        (0x4822_7c20, 16, false),
        (0xf8bf_c020, 8, false),
        (0xc87f_0820, 16, false),
        (0x88df_fc20, 4, false),
        (0x48df_fc20, 2, false),
    ];
    for (word, bytes, is_write) in accesses {
        let address = 0x1000 + bytes / 2;
        let mut after = state();
        after.x[1] = address;
        let before = after.clone();
        let exit = step(word, &mut after).0;
        let expected = Exception::Alignment { address, is_write };
        assert_eq!(exit, Some(Exit::Stop(expected.into())), "{word:08x}");
        assert_eq!(before, after);
        after.x[1] = 0x1000;
        assert_eq!(step(word, &mut after).0, None);
    }
}

#[test]
fn dc_zva_clears_the_block_that_dczid_describes() {
    let mut state = state();
    // MRS X0, DCZID_EL0.
    step(0xd53b_00e0, &mut state);
    assert_eq!(state.x[0], 4);
    state.pc = CODE;
    state.x[3] = 0x105;
    let shared = Shared::new(&[0xd50b_7423]);
    for word in &shared.words {
        word.store(u64::MAX, Ordering::Relaxed);
    }
    assert_eq!(run::step(&mut state, &mut View::new(&shared)), None);
    for (n, word) in shared.words.iter().enumerate() {
        let expected = if (0x20..0x28).contains(&n) {
            0
        } else {
            u64::MAX
        };
        assert_eq!(word.load(Ordering::Relaxed), expected, "{n}");
    }
}

#[test]
fn system_registers_of_el0() {
    let mut state = state();
    assert!(state.set_system(SystemName::new(3, 3, 13, 0, 3), 77));
    state.x[5] = 99;
    // MSR TPIDR_EL0, X5; MRS X6, TPIDR_EL0; MRS X7, TPIDRRO_EL0; MSR DIT, #1; MRS X8, DIT.
    let code = [
        0xd51b_d045,
        0xd53b_d046,
        0xd53b_d067,
        0xd503_415f,
        0xd53b_42a8,
    ];
    let shared = Shared::new(&code);
    let exit = run::run(&mut state, &mut View::new(&shared), code.len() as u64);
    assert_eq!(exit, Exit::Limit);
    assert_eq!(state.x[6..9], [99, 77, 1 << 24]);
    // TPIDRRO_EL0 cannot be written. An unknown register cannot be read.
    assert_eq!(exception(0xd51b_d060), Exception::Undefined);
    assert_eq!(exception(0xd53b_ff00), Exception::Undefined);
}

#[test]
fn hints_reach_the_caller() {
    let hints = [
        (1, Hint::Yield),
        (2, Hint::Wfe),
        (3, Hint::Wfi),
        (4, Hint::Sev),
        (5, Hint::Sevl),
    ];
    for (number, hint) in hints {
        let mut state = state();
        assert_eq!(
            step(NOP | number << 5, &mut state).0,
            Some(Exit::Hint(hint))
        );
        assert_eq!(state.pc, CODE + 4);
    }
    // PACIASP is a NOP.
    let mut after = state();
    assert_eq!(step(0xd503_233f, &mut after).0, None);
    let mut expected = state();
    expected.pc += 4;
    assert_eq!(after, expected);
}

#[test]
fn exclusive_stores_need_the_same_place_and_value() {
    // LDXR X0, [X1]; ADD X0, X0, #1; STXR W2, X0, [X3].
    let code = [0xc85f_7c20, 0x9100_0400, 0xc802_7c60];
    let run_three = |state: &mut State, between: &dyn Fn(&mut State, &Shared)| {
        let shared = Shared::new(&code);
        let mut view = View::new(&shared);
        run::run(state, &mut view, 2);
        between(state, &shared);
        run::run(state, &mut view, 1);
        (state.x[2], shared.words[0].load(Ordering::Relaxed))
    };
    assert_eq!(run_three(&mut state(), &|_, _| {}), (0, 1));
    let other_place = |state: &mut State, _: &Shared| state.x[3] = 8;
    assert_eq!(run_three(&mut state(), &other_place), (1, 0));
    let other_value = |_: &mut State, shared: &Shared| shared.words[0].store(7, Ordering::Relaxed);
    assert_eq!(run_three(&mut state(), &other_value), (1, 7));
    let cleared = |state: &mut State, _: &Shared| state.exclusive = None;
    assert_eq!(run_three(&mut state(), &cleared), (1, 0));
}

#[test]
fn increments_by_processors_on_several_threads_are_all_there() {
    const TURNS: u64 = 5000;
    // Again: LDAXR X0, [X1]; ADD X0, X0, #1; STLXR W2, X0, [X1]; CBNZ W2, again; LDADD X4, X5, [X6];
    // SUBS X3, X3, #1; B.NE again; BRK.
    let code = [
        0xc85f_fc20,
        0x9100_0400,
        0xc802_fc20,
        0x35ff_ffa2,
        0xf824_00c5,
        0xf100_0463,
        0x54ff_ff41,
        0xd420_0000,
    ];
    let shared = Shared::new(&code);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut state = state();
                state.x[3] = TURNS;
                state.x[4] = 3;
                state.x[6] = 64;
                let exit = run::run(&mut state, &mut View::new(&shared), u64::MAX);
                assert_eq!(exit, Exit::Stop(Exception::Brk(0).into()));
            });
        }
    });
    assert_eq!(shared.words[0].load(Ordering::Relaxed), 4 * TURNS);
    assert_eq!(shared.words[8].load(Ordering::Relaxed), 3 * 4 * TURNS);
}

#[test]
fn a_block_does_what_single_steps_do() {
    // X1 counts down from X0 to 0, and X2 is the sum.
    let code = [0x8b01_0042, 0xf100_0421, 0x54ff_ffc1, NOP];
    let shared = Shared::new(&code);
    let mut view = View::new(&shared);
    let mut stepped = state();
    stepped.x[1] = 100;
    let mut blocked = stepped.clone();
    assert_eq!(run::run(&mut stepped, &mut view, 300), Exit::Limit);
    let block = Block::decode(&stepped, &mut view, CODE).unwrap();
    assert_eq!((block.start(), block.instructions()), (CODE, 3));
    assert_eq!(run::run_block(&mut blocked, &mut view, &block, 1000), None);
    assert_eq!(stepped, blocked);
    assert_eq!(blocked.x[2], 5050);
}

/// Makes each access of each instruction fail once. The instruction must then have changed nothing.
#[test]
fn an_instruction_whose_access_fails_has_changed_nothing() {
    let mut random = 1u64;
    let mut next = || {
        random = random
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        random ^ random >> 29
    };
    let (mut encodings, mut failures) = (0, 0);
    for encoding in spec::ENCODINGS.iter() {
        let mut made = 0;
        for _ in 0..40 {
            let word = next() as u32 & !encoding.mask | encoding.value;
            if !slat_a64::is_defined(word) {
                continue;
            }
            let mut before = state();
            before.x = std::array::from_fn(|_| next() & 0xffff_fff0);
            before.sp = next() & 0xffff_fff0;
            before.v = std::array::from_fn(|_| u128::from(next()) << 64 | u128::from(next()));
            let address = before
                .x
                .get((word >> 5 & 31) as usize)
                .copied()
                .unwrap_or(before.sp);
            let size = (word >> 30) as u8 + (word >> 21 & 1) as u8;
            before.exclusive = Some(slat_a64::Exclusive {
                address,
                size,
                value: 0,
            });
            for failing in 1.. {
                let shared = Shared::new(&[word]);
                let mut view = View::new(&shared);
                view.failing = Some(failing);
                let mut after = before.clone();
                let exit = run::step(&mut after, &mut view);
                if view.accesses < failing {
                    break;
                }
                assert_eq!(exit, Some(Exit::Stop(Stop::Memory(Failed))), "{word:08x}");
                assert_eq!(before, after, "{word:08x}, access {failing}");
                let is_zero = shared
                    .words
                    .iter()
                    .all(|word| word.load(Ordering::Relaxed) == 0);
                assert!(is_zero, "{word:08x}, access {failing}, has stored");
                failures += 1;
                made = 1;
            }
        }
        encodings += made;
    }
    println!("{failures} failures of {encodings} encodings");
    assert!(encodings > 400, "{encodings}");
}
