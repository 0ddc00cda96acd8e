//! Saves a VM while its CPUs write: the saved memory is that of one moment, though no CPU stops.
//!
//! Run it: `cargo run -p slat --example snapshot`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;

use cpu::Cpu;
use plain_memory::{Content, PlainMemory};
use slat::{Config, ENTRIES, Ept, Gpa, Hva, PAGE_SIZE, Region, Vm};

/// Each of the CPUs writes to its own 2 MiB of guest memory.
const CPUS: u64 = 2;
const PAGES: u64 = 512;

/// Returns the address to which CPU `of` makes its write number `n`: in the next page of its memory, and after the last
/// page in the next word of the first.
fn address(of: u64, n: u64) -> Gpa {
    let (page, word) = (n % PAGES, n / PAGES % ENTRIES as u64);
    Gpa((of * PAGES + page) * PAGE_SIZE + word * 8)
}

/// Returns the memory of a CPU after its writes up to number `last`.
fn memory_after(last: u64) -> Vec<Content> {
    let mut pages: Vec<Content> = (0..PAGES).map(|_| Box::new([0; ENTRIES])).collect();
    let all = PAGES * ENTRIES as u64;
    for n in last.saturating_sub(all - 1)..=last {
        pages[(n % PAGES) as usize][(n / PAGES) as usize % ENTRIES] = n;
    }
    pages
}

/// Returns the lines that the program prints.
fn run() -> Result<String, Box<dyn Error>> {
    let memory = CPUS * PAGES;
    let host = Arc::new(PlainMemory::new(memory as usize + 64, memory as usize));
    let vm = Vm::<_, Ept>::new(host.clone(), Config::default())?;
    vm.set_memory_region(0, &Region::new(0, Gpa(0), memory * PAGE_SIZE, Hva(0)))?;
    let written = [const { AtomicU64::new(0) }; CPUS as usize];
    let stopped = AtomicBool::new(false);
    let cpus: Vec<Cpu> = (0..CPUS).map(|_| Cpu::new(&vm)).collect::<Result<_, _>>()?;

    let (saved, mut cpus) = thread::scope(|scope| {
        let run = |((of, mut cpu), written): ((u64, Cpu), &AtomicU64)| {
            let mut n = 0;
            while !stopped.load(Relaxed) {
                cpu.store(address(of, n), n).expect("it has memory");
                n += 1;
                written.store(n, Release);
            }
            cpu
        };
        let running = (0..).zip(cpus).zip(&written);
        let running: Vec<_> = running.map(|cpu| scope.spawn(move || run(cpu))).collect();
        // Both CPUs have written to each of their pages more than once.
        while written.iter().any(|n| n.load(Acquire) < 3 * PAGES) {
            thread::yield_now();
        }
        let snapshot = vm.begin_snapshot();
        let saved = snapshot.map(|snapshot| while snapshot.keep_next(16) > 0 {});
        stopped.store(true, Relaxed);
        let cpus = running
            .into_iter()
            .map(|cpu| cpu.join().expect("it has stopped"));
        (saved, cpus.collect::<Vec<_>>())
    });
    saved?;

    let saved = host.saved();
    let mut last = Vec::new();
    for of in 0..CPUS {
        let own = (of * PAGES..(of + 1) * PAGES).map(|page| saved.get(&page));
        let own: Vec<&Content> = own.collect::<Option<_>>().ok_or("a page is missing")?;
        // The number of the last write that is in the saved memory.
        let words = own.iter().flat_map(|page| page.iter());
        let n = words.copied().max().unwrap_or(0);
        let whole = memory_after(n);
        assert!(own.into_iter().eq(&whole), "not the memory of one moment");
        last.push(n);
    }
    let now = written.map(|n| n.load(Relaxed));
    for ((of, cpu), n) in (0..).zip(&mut cpus).zip(now) {
        assert_eq!(cpu.load(address(of, n - 1))?, n - 1);
    }
    Ok(format!(
        "saved: {} pages, as the CPUs had written them up to numbers {last:?}\nthe CPUs went on, up to numbers {now:?}, with {} faults\n",
        saved.len(),
        cpus.iter().map(|cpu| cpu.stats().pf_taken).sum::<u64>(),
    ))
}

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", run()?);
    Ok(())
}

#[test]
fn the_saved_memory_is_that_of_one_moment() {
    let printed = run().unwrap();
    assert!(printed.starts_with("saved: 1024 pages"), "{printed}");
}
