//! Runs random operations on a machine with tables of one format. A seed or a fuzzer's bytes choose the operations.

use std::ops::Range;

use slat::format::{Ept5, GStage, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, X86};
use slat::{Config, Ept, Format, Granule, MmuKind};

use crate::clones::Simulated;
use crate::generator::Generator;
use crate::machine::Machine;
use crate::model::capacity;
use crate::ops::Op;
use crate::rng::Rng;
use crate::runner::Family;
use crate::setup::Setup;
use crate::shrink::{Failure, panics, run_or_shrink};
use crate::tally::Tally;

/// A machine, a page-table format and an MMU to test.
#[derive(Clone, Copy)]
pub struct Subject {
    /// The subject's name.
    pub name: &'static str,
    /// The MMU that makes the tables.
    mmu: MmuKind,
    /// Whether the VM shadows nested tables. The guest has none.
    nested: bool,
    /// Runs operations (see [`Subject::run`]). The next two functions replay and record them.
    run: fn(Config, Setup, Rng, usize) -> Tally,
    replay: fn(Config, Setup, &[Op]),
    record: fn(Config, Setup, Rng, usize) -> Vec<Op>,
}

impl Subject {
    /// Makes a subject that tests machines `M` with tables of format `F`.
    pub const fn of<M: Machine, F: Format>(name: &'static str) -> Self {
        Subject {
            name,
            mmu: MmuKind::Tdp,
            nested: false,
            run: run::<M, F>,
            replay: replay::<M, F>,
            record: record::<M, F>,
        }
    }

    /// Returns this subject, called `name`, with tables that `mmu` makes.
    pub const fn with_mmu(self, name: &'static str, mmu: MmuKind) -> Self {
        Subject { name, mmu, ..self }
    }

    /// Returns this subject, called `name`, for a VM that would shadow nested tables if the guest had any.
    const fn with_nested(self, name: &'static str) -> Self {
        Subject {
            name,
            nested: true,
            ..self
        }
    }

    fn config(&self) -> Config {
        let config = Config::default().with_mmu(self.mmu);
        config.with_nested(self.nested)
    }

    const fn simulated<F: Format>(name: &'static str) -> Self {
        Subject::of::<Simulated<F>, F>(name)
    }

    /// The simulated machine with every format. Formats with a size parameter appear in several sizes.
    pub const ALL: [Subject; 20] = [
        Subject::simulated::<Ept>("EPT"),
        Subject::simulated::<Npt>("NPT"),
        Subject::simulated::<X86<5>>("x86 5-level"),
        Subject::simulated::<Stage2<48>>("stage 2, 48 bits"),
        Subject::simulated::<Stage2<40>>("stage 2, 40 bits, concatenated root"),
        Subject::simulated::<GStage<3>>("Sv39x4"),
        Subject::simulated::<GStage<4>>("Sv48x4"),
        Subject::simulated::<Stage2<48, true>>("stage 2, 48 bits, hardware dirty state"),
        Subject::simulated::<Ept>("").with_mmu("EPT, direct", MmuKind::Direct),
        Subject::simulated::<Npt>("").with_mmu("NPT, direct", MmuKind::Direct),
        Subject::simulated::<Ept5>("EPT, 5 levels"),
        Subject::simulated::<Npt5>("NPT, 5 levels"),
        Subject::simulated::<GStage<5>>("Sv57x4"),
        Subject::simulated::<Ept5>("").with_mmu("EPT, 5 levels, direct", MmuKind::Direct),
        Subject::simulated::<Stage2<52>>("stage 2, 52 bits"),
        Subject::simulated::<Stage2Kib16<48>>("stage 2, 16 KiB, concatenated root"),
        Subject::simulated::<Stage2Kib16<52, true>>(
            "stage 2, 16 KiB, 52 bits, hardware dirty state",
        ),
        Subject::simulated::<Stage2Kib64<48>>("stage 2, 64 KiB"),
        Subject::simulated::<Stage2Kib64<52>>("stage 2, 64 KiB, 52 bits"),
        Subject::simulated::<Npt>("").with_nested("NPT, nested tables"),
    ];

