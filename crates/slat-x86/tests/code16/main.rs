//! Compiled code with segments has the same results as the interpreter, in both tiers: random programs of 16 and 32
//! bits in real mode, virtual-8086 mode and protected mode, and programs that tell two code segments apart.
#![cfg(feature = "jit")]

#[path = "../common/mod.rs"]
mod common;
mod known;
mod modes;
mod programs;

use common::*;
use modes::Mode;
use slat_x86::*;

/// The number of bytes of memory that are compared: all that a paragraph number can reach.
const COMPARED: usize = 0x11_0000;

/// Returns the memory of a guest.
fn memory(guest: &Guest) -> &[u8] {
    // SAFETY: the range is within the mapping, and the guest does not run.
    unsafe { std::slice::from_raw_parts(guest.memory().at(0), COMPARED) }
}

/// The executor of the code: the interpreter, or compiled code of a tier.
const BY: [Option<Tier>; 3] = [None, Some(Tier::Baseline), Some(Tier::Full)];

fn interpreted() -> Guest {
    Guest::interpreted(Memory::new(MMIO as usize), &[])
}

/// Makes a guest whose code is executed by `tier`.
fn guest(tier: Option<Tier>) -> Guest {
    let mut guest = interpreted();
    if let Some(tier) = tier {
        compiled::by(&mut guest.cpu, tier);
    }
    guest
}

#[test]
fn compiled_code_with_segments_does_what_the_interpreter_does() {
    let rounds = std::env::var("SLAT_TEST_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
    let seed: u64 = std::env::var("SLAT_ORACLE_SEED").map_or(1, |seed| seed.parse().unwrap());
    std::thread::scope(|scope| {
        for (part, mode) in (0..).zip(Mode::ALL) {
            scope.spawn(move || compare(mode, 4 * seed + part, rounds * 60));
        }
    });
}

/// Whether a program ends soon, found by single steps. Programs that have lost their stack may never end.
fn ends_soon(guest: &mut Guest) -> bool {
    guest.cpu.requests.debugger.single_step = true;
    (0..4000).any(|_| {
        let state = &guest.cpu.state;
        let [next] = guest.memory().read((state.cs.base + state.rip) & 0xff_ffff);
        const HLT: u8 = 0xf4;
        next == HLT || !matches!(guest.run(), Exit::Debug { .. })
    })
}

/// Runs `count` random programs in each of the ways of [`BY`] and compares the results.
fn compare(mode: Mode, seed: u64, count: u64) {
    let mut random = Random(0x2545_f491_4f6c_dd1d ^ seed);
    let (mut executed, mut compiled) = (0, 0);
    for round in 0..count {
        let seed = random.next();
        let mut stepped = interpreted();
        modes::prepare(&mut stepped, mode, &mut Random(seed));
        if !ends_soon(&mut stepped) {
            continue;
        }
        let mut ends = BY.map(|tier| {
            let (mut guest, mut random) = (guest(tier), Random(seed));
            let code = modes::prepare(&mut guest, mode, &mut random);
            let (ip, base) = (guest.cpu.state.rip, guest.cpu.state.cs.base);
            let exit = guest.run();
            let counters = guest.cpu.counters();
            compiled += counters.instructions_compiled;
            executed += counters.instructions;
            (guest, exit, (base, ip, code))
        });
        let [interpreted, others @ ..] = &mut ends;
        for (other, tier) in others.iter_mut().zip([Tier::Baseline, Tier::Full]) {
            let (a, b) = (memory(&interpreted.0), memory(&other.0));
            let different = a.iter().zip(b).position(|(a, b)| a != b);
            let states = (&interpreted.0.cpu.state, &other.0.cpu.state);
            assert!(
                interpreted.1 == other.1 && states.0 == states.1 && different.is_none(),
                "{mode:?} {tier:?}, round {round}: {:02x?}\n{:?} {:x?}\n{:?} {:x?}\nmemory at {different:x?}",
                interpreted.2,
                interpreted.1,
                states.0,
                other.1,
                states.1,
            );
        }
    }
    println!("{mode:?}: {executed} instructions, {compiled} compiled");
    assert!(compiled * 3 > executed, "{mode:?}: {compiled} compiled");
}
