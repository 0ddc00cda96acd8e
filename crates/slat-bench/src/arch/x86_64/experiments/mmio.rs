//! Measures MMIO: the time that slat needs to find out that an address is in no memslot.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use kvm_ioctls::VcpuExit;

use crate::arch::x86_64::machine::guest::{DATA, DEVICE, PAGE};
use crate::arch::x86_64::machine::{
    Api, Failure, Machine, Memory, Pages, Program, RealKvm, Slot, no_device,
};
use crate::compared::{Line, Rows};
use crate::maps::Maps;
use crate::report::{Report, Sample, Unit};
use crate::rounds::{Bench, fastest};
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "mmio";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "MMIO caching",
    explain: "\
A guest uses a device register in no memslot. To find that out a fault searches the slots; with
mmio_caching an MMIO entry in the page tables records it, valid until the slots change.
exit/tdp/N: doorbell writes with N memslots. ns_per_exit: from one to the next, the way out to the
program and back included. slot_lookups: searches for a slot. guest_pte_reads: entries read of the
guest's own tables. Under two-dimensional paging a vCPU remembers where the last devices are, as
KVM's do; exit/shadow/N: without a second level, the MMIO entry is what is remembered.
rr: request and response: a doorbell, an answer in memory, a status register that is read.
ordinary: faults, TLB misses and calls, no MMIO. Published in 2011: rr +2.5 %, ordinary -0.8 %.
Asked for: cached makes no look-up at all and takes no longer with 32764 slots than with 32; rr is
no slower; ordinary differs by no more than 1 %. Times are the vCPU's processor time.",
    settable: Settable::AllBut(&["mmio_caching"]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const VARIANTS: &[&str] = &["uncached", "cached"];
const SLOTS: &[u32] = &[32, 509, 32764];
/// The number of runs. The result is the shortest time, or the sum of a counter over all runs.
const RUNS: usize = 10;
/// The address of the first small memslot. The small memslots are contiguous.
const SMALL_SLOTS: u64 = 1 << 30;
/// The number of bytes of guest memory that a page map in the report shows, beginning at the device.
const SHOWN: u64 = 64 << 20;
/// The value of the device's status register.
const READY: u32 = 1;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    exits(bench)?;
    request_response(bench)?;
    ordinary(bench)
}

/// Makes a machine with `slots` memslots: the system slot, the memory `data` at [`DATA`], and slots of one page each of
/// the memory `small`.
fn prepare<'m, A: Api>(
    api: &A,
    slots: u32,
    data: &'m Memory,
    small: &'m Memory,
) -> Result<Machine<'m, A>, Failure> {
    let mut machine = Machine::new(api, 1, DATA + data.size() as u64)?;
    machine.set_slot(&Slot::whole(1, DATA, data))?;
    for id in 2..slots {
        let offset = u64::from(id - 2) * PAGE;
        machine.set_slot(&Slot {
            id,
            flags: 0,
            gpa: SMALL_SLOTS + offset,
            memory: small,
            offset,
            size: PAGE,
        })?;
    }
    machine.touch_system()?;
    Ok(machine)
}

fn small_slots() -> Result<Memory, Failure> {
    let most = SLOTS.iter().max().map_or(0, |&slots| slots as usize);
    Ok(Memory::new(most * PAGE as usize, 2 << 20, Pages::Small)?)
}

fn set_caching<A: Api>(machine: &Machine<'_, A>, variant: &str) -> Result<(), Failure> {
    let on = variant == "cached";
    machine.set_policy("mmio_caching", if on { "on" } else { "off" })
}

