//! Whole runs: random operations on one format, from a seed or from a fuzzer's bytes; and the shortening of a run that failed.

use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use slat::format::{GStage, Npt, Stage2, X86};
use slat::{Ept, Format};

use crate::generator::Generator;
use crate::model::capacity;
use crate::ops::Op;
use crate::rng::Rng;
use crate::runner::Runner;
use crate::setup::Setup;
use crate::tally::Tally;

/// A page-table format to run on.
#[derive(Clone, Copy)]
pub struct Subject {
    /// Its name.
    pub name: &'static str,
    /// See [`Subject::run`].
    run: fn(Setup, Rng, usize) -> Tally,
    replay: fn(Setup, &[Op]),
    record: fn(Setup, Rng, usize) -> Vec<Op>,
}

impl Subject {
    const fn of<F: Format>(name: &'static str) -> Self {
        Subject {
            name,
            run: run::<F>,
            replay: replay::<F>,
            record: record::<F>,
        }
    }

    /// Every format; those with a size twice.
    pub const ALL: [Subject; 8] = [
        Subject::of::<Ept>("EPT"),
        Subject::of::<Npt>("NPT"),
        Subject::of::<X86<5>>("x86 5-level"),
        Subject::of::<Stage2<48>>("stage 2, 48 bits"),
        Subject::of::<Stage2<40>>("stage 2, 40 bits, concatenated root"),
        Subject::of::<GStage<3>>("Sv39x4"),
        Subject::of::<GStage<4>>("Sv48x4"),
        Subject::of::<Stage2<48, true>>("stage 2, 48 bits, hardware dirty state"),
    ];

    /// Runs up to `steps` operations, as `rng` chooses them, with an audit every 500.
    ///
    /// # Panics
    /// If engine and model disagree.
    pub fn run(&self, setup: Setup, rng: Rng, steps: usize) -> Tally {
        (self.run)(setup, rng, steps)
    }

    /// Like [`Subject::run`], but from a seed. If the run fails, prints how to repeat it: seed and setup, and the operations
    /// without which it does not fail.
    ///
    /// # Panics
    /// Those of [`Subject::run`].
    pub fn run_seed(&self, seed: u64, setup: Setup, steps: usize) -> Tally {
        let run = || self.run(setup, Rng::new(seed), steps);
        panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|why| {
            eprintln!("{}, seed {seed}, {setup:?}, {steps} steps", self.name);
            let ops = self.shrink(setup, Rng::new(seed), steps);
            eprintln!("these {} operations fail, too:", ops.len());
            ops.iter().for_each(|op| eprintln!("    {op:?}"));
            panic::resume_unwind(why)
        })
    }

    /// Shortens the run to operations that still fail. Hides all panic messages meanwhile.
    fn shrink(&self, setup: Setup, rng: Rng, steps: usize) -> Vec<Op> {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(|_| {}));
        let mut ops = (self.record)(setup, rng, steps);
        let fails = |ops: &[Op]| {
            panic::catch_unwind(AssertUnwindSafe(|| (self.replay)(setup, ops))).is_err()
        };
        let begin = Instant::now();
        let mut chunk = ops.len() / 2;
        while chunk > 0 {
            let mut at = 0;
            while at < ops.len() && begin.elapsed() < PATIENCE {
                let end = (at + chunk).min(ops.len());
                let fewer = [&ops[..at], &ops[end..]].concat();
                if fails(&fewer) {
                    ops = fewer;
                } else {
                    at = end;
                }
            }
            chunk /= 2;
        }
        panic::set_hook(hook);
        ops
    }
}

/// Steps between two audits.
const BATCH: usize = 500;
/// Time limit: operations that are not left out by then stay.
const PATIENCE: Duration = Duration::from_secs(20);

/// Generates and runs operations; calls `each` with every operation before it is run.
fn generate<F: Format>(setup: Setup, rng: Rng, steps: usize, mut each: impl FnMut(&Op)) -> Tally {
    let mut runner = Runner::<F>::new(setup.host_pages, setup.rings);
    let mut generator = Generator::new(rng, setup, capacity::<F>());
    for step in 1..=steps {
        if generator.is_exhausted() {
            break;
        }
        let op = generator.next_op(runner.models());
        each(&op);
        runner.run(&op);
        if step % BATCH == 0 {
            runner.check();
        }
    }
    runner.finish()
}

fn run<F: Format>(setup: Setup, rng: Rng, steps: usize) -> Tally {
    generate::<F>(setup, rng, steps, |_| ())
}

/// Returns the operations of a run up to the one that fails.
fn record<F: Format>(setup: Setup, rng: Rng, steps: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    let run = || generate::<F>(setup, rng, steps, |op| ops.push(op.clone()));
    let _ = panic::catch_unwind(AssertUnwindSafe(run));
    ops
}

/// Runs just these operations, audited once, at the end.
fn replay<F: Format>(setup: Setup, ops: &[Op]) {
    let mut runner = Runner::<F>::new(setup.host_pages, setup.rings);
    ops.iter().for_each(|op| runner.run(op));
    runner.finish();
}
