//! Scenarios about addresses without memory.

use alloc::format;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Gpa, Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, DATA, HOLE, TestVm, page, pages, read_word, same, write_word};
use crate::guest::DEVICE;
use crate::{Command, Cpu, Machine, Op};

fn at_hole(op: Op, count: u64) -> Command {
    Command {
        op,
        gpa: HOLE,
        step: 4,
        count,
        value: 7,
    }
}

impl<M: Machine> TestVm<M> {
    /// Checks the faults that the first CPU has reported since the last check: `mmio` faults from MMIO entries, and
    /// `others` from other entries.
    fn faulted_mmio(&mut self, others: u64, mmio: u64) -> Result<(), alloc::string::String> {
        let seen = self.guest.seen.mmio_faults.swap(0, SeqCst);
        if M::Cpu::REPORTS_MMIO {
            same("faults reported as MMIO", seen, mmio)?;
            self.faulted(others)
        } else {
            self.faulted(others + mmio)
        }
    }
}

pub(super) fn cached<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const READS: u64 = 100;
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "off")])?;
    let read = bench.run(&mut vm, at_hole(Op::Read, 1))?;
    same("word read from the device", read, DEVICE)?;
    vm.faulted_mmio(1 + 1, 0)?;
    vm.counted(&[
        ("pf_emulate", 1),
        ("pf_mmio_spte_created", 1),
        ("mmio_cached", 0),
    ])?;

    let read = bench.run(&mut vm, at_hole(Op::Read, READS))?;
    same("sum read from the device", read, READS as u32 * DEVICE)?;
    bench.run(&mut vm, at_hole(Op::Write, READS))?;
    vm.faulted_mmio(0, 2 * READS)?;
    vm.counted(&[
        ("mmio_cached", 2 * READS),
        ("pf_taken", 0),
        ("slot_lookups", 0),
        ("slot_lookups_saved", 0),
        ("pf_mmio_spte_created", 0),
    ])?;
    same(
        "accesses to MMIO",
        vm.guest.seen.mmio.load(SeqCst),
        1 + 2 * READS,
    )?;
    vm.end(&bench.host)?;
    Ok(format!("{} accesses, 1 slot look-up", 1 + 2 * READS))
}

pub(super) fn becomes_memory_and_back<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "off")])?;
    bench.run(&mut vm, at_hole(Op::Read, 2))?;
    vm.faulted_mmio(1 + 1, 1)?;

    let memory = bench
        .data_slot(4 * page::<M>(), SlotFlags::default())
        .with_gpa(HOLE);
    vm.set(&memory)?;
    write_word(bench.page(0), 1000);
    write_word(slat::Hpa(bench.page(0).0 + 4), 337);
    let sum = bench.run(&mut vm, at_hole(Op::Read, 2))?;
    same("sum read from the new memory", sum, 1337)?;
    // The entry is still mapped, but its generation is not that of the slots any more.
    vm.faulted_mmio(0, 1)?;

    vm.set(&memory.with_size(0))?;
    let sum = bench.run(&mut vm, at_hole(Op::Read, 3))?;
    same("sum read from the device again", sum, 3 * DEVICE)?;
    vm.faulted_mmio(1, 2)?;
    vm.end(&bench.host)?;
    Ok("an MMIO entry of an old generation is not believed".into())
}

pub(super) fn read_only_slot<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const PAGES: u64 = 4;
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "off")])?;
    vm.set(&bench.data_slot(PAGES * page::<M>(), SlotFlags::READONLY))?;
    for page in 0..PAGES {
        write_word(bench.page(page), 11);
    }
    let sum = bench.run(&mut vm, pages::<M>(Op::Read, 0, PAGES))?;
    same("sum read", sum, 11 * PAGES as u32)?;
    vm.faulted_mmio(1 + PAGES, 0)?;
    bench.run(&mut vm, pages::<M>(Op::Write, 0, PAGES))?;
    vm.faulted_mmio(PAGES, 0)?;
    same("writes that exited", vm.guest.seen.mmio.load(SeqCst), PAGES)?;
    for page in 0..PAGES {
        let gpa = Gpa(DATA.0 + bench.page(page).0 - bench.page(0).0);
        same(
            "word that was not to be written",
            read_word(bench.page(page)),
            11,
        )
        .map_err(|error| format!("{error}, at {gpa}"))?;
    }
    vm.end(&bench.host)?;
    Ok(format!("{PAGES} pages read, {PAGES} writes exited"))
}
