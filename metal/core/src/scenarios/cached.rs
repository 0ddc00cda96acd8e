//! Tests which entries walkers may have cached, while tables change under a guest that writes.
//!
//! The host keeps a record of the entries that walkers may have cached ([`slat_model::Tlb`]). For that, the host reads
//! the tables when the engine reaches them, and before and after each flush. If the format requires break-before-make,
//! a valid entry must not *conflict* with an entry that was removed and is not flushed yet. On all formats, after an
//! operation has returned, no entry may be cached that the tables do not allow.

use alloc::format;
use alloc::string::{String, ToString};
use core::hint::spin_loop;

use slat::Setting;
use slat::{Format, Gfn, Gpa, Hva, Level, MemoryAttributes, PAGE_SIZE, Region, SlotFlags, Stats};

use super::Verdict;
use super::nx::plant_functions;
use crate::bench::{Bench, DATA, GIB, MIB, TestVm, every, holds, pages};
use crate::guest::{Beside, Tables};
use crate::{Command, Machine, Op};

/// The number of pages that the guests use: two huge pages.
const PAGES: u64 = 1024;
/// The other CPU's guest writes to every page whose number is a multiple of this one.
const STEP: u64 = 3;
/// The pages with functions: one in each huge page. The other CPU does not write to these pages.
const FUNCTIONS: [u64; 2] = [1, 514];
/// The number of spins before each flush.
const DELAY: u32 = 5_000;

/// Returns the number of times that the guest is stopped, and the number of times that each change is made under the
/// running guest before a stop. The numbers are higher on faster machines: Bochs needs a second for each turn.
const fn stops_and_turns<M: Machine>() -> (u64, u64) {
    if Tables::<M>::BREAK_BEFORE_MAKE {
        (3, 4)
    } else {
        (1, 2)
    }
}

/// A change of the tables that finally restores them.
struct Change<M: Machine> {
    name: &'static str,
    /// The level of the host's mappings.
    level: Level,
    policies: &'static [(&'static str, &'static str)],
    data: fn(&Bench<'_, M>) -> Region,
    make: Make<M>,
    /// The engine's expected counts for a number of changes.
    counts: Counts,
}

type Make<M> = fn(&mut Turn<'_, '_, M>) -> Result<(), String>;
type Counts = fn(&Stats, u64) -> bool;

/// One execution of a change.
struct Turn<'a, 'b, M: Machine> {
    bench: &'a mut Bench<'b, M>,
    vm: &'a mut TestVm<M>,
    running: &'a Beside<M>,
    number: u64,
}

fn slot<M: Machine>(bench: &Bench<'_, M>) -> Region {
    bench.data_slot(PAGES * PAGE_SIZE, SlotFlags::default())
}

/// Returns the data slot. The second half of the host's memory is its private memory.
fn slot_with_private_memory<M: Machine>(bench: &Bench<'_, M>) -> Region {
    let slot = slot(bench);
    slot.with_private(Some(Hva(slot.backing.0 + GIB / 2)))
}

fn slot_of_a_gib<M: Machine>(bench: &Bench<'_, M>) -> Region {
    bench.data_slot(GIB, SlotFlags::default())
}

fn data_gfns() -> core::ops::Range<Gfn> {
    DATA.gfn()..DATA.gfn().add(PAGES)
}

fn policies<M: Machine>(vm: &TestVm<M>, policies: &[(&str, &str)]) -> Result<(), String> {
    for (name, value) in policies {
        let setting = Setting::parse(name, value).map_err(|error| error.to_string())?;
        vm.vm.set_policy(setting);
    }
    Ok(())
}

impl<M: Machine> Turn<'_, '_, M> {
    /// Waits while the other CPU writes: until that CPU has written all of its pages, or only for a moment, so that the
    /// next change happens while its translations are missing.
    fn guest_writes(&self) {
        if self.number.is_multiple_of(2) {
            self.running.pass();
        } else {
            (0..self.number * 1777 % 20_000).for_each(|_| spin_loop());
        }
    }

    /// Executes a function in both huge pages, if they are mapped.
    fn execute(&mut self) -> Result<(), String> {
        for page in FUNCTIONS {
            self.bench.run(self.vm, pages::<M>(Op::Read, page, 1))?;
            self.bench.run(self.vm, pages::<M>(Op::Execute, page, 1))?;
        }
        Ok(())
    }

    fn set(&self, change: impl FnOnce(Region) -> Region) -> Result<(), String> {
        self.vm.set(&change(slot(self.bench)))
    }

