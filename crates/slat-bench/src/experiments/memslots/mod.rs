//! Measures the time to look up and to change memslots.
//!
//! Each case of memslot_perf_test is measured in two ways. [`mod@inside`] compares the time that slat's memory system
//! takes with the time of an array of memslots. The second measurement needs a guest, and is in `crate::arch`. It
//! compares how long a KVM program waits on slat and on a real KVM.

mod inside;
pub(crate) mod layout;

use crate::compared::{Line, REAL_KVM, Rows};
use crate::published;
use crate::report::{Report, Sample};
use crate::rounds::{Bench, Size};
use crate::{Elsewhere, Experiment, Failure, Settable};
use inside::{Array, Direct, Inside, Shadow, Slat, Tables, Tdp};
use layout::Layout;

pub(crate) const NAME: &str = "memslots";

/// The experiment without the measurement that needs a guest.
pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "memslots: an array that is copied on every change, and slat's trees",
    explain: "\
The cases of memslot_perf_test. map: a guest writes to half of 32 MiB while the host discards the
other half (madvise), then the other way round. unmap, unmap-2m: the host discards 128 MiB, page
by page or 2 MiB at a time. move-active, move-inactive: a slot moves and comes back, with pages in
use or none. rw: 512 MiB are written to, twice. setup: all slots are created.
seconds_per_op: time inside the memory system, without the host's own madvise, refault and zeroing.
array: slots of 32 bytes sorted by gfn, copied on every change, scanned from end to end for an hva;
tables, flushes and faults are slat's own code. tables: that code alone; the rest is the slots' (in
setup: two trees in each of two sets are filled). direct, shadow: slat on its other MMUs.
wall_seconds_per_op: a KVM program with a running guest, on slat and on a real KVM: what the program
waits for. That includes madvise and, but for moves and setup, the guest's instructions.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

/// A case of memslot_perf_test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    Map,
    Unmap,
    Unmap2m,
    MoveActive,
    MoveInactive,
    Rw,
    Setup,
}