fn exits(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, times) = (
        bench.size.pick(1, 8, 20),
        bench.size.pick(10, 5_000, 20_000),
    );
    let data = Memory::new(PAGE as usize, PAGE as usize, Pages::Small)?;
    let small = small_slots()?;
    let mut maps = Maps::new(NAME);
    let mut machines = Vec::new();
    for &slots in SLOTS {
        let slat = prepare(&bench.guests.slat, slots, &data, &small)?;
        let kvm = match &bench.guests.kvm {
            Some(kvm) => Some(prepare(kvm, slots, &data, &small)?),
            None => None,
        };
        machines.push((format!("exit/tdp/{slots}"), slat, kvm));
    }
    for &slots in SLOTS {
        let shadow = prepare(&bench.guests.shadow, slots, &data, &small)?;
        machines.push((format!("exit/shadow/{slots}"), shadow, None));
    }
    // Each round measures all numbers of memslots, because the report compares them with one another.
    for round in 0..rounds {
        for (case, slat, kvm) in &mut machines {
            let variants = match (round, &kvm) {
                (0, Some(_)) => bench.guests.with_kvm(VARIANTS),
                _ => VARIANTS.to_vec(),
            };
            bench.in_turns(case, 2, &variants, |_, variant| {
                match kvm.as_mut().filter(|_| variant == RealKvm::NAME) {
                    Some(kvm) => ring(kvm, variant, times / 20 + 1),
                    None => {
                        let samples = ring(slat, variant, times)?;
                        let around = DEVICE..DEVICE + SHOWN;
                        maps.take(case, variant, "used", slat.engine(), around);
                        Ok(samples)
                    }
                }
            })?;
        }
    }
    bench.keep(maps);
    Ok(())
}

fn ring<A: Api>(
    machine: &mut Machine<'_, A>,
    variant: &str,
    times: u64,
) -> Result<Vec<Sample>, Failure> {
    let rung = AtomicU64::new(0);
    let device = |_, exit: VcpuExit<'_>| match exit {
        VcpuExit::MmioWrite(DEVICE, [_, _, _, _]) => {
            rung.fetch_add(1, Relaxed);
            Ok(())
        }
        exit => no_device(0, exit),
    };
    set_caching(machine, variant)?;
    // The first exit installs the MMIO SPTE.
    machine.run(&[Program::doorbell(1)], &device)?;
    let before = machine.engine().map(|engine| engine.stats());
    let time = fastest(RUNS, || {
        Ok(machine.run(&[Program::doorbell(times)], &device)?.cpu)
    })?;
    if rung.into_inner() != RUNS as u64 * times + 1 {
        return Err("a doorbell was not heard".into());
    }
    let nanoseconds = time.as_secs_f64() * 1e9 / times as f64;
    let mut samples = vec![Sample::new("ns_per_exit", Unit::Nanoseconds, nanoseconds)];
    if let (Some(engine), Some(before)) = (machine.engine(), before) {
        let counted = engine.stats().since(&before);
        let lookups = counted.slot_lookups + counted.slot_lookups_saved;
        samples.extend([
            Sample::count("slot_lookups", lookups),
            Sample::count("guest_pte_reads", counted.guest_pte_reads),
        ]);
    }
    Ok(samples)
}

fn request_response(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, times) = (
        bench.size.pick(1, 15, 31),
        bench.size.pick(100, 20_000, 100_000),
    );
    let data = Memory::new(PAGE as usize, PAGE as usize, Pages::Small)?;
    let small = small_slots()?;
    let mut slat = prepare(&bench.guests.slat, 509, &data, &small)?;
    let mut kvm = match &bench.guests.kvm {
        Some(kvm) => Some(prepare(kvm, 509, &data, &small)?),
        None => None,
    };
    let variants = bench.guests.with_kvm(VARIANTS);
    bench.in_turns("rr", rounds, &variants, |_, variant| {
        match kvm.as_mut().filter(|_| variant == RealKvm::NAME) {
            Some(kvm) => converse(kvm, &data, variant, times / 20 + 1),
            None => converse(&mut slat, &data, variant, times),
        }
    })
}

fn converse<A: Api>(
    machine: &mut Machine<'_, A>,
    data: &Memory,
    variant: &str,
    times: u64,
) -> Result<Vec<Sample>, Failure> {
    const STATUS: u64 = DEVICE + 4;
    let response = &data.words()[0];
    let device = |_, exit: VcpuExit<'_>| {
        match exit {
            VcpuExit::MmioWrite(DEVICE, &[a, b, c, d]) => {
                let request = u32::from_le_bytes([a, b, c, d]);
                response.store((!request).into(), SeqCst);
            }
            VcpuExit::MmioRead(STATUS, answer) if answer.len() == 4 => {
                answer.copy_from_slice(&READY.to_le_bytes());
            }
            exit => return no_device(0, exit),
        }
        Ok(())
    };
    set_caching(machine, variant)?;
    machine.run(&[Program::requests(1, DATA)], &device)?;
    let ran = machine.run(&[Program::requests(times, DATA)], &device)?;
    let end = &ran.registers[0];
    if (end.rsi, end.rdi) != (times, times * u64::from(READY)) {
        return Err(format!("{} of {times} responses were right", end.rsi).into());
    }
    let rate = times as f64 / ran.cpu.as_secs_f64();
    Ok(vec![Sample::new(
        "transactions_per_s",
        Unit::PerSecond,
        rate,
    )])
}