    /// Splits huge leaves for a log, and merges them when the log ends.
    fn end_logging(&mut self) -> Result<(), String> {
        self.set(|slot| slot.with_flags(SlotFlags::LOG_DIRTY_PAGES))?;
        self.guest_writes();
        self.vm.log()?;
        self.guest_writes();
        self.set(|slot| slot)
    }

    fn recover_nx(&mut self) -> Result<(), String> {
        self.execute()?;
        self.guest_writes();
        self.vm.vm.recover_nx_huge_pages();
        Ok(())
    }

    fn switch_nx(&mut self) -> Result<(), String> {
        policies(self.vm, &[("nx_huge_pages", "on")])?;
        self.execute()?;
        self.guest_writes();
        policies(self.vm, &[("nx_huge_pages", "off")])?;
        self.vm.vm.recover_nx_huge_pages();
        Ok(())
    }

    /// Zaps leaves. Faults then find a host mapping of another size.
    fn zap_to_another_level(&mut self) -> Result<(), String> {
        for level in [Level::PAGE, Level::MEGA] {
            self.bench.host.map_at(level);
            self.vm.vm.zap(0, data_gfns());
            self.guest_writes();
        }
        Ok(())
    }

    fn split_a_gib(&mut self) -> Result<(), String> {
        self.execute()?;
        self.guest_writes();
        self.vm.vm.zap(0, data_gfns());
        Ok(())
    }

    /// Makes a part of each huge page private and shared again. Then does the same with the whole second huge page.
    fn convert(&mut self) -> Result<(), String> {
        for part in [300..700, 512..1024] {
            let gfns = DATA.gfn().add(part.start)..DATA.gfn().add(part.end);
            for attributes in [MemoryAttributes::PRIVATE, MemoryAttributes::NONE] {
                (self.vm.vm.set_memory_attributes(gfns.clone(), attributes))
                    .map_err(|error| error.to_string())?;
                self.guest_writes();
            }
        }
        Ok(())
    }

    /// Moves the slot by a page, so that no leaf can be huge afterwards, or by a huge page.
    fn move_the_slot(&mut self) -> Result<(), String> {
        for bytes in [PAGE_SIZE, 2 * MIB] {
            self.set(|slot| slot.with_gpa(Gpa(slot.gpa.0 + bytes)))?;
            self.guest_writes();
            self.set(|slot| slot)?;
            self.guest_writes();
        }
        Ok(())
    }

    fn delete_the_slot(&mut self) -> Result<(), String> {
        for offset in [2 * MIB, 0] {
            self.set(|slot| slot.with_size(0))?;
            let gfns = data_gfns();
            (self.bench.host.tlb()).check_gone(0, &(gfns.start.0..gfns.end.0))?;
            self.guest_writes();
            self.set(|slot| slot.with_backing(Hva(slot.backing.0 + offset)))?;
            self.guest_writes();
        }
        Ok(())
    }

    /// Invalidates one page of a huge leaf. Faults on the other pages then find a mapping of another size.
    fn invalidate_a_page(&mut self) -> Result<(), String> {
        for level in [Level::PAGE, Level::MEGA] {
            let invalidation = self.vm.vm.invalidate(self.bench.backing(78..79));
            let frame = self.bench.page(78).pfn();
            (self.bench.host.tlb())
                .check_frames(|first, count| (first..first.add(count)).contains(&frame))?;
            self.bench.host.map_at(level);
            drop(invalidation);
            self.bench.run(self.vm, pages::<M>(Op::Write, 80, 1))?;
            self.guest_writes();
        }
        Ok(())
    }

