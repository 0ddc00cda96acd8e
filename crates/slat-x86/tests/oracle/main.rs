//! The oracle: the host CPU executes the same instruction bytes from the same state as the software CPU, and both must
//! leave the same registers, flags, memory and faults.
//!
//! The host's CPU may be Intel's or AMD's: `vendor.rs` has the differences of AMD's CPUs.
//!
//! `cargo test` takes a few seconds with fixed seeds. A campaign: `SLAT_ORACLE_ROUNDS=5000 SLAT_ORACLE_SEED=7 cargo
//! test --release -p slat-x86 --test oracle`; `SLAT_ORACLE_PROGRAMS=100000` runs that number of whole programs;
//! `SLAT_ORACLE_ONLY=mulss,fld` runs only these mnemonics; `SLAT_ORACLE_SHOW=20` reports more differences of each form.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

#[path = "../common/compiled.rs"]
mod compiled;
mod forms;
mod guest;
mod judge;
mod memory;
mod native;
mod programs;
mod rng;
mod sequences;
mod vendor;

use std::collections::BTreeMap;

use forms::{Case, Prefixes};
use guest::{Beside, Guest, Outcome};
use iced_x86::Mnemonic;
use native::Arena;
use rng::Rng;
use sequences::Pool;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(default)
}

fn wanted(mnemonic: Mnemonic) -> bool {
    match std::env::var("SLAT_ORACLE_ONLY") {
        Ok(only) => only
            .split(',')
            .any(|name| format!("{mnemonic:?}").eq_ignore_ascii_case(name)),
        Err(_) => true,
    }
}

#[test]
fn every_instruction_does_what_the_host_does() {
    let arena = Arena::new();
    let mut guest = Guest::new(&arena);
    let rounds = setting("SLAT_ORACLE_ROUNDS", 30);
    let mut seeds = Rng(setting("SLAT_ORACLE_SEED", 1));
    let mut unimplemented: BTreeMap<String, &str> = BTreeMap::new();
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut as_amd: BTreeMap<&str, u64> = BTreeMap::new();
    let mut cases = 0u64;
    let prefixes = Prefixes::new();
    for code in forms::all() {
        let mut rng = Rng(seeds.next());
        if !wanted(code.mnemonic()) {
            continue;
        }
        for _ in 0..rounds {
            let Some(mut case) = forms::random(code, arena.base, &mut rng) else {
                continue;
            };
            if rng.one_in(8) {
                prefixes.try_on(&mut case, &mut rng);
            }
            match run(&case, &arena, &mut guest) {
                Verdict::Same => cases += 1,
                Verdict::AsAmd(rule) => *as_amd.entry(rule).or_default() += 1,
                Verdict::Unimplemented(reason) => {
                    unimplemented.insert(format!("{code:?}"), reason);
                }
                Verdict::Wrong(report) => {
                    wrong.entry(format!("{code:?}")).or_default().push(report)
                }
            }
        }
    }
    println!("{cases} cases agree");
    for (rule, cases) in &as_amd {
        println!("{cases} cases differ as AMD's CPUs do: {rule}");
    }
    for (code, reason) in &unimplemented {
        println!("not implemented: {code} ({reason})");
    }
    let shown = setting("SLAT_ORACLE_SHOW", 1) as usize;
    for (code, reports) in &wrong {
        let first = reports[..shown.min(reports.len())].join("\n");
        println!("{code}: {} wrong; the first:\n{first}", reports.len());
    }
    assert!(
        wrong.is_empty(),
        "{} forms differ from the host",
        wrong.len()
    );
    assert!(
        unimplemented.is_empty(),
        "not implemented: {unimplemented:?}"
    );
}

