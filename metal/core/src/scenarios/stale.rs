//! Tests a page that the host moves: a CPU that has read the old page must not read it after the move.

use alloc::format;
use core::hint::spin_loop;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Hpa, Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, CODE_PAGES, TestVm, holds, page, pages, same, write_word};
use crate::guest::Beside;
use crate::{Command, Machine, Op};

/// The number of reads of the page in one pass.
const READS: u64 = 4096;
const OLD: u32 = 3;
const NEW: u32 = 5;
/// The word on a page that must not be read. One such word in a sum is larger than the sum of all other words.
const POISON: u32 = 1 << 16;

fn read_first_page<M: Machine>() -> Command {
    Command {
        step: 0,
        ..pages::<M>(Op::Read, 0, READS)
    }
}

impl<M: Machine> Bench<'_, M> {
    /// Returns the page that replaces the first page of the data slot after [`Bench::move_page`].
    pub(super) fn spare(&self) -> Hpa {
        Hpa(self.host.small().0 + CODE_PAGES * page::<M>())
    }

    /// Makes `page` back the first page of the data slot. Runs `meanwhile` while that page of the slot is invalidated.
    pub(super) fn move_page<R>(
        &self,
        vm: &TestVm<M>,
        page: Hpa,
        meanwhile: impl FnOnce() -> R,
    ) -> R {
        let first = self.backing(0..1);
        let invalidation = vm.vm.invalidate(first.clone());
        self.host.replace(first.start, page);
        let result = meanwhile();
        drop(invalidation);
        result
    }

    /// Makes a VM whose data slot has the word `OLD` on its first page, and a spare page with the word `NEW`.
    fn vm_with_page_to_move(&mut self) -> Result<TestVm<M>, alloc::string::String> {
        let vm = self.vm(Level::PAGE, &[("prefetch", "off")])?;
        vm.set(&self.data_slot(page::<M>(), SlotFlags::default()))?;
        write_word(self.page(0), OLD);
        write_word(self.spare(), NEW);
        Ok(vm)
    }
}

pub(super) fn on_one_cpu<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let mut vm = bench.vm_with_page_to_move()?;
    let sum = bench.run(&mut vm, read_first_page::<M>())?;
    same("sum read", sum, OLD * READS as u32)?;
    vm.faulted(1 + 1)?;
    bench.run(&mut vm, read_first_page::<M>())?;
    vm.faulted(0)?;
    bench.move_page(&vm, bench.spare(), || ());
    let sum = bench.run(&mut vm, read_first_page::<M>())?;
    same("sum read after the page was moved", sum, NEW * READS as u32)?;
    vm.faulted(1)?;
    vm.counted(&[("zapped", 1), ("invalidations", 1)])?;
    vm.end(&bench.host)?;
    Ok(format!("1 fault, then {NEW} is read, not {OLD}"))
}

pub(super) fn on_another_cpu<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const ROUNDS: u64 = 50;
    let vm = bench.vm_with_page_to_move()?;
    let running = Beside::start(vm.second_guest()?, read_first_page::<M>());
    let mut now = (bench.page(0), OLD);
    let mut then = (bench.spare(), NEW);
    for round in 0..ROUNDS {
        let sum = running.pass();
        same("sum read before", sum, now.1 * READS as u32)?;
        let passes = bench.move_page(&vm, then.0, || {
            // If a CPU still reads the old page, its sum shows that.
            write_word(now.0, POISON);
            let before = running.passes();
            (0..20_000).for_each(|_| spin_loop());
            running.passes() - before
        });
        // At the moment of the move, the CPU may have been executing its last instruction on the old page.
        holds(
            "the guest went on reading a page that was away",
            passes <= 1,
        )?;
        let sum = running.pass();
        same(
            "sum read after the page was moved",
            sum,
            then.1 * READS as u32,
        )
        .map_err(|error| format!("{error}, round {round}"))?;
        holds("a page was read that was gone", running.largest() < POISON)
            .map_err(|error| format!("{error}, round {round}"))?;
        write_word(now.0, now.1);
        core::mem::swap(&mut now, &mut then);
    }
    let kicks = running.seen.kicks.load(SeqCst);
    drop(running.stop()?);
    vm.end(&bench.host)?;
    Ok(format!("{ROUNDS} times, {kicks} kicks"))
}
