//! Scenarios about a guest that changes its own tables, while the walker walks the engine's shadow tables.

use alloc::format;
use alloc::string::String;

use slat::{Gpa, Level, PAGE_SIZE, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, DATA, GIB, TestVm, holds, same, write_word};
use crate::guest::Beside;
use crate::guest_tables::{LARGE, LEVEL_1, LEVEL_2, USED, WINDOW, root, table};
use crate::shadowed::{no_leaf, page_fault};
use crate::{Command, Machine, Op};

/// The entry of the table of level 2 that most scenarios use.
const ENTRY: u64 = 3;
/// The number of pages that an entry of level 2 maps.
const LARGE_PAGES: u64 = 512;

fn at(op: Op, gva: Gpa) -> Command {
    Command {
        op,
        gpa: gva,
        step: 0,
        count: 1,
        value: 0,
    }
}

/// Returns the word that marks page `page` of the data slot.
fn mark(page: u64) -> u32 {
    0x4000_0000 + page as u32
}

/// Returns the guest's store that makes entry `index` of a table map the data slot from page `page` on. The upper
/// half of the entry is 0.
fn maps(number: u64, index: u64, page: u64) -> Command {
    let flags = if number == LEVEL_1 { USED } else { LARGE };
    Command {
        value: ((DATA.0 + page * PAGE_SIZE) | flags) as u32,
        ..at(Op::Write, Gpa(table(number).0 + 8 * index))
    }
}

/// Returns the address in the window that entry `index` of the table maps.
fn window(number: u64, index: u64) -> Gpa {
    let pages = if number == LEVEL_1 { 1 } else { LARGE_PAGES };
    Gpa(WINDOW.0 + index * pages * PAGE_SIZE)
}

impl<M: Machine> Bench<'_, M> {
    /// Makes a VM whose data slot has a mark on each page of `pages`.
    fn vm_with_marks(&mut self, pages: impl Iterator<Item = u64>) -> Result<TestVm<M>, String> {
        let vm = self.vm(Level::PAGE, &[("prefetch", "off")])?;
        vm.set(&self.data_slot(GIB, SlotFlags::default()))?;
        pages.for_each(|page| write_word(self.page(page), mark(page)));
        Ok(vm)
    }

    /// Makes the guest read `gva`, and checks that it finds page `page` of the data slot.
    fn finds(&mut self, vm: &mut TestVm<M>, gva: Gpa, page: u64) -> Result<(), String> {
        let read = self.run(vm, at(Op::Read, gva))?;
        same("word read", read, mark(page)).map_err(|error| format!("{error}, at {gva}"))
    }
}

/// Every store to an upper table exits to the monitor, which zaps the entries made from the table.
pub(super) fn upper<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const ROUNDS: u64 = 50;
    let large = |round: u64| (ENTRY + round) % 64 * LARGE_PAGES;
    let mut vm = bench.vm_with_marks((0..ROUNDS + 2).map(large))?;
    let gva = window(LEVEL_2, ENTRY);
    bench.finds(&mut vm, gva, large(0))?;
    for round in 1..=ROUNDS {
        bench.run(&mut vm, maps(LEVEL_2, ENTRY, large(round)))?;
        bench.run(&mut vm, at(Op::Invalidate, gva))?;
        bench.finds(&mut vm, gva, large(round))?;
    }
    holds(
        "a store did not zap the table's page",
        vm.vm.stats().mmu_shadow_zapped >= ROUNDS,
    )?;
    // No entry of the table is shadowed now, so only the first of these stores exits.
    bench.run(&mut vm, maps(LEVEL_2, ENTRY, large(0)))?;
    vm.faults();
    for index in 10..20 {
        bench.run(&mut vm, maps(LEVEL_2, index, large(0)))?;
    }
    vm.faulted(0)?;
    vm.end(&bench.host)?;
    Ok(format!("{ROUNDS} stores found at the next access"))
}

/// The first store to a table of level 1 exits to the monitor. The next stores do not, until the guest flushes.
pub(super) fn last<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const ROUNDS: u64 = 20;
    const ENTRIES: u64 = 32;
    let page = |round: u64, index: u64| (round + index) % 512;
    let mut vm = bench.vm_with_marks(0..512)?;
    let mut faults = 0;
    for round in 0..ROUNDS {
        for index in 0..ENTRIES {
            bench.finds(&mut vm, window(LEVEL_1, index), page(round, index))?;
        }
        vm.faults();
        for index in 0..ENTRIES {
            bench.run(&mut vm, maps(LEVEL_1, index, page(round + 1, index)))?;
        }
        let seen = vm.faults();
        holds("each store faults", seen < 8)?;
        faults += seen;
        // Flush the addresses one by one, or all at once.
        if round % 2 == 0 {
            let mut each = at(Op::Invalidate, window(LEVEL_1, 0));
            (each.step, each.count) = (PAGE_SIZE, ENTRIES);
            bench.run(&mut vm, each)?;
        } else {
            bench.run(&mut vm, at(Op::Root, root(0)))?;
        }
    }
    let unsynced = vm.vm.stats().mmu_unsync;
    vm.end(&bench.host)?;
    let stores = ROUNDS * ENTRIES;
    Ok(format!(
        "{stores} stores, {faults} faults of them, unsynced now: {unsynced}"
    ))
}

