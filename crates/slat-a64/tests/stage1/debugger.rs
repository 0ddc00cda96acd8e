//! A debugger outside of the guest, and software step across instructions that an embedder completes.

use crate::guest::*;
use crate::machine::*;
use slat_a64::{
    AccessProbe, BREAKPOINTS, Debugger, Leave, Pending, Pstate, SystemName, WATCHPOINTS,
};

const NOP: u32 = 0xd503_201f;
const BRK_3: u32 = 0xd420_0060;
const SVC: u32 = 0xd400_0001;
const HVC: u32 = 0xd400_0002;
const ERET: u32 = 0xd69f_03e0;
/// MSR OSLAR_EL1, XZR.
const UNLOCK: u32 = 0xd510_109f;
/// MSR DBGBVR0_EL1, X1; MRS X0, DBGBVR0_EL1.
const WRITE_DBGBVR0: u32 = 0xd510_0081;
const READ_DBGBVR0: u32 = 0xd530_0080;

const MDSCR: SystemName = SystemName::new(2, 0, 0, 2, 2);
const IL: u32 = 1 << 25;
const BRK: u32 = 0x3c << 26 | IL;
const BREAKPOINT: u32 = 0x30 << 26 | IL | 0x22;
const WATCHPOINT: u32 = 0x34 << 26 | IL | 0x22;
/// Software step's syndrome without and with ISV.
const STEP: u32 = 0x32 << 26 | IL | 0x22;
const STEPPED: u32 = STEP | 1 << 24;
/// The value of a control register: enabled, for EL1, and for all bytes of a word. As a watchpoint's control, it
/// selects loads and stores.
const ON: u64 = 1 | 1 << 1 | 0xf << 5;
const LOADS: u64 = 1 << 3;
const STORES: u64 = 2 << 3;

fn attach(
    guest: &mut Guest,
    steps: bool,
    breakpoint: Option<[u64; 2]>,
    watchpoint: Option<[u64; 2]>,
) {
    let mut breakpoints = [[0; 2]; BREAKPOINTS];
    let mut watchpoints = [[0; 2]; WATCHPOINTS];
    breakpoints[1] = breakpoint.unwrap_or_default();
    watchpoints[2] = watchpoint.unwrap_or_default();
    let debugger = Debugger::new(steps, breakpoints, watchpoints);
    guest.cpu.state.debugger = Some(Box::new(debugger));
    guest.cpu.forget_pages();
}

/// Runs until the debugger's exception. Returns its syndrome, and how far the program counter is from the code.
fn debugged(guest: &mut Guest) -> (u32, u64) {
    match guest.cpu.run(&mut guest.ram, 5) {
        Leave::Debug(debug) => (debug.esr(), guest.cpu.state.pc.wrapping_sub(guest.code)),
        leave => panic!("{leave:?}"),
    }
}

/// Begins code at EL1 with everything masked.
fn begin(guest: &mut Guest, words: &[u32]) {
    set_code(&mut guest.cpu, &mut guest.ram, CODE, words);
    let pstate = Pstate {
        el1: true,
        own_stack: true,
        daif: 15,
        ..Pstate::default()
    };
    guest.cpu.state.set_pstate(pstate);
    guest.cpu.state.pc = guest.code;
}

#[test]
fn a_debugger_takes_brk_at_both_levels() {
    let mut guest = Guest::new();
    attach(&mut guest, false, None, None);
    for el1 in [false, true] {
        match guest.execute_at(el1, &[BRK_3], [0, 0]) {
            Leave::Debug(debug) => assert_eq!(debug.esr(), BRK | 3),
            leave => panic!("{leave:?}"),
        }
        assert_eq!(guest.cpu.state.pc, guest.code);
    }
}

#[test]
fn a_debugger_steps_whatever_is_masked_and_locked() {
    let mut guest = Guest::new();
    attach(&mut guest, true, None, None);
    begin(&mut guest, &[NOP, SVC]);
    let before = guest.cpu.state.pstate();
    assert_eq!(debugged(&mut guest), (STEPPED, 4));
    assert_eq!(guest.cpu.state.pstate(), before, "PSTATE.SS is the guest's");
    // The step of a call ends in the vector.
    assert_eq!(debugged(&mut guest), (STEP, 0x8200));
    // HVC has its own exit first.
    begin(&mut guest, &[HVC, NOP]);
    assert_eq!(guest.cpu.run(&mut guest.ram, 5), Leave::Hvc(0));
    assert_eq!(debugged(&mut guest), (STEPPED, 4));
    assert_eq!(debugged(&mut guest), (STEPPED, 8));
}

#[test]
fn a_debugger_steps_returns_and_interrupts() {
    let mut guest = Guest::new();
    attach(&mut guest, true, None, None);
    begin(&mut guest, &[ERET, NOP, NOP]);
    let target = guest.code + 8;
    guest.cpu.set_system(SystemName::new(3, 0, 4, 0, 1), target);
    // EL1 with its own stack pointer, without masks.
    guest.cpu.set_system(SystemName::new(3, 0, 4, 0, 0), 5);
    assert_eq!(debugged(&mut guest), (STEPPED, 8));
    guest.cpu.pending = Pending {
        irq: true,
        ..Pending::default()
    };
    assert_eq!(debugged(&mut guest), (STEP, 0x8280));
}

