//! Tests dirty logs of a guest that does not run while a log is read. Such logs are exact to the page.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use slat::{Format, Level, MmuKind, SlotFlags};

use super::Verdict;
use crate::bench::{
    Bench, DATA_SLOT, GIB, TestVm, every, fell, holds, huge, page, pages, pieces, same,
};
use crate::guest::Tables;
use crate::{Cpu, Machine, Op};

const PAGES: u64 = 512;

impl<M: Machine> TestVm<M> {
    /// Gets the log of the data slot.
    pub(super) fn log(&self) -> Result<Vec<u64>, String> {
        let words = self.vm.dirty_log_words(0, DATA_SLOT);
        let mut bitmap = vec![0; words.map_err(|error| error.to_string())?];
        self.vm
            .get_dirty_log(0, DATA_SLOT, &mut bitmap)
            .map_err(|error| error.to_string())?;
        Ok(bitmap)
    }

    /// Checks that the log names the pages for which `dirty` returns true, and no others.
    fn logged(&self, what: &str, dirty: impl Fn(u64) -> bool) -> Result<(), String> {
        let log = self.log()?;
        for page in 0..log.len() as u64 * 64 {
            let named = log[page as usize / 64] >> (page % 64) & 1 != 0;
            same("page in the log", named, dirty(page))
                .map_err(|error| format!("{what}: {error}, page {page}"))?;
        }
        Ok(())
    }
}

/// Checks the log by any mechanism. `faults` says whether a first write to a page faults.
fn takes_exact_logs<M: Machine>(
    bench: &mut Bench<'_, M>,
    means: &str,
    write_faults: bool,
) -> Verdict {
    let faults = |count: u64| if write_faults { count } else { 0 };
    let policies = [("dirty_log", means), ("dirty_log_reads", "off")];
    let mut vm = bench.vm(Level::PAGE, &policies)?;
    vm.set(&bench.data_slot(PAGES * page::<M>(), SlotFlags::LOG_DIRTY_PAGES))?;

    bench.run(&mut vm, pages::<M>(Op::Read, 0, 128))?;
    vm.faulted(1 + 128)?;
    vm.logged("read only", |_| false)?;

    bench.write(&mut vm, pages::<M>(Op::Write, 32, 128))?;
    // The first 96 pages were read before, so they are mapped.
    vm.faulted(faults(96) + 32)?;
    vm.logged("written", |page| (32..160).contains(&page))?;
    vm.logged("not written since", |_| false)?;

    bench.write(&mut vm, every::<M>(Op::Write, 40, 12, 8 * page::<M>()))?;
    vm.faulted(faults(12))?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, 160))?;
    vm.faulted(0)?;
    vm.logged("written again", |page| {
        (40..136).contains(&page) && page % 8 == 0
    })?;
    vm.logged("not written since", |_| false)?;
    // To allow the write again, the engine needs neither the slot nor the host page. But a shadow table needs the
    // rights that the guest's tables grant.
    let fast = match Tables::<M>::SHADOWS {
        true => 0,
        false => faults(96) + faults(12),
    };
    vm.counted(&[("dirty_pages", 128 + 12), ("pf_fast", fast)])?;
    vm.end(&bench.host)?;
    Ok(format!("{} pages, in 2 logs of 5", 128 + 12))
}

pub(super) fn by_write_protection<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    takes_exact_logs(bench, "write-protect", true)
}

pub(super) fn by_dirty_bit<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    if !bench.cpu.sets_dirty() {
        return Ok("this CPU sets no dirty bits: nothing to see".into());
    }
    takes_exact_logs(bench, "dirty-bit", false)
}

/// The walker's buffer names the pages, so the harvests read only these. In the end the walker writes to more pages
/// than its buffer holds.
pub(super) fn by_buffer<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    if !M::Cpu::FILLS_BUFFER {
        return Ok("this CPU fills no buffer: nothing to see".into());
    }
    let verdict = takes_exact_logs(bench, "buffer", false)?;
    const MANY: u64 = 4 * PAGES;
    let policies = [("dirty_log", "buffer"), ("dirty_log_reads", "off")];
    let mut vm = bench.vm(Level::PAGE, &policies)?;
    vm.set(&bench.data_slot(MANY * page::<M>(), SlotFlags::LOG_DIRTY_PAGES))?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, MANY))?;
    vm.faulted(1 + MANY)?;
    bench.write(&mut vm, pages::<M>(Op::Write, 0, MANY))?;
    vm.faulted(0)?;
    vm.logged("more than a buffer holds", |page| page < MANY)?;
    vm.end(&bench.host)?;
    Ok(format!("{verdict}, then {MANY} by one run"))
}