impl Case {
    pub(crate) const ALL: [Case; 7] = [
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

    /// Returns a text that divides slat's time into two parts: the time of the tables alone, and the rest.
    fn dominated(self, time: f64, tables: Option<f64>) -> String {
        let slots = match self {
            Case::Map | Case::Unmap | Case::Unmap2m => "faults and invalidations that find slots",
            Case::MoveActive | Case::MoveInactive => "changes of two sets of slots",
            Case::Rw => "faults that find slots",
            Case::Setup => "insertions into the trees of two sets",
        };
        let tables = 100.0 * tables.unwrap_or(0.0) / time;
        format!("{:.0} % are {slots}", (100.0 - tables).max(0.0))
    }

    /// Returns the name of this case with this number of memslots.
    pub(crate) fn with(self, slots: u64) -> String {
        format!("{}/{slots}", self.name())
    }

    /// Returns the goal: the largest accepted change with 32764 memslots (in the map case, with 8194).
    fn asked_at_most(self) -> Option<f64> {
        match self {
            Case::Map => Some(-0.73),
            Case::Unmap | Case::Unmap2m => Some(-0.95),
            Case::MoveActive | Case::MoveInactive => Some(-0.94),
            Case::Rw => None,
            Case::Setup => Some(-0.96),
        }
    }
}

const SECONDS: &str = "seconds_per_op";
/// The metric of the measurement with a guest.
pub(crate) const WALL: &str = "wall_seconds_per_op";
/// The numbers of memslots that are measured.
pub(crate) const SLOTS: [u64; 7] = [10, 30, 50, 100, 509, 8194, 32764];
const ARRAY: &str = "array";
/// The variant for slat's engine.
pub(crate) const SLAT: &str = "slat";
const TABLES: &str = "tables";
const DIRECT: &str = "direct";
const SHADOW: &str = "shadow";

/// The minimum processor time of a sample of [`mod@inside`], in seconds.
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
    let (placements, rounds) = match slots {
        // With this number of memslots, an array is so slow that a few samples suffice.
        1000.. => (1, bench.size.pick(1, 2, 5)),
        // For these numbers of memslots there is a goal, so they get more samples.
        10 | 509 => bench.size.pick((1, 1), (5, 3), (8, 4)),
        _ => bench.size.pick((1, 1), (3, 2), (8, 4)),
    };
    let variants = match case {
        // Creating memslots zaps nothing, so the variant with only the tables is omitted.
        Case::Setup => &[ARRAY, SLAT, DIRECT, SHADOW][..],
        _ => &[ARRAY, SLAT, TABLES, DIRECT, SHADOW],
    };
    // The addresses of a system's memory determine which of its cache lines conflict, as long as the system lives. So
    // each system has several instances at the same time, at different addresses.
    let mut placed = Vec::new();
    for _ in 0..placements {
        let mut slat = Inside::<Slat<Tdp>>::new(layout)?;
        let mut direct = Inside::<Slat<Direct>>::new(layout)?;
        let mut shadow = Inside::<Slat<Shadow>>::new(layout)?;
        let mut array = Inside::<Array>::new(layout)?;
        let mut tables = Inside::<Tables>::new(layout)?;
        let mut measure = |variant, times| match variant {
            ARRAY => array.measure(case, times),
            SLAT => slat.measure(case, times),
            DIRECT => direct.measure(case, times),
            SHADOW => shadow.measure(case, times),
            _ => tables.measure(case, times),
        };
        let once = measure(SLAT, 1)?.as_secs_f64();
        if placements > 1 {
            // Also run each of the other systems once, so that the caches are equally warm for all systems.
            for &other in variants.iter().filter(|variant| **variant != SLAT) {
                measure(other, 1)?;
            }
        }
        let times = match bench.size {
            Size::Tiny => 1,
            // Each sample needs a system without memslots. Making these systems takes most of the time, so there are
            // fewer samples.
            _ if case == Case::Setup => (SAMPLE / once).clamp(1.0, 200.0) as u32,
            _ => (SAMPLE / once).clamp(1.0, 1000.0) as u32,
        };
        bench.in_turns(&case.with(slots), rounds, variants, |_, variant| {
            Ok(vec![Sample::seconds(SECONDS, measure(variant, times)?)])
        })?;
        placed.push((slat, direct, shadow, array, tables));
    }
    Ok(())
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for slots in SLOTS {
        for case in Case::ALL {
            let name = case.with(slots);
            let limit = report.value(NAME, &name, TABLES, SECONDS);
            let inside = Line::compare(report, NAME, &name, SECONDS, ARRAY, SLAT)
                .map(|line| line.with_limit(TABLES, limit));
            let inside = inside.map(|line| match (slots, case.asked_at_most()) {
                // With 10 memslots, slat must not be slower than the array.
                (10, _) => line.change_at_most(0.05),
                (509, Some(_)) => match published::find(NAME, &name, SECONDS) {
                    Some(published) => line.change_at_most(published),
                    None => line,
                },
                (32764, Some(most)) => line.change_at_most(most),
                (8194, Some(most)) if case == Case::Map => line.change_at_most(most),
                _ => line,
            });
            lines.extend(inside.map(|line| {
                let why = case.dominated(line.after.1, limit);
                line.or_else(why)
            }));
        }
    }
    for slots in SLOTS {
        for case in Case::ALL {
            let name = case.with(slots);
            for other in [DIRECT, SHADOW] {
                let line = Line::compare(report, NAME, &name, SECONDS, SLAT, other);
                lines.extend(line.map(|line| line.with_published(None).change_at_most(0.5)));
            }
        }
    }
    for slots in SLOTS {
        for case in Case::ALL {
            let name = case.with(slots);
            let against = |before| Line::compare(report, NAME, &name, WALL, before, SLAT);
            let asked = matches!(case, Case::MoveActive | Case::MoveInactive);
            lines.extend(match against(REAL_KVM) {
                Some(line) if asked => Some(line.change_at_most(-0.9)),
                Some(line) => Some(line),
                None => Line::of(report, NAME, &name, WALL, SLAT),
            });
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn array_and_slat_take_the_same_faults() {
        // `run` itself checks the number of faults.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for case in Case::ALL {
            let name = case.with(100);
            for variant in [ARRAY, SLAT, DIRECT, SHADOW] {
                assert!(report.value(NAME, &name, variant, SECONDS).unwrap() > 0.0);
            }
            let tables = report.value(NAME, &name, TABLES, SECONDS);
            assert_eq!(tables.is_some_and(|time| time > 0.0), case != Case::Setup);
        }
    }
}