    /// Moves the first page to another frame, and back.
    fn move_a_page(&mut self) -> Result<(), String> {
        let (page, spare) = (self.bench.page(0), self.bench.spare());
        for (from, to) in [(page, spare), (spare, page)] {
            let tlb = self.bench.host.tlb();
            self.bench.move_page(self.vm, to, || {
                tlb.check_frames(|first, count| (first..first.add(count)).contains(&from.pfn()))
            })?;
            self.guest_writes();
        }
        Ok(())
    }
}

const NX: &[(&str, &str)] = &[
    ("nx_huge_pages", "on"),
    ("nx_huge_pages_recovery_ratio", "1"),
];

/// Makes a change for a host with mappings of 2 MiB.
fn of_2m<M: Machine>(name: &'static str, make: Make<M>, counts: Counts) -> Change<M> {
    Change {
        name,
        level: Level::MEGA,
        policies: &[],
        data: slot,
        make,
        counts,
    }
}

fn changes<M: Machine>() -> impl Iterator<Item = Change<M>> {
    let splits_and_zaps: Counts = |stats, times| stats.splits >= times && stats.zapped >= times;
    let zaps: Counts = |stats, times| stats.zapped >= times;
    let invalidates: Counts = |stats, times| stats.invalidations >= 2 * times;
    let all: [Change<M>; 10] = [
        of_2m(
            "the end of logging",
            |turn| turn.end_logging(),
            splits_and_zaps,
        ),
        Change {
            policies: NX,
            ..of_2m("recovery", |turn| turn.recover_nx(), splits_and_zaps)
        },
        of_2m("nx_huge_pages", |turn| turn.switch_nx(), splits_and_zaps),
        of_2m("a zap", |turn| turn.zap_to_another_level(), zaps),
        Change {
            level: Level::GIGA,
            policies: NX,
            data: slot_of_a_gib,
            ..of_2m(
                "a split of 1 GiB",
                |turn| turn.split_a_gib(),
                splits_and_zaps,
            )
        },
        Change {
            data: slot_with_private_memory,
            ..of_2m("a conversion", |turn| turn.convert(), splits_and_zaps)
        },
        of_2m("a slot that moves", |turn| turn.move_the_slot(), zaps),
        of_2m("a slot that goes", |turn| turn.delete_the_slot(), zaps),
        of_2m(
            "an invalidation",
            |turn| turn.invalidate_a_page(),
            invalidates,
        ),
        Change {
            level: Level::PAGE,
            ..of_2m("a page that moves", |turn| turn.move_a_page(), invalidates)
        },
    ];
    all.into_iter()
}

/// Returns the command that the other CPU's guest runs, again and again.
fn writes<M: Machine>() -> Command {
    every::<M>(Op::Write, 0, PAGES / STEP, STEP * PAGE_SIZE)
}

/// The counts of all changes.
#[derive(Default)]
struct Seen {
    changes: u64,
    flushes: u64,
    /// The number of entries that were removed from the tables, or have lost a right.
    taken_out: u64,
    first_conflict: Option<String>,
}

impl Seen {
    /// Checks the record of cached entries. Call while no operation is in progress.
    fn look<M: Machine>(&mut self, bench: &Bench<'_, M>, change: &Change<M>) -> Result<(), String> {
        let conflict = bench.host.tlb().findings().into_iter().next();
        self.first_conflict = (self.first_conflict.take())
            .or_else(|| conflict.map(|conflict| format!("{}: {conflict}", change.name)));
        bench.host.nothing_is_stale()
    }
}

/// Makes `change` under a guest that writes.
fn make<M: Machine>(
    bench: &mut Bench<'_, M>,
    change: &Change<M>,
    seen: &mut Seen,
) -> Result<(), String> {
    let mut vm = bench.vm(change.level, change.policies)?;
    bench.host.watch(&vm.vm, DELAY);
    vm.set(&(change.data)(bench))?;
    for page in FUNCTIONS {
        plant_functions(bench, page..page + 1);
    }
    let mut guest = vm.second_guest()?;
    let (stops, turns) = stops_and_turns::<M>();
    for stop in 0..stops {
        let running = Beside::start(guest, writes::<M>());
        running.pass();
        for turn in 0..turns {
            let mut turn = Turn {
                bench,
                vm: &mut vm,
                running: &running,
                number: stop * turns + turn,
            };
            (change.make)(&mut turn)?;
            turn.guest_writes();
        }
        guest = running.stop()?;
        seen.look(bench, change)?;
    }
    drop(guest);
    let stats = vm.vm.stats();
    holds("it was not made", (change.counts)(&stats, stops * turns))?;
    // Every page is at its old address again.
    bench.write(&mut vm, pages::<M>(Op::Write, 0, PAGES))?;
    seen.look(bench, change)?;
    seen.changes += 1;
    seen.flushes += stats.remote_tlb_flush;
    seen.taken_out += bench.host.tlb().ghosts();
    vm.end(&bench.host)
}

pub(super) fn under_a_running_guest<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let mut seen = Seen::default();
    let mut made = Ok(());
    for change in changes::<M>() {
        made = made.and(
            make(bench, &change, &mut seen).map_err(|error| format!("{}: {error}", change.name)),
        );
    }
    let conflicts = bench.host.tlb().conflicts();
    if let Some(first) = seen.first_conflict {
        return Err(format!("{conflicts} conflicts, the first after {first}"));
    }
    made?;
    let conflicts = match Tables::<M>::BREAK_BEFORE_MAKE {
        true => format!("{conflicts} conflicts"),
        false => "conflicts are allowed".into(),
    };
    let (stops, turns) = stops_and_turns::<M>();
    Ok(format!(
        "{} changes, {} times each; {} flushes of {} entries: {conflicts}, nothing stale",
        seen.changes,
        stops * turns,
        seen.flushes,
        seen.taken_out,
    ))
}