#[test]
fn a_step_of_an_instruction_that_the_embedder_completes_ends() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE | DEVICE);
    guest.ram.holes.push(5);
    let complete = |guest: &mut Guest| match guest.cpu.run(&mut guest.ram, 5) {
        Leave::Stage2 {
            syndrome: Some(syndrome),
            ..
        } => syndrome.complete(&mut guest.cpu.state, 0x42),
        leave => panic!("{leave:?}"),
    };
    attach(&mut guest, true, None, None);
    begin(&mut guest, &[LDR, NOP]);
    guest.cpu.state.x[1] = 0x1000;
    complete(&mut guest);
    assert_eq!(debugged(&mut guest), (STEP, 4));
    assert_eq!(guest.cpu.state.x[0], 0x42);
    // The guest's own software step: PSTATE.SS is clear after the access.
    guest.cpu.state.debugger = None;
    guest.execute(&[UNLOCK], [0, 0]);
    guest.cpu.set_system(MDSCR, 1 | 1 << 13);
    begin(&mut guest, &[LDR, NOP]);
    guest.cpu.state.set_pstate(Pstate {
        daif: 0,
        ss: true,
        ..guest.cpu.state.pstate()
    });
    guest.cpu.state.x[1] = 0x1000;
    complete(&mut guest);
    guest.cpu.run(&mut guest.ram, 1);
    assert_eq!(guest.syndrome()[0], (0x33 << 26 | 0x22 | u64::from(IL)));
}

#[test]
fn a_debugger_has_its_own_breakpoints() {
    let mut guest = Guest::new();
    guest.execute(&[UNLOCK], [0, 0]);
    let here = guest.code;
    // The guest's breakpoint at the second instruction has no effect meanwhile.
    guest.cpu.set_system(MDSCR, 1 << 15 | 1 << 13);
    guest
        .cpu
        .set_system(SystemName::new(2, 0, 0, 0, 4), here + 4);
    guest.cpu.set_system(SystemName::new(2, 0, 0, 0, 5), ON);
    attach(&mut guest, false, Some([here + 8, ON]), None);
    begin(&mut guest, &[WRITE_DBGBVR0, READ_DBGBVR0, NOP]);
    guest.cpu.state.set_pstate(Pstate {
        daif: 0,
        ..guest.cpu.state.pstate()
    });
    guest.cpu.state.x[1] = 0x1230;
    assert_eq!(debugged(&mut guest), (BREAKPOINT, 8));
    assert_eq!(guest.cpu.state.x[0], 0x1230, "the guest's own register");
    // Again, until the debugger changes something.
    assert_eq!(debugged(&mut guest), (BREAKPOINT, 8));
    attach(&mut guest, true, None, None);
    assert_eq!(debugged(&mut guest), (STEPPED, 12));
}

#[test]
fn a_debugger_has_its_own_watchpoints() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE);
    let watched = |guest: &mut Guest, word: u32, address: u64| {
        begin(guest, &[word, NOP]);
        guest.cpu.state.x[1] = address;
        match guest.cpu.run(&mut guest.ram, 1) {
            Leave::Debug(debug) => Some((debug.esr(), debug.address.unwrap())),
            Leave::Limit => None,
            leave => panic!("{leave:?}"),
        }
    };
    // The page is in the TLB before.
    assert_eq!(watched(&mut guest, STR, 0x1010), None);
    attach(&mut guest, false, None, Some([0x1010, ON | STORES]));
    let write = WATCHPOINT | 1 << 6;
    assert_eq!(watched(&mut guest, STR, 0x1010), Some((write, 0x1010)));
    assert_eq!(watched(&mut guest, STP, 0x1008), Some((write, 0x1010)));
    assert_eq!(watched(&mut guest, LDR, 0x1010), None);
    attach(&mut guest, false, None, Some([0x1010, ON | LOADS]));
    assert_eq!(watched(&mut guest, STR, 0x1010), None);
    assert_eq!(watched(&mut guest, LDR, 0x1010), Some((WATCHPOINT, 0x1010)));
    guest.cpu.state.debugger = None;
    guest.cpu.forget_pages();
    assert_eq!(watched(&mut guest, LDR, 0x1010), None);
}

#[test]
fn probes_note_accesses_and_let_them_happen() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE);
    let probe = |first, reads, writes| AccessProbe {
        first,
        bytes: 4,
        reads,
        writes,
    };
    let accesses = |guest: &mut Guest, word: u32, address: u64| {
        let done = guest.execute(&[word], [7, address]);
        assert_eq!((done, guest.syndrome()[0]), (Leave::Limit, 0));
        guest.cpu.take_probe_hit()
    };
    // The page is in the TLB before.
    assert_eq!(accesses(&mut guest, STR, 0x1010), None);
    guest
        .cpu
        .set_probes(vec![probe(0x1010, false, true), probe(0x1020, true, false)]);
    assert_eq!(accesses(&mut guest, STR, 0x1010), Some((0, 0x1010)));
    assert_eq!(guest.ram.word(0x5010), 7);
    assert_eq!(accesses(&mut guest, STR, 0x1013), Some((0, 0x1013)));
    assert_eq!(accesses(&mut guest, STR, 0x1014), None);
    assert_eq!(accesses(&mut guest, STR, 0x1009), Some((0, 0x1010)));
    assert_eq!(accesses(&mut guest, LDR, 0x1010), None);
    assert_eq!(accesses(&mut guest, LDR, 0x1020), Some((1, 0x1020)));
    // LDADD reads and writes.
    assert_eq!(accesses(&mut guest, 0xf820_0020, 0x1020), Some((1, 0x1020)));
    guest.cpu.set_probes(vec![]);
    assert_eq!(accesses(&mut guest, STR, 0x1010), None);
}
