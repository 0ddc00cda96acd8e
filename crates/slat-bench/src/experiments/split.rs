//! Huge leaves that are split for the dirty log before the guest writes to them.

use std::hint::black_box;
use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
};
use slat::Stats;

use crate::compared::{Line, Rows};
use crate::machine::guest::{DATA, PAGE};
use crate::machine::{Failure, Machine, Memory, Program, Slat, Slot, no_device, thread_time};
use crate::maps::Maps;
use crate::report::{Report, Sample};
use crate::rounds::Bench;
use crate::{Experiment, Settable};

const NAME: &str = "split";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "huge leaves split for the dirty log",
    explain: "\
The dirty log knows pages of 4 KiB, so the huge leaves of a slot that is logged are split: all when
logging is enabled (enable), or by the call that clears the log, where that protects pages anew
(clear: average of two, the guest writes to all pages before each). split: that call with no page.
4k, thp, 1g: the guest has written to all memory, which is mapped by leaves of 4 KiB (it was split
before), 2 MiB, 1 GiB. One GiB, repeated, backs the whole slot: that saves memory.
full-walk: looks at every entry of the range. skip-last-level: passes over tables of 4 KiB entries,
in which nothing can be split (published for arm64). default: passes over what holds no huge leaf.
from-above: default, and the pages are protected by the entries above their tables (policy
hierarchical_protect; in the other rows it is off): each table when the first write comes to it.
limit_seconds: the bytes of the new tables, written one after the other. Frames are resident.",
    settable: Settable::AllBut(&[
        "prefetch",
        "split_walk",
        "huge_pages",
        "hierarchical_protect",
    ]),
    run,
    compare,
    rows: Rows::Metrics,
};

const SECONDS: &str = "seconds";
const ENTRIES_VISITED: &str = "entries_visited";
const LIMIT: &str = "limit_seconds";

/// The variants: values of the policy `split_walk`, and one value of another policy.
const FULL_WALK: &str = "full-walk";
const SKIP: &str = "skip-last-level";
const DEFAULT: &str = "default";
/// The variant with the value `default` of `split_walk`, and with the policy `hierarchical_protect`.
const FROM_ABOVE: &str = "from-above";
const VARIANTS: [&str; 4] = [FULL_WALK, SKIP, DEFAULT, FROM_ABOVE];

/// The call that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Enable,
    Clear,
    Split,
}

/// The leaves that map the memslot before the call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mapped {
    Small,
    Mega,
    Giga,
}

const CALLS: [(Call, &str); 3] = [
    (Call::Enable, "enable"),
    (Call::Clear, "clear"),
    (Call::Split, "split"),
];
const STATES: [(Mapped, &str); 3] = [
    (Mapped::Small, "4k"),
    (Mapped::Mega, "thp"),
    (Mapped::Giga, "1g"),
];

const MEGA: u64 = 2 << 20;
const GIGA: u64 = 1 << 30;

/// A memslot to be split, and its backing.
struct Subject {
    mapped: Mapped,
    size: u64,
    memory: Memory,
}

impl Subject {
    fn new(mapped: Mapped, size: u64) -> Result<Self, Failure> {
        // The memory is one GiB, mapped repeatedly. To make the largest leaf 2 MiB, the backing must be misaligned with
        // the guest's GiB by 2 MiB.
        let piece = size.min(GIGA) as usize;
        let spare = if mapped == Mapped::Mega { piece } else { 0 };
        Ok(Subject {
            mapped,
            size,
            memory: Memory::aliased(size as usize + spare, piece, GIGA as usize)?,
        })
    }

