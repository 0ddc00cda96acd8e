//! Measures how huge leaves are split for dirty logging, before the guest writes to them.
//!
//! The measured calls are those of KVM's API. No guest runs, because no guest time is measured. In place of each access
//! that a guest would make, the engine's fault is called.

use std::hint::black_box;
use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use slat::{Access, Gpa, MmuKind, Setting, Stats, Stop};
use slat_demo::memory::Memory;
use slat_kvm::engine::{EngineVcpu, TableFormat};
use slat_kvm::{Kvm, VmFd};

use crate::bare::{DATA, PAGE};
use crate::compared::{Line, Rows};
use crate::maps::Maps;
use crate::report::{Report, Sample};
use crate::rounds::{Bench, thread_time};
use crate::{Elsewhere, Experiment, Failure, Settable};

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
    elsewhere: Elsewhere::Tables,
    run,
    compare,
    rows: Rows::Metrics,
};

const SECONDS: &str = "seconds";
const ENTRIES_VISITED: &str = "entries_visited";
const LIMIT: &str = "limit_seconds";

/// A variant, which is a value of the policy `split_walk`. Only the variant [`FROM_ABOVE`] sets another policy.
const FULL_WALK: &str = "full-walk";
const SKIP: &str = "skip-last-level";
const DEFAULT: &str = "default";
/// The variant that sets the policy `hierarchical_protect`, and leaves `split_walk` at `default`.
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

const SLOT: u32 = 1;
const MEGA: u64 = 2 << 20;
const GIGA: u64 = 1 << 30;

/// A memslot whose leaves are to be split, and its backing.
struct Subject {
    mapped: Mapped,
    size: u64,
    memory: Memory,
}

impl Subject {
    fn new(mapped: Mapped, size: u64) -> Result<Self, Failure> {
        // All of the memslot is backed by the same GiB of memory, mapped repeatedly. For leaves of at most 2 MiB, the
        // backing is offset by 2 MiB, so that it is not aligned to the guest's GiB.
        let piece = size.min(GIGA) as usize;
        let spare = if mapped == Mapped::Mega { piece } else { 0 };
        Ok(Subject {
            mapped,
            size,
            memory: Memory::aliased(size as usize + spare, piece, GIGA as usize)?,
        })
    }

    fn slot(&self, flags: u32) -> kvm_userspace_memory_region {
        let offset = if self.mapped == Mapped::Mega { MEGA } else { 0 };
        kvm_userspace_memory_region {
            slot: SLOT,
            flags,
            guest_phys_addr: DATA,
            memory_size: self.size,
            userspace_addr: self.memory.address() + offset,
        }
    }

    fn pages(&self) -> u64 {
        self.size / PAGE
    }

    /// Returns a dirty bitmap with no bit set.
    fn no_page(&self) -> Vec<u64> {
        vec![0; self.pages().div_ceil(64) as usize]
    }

    /// Returns the numbers of 4 KiB, 2 MiB and 1 GiB leaves before the call.
    fn leaves(&self) -> [u64; 3] {
        match self.mapped {
            Mapped::Small => [self.pages(), 0, 0],
            Mapped::Mega => [0, self.size / MEGA, 0],
            Mapped::Giga => [0, 0, self.size / GIGA],
        }
    }

    /// Returns the number of leaves that are split. For each of them, the split makes one table.
    fn splits(&self) -> u64 {
        match self.mapped {
            Mapped::Small => 0,
            Mapped::Mega => self.size / MEGA,
            Mapped::Giga => self.size / GIGA + self.size / MEGA,
        }
    }
}

/// A VM with the memslot that is split.
struct Machine<'s> {
    subject: &'s Subject,
    vm: VmFd,
    vcpu: EngineVcpu,
}

impl<'s> Machine<'s> {
    fn new(kvm: &Kvm, subject: &'s Subject) -> Result<Self, Failure> {
        let vm = kvm.create_vm()?;
        let vcpu = vm.engine().create_vcpu()?;
        Ok(Machine { subject, vm, vcpu })
    }