/// When the log is enabled, huge leaves are split before the first write, and the split reads no entry of a page.
pub(super) fn eager_split<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let leaves = (GIB / huge::<M>()).min(4);
    let (size, small) = (leaves * huge::<M>(), leaves * pieces::<M>());
    let mut visited = [0; 2];
    for (walk, visited) in ["full-walk", "skip-last-level"]
        .into_iter()
        .zip(&mut visited)
    {
        let mut vm = bench.vm(Level::MEGA, &[("split_walk", walk)])?;
        vm.set(&bench.data_slot(size, SlotFlags::default()))?;
        bench.run(&mut vm, every::<M>(Op::Write, 0, leaves, huge::<M>()))?;
        vm.faulted(1 + leaves)?;
        vm.set(&bench.data_slot(size, SlotFlags::LOG_DIRTY_PAGES))?;
        vm.counted(&[("splits", leaves), ("zapped", 0)])?;
        *visited = vm.vm.stats().split_entries_visited;
        bench.run(&mut vm, pages::<M>(Op::Read, 0, small))?;
        vm.faulted(0)?;
        vm.logged("enabled", |_| false)?;
        bench.write(&mut vm, pages::<M>(Op::Write, 0, small))?;
        vm.faulted(small)?;
        vm.logged("written", |_| true)?;
        vm.end(&bench.host)?;
    }
    let [full, skipping] = visited;
    // If leaves have to be broken first, a second full walk is needed, which also reads the tables made for them.
    let again = u64::from(Tables::<M>::BREAK_BEFORE_MAKE) * skipping;
    // After 4096 entries the walk continues in another step, which reads the entries on its path again.
    let steps = small / 4096 * u64::from(Tables::<M>::TOP.0 - 1);
    let passed_over = full - skipping - again;
    holds(
        "entries of level 1 passed over",
        (small..=small + steps).contains(&passed_over),
    )?;
    Ok(format!("{skipping} entries visited, not {full}"))
}

/// KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, with a log that begins with all pages marked: huge pages are split when their
/// part of the log is cleared, and not before.
pub(super) fn cleared_by_hand<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const HUGE: u64 = 4;
    let mut vm = bench.vm(Level::MEGA, &[("prefetch", "off")])?;
    vm.vm.set_manual_dirty_log(true, true);
    vm.set(&bench.data_slot(HUGE * huge::<M>(), SlotFlags::default()))?;
    bench.write(&mut vm, every::<M>(Op::Write, 0, HUGE, huge::<M>()))?;
    vm.faulted(1 + HUGE)?;
    vm.set(&bench.data_slot(HUGE * huge::<M>(), SlotFlags::LOG_DIRTY_PAGES))?;
    vm.counted(&[("pages_2m", HUGE), ("splits", 0)])?;
    vm.logged("initially set", |_| true)?;
    vm.logged("looked at only", |_| true)?;
    bench.write(&mut vm, pages::<M>(Op::Write, 0, HUGE * 512))?;
    vm.faulted(0)?;

    // Clears the log of the second huge page.
    vm.vm
        .clear_dirty_log(0, DATA_SLOT, 512, 512, &[u64::MAX; 8])
        .map_err(|error| error.to_string())?;
    vm.counted(&[("splits", 1), ("pages_2m", fell(1)), ("pages_4k", 512)])?;
    vm.logged("cleared", |page| !(512..1024).contains(&page))?;
    bench.write(&mut vm, pages::<M>(Op::Write, 0, HUGE * 512))?;
    vm.faulted(512)?;
    vm.logged("written again", |_| true)?;

    // Without logging, no leaf has to be small: the huge page is mapped by a huge leaf again, in place if the leaf is
    // known from the slot.
    vm.set(&bench.data_slot(HUGE * huge::<M>(), SlotFlags::default()))?;
    bench.run(&mut vm, every::<M>(Op::Read, 0, HUGE, huge::<M>()))?;
    let in_place = bench.mmu == MmuKind::Tdp;
    vm.faulted(u64::from(!in_place))?;
    vm.counted(&[
        ("collapses", u64::from(in_place)),
        ("zapped", 512),
        ("pages_2m", 1),
        ("pages_4k", fell(512)),
    ])?;
    vm.end(&bench.host)?;
    Ok("1 of 4 huge pages split, when its log was cleared".into())
}
