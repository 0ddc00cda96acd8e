//! A guest that is copied to another host while it runs, by its dirty log. It is stopped only while the
//! last pages are copied.
//!
//! The guest runs in steps between the copied pages, so that each run of this program prints the same. Nothing depends
//! on that: vCPUs may run on threads of their own. Run it: `cargo run -p slat --example migration`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;

use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cpu::Cpu;
use plain_memory::PlainMemory;
use slat::{
    Config, Ept, Gpa, Hpa, Hva, PAGE_SIZE, Region, RegionError, ResolveError, SlotFlags, Stop, Vm,
};

/// 16 MiB of guest memory, in slot 0, at address 0.
const PAGES: u64 = 4096;
const SLOT: u32 = 0;
/// The guest is stopped when a round has copied no more pages than `FEW_PAGES`, or after `MOST_ROUNDS` rounds.
const FEW_PAGES: usize = 32;
const MOST_ROUNDS: usize = 10;

/// A host with one VM.
struct Machine {
    host: Arc<PlainMemory>,
    vm: Arc<Vm<PlainMemory, Ept>>,
    cpu: Cpu,
}

impl Machine {
    fn new() -> Result<Self, Box<dyn Error>> {
        let host = Arc::new(PlainMemory::new(PAGES as usize + 64, PAGES as usize));
        let vm = Vm::new(host.clone(), Config::default())?;
        let cpu = Cpu::new(&vm)?;
        let machine = Machine { host, vm, cpu };
        machine.set_flags(SlotFlags::default())?;
        Ok(machine)
    }

    /// Creates the memslot, or changes its flags.
    fn set_flags(&self, flags: SlotFlags) -> Result<(), RegionError> {
        let region = Region::new(SLOT, Gpa(0), PAGES * PAGE_SIZE, Hva(0)).with_flags(flags);
        self.vm.set_memory_region(0, &region)
    }
}

/// A guest program that writes pseudo-random numbers (Marsaglia's xorshift): usually to a few pages, sometimes to any
/// page.
struct Guest(u64);

impl Guest {
    fn step(&mut self, cpu: &mut Cpu) -> Result<(), Stop> {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let pages = if self.0.is_multiple_of(8) { PAGES } else { 16 };
        let page = (self.0 >> 8) % pages;
        let word = (self.0 >> 32) % (PAGE_SIZE / 8);
        cpu.store(Gpa(page * PAGE_SIZE + word * 8), self.0)
    }
}

/// Copies a page by its backing address, not through a vCPU, as a VMM does that sends a page. Pages that were never
/// used are zero on both hosts, so they are not copied.
fn copy(page: u64, from: &PlainMemory, to: &PlainMemory) -> Result<(), ResolveError> {
    let at = Hva(page * PAGE_SIZE);
    if let Some(source) = from.resident(at) {
        let target = to.make_resident(at)?;
        for offset in (0..PAGE_SIZE).step_by(8) {
            let word = from.word(Hpa(source.hpa().0 + offset)).load(Relaxed);
            let address = Hpa(target.hpa().0 + offset);
            to.word(address).store(word, Relaxed);
        }
    }
    Ok(())
}

/// Gets the dirty log and copies the pages that it names. Calls `meanwhile` after each page. Returns the number of
/// pages.
fn round(
    source: &mut Machine,
    target: &Machine,
    mut meanwhile: impl FnMut(&mut Cpu) -> Result<(), Stop>,
) -> Result<usize, Box<dyn Error>> {
    let mut log = vec![0; source.vm.dirty_log_words(0, SLOT)?];
    source.vm.get_dirty_log(0, SLOT, &mut log)?;
    let mut copied = 0;
    for (first, word) in (0..PAGES).step_by(64).zip(log) {
        // The log is cleared *before* the pages are copied: a write during the copy is in the next round.
        source.vm.clear_dirty_log(0, SLOT, first, 64, &[word])?;
        for page in (first..first + 64).filter(|page| word >> (page % 64) & 1 != 0) {
            copy(page, &source.host, &target.host).map_err(|error| error.to_string())?;
            meanwhile(&mut source.cpu)?;
            copied += 1;
        }
    }
    Ok(copied)
}

/// Compares the guest's memory as both of its CPUs see it; returns the number of bytes, or the first that differs.
fn compare(source: &mut Machine, target: &mut Machine) -> Result<Result<u64, Gpa>, Stop> {
    for gpa in (0..PAGES * PAGE_SIZE).step_by(8).map(Gpa) {
        if source.cpu.load(gpa)? != target.cpu.load(gpa)? {
            return Ok(Err(gpa));
        }
    }
    Ok(Ok(PAGES * PAGE_SIZE))
}

/// Runs a guest on one machine and moves it to another.
fn migrate(
    out: &mut impl Write,
    with_last_round: bool,
) -> Result<Result<u64, Gpa>, Box<dyn Error>> {
    let (mut source, mut target) = (Machine::new()?, Machine::new()?);
    let mut guest = Guest(42);
    for _ in 0..20_000 {
        guest.step(&mut source.cpu)?;
    }

    // With manual protection, getting the log changes nothing, and clearing it protects the pages. With "initially
    // set", the new log names every page.
    source.vm.set_manual_dirty_log(true, true);
    source.set_flags(SlotFlags::LOG_DIRTY_PAGES)?;
    let before = source.cpu.stats();
    for number in 1..=MOST_ROUNDS {
        let copied = round(&mut source, &target, |cpu| guest.step(cpu))?;
        writeln!(out, "round {number}: {copied} pages, while the guest ran")?;
        if copied <= FEW_PAGES {
            break;
        }
    }
    if with_last_round {
        let downtime = round(&mut source, &target, |_| Ok(()))?;
        writeln!(out, "the guest is stopped for {downtime} pages")?;
    }
    let faults = source.cpu.stats().since(&before).pf_taken;
    writeln!(out, "the log has cost {faults} faults")?;
    let compared = compare(&mut source, &mut target)?;
    if let Ok(bytes) = compared {
        writeln!(out, "{bytes} bytes are equal on both hosts")?;
    }
    Ok(compared)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = String::new();
    let compared = migrate(&mut out, true)?;
    print!("{out}");
    compared.map_err(|gpa| format!("the guest differs at {gpa}"))?;
    Ok(())
}

#[test]
fn the_readme_shows_what_it_prints() {
    let mut out = String::new();
    assert_eq!(migrate(&mut out, true).unwrap(), Ok(PAGES * PAGE_SIZE));
    assert!(include_str!("../README.md").contains(&out), "{out}");
}

#[test]
fn without_the_last_round_the_guest_differs() {
    assert!(migrate(&mut String::new(), false).unwrap().is_err());
}