    fn slot(&self, flags: u32) -> Slot<'_> {
        Slot {
            id: 1,
            flags,
            gpa: DATA,
            memory: &self.memory,
            offset: if self.mapped == Mapped::Mega { MEGA } else { 0 },
            size: self.size,
        }
    }

    fn pages(&self) -> u64 {
        self.size / PAGE
    }

    /// Returns a bitmap without any page.
    fn no_page(&self) -> Vec<u64> {
        vec![0; self.pages().div_ceil(64) as usize]
    }

    /// Returns the number of leaves of 4 KiB, 2 MiB, 1 GiB before the call.
    fn leaves(&self) -> [u64; 3] {
        match self.mapped {
            Mapped::Small => [self.pages(), 0, 0],
            Mapped::Mega => [0, self.size / MEGA, 0],
            Mapped::Giga => [0, 0, self.size / GIGA],
        }
    }

    /// Returns the number of leaves that a split replaces, which is also the number of tables that it makes.
    fn splits(&self) -> u64 {
        match self.mapped {
            Mapped::Small => 0,
            Mapped::Mega => self.size / MEGA,
            Mapped::Giga => self.size / GIGA + self.size / MEGA,
        }
    }
}

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let mut maps = Maps::new(NAME);
    for (call, name) in CALLS {
        for (mapped, state) in STATES {
            let tiny = match mapped {
                Mapped::Giga => GIGA,
                _ => 8 * MEGA,
            };
            // Clearing needs a fault for each page before the call. Split memory is only walked, so its tables must
            // exceed a cache.
            let (usual, rounds, full_rounds) = match (call, mapped) {
                (Call::Clear, Mapped::Small) => (3 * GIGA, 3, 3),
                (Call::Clear, _) => (GIGA, 7, 3),
                _ => (8 * GIGA, 7, 3),
            };
            let rounds = bench.size.pick(1, rounds, full_rounds);
            let subject = Subject::new(mapped, bench.size.pick(tiny, usual, 64 * GIGA))?;
            // A buffer as large as the memslot's tables, which is resident from here on.
            let mut table_bytes = vec![1u64; (subject.splits() * PAGE) as usize / 8];
            let case = format!("{name}/{state}");
            bench.in_turns(&case, rounds, &VARIANTS, |bench, walk| {
                // The walks read different entries, and have the same result.
                let mut look = |phase, machine: &Machine<'_, Slat>| {
                    if walk == DEFAULT {
                        let gpas = DATA..DATA + subject.size;
                        maps.take(&case, walk, phase, machine.engine(), gpas);
                    }
                };
                let mut samples = measure(&bench.slat, call, &subject, walk, &mut look)?;
                if !table_bytes.is_empty() {
                    samples.push(Sample::seconds(LIMIT, stream(&mut table_bytes)));
                }
                Ok(samples)
            })?;
        }
    }
    bench.keep(maps);
    Ok(())
}

/// Writes words like the entries of leaf tables: a number that counts up.
fn stream(words: &mut [u64]) -> Duration {
    let began = thread_time();
    let mut entry = 0x37;
    for word in &mut *words {
        *word = entry;
        entry += PAGE;
    }
    black_box(words);
    thread_time() - began
}

fn measure(
    slat: &Slat,
    call: Call,
    subject: &Subject,
    walk: &str,
    look: &mut dyn FnMut(&'static str, &Machine<'_, Slat>),
) -> Result<Vec<Sample>, Failure> {
    let mut machine = Machine::new(slat, 1, DATA + subject.size)?;
    machine.set_policy("prefetch", "off")?;
    machine.touch_system()?;
    machine.vm().engine().set_contiguous(true);
    machine.set_slot(&subject.slot(0))?;
    let before = stats(&machine);
    // The tables do not show which pages were written, so writing one page is enough to populate a whole huge leaf.
    let populate = Program::write_every(DATA, MEGA, subject.size / MEGA, 1);
    machine.run(&[populate], &no_device)?;
    protect_manually(&machine, true)?;
    if subject.mapped == Mapped::Small {
        split_and_stay(&machine, subject)?;
    }
    protect_manually(&machine, call != Call::Enable)?;
    let from_above = walk == FROM_ABOVE;
    machine.set_policy("split_walk", if from_above { DEFAULT } else { walk })?;
    machine.set_policy(
        "hierarchical_protect",
        if from_above { "on" } else { "off" },
    )?;
    let now = stats(&machine).since(&before);
    let leaves = [now.pages_4k, now.pages_2m, now.pages_1g];
    if leaves != subject.leaves() {
        return Err(format!("mapped by {leaves:?} leaves, not {:?}", subject.leaves()).into());
    }
    look("before", &machine);
    machine.vm().engine().warm_frames(subject.splits() as usize);

    let before = stats(&machine);
    let log = subject.slot(KVM_MEM_LOG_DIRTY_PAGES);
    let (time, calls) = match call {
        Call::Enable => (timed(|| machine.set_slot(&log))?, 1),
        Call::Split => {
            machine.set_slot(&log)?;
            let no_page = subject.no_page();
            (timed(|| clear(&machine, subject, &no_page))?, 1)
        }
        Call::Clear => {
            machine.set_slot(&log)?;
            let mut time = Duration::ZERO;
            for _ in 0..2 {
                write_all(&mut machine, subject)?;
                let dirty = machine.vm().get_dirty_log(1, subject.size as usize)?;
                let marked: u64 = dirty.iter().map(|word| u64::from(word.count_ones())).sum();
                if marked != subject.pages() {
                    return Err(format!("{marked} pages dirty of {}", subject.pages()).into());
                }
                time += timed(|| clear(&machine, subject, &dirty))?;
            }
            (time, 2)
        }
    };
    look("after", &machine);
    let now = stats(&machine).since(&before);
    if now.splits != subject.splits() {
        return Err(format!("{} leaves split, not {}", now.splits, subject.splits()).into());
    }
    Ok(vec![
        Sample::seconds(SECONDS, time / calls),
        Sample::count(
            ENTRIES_VISITED,
            now.split_entries_visited / u64::from(calls),
        ),
    ])
}

