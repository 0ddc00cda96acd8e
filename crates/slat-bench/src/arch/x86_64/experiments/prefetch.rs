//! Measures prefetch: pages that are mapped before their first use.

use slat::Hva;

use crate::arch::x86_64::machine::guest::{DATA, PAGE};
use crate::arch::x86_64::machine::program::Random;
use crate::arch::x86_64::machine::{
    Api, Failure, Machine, Memory, Pages, Program, Slot, no_device,
};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "prefetch";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "pages mapped ahead of their use",
    explain: "\
A guest reads one byte of each 4 KiB page of memory that its host has allocated before: sequential.
Or of pages taken at random, one read for each eight pages: random. direct, shadow: on those MMUs.
Each page that is not mapped costs a second-level fault: pf_fixed. A fault may map its neighbours,
too: prefetched. Those that the guest never uses are waste: prefetched_unused. Published, for KVM's
direct MMU: mending its prefetch took 6 GiB from ~1.75 million faults to less than 0.27 million.
off: a fault maps its page only. window-8: the aligned window of 8 pages around it. adaptive, the
default: the window doubles with each fault near the last ones, from 16 pages to a table of 512, and
is closed elsewhere. Asked for: window-8 takes 1/8 of the faults and 0.8 of the time, at random at
most 1.1; adaptive at most 1/64 of the faults, and at random it wastes no more than 5 % of the pages
touched. Times are the vCPU's processor time.",
    settable: Settable::AllBut(&["prefetch"]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const SEQUENTIAL: &str = "sequential";
/// The case of sequential accesses with the direct MMU. The published number is for this case.
const DIRECT: &str = "sequential/direct";
/// The case of sequential accesses with shadow paging. Leaves of 4 KiB then shadow the guest's 2 MiB pages.
const SHADOW: &str = "sequential/shadow";
const RANDOM: &str = "random";

/// The variants, each with its value of the policy.
const VARIANTS: &[(&str, &str)] = &[("off", "off"), ("window-8", "8"), ("adaptive", "adaptive")];

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 5, 3);
    // At the full size, the guest touches 6 GiB of an 8 GiB VM, as in the publication. At smaller sizes it touches the
    // same share of the memory.
    let size: usize = bench.size.pick(8 << 20, 512 << 20, 8 << 30);
    let pages = size as u64 / PAGE;
    let memory = Memory::new(size, 2 << 20, Pages::Small)?;
    memory.populate()?;

    let variants: Vec<_> = VARIANTS.iter().map(|(variant, _)| *variant).collect();
    let variants = bench.guests.with_kvm(&variants);
    let touched = pages / 4 * 3;
    bench.in_turns(SEQUENTIAL, rounds, &variants, |bench, variant| {
        let program = Program::read(DATA, touched);
        measure(bench, variant, &memory, program, touched)
    })?;
    let own: Vec<_> = VARIANTS.iter().map(|(variant, _)| *variant).collect();
    for case in [DIRECT, SHADOW] {
        bench.in_turns(case, rounds, &own, |bench, variant| {
            let program = Program::read(DATA, touched);
            let policy = policy(variant).ok_or("no such variant")?;
            let slat = if case == DIRECT {
                &bench.guests.direct
            } else {
                &bench.guests.shadow
            };
            touch(slat, policy, &memory, program, touched)
        })?;
    }
    let bits = pages.ilog2();
    let times = pages / 8;
    let mut distinct: Vec<u64> = Random::pages(bits).take(times as usize).collect();
    distinct.sort_unstable();
    distinct.dedup();
    bench.in_turns(RANDOM, rounds, &variants, |bench, variant| {
        let program = Program::scatter(DATA, bits, times);
        measure(bench, variant, &memory, program, distinct.len() as u64)
    })
}

/// Returns the value of the policy `prefetch` for a variant. `None`: the variant is not one of slat's.
fn policy(variant: &str) -> Option<&'static str> {
    let known = VARIANTS.iter().find(|(name, _)| *name == variant);
    known.map(|(_, policy)| *policy)
}

/// Runs `program`, which uses `distinct` pages of `memory`, on the KVM of `variant`.
fn measure(
    bench: &Bench,
    variant: &str,
    memory: &Memory,
    program: Program,
    distinct: u64,
) -> Result<Vec<Sample>, Failure> {
    match (policy(variant), &bench.guests.kvm) {
        (Some(policy), _) => touch(&bench.guests.slat, policy, memory, program, distinct),
        (None, Some(kvm)) => touch(kvm, variant, memory, program, distinct),
        (None, None) => Err("there is no /dev/kvm".into()),
    }
}

