//! Measures what it costs to save the memory of a VM, and to clone it.

mod host;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use slat::{Access, Config, Ept, Gpa, Hva, Level, LogReader, Region, SlotFlags, Stop, Vcpu, Vm};

use crate::bare::{DATA, PAGE};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Failure, Settable};
use host::Host;

const NAME: &str = "snapshot";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "memory that is saved or cloned while the VM runs",
    explain: "\
The engine alone, EPT. The memory is 1 GiB, mapped again and again by pages of 4 KiB or 2 MiB (thp).
pause: how long no vCPU gets a new right to write. full-copy: the VM stands, all is copied.
dirty-log: it stands for the last round of a live copy: the log of the slot, and 4,096 dirty pages.
epoch: a reader of the log begins its next epoch, the VM runs. background: begin_snapshot, likewise.
write: a guest's write to a page, the copy of 4 KiB included if it is saved first: first write, and
the later ones, plain and while a background snapshot is in progress; its content is checked.
differential/N: from N dirty pages among those of 64 GiB to their list, by the log's bitmap, and by
a reader's epoch. No page is copied. clones: 100 (full: 1,000) of a VM with 1 GiB in use, its memory
shared: each is a new VM that faults it in (anew), or made by fork_from (fork). seconds and bytes of
tables for each. Asked for: background in 2 ms at 64 GiB, a first write in 3 us, fork <= anew / 2.",
    settable: Settable::None,
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const FULL_COPY: &str = "full-copy";
const DIRTY_LOG: &str = "dirty-log";
const EPOCH: &str = "epoch";
const BACKGROUND: &str = "background";
const PLAIN: &str = "plain";
const BITMAP: &str = "bitmap";
const ANEW: &str = "anew";
const FORK: &str = "fork";

const PAUSE: &str = "pause_seconds";
const FIRST: &str = "first_write_seconds";
const LATER: &str = "later_write_seconds";
const LIST: &str = "list_seconds";
const MADE: &str = "seconds";
const TABLES: &str = "table_bytes";

const GIB: u64 = 1 << 30;
const SLOT: u32 = 0;
/// The number of dirty pages of the last round of a live copy.
const LAST_ROUND: u64 = 4096;

const SIZES: [(u64, &str); 3] = [(2, "2g"), (16, "16g"), (64, "64g")];
const LEVELS: [(Level, &str); 2] = [(Level::PAGE, "4k"), (Level::MEGA, "thp")];

/// The numbers of dirty pages in the cases `differential`.
const DIRTY: [u64; 3] = [1 << 10, 1 << 14, 1 << 18];

/// A VM with one memslot, and a vCPU that translates in place of a guest's accesses.
struct Machine {
    host: Arc<Host>,
    vm: Arc<Vm<Host, Ept>>,
    vcpu: Vcpu<Host, Ept>,
    size: u64,
}

impl Machine {
    fn new(host: &Arc<Host>, size: u64) -> Result<Self, Failure> {
        let vm = Vm::new(host.clone(), Config::default())?;
        let vcpu = vm.create_vcpu()?;
        let machine = Machine {
            host: host.clone(),
            vm,
            vcpu,
            size,
        };
        machine.log(false)?;
        Ok(machine)
    }

    fn pages(&self) -> u64 {
        self.size / PAGE
    }

    /// Creates the memslot, or begins or ends its dirty log.
    fn log(&self, is_on: bool) -> Result<(), Failure> {
        let flags = match is_on {
            true => SlotFlags::LOG_DIRTY_PAGES,
            false => SlotFlags(0),
        };
        let region = Region::new(SLOT, Gpa(DATA), self.size, Hva(self.host.backing()));
        Ok(self.vm.set_memory_region(0, &region.with_flags(flags))?)
    }

    /// Translates for an access to every `step`th page.
    fn access_every(&mut self, step: u64, access: Access) -> Result<(), Failure> {
        for page in (0..self.pages()).step_by(step as usize) {
            self.access(page, access)?;
        }
        Ok(())
    }

