//! Memslots: found and changed.

mod inside;
mod layout;

use crate::Experiment;
use crate::machine::Failure;
use crate::report::{Report, Sample};
use crate::rounds::{Bench, Size};
use crate::show::Line;
use inside::{Array, Inside, Slat, Tables};
use layout::Layout;

const NAME: &str = "memslots";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "memslots: an array copied on every change against slat's trees",
    explain: "",
    run,
    compare,
};

/// What memslot_perf_test measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Map,
    Unmap,
    Unmap2m,
    MoveActive,
    MoveInactive,
    Rw,
    Setup,
}

impl Case {
    const ALL: [Case; 7] = [
        Case::Map,
        Case::Unmap,
        Case::Unmap2m,
        Case::MoveActive,
        Case::MoveInactive,
        Case::Rw,
        Case::Setup,
    ];

    fn name(self) -> &'static str {
        match self {
            Case::Map => "map",
            Case::Unmap => "unmap",
            Case::Unmap2m => "unmap-2m",
            Case::MoveActive => "move-active",
            Case::MoveInactive => "move-inactive",
            Case::Rw => "rw",
            Case::Setup => "setup",
        }
    }

    fn with(self, slots: u64) -> String {
        format!("{}/{slots}", self.name())
    }
}

const SECONDS: &str = "seconds_per_op";
const SLOTS: [u64; 7] = [10, 30, 50, 100, 509, 8194, 32764];
const ARRAY: &str = "array";
const SLAT: &str = "slat";
const TABLES: &str = "tables";

/// Processor time that a sample is to take at least.
const SAMPLE: f64 = 2e-3;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    for slots in bench.size.pick(&[10, 100][..], &SLOTS, &SLOTS) {
        for case in Case::ALL {
            if let Some(layout) = Layout::new(case, *slots) {
                inside(bench, case, *slots, layout)?;
            }
        }
    }
    Ok(())
}

fn inside(bench: &mut Bench, case: Case, slots: u64, layout: Layout) -> Result<(), Failure> {
    let mut slat = Inside::<Slat>::new(layout)?;
    let mut array = Inside::<Array>::new(layout)?;
    let mut tables = Inside::<Tables>::new(layout)?;
    let once = slat.measure(case, 1)?.as_secs_f64();
    let times = match bench.size {
        Size::Tiny => 1,
        _ => (SAMPLE / once).clamp(1.0, 1000.0) as u32,
    };
    let rounds = if slots > 1000 {
        bench.size.pick(1, 3, 5)
    } else {
        bench.size.pick(1, 15, 31)
    };
    bench.in_turns(
        &case.with(slots),
        rounds,
        &[ARRAY, SLAT, TABLES],
        |_, variant| {
            let time = match variant {
                ARRAY => array.measure(case, times)?,
                SLAT => slat.measure(case, times)?,
                _ => tables.measure(case, times)?,
            };
            Ok(vec![Sample::seconds(SECONDS, time)])
        },
    )
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for slots in SLOTS {
        for case in Case::ALL {
            let name = case.with(slots);
            let limit = report.value(NAME, &name, TABLES, SECONDS);
            lines.extend(
                Line::compare(report, NAME, &name, SECONDS, ARRAY, SLAT)
                    .map(|line| line.with_limit(TABLES, limit)),
            );
        }
    }
    lines
}