    /// Runs up to `steps` operations, which `rng` chooses, with an audit every 500 operations.
    ///
    /// # Panics
    /// If engine and model disagree.
    pub fn run(&self, setup: Setup, rng: Rng, steps: usize) -> Tally {
        (self.run)(self.config(), setup, rng, steps)
    }

    /// Runs steps like [`Subject::run`], but derives them from a seed.
    ///
    /// # Panics
    /// The panics of [`Subject::run`], with a [`Failure`] as the message.
    pub fn run_seed(&self, seed: u64, setup: Setup, steps: usize) -> Tally {
        let result = self.try_seed(seed, setup, steps);
        result.unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Runs `steps` operations from each of `seeds`, with the setups of [`Setup::of_seed`]. On the simulated machine,
    /// 16 seeds with 8,000 steps each reach everything in [`Tally::USUAL`] and [`Tally::OF_RINGS`].
    ///
    /// # Panics
    /// The panics of [`Subject::run_seed`].
    pub fn run_seeds(&self, seeds: Range<u64>, steps: usize) -> Tally {
        let mut tally = Tally::default();
        for seed in seeds {
            tally.add(&self.run_seed(seed, Setup::of_seed(seed), steps));
        }
        tally
    }

    /// Runs the steps of a seed like [`Subject::run_seed`], but returns a failure instead of panicking. Shortening a
    /// failing run takes up to 20 seconds.
    ///
    /// # Errors
    /// [`Failure`]: engine, platform and model disagree.
    pub fn try_seed(&self, seed: u64, setup: Setup, steps: usize) -> Result<Tally, Failure> {
        run_or_shrink(
            || self.run(setup, Rng::new(seed), steps),
            || format!("{}, seed {seed}, {setup:?}, {steps} steps", self.name),
            || (self.record)(self.config(), setup, Rng::new(seed), steps),
            |ops| (self.replay)(self.config(), setup, ops),
        )
    }
}

/// The number of steps between two audits.
const BATCH: usize = 500;

/// Returns the number of pages of host memory. If tables have more entries than tables of 4 KiB, the number of pages is
/// larger by the same factor, but at most the number of the largest setup.
fn host_pages<F: Format>(setup: Setup) -> u64 {
    let times = F::GRANULE.entries() as u64 / Granule::Kib4.entries() as u64;
    (setup.host_pages * times).min(Setup::LARGE.host_pages)
}

/// Generates and runs operations. Calls `each` with every operation before running it.
fn generate<M: Machine, F: Format>(
    config: Config,
    setup: Setup,
    rng: Rng,
    steps: usize,
    mut each: impl FnMut(&Op),
) -> Tally {
    let mut family = Family::<M, F>::new(host_pages::<F>(setup), setup.rings, config);
    let setup = Setup {
        host_pages: family.host_pages(),
        ..setup
    };
    let mut generator = Generator::new(rng, setup, F::GRANULE, capacity::<F>());
    for step in 1..=steps {
        if generator.is_exhausted() {
            break;
        }
        let op = generator.next_op(family.models());
        each(&op);
        family.run(&op);
        if step % BATCH == 0 {
            family.check();
        }
    }
    family.finish()
}

fn run<M: Machine, F: Format>(config: Config, setup: Setup, rng: Rng, steps: usize) -> Tally {
    generate::<M, F>(config, setup, rng, steps, |_| ())
}

/// Returns the operations of a failing run, up to the operation that fails.
fn record<M: Machine, F: Format>(config: Config, setup: Setup, rng: Rng, steps: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    let run = || generate::<M, F>(config, setup, rng, steps, |op| ops.push(op.clone()));
    panics(|| drop(run()));
    ops
}

/// Runs only these operations, and audits once, at the end.
fn replay<M: Machine, F: Format>(config: Config, setup: Setup, ops: &[Op]) {
    let mut family = Family::<M, F>::new(host_pages::<F>(setup), setup.rings, config);
    ops.iter().for_each(|op| family.run(op));
    family.finish();
}