    fn access(&mut self, page: u64, access: Access) -> Result<(), Failure> {
        loop {
            self.vcpu.enter_unguarded(0);
            let done = self.vcpu.translate(Gpa(DATA + page * PAGE), access);
            self.vcpu.leave();
            match done {
                Err(Stop::Retry) => {}
                Err(stop) => return Err(stop.into()),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Begins the dirty log, and makes every `step`th page dirty. Returns a bitmap for the slot.
    fn with_log(&mut self, step: u64) -> Result<Vec<u64>, Failure> {
        let mut bitmap = vec![0u64; self.pages().div_ceil(64) as usize];
        self.log(true)?;
        self.vm.get_dirty_log(0, SLOT, &mut bitmap)?;
        self.access_every(step, Access::Write)?;
        Ok(bitmap)
    }

    /// Makes a reader of the log, and then every `step`th page dirty.
    fn with_reader(&mut self, step: u64) -> Result<LogReader<Host, Ept>, Failure> {
        let mut reader = self.vm.log_reader()?;
        reader.begin().commit();
        self.access_every(step, Access::Write)?;
        Ok(reader)
    }

    /// Writes to the first word of a page as a guest does.
    fn write(&mut self, page: u64, word: u64) -> Result<(), Failure> {
        self.access(page, Access::Write)?;
        self.host.page(page)[0].store(word, Relaxed);
        Ok(())
    }
}

fn run(bench: &mut Bench) -> Result<(), Failure> {
    pauses(bench)?;
    writes(bench)?;
    differential(bench)?;
    clones(bench)
}

fn pauses(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 3, 9);
    let is_full = bench.size == crate::Size::Full;
    for (gib, size_name) in SIZES {
        // In a test, a size is as many times 4 MiB.
        let size = gib * bench.size.pick(4 << 20, GIB, GIB);
        for (level, level_name) in LEVELS {
            let host = Host::new(size, size.min(GIB), level)?;
            let mut machine = Machine::new(&host, size)?;
            let variants = match is_full || gib == SIZES[0].0 {
                true => &[FULL_COPY, DIRTY_LOG, EPOCH, BACKGROUND][..],
                false => &[DIRTY_LOG, EPOCH, BACKGROUND],
            };
            let case = format!("{size_name}/{level_name}");
            bench.in_turns(&case, rounds, variants, |_, variant| {
                let time = pause(&mut machine, variant)?;
                Ok(vec![Sample::seconds(PAUSE, time)])
            })?;
        }
    }
    Ok(())
}

/// Measures the pause of a machine all of whose memory is in use and writable.
fn pause(machine: &mut Machine, variant: &str) -> Result<Duration, Failure> {
    machine.access_every(1, Access::Write)?;
    let pages = machine.pages();
    let step = (pages / LAST_ROUND).max(1);
    match variant {
        FULL_COPY => {
            let began = Instant::now();
            (0..pages).for_each(|page| machine.host.save(page));
            Ok(began.elapsed())
        }
        DIRTY_LOG => {
            let mut bitmap = machine.with_log(step)?;
            let began = Instant::now();
            machine.vm.get_dirty_log(0, SLOT, &mut bitmap)?;
            let mut copied = 0;
            for page in dirty_pages(&bitmap) {
                machine.host.save(page);
                copied += 1;
            }
            let time = began.elapsed();
            machine.log(false)?;
            expect("dirty pages", copied, pages.div_ceil(step))?;
            Ok(time)
        }
        EPOCH => {
            let mut reader = machine.with_reader(step)?;
            let began = Instant::now();
            let epoch = reader.begin();
            let time = began.elapsed();
            expect("dirty pages", epoch.pages(), pages.div_ceil(step))?;
            epoch.commit();
            Ok(time)
        }
        _ => {
            let began = Instant::now();
            let snapshot = machine.vm.begin_snapshot()?;
            let time = began.elapsed();
            expect("pages to save", snapshot.pages_left(), pages)?;
            Ok(time)
        }
    }
}

/// Returns the numbers of the pages whose bit is set.
fn dirty_pages(bitmap: &[u64]) -> impl Iterator<Item = u64> + '_ {
    (0..).zip(bitmap).flat_map(|(index, &word)| {
        let next = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
        let words = std::iter::successors(Some(word).filter(|word| *word != 0), next);
        words.map(move |word| index * 64 + u64::from(word.trailing_zeros()))
    })
}

fn expect(what: &str, found: u64, expected: u64) -> Result<(), Failure> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("{found} {what}, not {expected}").into()),
    }
}

fn writes(bench: &mut Bench) -> Result<(), Failure> {
    let size = bench.size.pick(8 << 20, 256 << 20, GIB);
    let rounds = bench.size.pick(1, 3, 9);
    for (level, name) in LEVELS {
        let host = Host::new(size, size, level)?;
        let mut machine = Machine::new(&host, size)?;
        bench.in_turns(
            &format!("write/{name}"),
            rounds,
            &[PLAIN, BACKGROUND],
            |_, variant| write_all(&mut machine, variant == BACKGROUND),
        )?;
    }
    Ok(())
}

/// Measures writes to all pages, twice. Checks that the pages which were saved have the content from before.
fn write_all(machine: &mut Machine, saves: bool) -> Result<Vec<Sample>, Failure> {
    let pages = machine.pages();
    for page in 0..pages {
        machine.write(page, page)?;
    }
    machine.host.take_kept();
    let snapshot = saves.then(|| machine.vm.begin_snapshot()).transpose()?;
    let mut samples = Vec::new();
    for (metric, add) in [(FIRST, 1), (LATER, 2)] {
        let began = Instant::now();
        for page in 0..pages {
            machine.write(page, page + add)?;
        }
        let time = began.elapsed().as_secs_f64() / pages as f64;
        samples.push(Sample::new(metric, Unit::Seconds, time));
    }
    if let Some(snapshot) = snapshot {
        expect("pages left", snapshot.keep_next(u64::MAX), 0)?;
        expect("pages saved", machine.host.take_kept(), pages)?;
        for page in 0..pages {
            let word = machine.host.saved(page)[0].load(Relaxed);
            expect("is saved of a page", word, page)?;
        }
    }
    Ok(samples)
}