/// Switches manual protection: with it a log begins with all pages dirty and none protected.
fn protect_manually(machine: &Machine<'_, Slat>, manual: bool) -> Result<(), Failure> {
    let options = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
    let options = if manual { options } else { 0 };
    Ok(machine.vm().enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        args: [options.into(), 0, 0, 0],
        ..Default::default()
    })?)
}

/// Logs the memslot just until all of it is split. Protects nothing, and prevents split leaves from being merged when
/// the log ends.
fn split_and_stay<'m>(machine: &Machine<'m, Slat>, subject: &'m Subject) -> Result<(), Failure> {
    machine.set_slot(&subject.slot(KVM_MEM_LOG_DIRTY_PAGES))?;
    clear(machine, subject, &subject.no_page())?;
    machine.set_policy("huge_pages", "off")?;
    machine.set_slot(&subject.slot(0))
}

fn stats(machine: &Machine<'_, Slat>) -> Stats {
    machine.vm().engine().stats()
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<Duration, Failure> {
    let began = thread_time();
    work()?;
    Ok(thread_time() - began)
}

fn write_all(machine: &mut Machine<'_, Slat>, subject: &Subject) -> Result<(), Failure> {
    machine.run(&[Program::write(DATA, subject.pages(), 1)], &no_device)?;
    Ok(())
}

/// Calls `KVM_CLEAR_DIRTY_LOG` for the whole memslot.
fn clear(machine: &Machine<'_, Slat>, subject: &Subject, bitmap: &[u64]) -> Result<(), Failure> {
    let pages = u32::try_from(subject.pages())?;
    Ok(machine.vm().clear_dirty_log(1, 0, pages, bitmap)?)
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for (call, name) in CALLS {
        for (mapped, state) in STATES {
            let case = format!("{name}/{state}");
            let line = |after| {
                let limit = report.value(NAME, &case, after, LIMIT);
                Line::compare(report, NAME, &case, SECONDS, FULL_WALK, after)
                    .map(|line| line.with_limit("stream", limit))
            };
            let published = crate::published::find(NAME, &case, SECONDS).map(|p| p.change);
            lines.extend(line(SKIP).map(|line| match published {
                Some(change) => line.change_at_most(change),
                None => line,
            }));
            let default = line(DEFAULT).map(|line| line.with_published(None));
            lines.extend(default.map(|line| match (mapped, call, published) {
                (Mapped::Small, Call::Split, _) => line.change_at_most(-0.95),
                (_, Call::Split, _) => line.at_most_of_limit(3.0),
                // Protecting this many pages takes more than a twentieth of the time with any walk.
                (Mapped::Small, _, Some(change)) => line.change_at_most(change),
                _ => line,
            }));
            // If memory is already split, only the entries above the tables need a change.
            let from_above = Line::compare(report, NAME, &case, SECONDS, DEFAULT, FROM_ABOVE);
            lines.extend(from_above.map(|line| match (mapped, call) {
                (Mapped::Small, Call::Enable) => line.change_at_most(-0.99),
                _ => line.with_published(None),
            }));
            lines.extend(Line::compare(
                report,
                NAME,
                &case,
                ENTRIES_VISITED,
                FULL_WALK,
                DEFAULT,
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;

    #[test]
    fn every_leaf_is_split_once_and_walks_that_skip_look_at_less() {
        // The run itself checks leaves, splits and logs.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        let entries = |case: &str, walk| report.value(NAME, case, walk, ENTRIES_VISITED).unwrap();
        for (_, call) in CALLS {
            for (_, state) in STATES {
                let case = &format!("{call}/{state}");
                assert!(entries(case, SKIP) < entries(case, FULL_WALK) / 100.0);
                assert!(entries(case, DEFAULT) <= entries(case, SKIP));
            }
        }
        assert!(entries("split/4k", FULL_WALK) >= 8.0 * 512.0);
        assert!(entries("split/1g", SKIP) >= 512.0);
    }
}