/// Each address space has its own translations, which are kept while the guest uses the other address space.
pub(super) fn roots<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const ROUNDS: u64 = 50;
    let mut vm = bench.vm_with_marks([ENTRY, 5].map(|large| large * LARGE_PAGES).into_iter())?;
    let gva = window(LEVEL_2, ENTRY);
    bench.run(&mut vm, maps(LEVEL_2, ENTRY, 5 * LARGE_PAGES))?;
    for round in 0..ROUNDS {
        for (space, large) in [(0, 5), (1, ENTRY)] {
            bench.run(&mut vm, at(Op::Root, root(space)))?;
            bench.finds(&mut vm, gva, large * LARGE_PAGES)?;
        }
        if round == 0 {
            vm.faults();
        }
    }
    vm.faulted(0)?;
    vm.end(&bench.host)?;
    Ok(format!(
        "2 address spaces, entered {} times with no fault",
        2 * (ROUNDS - 1)
    ))
}

/// An access that the guest's tables do not allow is a page fault of the guest. An access that no leaf can allow is
/// reported as an error.
pub(super) fn faults<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let mut vm = bench.vm_with_marks([LARGE_PAGES].into_iter())?;
    let gva = window(LEVEL_2, 1);
    bench.finds(&mut vm, gva, LARGE_PAGES)?;
    let mut cleared = maps(LEVEL_2, 1, 0);
    cleared.value = 0;
    bench.run(&mut vm, cleared)?;
    bench.run(&mut vm, at(Op::Invalidate, gva))?;
    let error = bench.run(&mut vm, at(Op::Read, gva)).err();
    same("error", error, Some(page_fault(gva, 0)))?;
    // The entry is present and not writable.
    let mut read_only = maps(LEVEL_2, 1, LARGE_PAGES);
    read_only.value &= !2;
    bench.run(&mut vm, read_only)?;
    bench.finds(&mut vm, gva, LARGE_PAGES)?;
    let error = bench.run(&mut vm, at(Op::Write, gva)).err();
    same("error", error, Some(page_fault(gva, 3)))?;
    same("faults of the guest's", vm.vm.stats().pf_guest, 2)?;
    // The table of level 3 maps all memory, including the table itself.
    let itself = Gpa(table(1).0 + 8 * 100);
    let error = bench.run(&mut vm, at(Op::Write, itself)).err();
    same("error", error, Some(no_leaf(itself)))?;
    bench.finds(&mut vm, gva, LARGE_PAGES)?;
    vm.end(&bench.host)?;
    Ok("2 page faults of the guest's, 1 store to emulate".into())
}

/// One CPU makes `store(round)` to a table through which another CPU walks, from `root` on. The other CPU must then
/// find `page(round)`.
fn changes_beside<M: Machine>(
    bench: &mut Bench<'_, M>,
    vm: &mut TestVm<M>,
    root: Gpa,
    store: impl Fn(u64) -> Command,
    page: impl Fn(u64) -> u64,
) -> Verdict {
    const ROUNDS: u64 = 40;
    const READS: u64 = 256;
    let read = Command {
        count: READS,
        ..at(Op::Read, window(LEVEL_2, ENTRY))
    };
    bench.run(vm, store(0))?;
    let mut second = vm.second_guest()?;
    second.run(bench.cpu, &at(Op::Root, root))?;
    let running = Beside::start(second, read);
    for round in 0..ROUNDS {
        bench.run(vm, store(round))?;
        // The zap flushes every CPU, although the guest has not asked for a flush.
        let sum = running.pass();
        let expected = mark(page(round)).wrapping_mul(READS as u32);
        same("sum read on the other CPU", sum, expected)
            .map_err(|error| format!("{error}, round {round}"))?;
    }
    drop(running.stop()?);
    Ok(format!(
        "{ROUNDS} stores under a CPU that walks with the table"
    ))
}

pub(super) fn upper_beside<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let page = |round: u64| (1 + round % 2) * LARGE_PAGES;
    let mut vm = bench.vm_with_marks([page(0), page(1)].into_iter())?;
    let store = |round| maps(LEVEL_2, ENTRY, page(round));
    let verdict = changes_beside(bench, &mut vm, root(0), store, page)?;
    vm.end(&bench.host)?;
    Ok(verdict)
}

/// Each store zaps the shadow table that the other CPU has loaded as its root.
pub(super) fn root_beside<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const OTHER: u64 = 5;
    let page = |round: u64| [ENTRY, OTHER][round as usize % 2] * LARGE_PAGES;
    let mut vm = bench.vm_with_marks([page(0), page(1)].into_iter())?;
    bench.run(&mut vm, maps(LEVEL_2, ENTRY, OTHER * LARGE_PAGES))?;
    // The root refers to the table of level 3 that maps the window as one page, or to the table of the other address
    // space.
    let store = |round: u64| Command {
        value: (table([3, 1][round as usize % 2]).0 | USED) as u32,
        ..at(Op::Write, root(1))
    };
    let verdict = changes_beside(bench, &mut vm, root(1), store, page)?;
    vm.end(&bench.host)?;
    Ok(verdict)
}
