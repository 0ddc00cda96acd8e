//! Compares three methods to detect writes: write protection, the dirty bits of leaves, and the buffers that walkers
//! fill.

use std::time::Duration;

use super::{NAME, NS_PER_PAGE, logged, pages, write};
use crate::arch::x86_64::machine::guest::DATA;
use crate::arch::x86_64::machine::{
    Failure, Machine, Memory, Program, Slat, no_device, thread_time,
};
use crate::compared::Line;
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;

/// The values of the policy `dirty_log`.
const PROTECT: &str = "write-protect";
const BITS: &str = "dirty-bit";
const BUFFER: &str = "buffer";

const NS: &str = "ns";

/// The number of pages that the guest writes before `KVM_GET_DIRTY_LOG` in the phase `Few`.
const FEW: u64 = 16;

#[derive(Clone, Copy)]
enum Case {
    /// The time of `KVM_GET_DIRTY_LOG` after the guest has written [`FEW`] pages.
    Few,
    /// The time of `KVM_GET_DIRTY_LOG` after the guest has written all pages.
    All,
    /// The time in which the guest writes to all pages again.
    Write,
}

const CASES: [(Case, &str, &str); 3] = [
    (Case::Few, "harvest-few", NS),
    (Case::All, "harvest-all", NS_PER_PAGE),
    (Case::Write, "write", NS_PER_PAGE),
];

pub(super) fn run(bench: &mut Bench, memory: &Memory, rounds: usize) -> Result<(), Failure> {
    for (case, name, metric) in CASES {
        let methods = [PROTECT, BITS, BUFFER];
        bench.in_turns(name, rounds, &methods, |bench, method| {
            let time = measure(&bench.guests.slat, memory, method, case)?;
            let parts = match case {
                Case::Few => 1,
                Case::All | Case::Write => pages(memory),
            };
            let ns = time.as_secs_f64() * 1e9 / parts as f64;
            Ok(vec![Sample::new(metric, Unit::Nanoseconds, ns)])
        })?;
    }
    Ok(())
}

fn measure(slat: &Slat, memory: &Memory, method: &str, case: Case) -> Result<Duration, Failure> {
    let mut machine = Machine::new(slat, 1, DATA + memory.size() as u64)?;
    machine.set_policy("dirty_log", method)?;
    machine.touch_system()?;
    machine.set_slot(&logged(memory))?;
    write(&mut machine, memory)?;
    harvest(&machine, memory, pages(memory))?;
    Ok(match case {
        Case::Few => {
            let program = Program::write(DATA, FEW.min(pages(memory)), 2);
            machine.run(&[program], &no_device)?;
            harvest(&machine, memory, FEW.min(pages(memory)))?
        }
        Case::All => {
            write(&mut machine, memory)?;
            harvest(&machine, memory, pages(memory))?
        }
        Case::Write => {
            let time = write(&mut machine, memory)?;
            harvest(&machine, memory, pages(memory))?;
            time
        }
    })
}

/// Reads the log, and checks that exactly the first `expected` pages are dirty. Returns the time that reading the log
/// takes.
fn harvest(
    machine: &Machine<'_, Slat>,
    memory: &Memory,
    expected: u64,
) -> Result<Duration, Failure> {
    let began = thread_time();
    let bitmap = machine.vm().get_dirty_log(1, memory.size())?;
    let time = thread_time() - began;
    let last = bitmap.iter().rposition(|word| *word != 0);
    let told: u64 = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
    match told == expected && last == Some((expected as usize - 1) / 64) {
        true => Ok(time),
        false => Err(format!("{told} pages were told, not {expected}, or others").into()),
    }
}

pub(super) fn compare(report: &Report) -> impl Iterator<Item = Line> {
    let pairs = [(PROTECT, BUFFER), (BITS, BUFFER)];
    CASES.iter().flat_map(move |(_, case, metric)| {
        let line = move |(before, after)| Line::compare(report, NAME, case, metric, before, after);
        pairs.into_iter().filter_map(line)
    })
}

#[cfg(test)]
pub(super) fn check(report: &Report) {
    for (_, case, metric) in CASES {
        for method in [PROTECT, BITS, BUFFER] {
            assert!(report.value(NAME, case, method, metric).unwrap() > 0.0);
        }
    }
}
