//! Measures a guest that is a hypervisor (L1), and the cost of memory accesses of that hypervisor's own guest (L2).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvm_ioctls::VcpuExit;

use crate::arch::x86_64::machine::guest::{DATA, DEVICE, PAGE};
use crate::arch::x86_64::machine::hypervisor::MOST_DATA;
use crate::arch::x86_64::machine::{
    Failure, Machine, Memory, Pages, Program, Ran, Slat, Slot, no_device,
};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample, Unit};
use crate::rounds::{Bench, fastest};
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "nested";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "a guest that is a hypervisor",
    explain: "\
A guest (L1) runs a guest of its own (L2) by SVM, with nested page tables in pages of 4 KiB. slat
stands for hardware that has no third level: a translation of L2's goes through its own tables, L1's
nested ones and slat's. slat shadows L1's nested tables as KVM does: entries go from L2's physical
addresses to the host's. tdp does so beside L1's second level; shadow is slat without one.
exit: what a guest asks of the level below: L2 of L1 by VMMCALL, there and back (l2); L1 of the
program by a device register (program); and of slat by VMMCALL, a call inside the CPU (slat).
compute: recursion in L1, in L2. walk: writes to pages at random. faults: L2 reads each page once.
mmio: L2's writes to a device register in no memslot. Asked for: l2 at most 3 times program; compute
within 5 %; with a window of 8 pages 1/8 of the faults; cached MMIO without a look-up of a memslot.
Times are the vCPU's processor time.",
    settable: Settable::AllBut(&["prefetch", "mmio_caching"]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

/// The levels at which a program can run.
const LEVELS: &[&str] = &["l1", L2];
const L2: &str = "l2";
/// The software that handles an exit. An exit of L1 is handled by slat or by the KVM program; an exit of L2, by L1.
const SLAT: &str = "slat";
const PROGRAM: &str = "program";
const FAULTS: &[(&str, &str)] = &[("off", "off"), ("window-8", "8")];
const CACHING: &[(&str, &str)] = &[("uncached", "off"), ("cached", "on")];
const MMUS: [&str; 2] = ["tdp", "shadow"];
/// The number of runs. The result is the shortest time.
const RUNS: usize = 10;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 5, 11);
    let exits = bench.size.pick(10, 20_000, 100_000);
    let depth = bench.size.pick(5, 25, 28);
    let walks = bench.size.pick(100, 200_000, 2_000_000);
    let size = bench.size.pick(2 << 20, 64 << 20, MOST_DATA as usize);
    let memory = Memory::new(size, 2 << 20, Pages::Small)?;
    memory.populate()?;
    let pages = size as u64 / PAGE;
    // The number of pages must be a power of two.
    let walked = 1 << pages.ilog2();

    for mmu in MMUS {
        let case = |name: &str| format!("{name}/{mmu}");
        let begin = |bench: &Bench| machine(bench, mmu, &memory);
        bench.in_turns(&case("exit"), rounds, &[SLAT, PROGRAM, L2], |bench, to| {
            let mut machine = begin(bench)?;
            let time = fastest(RUNS, || {
                let ran = match to {
                    SLAT => machine.run(&[Program::hypercalls(exits)], &no_device),
                    PROGRAM => machine.run(&[Program::doorbell(exits)], &bell),
                    _ => machine.run_nested(&Program::hypercalls(exits), &no_device),
                };
                Ok(ran?.cpu)
            })?;
            Ok(vec![each(time, exits)])
        })?;
        let (compute, _) = Program::fibonacci(depth);
        let (walk, _) = Program::walk(DATA, walked, walks);
        for (name, program) in [("compute", compute), ("walk", walk)] {
            bench.in_turns(&case(name), rounds, LEVELS, |bench, level| {
                let mut machine = begin(bench)?;
                // The program runs once before the measurement, so that its code is compiled and its pages are mapped.
                at(&mut machine, level, &program)?;
                let time = fastest(RUNS, || Ok(at(&mut machine, level, &program)?.cpu))?;
                Ok(vec![Sample::seconds("seconds", time)])
            })?;
        }
        let variants: Vec<_> = FAULTS.iter().map(|(variant, _)| *variant).collect();
        bench.in_turns(&case("faults"), rounds, &variants, |bench, variant| {
            let mut machine = begin(bench)?;
            set(&machine, "prefetch", FAULTS, variant)?;
            let before = machine.vm().engine().stats();
            let ran = machine.run_nested(&Program::read(DATA, pages), &no_device)?;
            let counted = machine.vm().engine().stats().since(&before);
            Ok(vec![
                Sample::seconds("seconds", ran.cpu),
                Sample::count("pf_fixed", counted.pf_fixed),
                Sample::count("guest_pte_reads", counted.guest_pte_reads),
            ])
        })?;
        let variants: Vec<_> = CACHING.iter().map(|(variant, _)| *variant).collect();
        bench.in_turns(&case("mmio"), rounds, &variants, |bench, variant| {
            let mut machine = begin(bench)?;
            set(&machine, "mmio_caching", CACHING, variant)?;
            ring(&mut machine, exits)
        })?;
    }
    Ok(())
}

