//! The oracle: qemu-aarch64, the interpreter and compiled code execute the same instructions from the same state. All
//! must produce the same registers, flags, memory and signals.
//!
//! `cargo test` takes a few seconds with fixed seeds. `SLAT_ORACLE_ROUNDS=5000 SLAT_ORACLE_SEED=7 cargo test --release
//! -p slat-a64 --test oracle` runs longer. `SLAT_ORACLE_PROGRAMS=100000` runs that number of whole programs.
//! `SLAT_ORACLE_ONLY=FADD,LDP` runs only encodings whose names begin with one of these words. `SLAT_ORACLE_SHOW=20`
//! reports more differences of each encoding. To compile is slow, so that one single instruction of eight is compiled,
//! and all programs are; `SLAT_ORACLE_COMPILED=1` compiles all.
#![cfg(target_os = "linux")]

mod case;
#[cfg(feature = "jit")]
#[allow(dead_code)]
#[path = "../common/compiled.rs"]
mod common;
#[cfg(feature = "jit")]
mod compiled;
#[cfg(not(feature = "jit"))]
#[path = "interpreted.rs"]
mod compiled;
mod guest;
#[cfg(feature = "jit")]
#[allow(dead_code)]
#[path = "../common/host.rs"]
mod host;
mod judge;
mod missing;
mod programs;
mod qemu;
#[allow(dead_code)]
#[path = "../../../slat-x86/tests/oracle/rng.rs"]
mod rng;
mod spec;

use std::collections::BTreeMap;

use qemu::{CASES, Qemu, Record};
use rng::Rng;
use spec::{ENCODINGS, Encoding};

