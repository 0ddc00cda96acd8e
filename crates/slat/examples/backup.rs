//! A backup and a migration follow the writes of one guest at the same time, each with epochs of its own. A write to
//! the backup fails once: nothing is lost, and the migration does not notice.
//!
//! Run it: `cargo run -p slat --example backup`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cpu::Cpu;
use plain_memory::PlainMemory;
use slat::{Config, DirtyRange, Ept, Gpa, Hva, LogReader, PAGE_SIZE, Region, Stop, Vm};

/// 4 MiB of guest memory, at address 0.
const PAGES: u64 = 1024;

/// A copy of the guest's memory: the first word of each page, of which the guest writes no other.
struct Copy {
    words: Vec<u64>,
    /// The number of pages that were copied, and of writes for them.
    pages: u64,
    writes: u64,
}

impl Copy {
    fn new() -> Self {
        Copy {
            words: vec![0; PAGES as usize],
            pages: 0,
            writes: 0,
        }
    }

    /// Copies the pages of `range` from `host`, by their backing addresses, in one write.
    fn write(&mut self, host: &PlainMemory, range: &DirtyRange) {
        let pages = range.gfns.end.0 - range.gfns.start.0;
        for page in 0..pages {
            let backing = range.backing.add_pages(page);
            let word = host
                .resident(backing)
                .map(|frame| host.word(frame.hpa()).load(Relaxed));
            self.words[(range.gfns.start.0 + page) as usize] = word.unwrap_or(0);
        }
        self.pages += pages;
        self.writes += 1;
    }
}

/// Brings `copy` up to date. If `fails`, the second write fails.
fn follow(
    reader: &mut LogReader<PlainMemory, Ept>,
    host: &PlainMemory,
    copy: &mut Copy,
    fails: bool,
) -> Result<(), String> {
    let epoch = reader.begin();
    // Up to 7 clean pages between two dirty ones are written, too: that is cheaper than another write of the disk.
    for (i, range) in epoch.dirty_ranges(8, 256).enumerate() {
        if fails && i == 1 {
            // The epoch is dropped, so its pages are in the next one.
            return Err("the disk is full".into());
        }
        copy.write(host, &range);
    }
    epoch.commit();
    Ok(())
}

/// Writes `value` to pages with the numbers `first`, `first + step`, …
fn write(cpu: &mut Cpu, first: u64, step: usize, value: u64) -> Result<(), Stop> {
    for page in (first..PAGES).step_by(step) {
        cpu.store(Gpa(page * PAGE_SIZE), value)?;
    }
    Ok(())
}

/// Returns the lines that the program prints.
fn run() -> Result<String, Box<dyn Error>> {
    let host = Arc::new(PlainMemory::new(PAGES as usize + 64, PAGES as usize));
    let vm = Vm::<_, Ept>::new(host.clone(), Config::default())?;
    vm.set_memory_region(0, &Region::new(0, Gpa(0), PAGES * PAGE_SIZE, Hva(0)))?;
    let mut cpu = Cpu::new(&vm)?;
    let (mut disk, mut target) = (Copy::new(), Copy::new());

    let mut backup = vm.log_reader()?;
    write(&mut cpu, 0, 5, 1)?;
    follow(&mut backup, &host, &mut disk, false)?;

    // The migration begins later. It has to copy all memory once, and follows the writes from then on.
    let mut migration = vm.log_reader()?;
    target.words.clone_from(&disk.words);
    write(&mut cpu, 0, 100, 2)?;
    let failed = follow(&mut backup, &host, &mut disk, true);
    follow(&mut migration, &host, &mut target, false)?;
    write(&mut cpu, 7, 50, 3)?;
    follow(&mut backup, &host, &mut disk, false)?;
    follow(&mut migration, &host, &mut target, false)?;

    for page in 0..PAGES {
        let word = cpu.load(Gpa(page * PAGE_SIZE))?;
        assert_eq!(disk.words[page as usize], word);
        assert_eq!(target.words[page as usize], word);
    }
    Ok(format!(
        "backup: {} pages in {} writes; once: {}\nmigration: {} pages in {} writes\nthe guest has taken {} faults\n",
        disk.pages,
        disk.writes,
        failed.expect_err("it fails once"),
        target.pages,
        target.writes,
        cpu.stats().pf_taken,
    ))
}

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", run()?);
    Ok(())
}

#[test]
fn both_copies_are_equal_to_the_guests_memory() {
    let printed = run().unwrap();
    assert!(
        printed.starts_with("backup: ") && printed.contains("once: the disk is full"),
        "{printed}"
    );
}
