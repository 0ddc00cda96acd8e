//! AArch64: only the experiments that run on the engine or the processor alone. No KVM programs with guests of arm64
//! exist yet.

use crate::experiments::{a64, faults, memslots, snapshot, split, waits};
use crate::rounds::{Bench, Size};
use crate::{Experiment, Failure};

/// All experiments, in the order in which they run.
pub const EXPERIMENTS: &[Experiment] = &[
    MEMSLOTS,
    split::EXPERIMENT,
    waits::EXPERIMENT,
    snapshot::EXPERIMENT,
    faults::EXPERIMENT,
    a64::EXPERIMENT,
];

const MEMSLOTS: Experiment = Experiment {
    run: memslots_without_program,
    ..memslots::EXPERIMENT
};

fn memslots_without_program(bench: &mut Bench) -> Result<(), Failure> {
    bench.note_missing(format!(
        "{}: {} is not measured, because there is no program for guests of this architecture yet.",
        memslots::NAME,
        memslots::WALL
    ));
    (memslots::EXPERIMENT.run)(bench)
}

/// The KVMs on which guests run. On AArch64 there are none.
pub struct Guests;

impl Guests {
    /// Opens no KVM, because slat-bench has no arm64 guests. Never fails.
    pub fn open(_: Size) -> Result<Self, Failure> {
        Ok(Guests)
    }
}

/// Returns a sentence that says whether a real KVM is measured.
pub(crate) fn real_kvm() -> String {
    "not measured: only guests are measured on it, and there are no programs for them yet"
        .to_owned()
}

/// Returns `None`, because no experiment starts this process as a KVM program.
pub fn as_client() -> Option<Result<String, Failure>> {
    None
}
