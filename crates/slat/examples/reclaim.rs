//! A host with less memory than its guest has. The host reclaims the pages that the guest has not used for some time,
//! which it gets from [`Vm::cold_ranges`]. The guest gets a page back when it uses the page again.
//!
//! The guest runs in steps between two passes of the host, so that each run of this program prints the same. Nothing
//! depends on that: vCPUs may run on threads of their own. Run it: `cargo run -p slat --example reclaim`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;

use std::error::Error;
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::*;

use cpu::Cpu;
use plain_memory::{Content, PlainMemory};
use slat::{ColdMap, Config, ENTRIES, Ept, Gpa, Hpa, Hva, PAGE_SIZE, Pfn, Region, Stop, Vm};

/// 16 MiB of guest memory, in slot 0, at address 0; the host has 8 MiB, of which some are page tables.
const PAGES: u64 = 4096;
const FRAMES: usize = 2048;

/// The guest's program has `PHASES` phases, and in each it uses other memory. Most of its `ACCESSES` accesses in a
/// phase are to the `WORKING_SET` pages of that phase.
const PHASES: u64 = 12;
const WORKING_SET: u64 = 1024;
const ACCESSES: u64 = 20_000;

/// Memory that was not used in this number of passes is reclaimed.
const PASSES: u8 = 2;

/// A guest program that writes pseudo-random numbers (Marsaglia's xorshift). The program checks that the first word of
/// each page has the value that was last written to this word.
struct Guest {
    random: u64,
    written: Vec<u64>,
}

impl Guest {
    fn step(&mut self, cpu: &mut Cpu, working_set: &Range<u64>) -> Result<(), Stop> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let somewhere = self.random >> 16;
        let page = match self.random % 512 {
            0 => somewhere % working_set.end,
            _ => working_set.start + somewhere % (working_set.end - working_set.start),
        };
        let gpa = Gpa(page * PAGE_SIZE);
        assert_eq!(cpu.load(gpa)?, self.written[page as usize], "page {page}");
        self.written[page as usize] = self.random;
        cpu.store(gpa, self.random)
    }
}

/// Reclaims the pages that `backing` backs. Returns their number.
fn reclaim(vm: &Vm<PlainMemory, Ept>, backing: Range<Hva>) -> u64 {
    let host = vm.platform();
    let pages = backing.start.0 / PAGE_SIZE..backing.end.0 / PAGE_SIZE;
    // From here until `invalidation` is dropped, no CPU uses the pages, and no fault maps them.
    let invalidation = vm.invalidate(backing);
    for page in pages.clone() {
        let owner = host
            .owner(Hva(page * PAGE_SIZE))
            .expect("it is guest memory");
        let frame = Pfn(owner.load(Acquire));
        let word = |n| host.word(Hpa(frame.hpa().0 + 8 * n as u64)).load(Relaxed);
        let content: Content = Box::new(std::array::from_fn::<_, ENTRIES, _>(word));
        let mut swapped = host.swapped.lock().unwrap_or_else(PoisonError::into_inner);
        swapped.insert(page, content);
        owner.store(0, Release);
        host.free(frame);
    }
    drop(invalidation);
    pages.end - pages.start
}

/// Makes a pass, and reclaims the memory that the guest has not used in the last `passes` passes. Returns the number of
/// pages.
fn reclaim_cold(vm: &Vm<PlainMemory, Ept>, map: &mut ColdMap, passes: u8) -> u64 {
    let cold = vm.cold_ranges(map, passes);
    cold.map(|range| reclaim(vm, range.hvas)).sum()
}

/// Runs a guest. If `reclaims`, the host reclaims unused memory.
fn run(out: &mut impl Write, reclaims: bool) -> Result<(), Box<dyn Error>> {
    let host = Arc::new(PlainMemory::new(FRAMES, PAGES as usize));
    let vm = Vm::<_, Ept>::new(host.clone(), Config::default())?;
    vm.set_memory_region(0, &Region::new(0, Gpa(0), PAGES * PAGE_SIZE, Hva(0)))?;
    let mut cpu = Cpu::new(&vm)?;
    let mut map = ColdMap::new(Hva(0)..Hva(PAGES * PAGE_SIZE))?;
    let mut guest = Guest {
        random: 42,
        written: vec![0; PAGES as usize],
    };
    let swapped = || {
        host.swapped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len() as u64
    };
    let step = (PAGES - WORKING_SET) / (PHASES - 1);
    for phase in 0..PHASES {
        let (before, faults) = (swapped(), cpu.stats().pf_taken);
        let working_set = phase * step..phase * step + WORKING_SET;
        for _ in 0..ACCESSES {
            guest.step(&mut cpu, &working_set)?;
        }
        let (back, faults) = (before - swapped(), cpu.stats().pf_taken - faults);
        let taken = match reclaims {
            true => reclaim_cold(&vm, &mut map, PASSES),
            false => 0,
        };
        let mapped = vm.memory_usage().pages_4k;
        writeln!(
            out,
            "phase {phase}: {faults} faults, {back} pages came back; {taken} were taken, {mapped} are mapped"
        )?;
    }
    for (page, expected) in (0..PAGES).zip(&guest.written) {
        // The host has too few frames for all of these pages at once.
        if page % 256 == 0 {
            reclaim_cold(&vm, &mut map, 1);
        }
        assert_eq!(cpu.load(Gpa(page * PAGE_SIZE))?, *expected, "page {page}");
    }
    writeln!(
        out,
        "the guest has {PAGES} pages as it left them, in {FRAMES} frames"
    )?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = String::new();
    let result = run(&mut out, true);
    print!("{out}");
    result
}

#[test]
fn the_readme_shows_what_it_prints() {
    let mut out = String::new();
    run(&mut out, true).unwrap();
    assert!(include_str!("../README.md").contains(&out), "{out}");
}

#[test]
fn without_reclaim_the_host_has_too_little_memory() {
    let error = run(&mut String::new(), false).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
}