/// Makes a machine on slat, with tables that `mmu` makes. Its guest is ready to be a hypervisor.
fn machine<'m>(bench: &Bench, mmu: &str, memory: &'m Memory) -> Result<Machine<'m, Slat>, Failure> {
    let slat = if mmu == "shadow" {
        &bench.guests.shadow
    } else {
        &bench.guests.slat
    };
    let mut machine = Machine::new(slat, 1, DATA + memory.size() as u64)?;
    machine.set_slot(&Slot::whole(1, DATA, memory))?;
    machine.set_policy("prefetch", "off")?;
    machine.begin_hypervisor()?;
    machine.touch_system()?;
    // In this run, L2 also uses the pages of the system slot, so that these pages are mapped afterwards.
    machine.run_nested(&Program::read(0, 1), &no_device)?;
    Ok(machine)
}

/// Sets the policy `name` to the value for `variant`.
fn set(
    machine: &Machine<'_, Slat>,
    name: &str,
    values: &[(&str, &str)],
    variant: &str,
) -> Result<(), Failure> {
    let value = values.iter().find(|(name, _)| *name == variant);
    machine.set_policy(name, value.ok_or("no such variant")?.1)
}

/// Runs `program` in L1 or in L2.
fn at(machine: &mut Machine<'_, Slat>, level: &str, program: &Program) -> Result<Ran, Failure> {
    match level {
        "l1" => machine.run(&[*program], &no_device),
        _ => machine.run_nested(program, &no_device),
    }
}

/// Makes L2 write to a device register, `times` times.
fn ring(machine: &mut Machine<'_, Slat>, times: u64) -> Result<Vec<Sample>, Failure> {
    let rung = AtomicU64::new(0);
    let device = |index, exit: VcpuExit<'_>| {
        rung.fetch_add(1, Relaxed);
        bell(index, exit)
    };
    // The first exit installs the MMIO SPTE.
    machine.run_nested(&Program::doorbell(1), &device)?;
    let before = machine.vm().engine().stats();
    let time = fastest(RUNS, || {
        Ok(machine.run_nested(&Program::doorbell(times), &device)?.cpu)
    })?;
    let counted = machine.vm().engine().stats().since(&before);
    if rung.into_inner() != RUNS as u64 * times + 1 {
        return Err("a doorbell was not heard".into());
    }
    let lookups = counted.slot_lookups + counted.slot_lookups_saved;
    Ok(vec![
        each(time, times),
        Sample::count("slot_lookups", lookups),
    ])
}

/// Handles the exits of guests that write to a device with one register.
fn bell(index: usize, exit: VcpuExit<'_>) -> Result<(), Failure> {
    match exit {
        VcpuExit::MmioWrite(DEVICE, [_, _, _, _]) => Ok(()),
        exit => no_device(index, exit),
    }
}

/// Returns the average time of one exit if `exits` exits took `time`.
fn each(time: Duration, exits: u64) -> Sample {
    let nanoseconds = time.as_secs_f64() * 1e9 / exits as f64;
    Sample::new("ns_per_exit", Unit::Nanoseconds, nanoseconds)
}

fn compare(report: &Report) -> Vec<Line> {
    let line = |name: &str, mmu: &str, metric, before, after| {
        Line::compare(
            report,
            NAME,
            &format!("{name}/{mmu}"),
            metric,
            before,
            after,
        )
    };
    let of = |mmu| {
        [
            line("exit", mmu, "ns_per_exit", PROGRAM, L2).map(|line| line.change_at_most(2.0)),
            line("exit", mmu, "ns_per_exit", SLAT, L2),
            line("compute", mmu, "seconds", "l1", L2).map(|line| line.change_within(0.05)),
            line("walk", mmu, "seconds", "l1", L2),
            // With a window of 8 pages, the guest's pages take an eighth of the faults that they take without prefetch.
            // L2's own tables and the ends of the memslot take some more faults.
            line("faults", mmu, "pf_fixed", "off", "window-8")
                .map(|line| line.change_at_most(1.02 / 8.0 - 1.0)),
            line("faults", mmu, "seconds", "off", "window-8"),
            line("faults", mmu, "guest_pte_reads", "off", "window-8"),
            line("mmio", mmu, "ns_per_exit", "uncached", "cached"),
            line("mmio", mmu, "slot_lookups", "uncached", "cached").map(|line| line.at_most(0.0)),
        ]
    };
    MMUS.into_iter().flat_map(of).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn the_counts_hold_at_a_tiny_size() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for mmu in MMUS {
            let value = |name: &str, variant, metric| {
                let case = format!("{name}/{mmu}");
                report.value(NAME, &case, variant, metric).unwrap()
            };
            assert_eq!(value("mmio", "cached", "slot_lookups"), 0.0);
            assert!(value("mmio", "uncached", "slot_lookups") >= 100.0);
            let (off, window) = (
                value("faults", "off", "pf_fixed"),
                value("faults", "window-8", "pf_fixed"),
            );
            assert!(off >= 512.0 && window <= off / 8.0 + 8.0, "{off} {window}");
        }
    }
}