fn touch<A: Api>(
    api: &A,
    policy: &str,
    memory: &Memory,
    program: Program,
    distinct: u64,
) -> Result<Vec<Sample>, Failure> {
    let mut machine = Machine::new(api, 1, DATA + memory.size() as u64)?;
    machine.set_slot(&Slot::whole(1, DATA, memory))?;
    machine.set_policy("prefetch", "off")?;
    machine.touch_system()?;
    machine.set_policy("prefetch", policy)?;
    let before = machine.engine().map(|engine| engine.stats());
    let ran = machine.run(&[program], &no_device)?;
    let mut samples = vec![Sample::seconds("seconds", ran.cpu)];
    if let (Some(engine), Some(before)) = (machine.engine(), before) {
        let counted = engine.stats().since(&before);
        let data = Hva(memory.addresses().start)..Hva(memory.addresses().end);
        let used = engine.age(data, false);
        if used != distinct {
            return Err(format!("the guest used {used} pages, not {distinct}").into());
        }
        samples.extend([
            Sample::count("pf_fixed", counted.pf_fixed),
            Sample::count("prefetched", counted.prefetched),
            // The gauge `pages_4k` counts all 4 KiB leaves, and all of them are in this memslot.
            Sample::count("prefetched_unused", counted.pages_4k - used),
        ]);
    }
    Ok(samples)
}

fn compare(report: &Report) -> Vec<Line> {
    let line = |case, metric, after| Line::compare(report, NAME, case, metric, "off", after);
    let pages = |case| report.value(NAME, case, "off", "pf_fixed");
    let tables = pages(SEQUENTIAL).map(|pages| (pages / 512.0).ceil());
    let waste = pages(RANDOM).map(|pages| (pages * 0.05).floor());
    let faults = |case, after, share: f64| {
        let line = line(case, "pf_fixed", after)?;
        let line = line.with_limit("tables", tables);
        Some(line.change_at_most(share - 1.0))
    };
    let seconds = |case, share: f64| {
        line(case, "seconds", "window-8").map(|line| line.change_at_most(share - 1.0))
    };
    [
        // The limit is an eighth of the faults, plus one percent for windows that reach beyond the memslot.
        faults(SEQUENTIAL, "window-8", 1.01 / 8.0),
        faults(SEQUENTIAL, "adaptive", 1.0 / 64.0).map(|line| line.with_published(None)),
        seconds(SEQUENTIAL, 0.8),
        line(SEQUENTIAL, "seconds", "adaptive"),
        faults(DIRECT, "window-8", 1.01 / 8.0),
        faults(DIRECT, "adaptive", 1.0 / 64.0).map(|line| line.with_published(None)),
        seconds(DIRECT, 0.8),
        line(DIRECT, "seconds", "adaptive"),
        faults(SHADOW, "window-8", 1.01 / 8.0).map(|line| line.with_published(None)),
        faults(SHADOW, "adaptive", 1.0 / 64.0).map(|line| line.with_published(None)),
        seconds(SHADOW, 0.8),
        line(SHADOW, "seconds", "adaptive"),
        line(RANDOM, "pf_fixed", "window-8"),
        line(RANDOM, "pf_fixed", "adaptive"),
        line(RANDOM, "prefetched_unused", "window-8"),
        line(RANDOM, "prefetched_unused", "adaptive")
            .zip(waste)
            .map(|(line, waste)| line.at_most(waste)),
        seconds(RANDOM, 1.1),
        line(RANDOM, "seconds", "adaptive"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn the_counts_hold_at_a_tiny_size() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let value = |case, variant, metric| report.value(NAME, case, variant, metric).unwrap();
        let touched = f64::from((8 << 20) / 4096 / 4 * 3);
        for case in [SEQUENTIAL, DIRECT, SHADOW] {
            assert_eq!(value(case, "off", "pf_fixed"), touched);
            assert_eq!(value(case, "window-8", "pf_fixed"), touched / 8.0);
        }
        for variant in ["off", "window-8", "adaptive"] {
            let fixed = value(SEQUENTIAL, variant, "pf_fixed");
            let used = touched + value(SEQUENTIAL, variant, "prefetched_unused");
            assert_eq!(fixed + value(SEQUENTIAL, variant, "prefetched"), used);
        }
        assert_eq!(value(RANDOM, "off", "prefetched"), 0.0);
        assert!(value(RANDOM, "window-8", "prefetched_unused") > 0.0);
        let touched = value(RANDOM, "off", "pf_fixed");
        assert!(value(RANDOM, "adaptive", "prefetched_unused") <= touched * 0.05);
    }
}