fn ordinary(bench: &mut Bench) -> Result<(), Failure> {
    let (rounds, size) = (
        bench.size.pick(1, 41, 81),
        bench.size.pick(1 << 20, 32 << 20, 64 << 20),
    );
    let calls = bench.size.pick(1000, 40_000, 80_000);
    let data = Memory::new(size, 2 << 20, Pages::Small)?;
    data.populate()?;
    let small = small_slots()?;
    let mut machine = prepare(&bench.guests.slat, 32, &data, &small)?;
    let pages = size as u64 / PAGE;
    bench.in_turns("ordinary", rounds, VARIANTS, |_, variant| {
        set_caching(&machine, variant)?;
        let time = fastest(RUNS, || {
            // The memslot has just been created, so each of its pages faults once.
            let slot = Slot::whole(1, DATA, &data);
            machine.set_slot(&Slot { size: 0, ..slot })?;
            machine.set_slot(&slot)?;
            let (touches, _) = Program::rounds(DATA, pages, 3);
            let touched = machine.run(&[touches], &no_device)?;
            let called = machine.run(&[Program::calls(calls).0], &no_device)?;
            Ok(touched.cpu + called.cpu)
        })?;
        Ok(vec![Sample::seconds("seconds", time)])
    })
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    let line = |case, metric| Line::compare(report, NAME, case, metric, "uncached", "cached");
    for case in report.cases(NAME) {
        if let Some((mmu, _)) = case.rsplit_once('/') {
            let first = format!("{mmu}/{}", SLOTS[0]);
            let with_few_slots = report.value(NAME, &first, "cached", "ns_per_exit");
            lines.extend(line(case, "ns_per_exit").map(|line| {
                if case == first {
                    return line;
                }
                // Differences up to one twentieth are noise.
                let (few, many) = ((&*first, "cached"), (case, "cached"));
                let ratio = report.ratio_between(NAME, "ns_per_exit", few, many);
                line.with_limit("32 slots", with_few_slots).goal(
                    "\u{2264} 1.05\u{d7} 32 slots".to_owned(),
                    ratio.is_some_and(|ratio| ratio <= 1.05),
                )
            }));
            lines.extend(line(case, "slot_lookups").map(|line| line.at_most(0.0)));
            let reads = line(case, "guest_pte_reads");
            lines.extend(match mmu {
                "exit/shadow" => reads.map(|line| line.at_most(0.0)),
                _ => reads,
            });
        }
    }
    lines.extend(line("rr", "transactions_per_s").map(|line| line.change_at_least(0.0)));
    lines.extend(line("ordinary", "seconds").map(|line| line.change_within(0.01)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn the_counts_hold_at_a_tiny_size() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for (mmu, slots) in ["tdp", "shadow"]
            .iter()
            .flat_map(|mmu| SLOTS.iter().map(move |n| (mmu, n)))
        {
            let counted = |variant, metric| {
                let case = format!("exit/{mmu}/{slots}");
                report.value(NAME, &case, variant, metric).unwrap()
            };
            assert_eq!(counted("uncached", "slot_lookups"), 100.0);
            assert_eq!(counted("cached", "slot_lookups"), 0.0);
            let reads = counted("cached", "guest_pte_reads");
            assert!(*mmu == "tdp" || reads == 0.0, "{reads}");
        }
        let cases = [
            "exit/tdp/32",
            "exit/tdp/509",
            "exit/tdp/32764",
            "exit/shadow/32",
            "exit/shadow/509",
            "exit/shadow/32764",
            "rr",
            "ordinary",
        ];
        assert_eq!(report.cases(NAME), cases);
    }

    #[test]
    fn a_device_has_an_entry_while_mmio_is_cached() {
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let entries = |variant: &str| -> Vec<u64> {
            let maps = report.maps("mmio").filter(|map| map.variant == variant);
            maps.map(|map| map.cells.iter().map(|cell| cell.mmio).sum())
                .collect()
        };
        assert_eq!(entries("uncached"), [0; 6]);
        assert_eq!(entries("cached"), [1; 6]);
    }
}