    /// Creates the memslot, or changes its flags.
    fn set_slot(&self, flags: u32) -> Result<(), Failure> {
        // SAFETY: the memory is borrowed for longer than the VM lives, and this process does not access it.
        unsafe { self.vm.set_user_memory_region(self.subject.slot(flags)) }
            .map_err(|e| format!("the memslot: {e}"))?;
        Ok(())
    }

    fn set_policy(&self, name: &str, value: &str) -> Result<(), Failure> {
        self.vm.engine().set_policy(Setting::parse(name, value)?);
        Ok(())
    }

    /// Calls the engine's fault for a guest write to one page of every `step` bytes of the memslot. No data is written.
    fn write_every(&mut self, step: u64) -> Result<(), Failure> {
        for gpa in (DATA..DATA + self.subject.size).step_by(step as usize) {
            loop {
                self.vcpu.enter_unguarded(0);
                let written = self.vcpu.translate(Gpa(gpa), Access::Write);
                self.vcpu.leave();
                match written {
                    Err(Stop::Retry) => {}
                    Err(stop) => return Err(stop.into()),
                    Ok(_) => break,
                }
            }
        }
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.vm.engine().stats()
    }
}

fn run(bench: &mut Bench) -> Result<(), Failure> {
    // SAFETY: the call only returns a number.
    let host_page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if host_page != PAGE as libc::c_long {
        bench.note_missing(format!(
            "{NAME}: not measured, because this host's pages have {host_page} bytes, and the leaves other sizes."
        ));
        return Ok(());
    }
    let kvm = Kvm::new()?;
    let format = kvm.create_vm()?.engine().format();
    if format != TableFormat::of(MmuKind::Tdp) {
        bench.note(format!(
            "{NAME}: the tables have the format {}, and the processor that writes them is this machine's.",
            format.name()
        ));
    }
    // The last variant needs a format whose entries for tables have the right to write.
    let variants = match format.protects_from_above() {
        true => &VARIANTS[..],
        false => &VARIANTS[..VARIANTS.len() - 1],
    };
    let mut maps = Maps::new(NAME);
    for (call, name) in CALLS {
        for (mapped, state) in STATES {
            let tiny = match mapped {
                Mapped::Giga => GIGA,
                _ => 8 * MEGA,
            };
            // The case `Clear` needs a fault for each page before the call, so its memslot is small. Memory that is
            // already split is only walked. Its tables must be larger than a cache, so that the walk can be measured.
            let (usual, rounds, full_rounds) = match (call, mapped) {
                (Call::Clear, Mapped::Small) => (3 * GIGA, 3, 3),
                (Call::Clear, _) => (GIGA, 7, 3),
                _ => (8 * GIGA, 7, 3),
            };
            let rounds = bench.size.pick(1, rounds, full_rounds);
            let subject = Subject::new(mapped, bench.size.pick(tiny, usual, 64 * GIGA))?;
            // This buffer is as large as the memslot's tables. Filling it before the measurement makes it resident.
            let mut table_bytes = vec![1u64; (subject.splits() * PAGE) as usize / 8];
            let case = format!("{name}/{state}");
            bench.in_turns(&case, rounds, variants, |_, walk| {
                // The variants read different entries, but have the same result. So the maps are taken of one variant
                // only.
                let mut look = |phase, machine: &Machine<'_>| {
                    if walk == DEFAULT {
                        let gpas = DATA..DATA + subject.size;
                        maps.take(&case, walk, phase, Some(machine.vm.engine()), gpas);
                    }
                };
                let mut samples = measure(&kvm, call, &subject, walk, &mut look)?;
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

/// Writes increasing numbers to `words`, like code that fills leaf tables. Returns the time.
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
    kvm: &Kvm,
    call: Call,
    subject: &Subject,
    walk: &str,
    look: &mut dyn FnMut(&'static str, &Machine<'_>),
) -> Result<Vec<Sample>, Failure> {
    let mut machine = Machine::new(kvm, subject)?;
    machine.set_policy("prefetch", "off")?;
    machine.vm.engine().set_contiguous(true);
    machine.set_slot(0)?;
    let before = machine.stats();
    // One write maps a whole huge leaf, so one write for each 2 MiB suffices.
    machine.write_every(MEGA)?;
    protect_manually(&machine, true)?;
    if subject.mapped == Mapped::Small {
        split_and_stay(&machine)?;
    }
    protect_manually(&machine, call != Call::Enable)?;
    let from_above = walk == FROM_ABOVE;
    machine.set_policy("split_walk", if from_above { DEFAULT } else { walk })?;
    machine.set_policy(
        "hierarchical_protect",
        if from_above { "on" } else { "off" },
    )?;
    let now = machine.stats().since(&before);
    let leaves = [now.pages_4k, now.pages_2m, now.pages_1g];
    if leaves != subject.leaves() {
        return Err(format!("mapped by {leaves:?} leaves, not {:?}", subject.leaves()).into());
    }
    look("before", &machine);
    machine.vm.engine().warm_frames(subject.splits() as usize);

    let before = machine.stats();
    let log = KVM_MEM_LOG_DIRTY_PAGES;
    let (time, calls) = match call {
        Call::Enable => (timed(|| machine.set_slot(log))?, 1),
        Call::Split => {
            machine.set_slot(log)?;
            let no_page = subject.no_page();
            (timed(|| clear(&machine, &no_page))?, 1)
        }
        Call::Clear => {
            machine.set_slot(log)?;
            let mut time = Duration::ZERO;
            for _ in 0..2 {
                machine.write_every(PAGE)?;
                let dirty = machine.vm.get_dirty_log(SLOT, subject.size as usize)?;
                let marked: u64 = dirty.iter().map(|word| u64::from(word.count_ones())).sum();
                if marked != subject.pages() {
                    return Err(format!("{marked} pages dirty of {}", subject.pages()).into());
                }
                time += timed(|| clear(&machine, &dirty))?;
            }
            (time, 2)
        }
    };
    look("after", &machine);
    let now = machine.stats().since(&before);
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

/// Switches KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 on or off. If it is on, all pages of a new dirty log are dirty, and none
/// is write-protected.
fn protect_manually(machine: &Machine<'_>, manual: bool) -> Result<(), Failure> {
    let options = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
    let options = if manual { options } else { 0 };
    Ok(machine.vm.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        args: [options.into(), 0, 0, 0],
        ..Default::default()
    })?)
}

/// Turns on dirty logging of the memslot, to split its leaves, and off again. Write-protects no page, and keeps the
/// split leaves from being merged when dirty logging ends.
fn split_and_stay(machine: &Machine<'_>) -> Result<(), Failure> {
    machine.set_slot(KVM_MEM_LOG_DIRTY_PAGES)?;
    clear(machine, &machine.subject.no_page())?;
    machine.set_policy("huge_pages", "off")?;
    machine.set_slot(0)
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<Duration, Failure> {
    let began = thread_time();
    work()?;
    Ok(thread_time() - began)
}

/// Calls `KVM_CLEAR_DIRTY_LOG` for the whole memslot.
fn clear(machine: &Machine<'_>, bitmap: &[u64]) -> Result<(), Failure> {
    let pages = u32::try_from(machine.subject.pages())?;
    Ok(machine.vm.clear_dirty_log(SLOT, 0, pages, bitmap)?)
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
            let published = crate::published::find(NAME, &case, SECONDS);
            lines.extend(line(SKIP).map(|line| match published {
                Some(change) => line.change_at_most(change),
                None => line,
            }));
            let default = line(DEFAULT).map(|line| line.with_published(None));
            lines.extend(default.map(|line| match (mapped, call, published) {
                (Mapped::Small, Call::Split, _) => line.change_at_most(-0.95),
                (_, Call::Split, _) => line.at_most_of_limit(3.0),
                // With so many small leaves, write-protecting takes more than a twentieth of the time, whatever the
                // walk.
                (Mapped::Small, _, Some(change)) => line.change_at_most(change),
                _ => line,
            }));
            // If the memory is already split, only the entries above the leaf tables have to be changed.
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
        // `run` itself checks leaves, splits and logs.
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
