//! The speed of the software CPU for guests of 64-bit Arm, on any host.
//!
//! | file | idea |
//! |---|---|
//! | `programs` | the loops, what each must compute, and the image that boards start |
//! | `board` | slat's processor over plain memory |
//! | `tcg` | QEMU's processor |

mod board;
mod programs;
mod tcg;

use std::time::Duration;

use slat_a64::Compiler;

use crate::compared::{Line, Rows};
use crate::others;
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Failure, Settable};
use programs::{PROGRAMS, Program};

const NAME: &str = "cpu";
const SLAT: &str = "slat";
const INTERPRETER: &str = "interpreter";
const MIPS: &str = "mips";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "guest instructions of 64-bit Arm in each second",
    explain: "\
How many million instructions of 64-bit Arm the guest executes in a second of processor time.
alu: arithmetic of registers. ldst: a load and a store of one word. copies: pairs and vectors are
loaded and stored. call: calls of a function that returns at once. branch: a branch that is taken
every second time. div: UDIV. float: FADD and FMUL of doubles. simd: vectors of words. atomic:
LDADDAL. miss: an addition in each of 2048 pages of 4 KiB, more than the software TLB's first level
holds. The guest runs at EL1 with translation on; it has memory and nothing else. slat: the
processor over plain memory, of which hot code is compiled; interpreter: its code is interpreted.
tcg: QEMU's software CPU (qemu-system-aarch64), without its start. Each loop leaves sums, which are
compared with what they must be.
Asked for: 1.5 times tcg's.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 5, 9);
    let most = bench.size.pick(6400, 100_000_000, 400_000_000);
    // An even number, as the average of two turns is counted. A loop of 0 turns would not end.
    let turns = |program: &Program, part: u64| 2 * (most / program.slowness / part / 2).max(1);
    let compiler = Compiler::try_new().ok_or("there is no address space for compiled code")?;
    // The thread ends with the process.
    let worker = compiler.clone();
    std::thread::Builder::new().spawn(move || {
        worker.work();
    })?;
    let mut variants = vec![SLAT, INTERPRETER];
    match others::version_of_qemu(tcg::PROGRAM) {
        Some(version) => {
            variants.insert(0, tcg::NAME);
            bench.note(format!("tcg is that of {version}."));
        }
        None => bench.note_missing(format!(
            "{NAME}: tcg is not measured: there is no {} here.",
            tcg::PROGRAM
        )),
    }
    for program in &PROGRAMS {
        let [few, part, many] = [1000, 50, 1].map(|part| Task::new(program, turns(program, part)));
        bench.in_turns(
            program.name,
            rounds,
            &variants,
            |_, variant| match variant {
                tcg::NAME => {
                    let start = few.checked(tcg::run(program, few.turns)?)?;
                    let all = many.checked(tcg::run(program, many.turns)?)?;
                    // At a tiny size, nearly all time is QEMU's start.
                    let time = all.saturating_sub(start).max(Duration::from_millis(1));
                    Ok(speed(program, many.turns - few.turns, time))
                }
                _ => {
                    let is_compiled = variant == SLAT;
                    let task = if is_compiled { &many } else { &part };
                    let ran = board::run(program, task.turns, is_compiled.then_some(&compiler))?;
                    Ok(speed(program, task.turns, task.checked(ran)?))
                }
            },
        )?;
    }
    Ok(())
}

/// A number of turns of a program, with the results that the program must leave.
struct Task {
    turns: u64,
    results: [u64; 2],
}

impl Task {
    fn new(program: &Program, turns: u64) -> Self {
        let results = (program.results)(turns);
        Task { turns, results }
    }

    /// Returns the time of a run whose results are right.
    fn checked(&self, (time, results): (Duration, [u64; 2])) -> Result<Duration, Failure> {
        match self.results == results {
            true => Ok(time),
            false => Err(format!("the guest computed something else: {results:x?}").into()),
        }
    }
}

fn speed(program: &Program, turns: u64, time: Duration) -> Vec<Sample> {
    let instructions = turns as f64 * program.instructions;
    let mips = instructions / time.as_secs_f64() / 1e6;
    vec![Sample::new(MIPS, Unit::Mips, mips)]
}

fn compare(report: &Report) -> Vec<Line> {
    let lines = PROGRAMS.iter().flat_map(|program| {
        let case = program.name;
        let compared = Line::compare(report, NAME, case, MIPS, tcg::NAME, SLAT)
            .map(|line| line.change_at_least(0.5))
            .or_else(|| Line::of(report, NAME, case, MIPS, SLAT));
        [compared, Line::of(report, NAME, case, MIPS, INTERPRETER)]
    });
    lines.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn every_loop_computes_what_it_should_at_a_tiny_size() {
        // `checked` compares the results.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert_eq!(report.cases(NAME), PROGRAMS.map(|program| program.name));
        assert_eq!(compare(&report).len(), 2 * PROGRAMS.len());
    }

    #[test]
    fn wrong_results_are_an_error() {
        let calls = PROGRAMS.iter().find(|program| program.name == "call");
        let calls = calls.unwrap();
        let (task, time) = (Task::new(calls, 4), Duration::from_secs(1));
        assert!(task.checked((time, [4, 0])).is_ok());
        assert!(task.checked((time, [3, 0])).is_err());
    }
}
