//! Measures the faults of one vCPU, and of two vCPUs at the same time.

use std::sync::{Barrier, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use slat::{Access, Ept, Gpa, Vcpu};

use crate::Failure;
use crate::bare::{self, Bare, PAGE};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;
use crate::rounds::thread_time;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "faults";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "second-level faults of several vCPUs against one lock around each fault",
    explain: "\
vCPUs write to pages that are not mapped; each write is a fault that finds the slot, asks the host
for the page and installs a leaf of 4 KiB. The engine alone is measured: the pages are resident,
no guest instruction is interpreted, nothing is prefetched.
1: one thread. 2/disjoint: two threads, each in a half of the range of its own, which share no
last table. 2/same-table: two threads take turns in the pages of every table.
slat: as it is: faults take the lock of the one table into which they install. global-lock: the same
faults inside one spin lock for the VM, as KVM's mmu_lock was before the TDP MMU.
A sample counts only if no other program took a processor away and both threads ran at once; it is
taken again otherwise, a number of times.
limit: what two threads could do at best, twice the rate of one.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const RATE: &str = "faults_per_s";
const SLAT: &str = "slat";
const GLOBAL_LOCK: &str = "global-lock";

/// The name of each case, its number of threads, and whether the threads' faults are in the same tables.
const CASES: [(&str, u64, bool); 3] = [
    ("1", 1, false),
    ("2/disjoint", 2, false),
    ("2/same-table", 2, true),
];

const FIRST: u64 = 1 << 30;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let pages = bench.size.pick(1 << 10, 1 << 16, 1 << 20);
    let tries = bench.size.pick(1, 20, 50);
    let mut disturbed = false;
    for (case, threads, same_table) in CASES {
        let rounds = bench.size.pick(1, 7, 15);
        bench.in_turns(case, rounds, &[GLOBAL_LOCK, SLAT], |_, variant| {
            let lock = Mutex::new(());
            let lock = (variant == GLOBAL_LOCK).then_some(&lock);
            let (mut rate, mut quiet) = (0.0, false);
            for _ in 0..tries {
                (rate, quiet) = faults(threads, same_table, pages, lock)?;
                if quiet {
                    break;
                }
            }
            disturbed |= !quiet;
            Ok(vec![Sample::new(RATE, Unit::PerSecond, rate)])
        })?;
    }
    if disturbed {
        bench.note(format!(
            "{NAME}: other programs ran on these processors; some samples are disturbed."
        ));
    }
    Ok(())
}

/// Measures how many faults per second all threads together take. Also returns whether the threads ran without
/// disturbance by other programs.
fn faults(
    threads: u64,
    same_table: bool,
    pages: u64,
    lock: Option<&Mutex<()>>,
) -> Result<(f64, bool), Failure> {
    let vm = bare::vm();
    vm.set_memory_region(0, &bare::region(0, FIRST, pages, FIRST))?;
    let start = Barrier::new(threads as usize);
    let ran = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let mut vcpu = vm.create_vcpu()?;
                let start = &start;
                Ok(scope.spawn(move || {
                    let share = pages / threads;
                    let (first, step) = match same_table {
                        true => (thread, threads as usize),
                        false => (thread * share, 1),
                    };
                    let mine = (first..pages).step_by(step).take(share as usize);
                    start.wait();
                    write(&mut vcpu, mine, lock)
                }))
            })
            .collect::<Result<_, slat::OutOfMemory>>()?;
        threads
            .into_iter()
            .map(|thread| thread.join().expect("faults do not panic"))
            .collect::<Result<Vec<_>, Failure>>()
    })?;
    let counted = vm.stats();
    if (counted.pf_fixed, counted.pages_4k) != (pages, pages) {
        let (faults, leaves) = (counted.pf_fixed, counted.pages_4k);
        return Err(format!("{faults} faults made {leaves} leaves for {pages} pages").into());
    }
    let began = ran.iter().map(|ran| ran.began).min();
    let ended = ran.iter().map(|ran| ran.began + ran.wall).max();
    let wall = ended.zip(began).map_or(Duration::ZERO, |(e, b)| e - b);
    // The vCPU threads never sleep. So if the wall time exceeds the processor time, other programs have used the
    // processors.
    let undisturbed = |ran: &Ran| ran.wall <= ran.cpu.mul_f64(1.05);
    let together = ran.iter().all(|ran| wall <= ran.wall.mul_f64(1.05));
    let rate = pages as f64 / wall.as_secs_f64();
    Ok((rate, together && ran.iter().all(undisturbed)))
}

struct Ran {
    began: Instant,
    wall: Duration,
    cpu: Duration,
}

fn write(
    vcpu: &mut Vcpu<Bare, Ept>,
    pages: impl Iterator<Item = u64>,
    lock: Option<&Mutex<()>>,
) -> Result<Ran, Failure> {
    let (began, cpu) = (Instant::now(), thread_time());
    vcpu.enter_unguarded(0);
    for page in pages {
        let _held = lock.map(spin);
        vcpu.translate(Gpa(FIRST + page * PAGE), Access::Write)?;
    }
    vcpu.leave();
    Ok(Ran {
        began,
        wall: began.elapsed(),
        cpu: thread_time() - cpu,
    })
}

fn spin(lock: &Mutex<()>) -> MutexGuard<'_, ()> {
    loop {
        match lock.try_lock() {
            Ok(guard) => return guard,
            Err(_) => std::hint::spin_loop(),
        }
    }
}

fn compare(report: &Report) -> Vec<Line> {
    let one = report.value(NAME, CASES[0].0, SLAT, RATE);
    CASES
        .iter()
        .filter_map(|(case, threads, _)| {
            let limit = one
                .filter(|_| *threads > 1)
                .map(|one| one * *threads as f64);
            Line::compare(report, NAME, case, RATE, GLOBAL_LOCK, SLAT)
                .map(|line| line.with_limit("2\u{d7} one", limit))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn every_page_is_one_fault_with_and_without_a_global_lock() {
        // `run` itself checks the counters.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for (case, ..) in CASES {
            for variant in [SLAT, GLOBAL_LOCK] {
                assert!(report.value(NAME, case, variant, RATE).unwrap() > 0.0);
            }
        }
    }
}
