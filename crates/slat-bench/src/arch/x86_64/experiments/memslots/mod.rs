//! The experiment about memslots on x86-64, which also has a measurement with a guest.

mod program;

use std::time::Duration;

use crate::arch::x86_64::machine::{Memory, Pages};
use crate::bare::PAGE;
use crate::compared::REAL_KVM;
use crate::experiments::memslots::layout::Layout;
use crate::experiments::memslots::{self, Case, SLAT, SLOTS, WALL};
use crate::report::{Sample, Unit};
use crate::rounds::{Bench, Size};
use crate::{Experiment, Failure};

/// The experiment with both measurements: one on the engine alone, and one with a guest.
pub const EXPERIMENT: Experiment = Experiment {
    run,
    ..memslots::EXPERIMENT
};

fn run(bench: &mut Bench) -> Result<(), Failure> {
    (memslots::EXPERIMENT.run)(bench)?;
    let pages = Layout::new(Case::Rw, 10).map_or(0, |layout| layout.pages());
    let memory = Memory::new((pages * PAGE) as usize, 2 << 20, Pages::Small)?;
    for slots in bench.size.pick(&[10][..], &[10, 509], &SLOTS) {
        for case in Case::ALL {
            if let Some(layout) = Layout::new(case, *slots) {
                program(bench, case, *slots, layout, &memory)?;
            }
        }
    }
    Ok(())
}

fn program(
    bench: &mut Bench,
    case: Case,
    slots: u64,
    layout: Layout,
    memory: &Memory,
) -> Result<(), Failure> {
    let budget = Duration::from_millis(bench.size.pick(1, 30, 200));
    let rounds = bench.size.pick(1, 3, 5);
    // If a KVM is an interpreter, each pass through 512 MiB takes seconds. So the case `Rw` is measured on a real KVM
    // only at the full size.
    let variants = match case {
        Case::Rw if bench.size != Size::Full => vec![SLAT],
        _ => bench.guests.with_kvm(&[SLAT]),
    };
    bench.in_turns(&case.with(slots), rounds, &variants, |bench, variant| {
        let time = match &bench.guests.kvm {
            Some(kvm) if variant == REAL_KVM => {
                program::measure(kvm, case, layout, memory, budget)?
            }
            _ => program::measure(&bench.guests.slat, case, layout, memory, budget)?,
        };
        Ok(vec![Sample::new(WALL, Unit::Seconds, time)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_measured_in_each_case() {
        // `run` itself checks what the guest has written.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for case in Case::ALL {
            let name = case.with(10);
            assert!(report.value(memslots::NAME, &name, SLAT, WALL).unwrap() > 0.0);
        }
    }
}
