//! Scenarios about huge leaves that are split while another CPU uses them.

use alloc::format;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Format, Level, SlotFlags};

use super::Verdict;
use super::nx::plant_functions;
use crate::bench::{Bench, MIB, every, fell, holds, pages, same, write_word};
use crate::guest::{Beside, Tables};
use crate::{Machine, Op};

/// One CPU reads a word of each of many huge pages, again and again; the other executes in each, which splits it. The
/// reader must read the right value of every word. If a leaf may be replaced in one step, the reader takes no fault. If
/// the leaf has to be broken before the table replaces it, each split flushes in between, and the reader may have to
/// wait for the split.
pub(super) fn under_a_running_guest<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const REGIONS: u64 = 256;
    let mut vm = bench.vm(Level::MEGA, &[("nx_huge_pages", "on")])?;
    vm.set(&bench.data_slot(REGIONS * 2 * MIB, SlotFlags::default()))?;
    for region in 0..REGIONS {
        plant_functions(bench, region * 512 + 1..region * 512 + 2);
        write_word(bench.page(region * 512), region as u32 + 1);
    }
    let sum = (REGIONS * (REGIONS + 1) / 2) as u32;
    let reads = every::<M>(Op::Read, 0, REGIONS, 2 * MIB);
    same("sum read", bench.run(&mut vm, reads)?, sum)?;
    vm.faulted(1 + REGIONS)?;
    vm.counted(&[("pages_2m", REGIONS)])?;

    let running = Beside::start(vm.second_guest()?, reads);
    same("sum read by the other CPU", running.pass(), sum)?;
    let before = running.passes();
    for region in 0..REGIONS {
        bench.run(&mut vm, pages::<M>(Op::Execute, region * 512 + 1, 1))?;
    }
    let passes = running.passes() - before;
    same("sum read afterwards", running.pass(), sum)?;
    let seen = running.seen.clone();
    drop(running.stop()?);
    let waits = seen.faults.load(SeqCst);
    vm.faulted(REGIONS)?;
    let breaks = Tables::<M>::BREAK_BEFORE_MAKE;
    holds("the other CPU faulted", breaks || waits == 0)?;
    vm.counted(&[
        ("splits", REGIONS),
        ("pages_2m", fell(REGIONS)),
        ("zapped", 0),
        ("remote_tlb_flush", if breaks { REGIONS } else { 0 }),
    ])?;
    vm.end(&bench.host)?;
    Ok(format!(
        "{REGIONS} splits, {passes} passes of the other CPU, which waited {waits} times"
    ))
}