fn setting(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn wanted(encoding: &Encoding) -> bool {
    match std::env::var("SLAT_ORACLE_ONLY") {
        Ok(only) => only.split(',').any(|name| encoding.name.starts_with(name)),
        Err(_) => true,
    }
}

/// Executes a batch with qemu, with the interpreter and, one case of `compile`, with compiled code. Returns the number
/// of compared cases, and reports the differences.
fn compare(
    qemu: &mut Qemu,
    (compiled, compile): (&mut compiled::Guest, u64),
    batch: &mut Vec<(&'static str, Record)>,
    wrong: &mut BTreeMap<&'static str, Vec<String>>,
) -> u64 {
    let mut compared = 0;
    let mut theirs: Vec<Record> = batch.iter().map(|(_, record)| *record).collect();
    qemu.run(&mut theirs);
    for (at, ((name, ours), theirs)) in batch.iter_mut().zip(&theirs).enumerate() {
        if !guest::execute(at, ours) {
            continue;
        }
        compared += 1;
        let mut check = |tier: &str, ours: &Record| {
            let differences = judge::differences(ours, theirs);
            if !differences.is_empty() {
                let report = judge::describe(ours, &differences);
                wrong
                    .entry(name)
                    .or_default()
                    .push(format!("{tier}\n{report}"));
            }
        };
        check("  interpreted", ours);
        if compared % compile == 0 {
            compiled.execute(at, ours);
            check("  compiled", ours);
        }
    }
    batch.clear();
    compared
}

fn check(wrong: &BTreeMap<&str, Vec<String>>) {
    let shown = setting("SLAT_ORACLE_SHOW", 1) as usize;
    for (name, reports) in wrong {
        let first = reports[..shown.min(reports.len())].join("\n");
        println!("{name}: {} wrong; the first:\n{first}", reports.len());
    }
    assert!(
        wrong.is_empty(),
        "{} encodings differ from qemu",
        wrong.len()
    );
}

#[test]
fn every_instruction_does_what_qemu_does() {
    let Some(mut qemu) = Qemu::start() else {
        return;
    };
    let mut compiled = compiled::Guest::new();
    let compile = setting("SLAT_ORACLE_COMPILED", 8);
    let rounds = setting("SLAT_ORACLE_ROUNDS", 30);
    let mut seeds = Rng(setting("SLAT_ORACLE_SEED", 1));
    let (mut wrong, mut batch) = (BTreeMap::new(), vec![]);
    let (mut cases, mut encodings) = (0, 0);
    for encoding in ENCODINGS.iter() {
        let mut rng = Rng(seeds.next());
        if !wanted(encoding) || !case::is_executed(encoding) {
            continue;
        }
        let mut made = 0;
        for _ in 0..rounds {
            let Some(record) = case::single(encoding, batch.len(), &mut rng) else {
                continue;
            };
            made += 1;
            batch.push((encoding.name, record));
            if batch.len() == CASES {
                cases += compare(&mut qemu, (&mut compiled, compile), &mut batch, &mut wrong);
            }
        }
        encodings += u64::from(made > 0);
    }
    cases += compare(&mut qemu, (&mut compiled, compile), &mut batch, &mut wrong);
    println!(
        "{cases} cases of {encodings} encodings compared; {} instructions were compiled",
        compiled.instructions()
    );
    check(&wrong);
    assert!(cases > 0 || std::env::var_os("SLAT_ORACLE_ONLY").is_some());
}

#[test]
fn programs_do_what_they_do_in_qemu() {
    let Some(mut qemu) = Qemu::start() else {
        return;
    };
    let mut compiled = compiled::Guest::new();
    let pool = programs::Pool::new();
    let mut rng = Rng(setting("SLAT_ORACLE_SEED", 1));
    let rounds = setting("SLAT_ORACLE_PROGRAMS", 2000);
    let (mut wrong, mut batch) = (BTreeMap::new(), vec![]);
    let mut cases = 0;
    for _ in 0..rounds {
        batch.push(("program", pool.random(&mut rng)));
        if batch.len() == CASES {
            cases += compare(&mut qemu, (&mut compiled, 1), &mut batch, &mut wrong);
        }
    }
    cases += compare(&mut qemu, (&mut compiled, 1), &mut batch, &mut wrong);
    println!(
        "{cases} programs compared; {} instructions were compiled",
        compiled.instructions()
    );
    check(&wrong);
    assert!(cases > rounds / 2);
}

/// A program that runs in several parts, and whose accesses fail now and then, has the same results as in one run.
#[cfg(feature = "jit")]
#[test]
fn programs_in_parts_do_the_same() {
    let mut compiled = compiled::Guest::new();
    let pool = programs::Pool::new();
    let mut rng = Rng(setting("SLAT_ORACLE_SEED", 2));
    let rounds = setting("SLAT_ORACLE_PARTS", 500);
    let (mut wrong, mut cases) = (BTreeMap::new(), 0);
    for _ in 0..rounds {
        let mut whole = pool.random(&mut rng);
        let mut parts = whole;
        if !guest::execute(0, &mut whole) {
            continue;
        }
        cases += 1;
        compiled.execute_in_parts(0, &mut parts, &mut rng);
        let differences = judge::differences(&parts, &whole);
        if !differences.is_empty() {
            let report = judge::describe(&parts, &differences);
            wrong.entry("program").or_insert_with(Vec::new).push(report);
        }
    }
    let (failed, instructions) = (compiled.gone(), compiled.instructions());
    println!(
        "{cases} programs in parts; {failed} accesses failed; {instructions} instructions were compiled"
    );
    check(&wrong);
    assert!(cases > rounds / 2 && u64::from(failed) > cases / 4);
}

#[test]
fn the_decoder_has_exactly_the_encodings_of_its_extensions() {
    let mut rng = Rng(setting("SLAT_ORACLE_SEED", 1));
    let mut absent = vec![];
    let mut present = 0;
    for encoding in ENCODINGS.iter() {
        // A word of an encoding inside of this one is not a word of this one.
        let inside: Vec<_> = ENCODINGS.iter().filter(|e| e.is_inside(encoding)).collect();
        let words = (0..200)
            .map(|_| rng.next() as u32 & !encoding.mask | encoding.value)
            .filter(|word| !inside.iter().any(|e| (word ^ e.value) & e.mask == 0));
        let defined = words.filter(|word| slat_a64::is_defined(*word)).count();
        let is_missing = missing::extension(encoding).is_some();
        present += usize::from(defined > 0);
        if (defined == 0) != is_missing {
            absent.push(format!("{} {}", encoding.class, encoding.name));
        }
    }
    println!("{present} of {} encodings", ENCODINGS.len());
    assert!(absent.is_empty(), "{}: {absent:#?}", absent.len());
    for _ in 0..200_000 {
        let word = rng.next() as u32;
        let is_wrong = slat_a64::is_defined(word) && !spec::is_allocated(word);
        assert!(!is_wrong, "{word:08x} is not allocated");
    }
}
