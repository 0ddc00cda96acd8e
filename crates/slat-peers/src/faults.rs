//! Measures the faults of one vCPU, and of two vCPUs at the same time. Each vCPU writes to pages that are not mapped.
//! Leaves have 4 KiB, and there is no prefetch. No other crate handles faults, so only slat is measured.
//!
//! * `1`, `2`: the number of threads. Two threads write to different halves of the range, which share no level 1 table.
//! * `1-same-table`, `2-same-table`: each of two threads writes every other page, so that both use every level 1 table;
//!   a single thread writes every page.
//!
//! The time is the wall time from the first thread's start to the last thread's end. A sample is measured again if
//! another program took a processor away from a thread, or if the threads did not run at the same time. The former is
//! assumed if the wall time is 5 % longer than the processor time, because a fault here never sleeps. Samples are no
//! longer repeated when [`LONGEST`] has passed.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use slat::format::{Npt, Stage2, Sv48x4};
use slat::{Access, Ept, Format, Gpa, Level, SlotFlags, Vcpu};
use slat::{Prefetch, Setting};

use crate::machine::{Machine, region, vm};
use crate::report::{Metric, Samples, thread_ns};
use crate::tables::BASE;

const PAGES: u64 = 1 << 16;
/// The time for which samples are repeated. It is enough for a hundred samples, or for a few samples if arm64 code is
/// emulated.
const LONGEST: Duration = Duration::from_secs(2);

/// The measurement of faults.
pub struct Faults;

impl Faults {
    pub fn new() -> Self {
        Faults
    }

    pub fn round(&mut self, samples: &mut Samples) {
        if !samples.wants("faults", "") {
            return;
        }
        format::<Ept>("slat-ept", samples);
        format::<Npt>("slat-npt", samples);
        format::<Stage2<48>>("slat-aarch64", samples);
        format::<Sv48x4>("slat-riscv", samples);
    }
}

fn format<F: Format>(name: &str, samples: &mut Samples) {
    for (case, threads, same_table) in [
        ("1", 1, false),
        ("2", 2, false),
        ("1-same-table", 1, true),
        ("2-same-table", 2, true),
    ] {
        let begin = Instant::now();
        let mut sample = faults_per_s::<F>(threads, same_table);
        while !sample.1 && begin.elapsed() < LONGEST {
            sample = faults_per_s::<F>(threads, same_table);
        }
        let (per_s, _) = sample;
        samples.add("faults", case, name, Metric::FaultsPerS, per_s);
    }
}

/// Returns the number of faults per second, and whether the threads ran without disturbance by other programs.
fn faults_per_s<F: Format>(threads: u64, same_table: bool) -> (f64, bool) {
    let vm = vm::<F>(Level::PAGE);
    vm.set_policy(Setting::Prefetch(Prefetch::Off));
    vm.set_memory_region(0, &region(0, SlotFlags(0), BASE, PAGES))
        .expect("a valid memslot");
    let barrier = Barrier::new(threads as usize);
    let times: Vec<(Instant, Instant, bool)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let mut vcpu = vm.create_vcpu().expect("memory for a vCPU");
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let (begin, cpu) = (Instant::now(), thread_ns());
                    vcpu.enter_unguarded(0);
                    if same_table {
                        write_all(&mut vcpu, (thread..PAGES).step_by(threads as usize));
                    } else {
                        let share = PAGES / threads;
                        write_all(&mut vcpu, thread * share..(thread + 1) * share);
                    }
                    vcpu.leave();
                    let (end, cpu) = (Instant::now(), thread_ns() - cpu);
                    let quiet = (end - begin).as_nanos() as f64 <= 1.05 * cpu as f64;
                    (begin, end, quiet)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("faults do not fail"))
            .collect()
    });
    assert_eq!(vm.stats().pages_4k, PAGES);
    let begin = times.iter().map(|(begin, ..)| *begin).min();
    let end = times.iter().map(|(_, end, _)| *end).max();
    let longest = times.iter().map(|(begin, end, _)| *end - *begin).max();
    let (Some(begin), Some(end)) = (begin, end) else {
        unreachable!("there is a thread")
    };
    let wall = end - begin;
    let together = longest.is_some_and(|longest| wall <= longest.mul_f64(1.05));
    let quiet = together && times.iter().all(|(.., quiet)| *quiet);
    (PAGES as f64 / wall.as_secs_f64(), quiet)
}

fn write_all<F: Format>(vcpu: &mut Vcpu<Machine, F>, pages: impl Iterator<Item = u64>) {
    for page in pages {
        let gpa = Gpa(BASE + (page << 12));
        vcpu.translate(gpa, Access::Write).expect("memory is there");
    }
}
