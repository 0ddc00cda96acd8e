//! Measures the execution of code in huge pages while the policy for NX huge pages forbids executable huge leaves.

use crate::arch::x86_64::machine::guest::{DATA, PAGE};
use crate::arch::x86_64::machine::program::COUNTED_RETURN;
use crate::arch::x86_64::machine::{
    Failure, Machine, Memory, Pages, Program, Slat, Slot, no_device,
};
use crate::compared::{Line, Rows};
use crate::maps::Maps;
use crate::published;
use crate::report::{Report, Sample};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "execute";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "execution from NX huge pages",
    explain: "\
Each vCPU has a GiB mapped by one 1 GiB leaf (policy host_level=contiguous replaces hugetlb pages;
the GiBs alias one backing). It writes a function to each 4 KiB page - count, and return -, which is
populate_seconds, and calls each: execute_seconds; processor time, spread over the processors.
Against CVE-2018-12207 huge leaves are not executable (nx_huge_pages), so a call faults. zap: the
leaf is zapped and the page mapped alone, as KVM did; all others fault in one by one. split:
it is split in place, to 512 executable pages; its siblings stay mapped. nx-off: huge leaves may be
executed; the limit. Published for 96 vCPUs: 2.90 s fell to 0.11 s. pf_fixed: faults for each GiB.
Here most of the time goes to decoding each page's function once: it falls less than the faults do.
No prefetch; no kvm, whose NX policy is its host's.
Asked for: at most 520 faults for each GiB, and at most 1.2 times the time of nx-off.",
    settable: Settable::AllBut(&["nx_huge_pages", "nx_huge_pages_split", "prefetch"]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

/// The name of each variant, with its values of the two policies.
const VARIANTS: &[(&str, &str, &str)] = &[
    ("zap", "on", "off"),
    ("split", "on", "on"),
    ("nx-off", "off", "on"),
];

const PUBLISHED_CASE: &str = "anonymous_hugetlb_1gb/v96";

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let (vcpus, rounds) = (bench.size.pick(2, 4, 96), bench.size.pick(1, 3, 3));
    // At the tiny size, huge leaves have 2 MiB; otherwise 1 GiB.
    let region = bench.size.pick(4 << 20, 1 << 30, 1 << 30);
    let memory = Memory::new(region, region, Pages::Huge)?;
    memory.populate()?;
    let variants: Vec<_> = VARIANTS.iter().map(|(variant, ..)| *variant).collect();
    let case = format!("anonymous_hugetlb_1gb/v{vcpus}");
    let mut maps = Maps::new(NAME);
    bench.in_turns(&case, rounds, &variants, |bench, variant| {
        let mut look = |phase, machine: &Machine<'_, Slat>| {
            let first = DATA..DATA + memory.size() as u64;
            maps.take(&case, variant, phase, machine.engine(), first);
        };
        measure(&bench.guests.slat, variant, vcpus, &memory, &mut look)
    })?;
    bench.keep(maps);
    Ok(())
}

fn measure(
    api: &Slat,
    variant: &str,
    vcpus: usize,
    memory: &Memory,
    look: &mut dyn FnMut(&'static str, &Machine<'_, Slat>),
) -> Result<Vec<Sample>, Failure> {
    let (size, pages) = (memory.size() as u64, memory.size() as u64 / PAGE);
    let mut machine = Machine::new(api, vcpus, DATA + vcpus as u64 * size)?;
    for (name, nx, split) in VARIANTS {
        if *name == variant {
            machine.set_policy("nx_huge_pages", nx)?;
            machine.set_policy("nx_huge_pages_split", split)?;
        }
    }
    machine.set_policy("prefetch", "off")?;
    if let Some(engine) = machine.engine() {
        engine.set_contiguous(true);
    }
    let places: Vec<u64> = (0..vcpus as u64).map(|i| DATA + i * size).collect();
    for (id, &gpa) in (1..).zip(&places) {
        machine.set_slot(&Slot::whole(id, gpa, memory))?;
    }
    machine.touch_system()?;

    let each = |program: fn(u64, u64) -> Program| -> Vec<Program> {
        places.iter().map(|&first| program(first, pages)).collect()
    };
    let populate = each(|first, pages| Program::write(first, pages, COUNTED_RETURN));
    let populated = machine.run(&populate, &no_device)?;
    look("written", &machine);
    let before = machine.engine().map(|engine| engine.stats());
    let executed = machine.run(&each(Program::call), &no_device)?;
    look("executed", &machine);
    for (index, end) in executed.registers.iter().enumerate() {
        if end.rsi != pages {
            return Err(format!("vCPU {index} executed {} of {pages} functions", end.rsi).into());
        }
    }
    let mut samples = vec![
        Sample::seconds("populate_seconds", populated.spread()),
        Sample::seconds("execute_seconds", executed.spread()),
    ];
    if let (Some(engine), Some(before)) = (machine.engine(), before) {
        let faults = engine.stats().since(&before).pf_fixed;
        samples.push(Sample::count("pf_fixed", faults / vcpus as u64));
    }
    Ok(samples)
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for case in report.cases(NAME) {
        let line = |metric| {
            let published = published::find(NAME, PUBLISHED_CASE, metric);
            let line = Line::compare(report, NAME, case, metric, "zap", "split")?;
            let limit = report.value(NAME, case, "nx-off", metric);
            Some(line.with_published(published).with_limit("nx-off", limit))
        };
        lines.extend(line("populate_seconds"));
        lines.extend(line("execute_seconds").map(|line| line.at_most_of_limit(1.2)));
        lines.extend(line("pf_fixed").map(|line| line.at_most(520.0)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;
    use crate::maps;

    #[test]
    fn the_counts_hold_at_a_tiny_size() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let faults = |variant| {
            let case = "anonymous_hugetlb_1gb/v2";
            report.value(NAME, case, variant, "pf_fixed").unwrap()
        };
        // 4 MiB consist of 1024 pages of 4 KiB, or of two huge leaves.
        assert_eq!(faults("zap"), 1024.0);
        assert_eq!(faults("split"), 2.0);
        assert_eq!(faults("nx-off"), 0.0);
    }

    #[test]
    fn execution_splits_the_huge_leaves_that_may_not_be_executed() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let cell = |variant: &str, phase: &str| {
            let mut maps = report.maps("execute");
            let map = maps.find(|map| (map.variant, map.phase) == (variant, phase));
            map.unwrap().cells[0]
        };
        // At the tiny size, huge leaves have 2 MiB.
        for variant in ["zap", "split"] {
            let (before, after) = (cell(variant, "written"), cell(variant, "executed"));
            assert_eq!(
                (before.by_level, before.nx),
                ([0, maps::CELL, 0], maps::CELL)
            );
            assert_eq!((after.by_level, after.nx), ([maps::CELL, 0, 0], 0));
        }
        let limit = cell("nx-off", "executed");
        assert_eq!((limit.by_level, limit.nx), ([0, maps::CELL, 0], 0));
    }
}
