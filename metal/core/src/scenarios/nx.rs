//! Scenarios about NX huge pages: an execution splits a leaf in place, and unmaps nothing.

use alloc::format;

use slat::{Format, Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, GIB, MIB, every, fell, pages, same};
use crate::guest::Tables;
use crate::{Cpu, Machine, Op};

/// Writes a function that only returns to the beginning of each of `pages` of the data slot.
pub(super) fn plant_functions<M: Machine>(bench: &Bench<'_, M>, pages: core::ops::Range<u64>) {
    for page in pages {
        let code = M::Cpu::RETURN;
        // SAFETY: the word is in the guests' memory, and no guest runs.
        unsafe {
            core::ptr::copy_nonoverlapping(code.as_ptr(), bench.page(page).0 as *mut u8, code.len())
        };
    }
}

pub(super) fn huge_page_2m<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const REGIONS: u64 = 8;
    const CALLED: u64 = 3 * 512;
    let policies = [
        ("nx_huge_pages", "on"),
        ("nx_huge_pages_recovery_ratio", "1"),
    ];
    let mut vm = bench.vm(Level::MEGA, &policies)?;
    vm.set(&bench.data_slot(REGIONS * 2 * MIB, SlotFlags::default()))?;
    plant_functions(bench, CALLED..CALLED + 512);
    bench.run(&mut vm, every::<M>(Op::Read, 0, REGIONS, 2 * MIB))?;
    vm.faulted(1 + REGIONS)?;
    vm.counted(&[("pages_2m", REGIONS), ("splits", 0)])?;

    bench.run(&mut vm, pages::<M>(Op::Execute, CALLED + 77, 1))?;
    vm.faulted(1)?;
    vm.counted(&[
        ("splits", 1),
        ("nx_lpage_splits", 1),
        ("pages_2m", fell(1)),
        ("pages_4k", 512),
        ("zapped", 0),
        (
            "remote_tlb_flush",
            u64::from(Tables::<M>::BREAK_BEFORE_MAKE),
        ),
    ])?;

    bench.run(&mut vm, pages::<M>(Op::Execute, CALLED, 512))?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, REGIONS * 512))?;
    vm.faulted(0)?;

    same("tables recovered", vm.vm.recover_nx_huge_pages(), 1)?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, REGIONS * 512))?;
    vm.faulted(1)?;
    vm.counted(&[("nx_lpage_splits", fell(1)), ("pages_2m", 1)])?;
    vm.end(&bench.host)?;
    Ok(format!(
        "1 fault split 1 of {REGIONS} huge pages, 512 calls and {} reads with no further one",
        REGIONS * 512
    ))
}

pub(super) fn huge_page_1g<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const CALLED: u64 = 100 * 512;
    let mut vm = bench.vm(Level::GIGA, &[("nx_huge_pages", "on")])?;
    vm.set(&bench.data_slot(GIB, SlotFlags::default()))?;
    plant_functions(bench, CALLED..CALLED + 512);
    bench.run(&mut vm, pages::<M>(Op::Read, 0, 1))?;
    vm.faulted(1 + 1)?;
    vm.counted(&[("pages_1g", 1)])?;

    bench.run(&mut vm, pages::<M>(Op::Execute, CALLED + 5, 1))?;
    // If a fault has to break a leaf before it makes a table, the flush after the break ends the fault. So there is one
    // fault for each of the two levels.
    let faults = if Tables::<M>::BREAK_BEFORE_MAKE { 2 } else { 1 };
    vm.faulted(faults)?;
    vm.counted(&[
        ("splits", 2),
        ("pages_1g", fell(1)),
        ("pages_2m", 511),
        ("pages_4k", 512),
        ("zapped", 0),
    ])?;

    bench.run(&mut vm, every::<M>(Op::Read, 0, 512, 2 * MIB))?;
    bench.run(&mut vm, pages::<M>(Op::Execute, CALLED, 512))?;
    bench.run(&mut vm, pages::<M>(Op::Read, CALLED - 512, 3 * 512))?;
    vm.faulted(0)?;
    vm.end(&bench.host)?;
    Ok(format!(
        "1 GiB split into 511 leaves of 2 MiB and 512 of 4 KiB, faults: {faults}"
    ))
}