fn differential(bench: &mut Bench) -> Result<(), Failure> {
    let size = bench.size.pick(GIB, 64 * GIB, 64 * GIB);
    let rounds = bench.size.pick(1, 3, 9);
    let host = Host::new(size, GIB, Level::PAGE)?;
    let mut machine = Machine::new(&host, size)?;
    machine.access_every(1, Access::Write)?;
    for dirty in DIRTY {
        let case = format!("differential/{dirty}");
        bench.in_turns(&case, rounds, &[BITMAP, EPOCH], |_, variant| {
            let time = list(&mut machine, dirty, variant)?;
            Ok(vec![Sample::seconds(LIST, time)])
        })?;
    }
    Ok(())
}

/// Measures the way from `dirty` dirty pages to their list.
fn list(machine: &mut Machine, dirty: u64, variant: &str) -> Result<Duration, Failure> {
    let pages = machine.pages();
    let step = (pages / dirty).max(1);
    let (time, listed) = match variant {
        BITMAP => {
            let mut bitmap = machine.with_log(step)?;
            let began = Instant::now();
            machine.vm.get_dirty_log(0, SLOT, &mut bitmap)?;
            let listed = dirty_pages(&bitmap).map(black_box).count() as u64;
            let time = began.elapsed();
            machine.log(false)?;
            (time, listed)
        }
        _ => {
            let mut reader = machine.with_reader(step)?;
            let began = Instant::now();
            let epoch = reader.begin();
            let ranges = epoch.dirty_ranges(1, 0);
            let listed = ranges
                .map(|range| black_box(range).gfns)
                .map(|gfns| gfns.end.0 - gfns.start.0)
                .sum();
            epoch.commit();
            (began.elapsed(), listed)
        }
    };
    expect("pages listed", listed, pages.div_ceil(step))?;
    Ok(time)
}

fn clones(bench: &mut Bench) -> Result<(), Failure> {
    let size = bench.size.pick(16 << 20, GIB, GIB);
    let count = bench.size.pick(3, 100, 1000);
    let rounds = bench.size.pick(1, 3, 5);
    for (level, name) in LEVELS {
        let host = Host::new(size, size, level)?;
        let mut parent = Machine::new(&host, size)?;
        parent.access_every(1, Access::Write)?;
        // As many clones as fit into 1 GiB of tables exist at a time.
        let together = bench.size.pick(3, 256, 256);
        let case = format!("clones/{name}");
        bench.in_turns(&case, rounds, &[ANEW, FORK], |_, variant| {
            let (mut time, mut table_bytes) = (Duration::ZERO, 0);
            let mut made = Vec::new();
            for _ in 0..count {
                let began = Instant::now();
                let vm = match variant {
                    FORK => Arc::new(Vm::fork_from(&parent.vm)?),
                    _ => {
                        let mut machine = Machine::new(&host, size)?;
                        machine.access_every(level.pages(), Access::Read)?;
                        machine.vm
                    }
                };
                time += began.elapsed();
                let usage = vm.memory_usage();
                expect("bytes are mapped", usage.mapped_bytes(), size)?;
                table_bytes += usage.table_bytes;
                made.push(vm);
                if made.len() == together {
                    made.clear();
                }
            }
            Ok(vec![
                Sample::seconds(MADE, time / count),
                Sample::count(TABLES, table_bytes / u64::from(count)),
            ])
        })?;
    }
    Ok(())
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for case in report.cases(NAME) {
        let line = |metric, before, after| Line::compare(report, NAME, case, metric, before, after);
        lines.extend(Line::of(report, NAME, case, PAUSE, FULL_COPY));
        lines.extend(line(PAUSE, DIRTY_LOG, EPOCH));
        let background = line(PAUSE, DIRTY_LOG, BACKGROUND);
        lines.extend(background.map(|line| match case.starts_with("64g") {
            true => line.at_most(2e-3),
            false => line,
        }));
        lines.extend(line(FIRST, PLAIN, BACKGROUND).map(|line| line.at_most(3e-6)));
        lines.extend(line(LATER, PLAIN, BACKGROUND));
        lines.extend(line(LIST, BITMAP, EPOCH));
        lines.extend(line(MADE, ANEW, FORK).map(|line| line.change_at_most(-0.5)));
        lines.extend(line(TABLES, ANEW, FORK));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn every_case_saves_and_lists_what_it_should() {
        // `run` itself checks the results.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let lines = compare(&report);
        for metric in [PAUSE, FIRST, LATER, LIST, MADE, TABLES] {
            assert!(lines.iter().any(|line| line.metric == metric), "{metric}");
        }
    }

    #[test]
    fn a_page_whose_bit_is_set_is_dirty() {
        let bitmap = [1 << 63 | 0b101, 0, 1];
        assert_eq!(dirty_pages(&bitmap).collect::<Vec<_>>(), [0, 2, 63, 128]);
    }
}