enum Verdict {
    Same,
    /// The host's result differs exactly as the rule with this name, about AMD's CPUs, says.
    AsAmd(&'static str),
    Unimplemented(&'static str),
    Wrong(String),
}

#[test]
fn sequences_of_instructions_do_what_the_host_does() {
    let arena = Arena::new();
    let mut guest = Guest::new(&arena);
    let pool = Pool::new();
    let mut rng = Rng(setting("SLAT_ORACLE_SEED", 1));
    let rounds = 500 * setting("SLAT_ORACLE_ROUNDS", 30);
    let mut wrong = vec![];
    let mut cases = 0u64;
    for _ in 0..rounds {
        let Some(case) = pool.random(arena.base, &mut rng) else {
            continue;
        };
        match run(&case, &arena, &mut guest) {
            Verdict::Same | Verdict::AsAmd(_) => cases += 1,
            Verdict::Unimplemented(reason) => panic!("{reason}"),
            Verdict::Wrong(report) => wrong.push(report),
        }
    }
    println!("{cases} sequences agree");
    let shown = setting("SLAT_ORACLE_SHOW", 1) as usize;
    for report in &wrong[..shown.min(wrong.len())] {
        println!("{report}");
    }
    assert!(
        wrong.is_empty(),
        "{} sequences differ from the host",
        wrong.len()
    );
}

/// While a CPU runs a program, it may be interrupted and inspected, and lose rights to pages. The program does not
/// notice.
#[test]
fn programs_do_what_they_do_on_the_host() {
    let arena = Arena::new();
    let mut guest = Guest::new(&arena);
    let pool = Pool::new();
    let mut seeds = Rng(setting("SLAT_ORACLE_SEED", 1));
    let rounds = setting("SLAT_ORACLE_PROGRAMS", 2000);
    let mut ends = [0u64; 2];
    let mut round = 0;
    // On a busy machine, each of these short programs may end before the thread that interrupts it runs. Then more
    // programs run, until an interrupt was taken.
    let is_enough = || rounds < 100 || Guest::interrupts(&arena) > 0;
    while round < rounds || (!is_enough() && round < 50 * rounds) {
        let seed = seeds.next();
        round += 1;
        let Some(case) = programs::random(&pool, arena.base, &mut Rng(seed)) else {
            continue;
        };
        let beside = match round % 5 {
            0 => Beside::Nothing,
            1 => Beside::Kicks,
            2 => Beside::Interrupts,
            3 => Beside::Protection,
            _ => Beside::Steps,
        };
        let expected = on_host(&case, &arena);
        ends[usize::from(expected.fault.is_some())] += 1;
        match on_guest(&case, &expected, &arena, &mut guest, beside) {
            Verdict::Same | Verdict::AsAmd(_) => {}
            Verdict::Unimplemented(reason) => panic!("{reason}"),
            Verdict::Wrong(report) => panic!("beside {beside:?}, program {round}:\n{report}"),
        }
    }
    let interrupts = Guest::interrupts(&arena);
    println!("programs that ended, that faulted: {ends:?}; {interrupts} interrupts");
    assert!(ends[0] > rounds / 3, "{ends:?}");
    assert!(is_enough(), "no program was interrupted");
}

fn run(case: &Case, arena: &Arena, guest: &mut Guest) -> Verdict {
    on_guest(case, &on_host(case, arena), arena, guest, Beside::Nothing)
}

/// Runs the case on the host. Returns the resulting state.
fn on_host(case: &Case, arena: &Arena) -> judge::Result {
    judge::set_memory(arena, case);
    let (regs, fault) = arena.run(case.placed(), &case.regs);
    judge::Result::new(arena, &case.instruction, regs, fault)
}

/// Runs the case on the software CPU, and judges the resulting state.
fn on_guest(
    case: &Case,
    expected: &judge::Result,
    arena: &Arena,
    guest: &mut Guest,
    beside: Beside,
) -> Verdict {
    judge::set_memory(arena, case);
    let actual = match guest.run(arena, case.placed(), &case.regs, beside) {
        Outcome::Done(regs, fault) => judge::Result::new(arena, &case.instruction, *regs, fault),
        Outcome::Unimplemented(reason) => return Verdict::Unimplemented(reason),
        Outcome::Strange(exit) => return Verdict::Wrong(judge::describe(case, &[exit])),
    };
    let differences = judge::differences(case, expected, &actual);
    if differences.is_empty() {
        return Verdict::Same;
    }
    if let Some((rewritten, rule)) = vendor::as_amd(case, expected, &actual)
        && judge::differences(case, expected, &rewritten).is_empty()
    {
        return Verdict::AsAmd(rule);
    }
    Verdict::Wrong(judge::describe(case, &differences))
}
