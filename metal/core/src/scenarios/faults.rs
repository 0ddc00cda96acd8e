//! Scenarios about memory that is mapped on demand.

use alloc::format;

use slat::{Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, CODE_PAGES, GIB, every, huge, page, pages};
use crate::{Cpu, Machine, Op};

/// Writes `count` words, `step` bytes apart, on a host with mappings of `level`, and expects one fault for each of
/// `leaves` leaves, counted by `gauge`. One more fault is for the page of the program.
fn on_demand<M: Machine>(
    bench: &mut Bench<'_, M>,
    level: Level,
    (count, step): (u64, u64),
    (gauge, leaves): (&str, u64),
) -> Verdict {
    let mut vm = bench.vm(level, &[("prefetch", "off")])?;
    vm.set(&bench.data_slot(GIB, SlotFlags::default()))?;
    let write = every::<M>(Op::Write, 0, count, step);
    bench.write(&mut vm, write)?;
    vm.faulted(leaves + 1)?;
    vm.counted(&[
        ("pf_taken", leaves + 1),
        ("pf_fixed", leaves + 1),
        ("pf_spurious", 0),
        (gauge, leaves + u64::from(level == Level::PAGE)),
    ])?;
    let read = every::<M>(Op::Read, 0, count, step);
    let sum: u64 = (0..count).map(|i| u64::from(write.value) + i).sum();
    let result = bench.run(&mut vm, read)?;
    crate::bench::same("sum read by the guest", result, sum as u32)?;
    vm.faulted(0)?;
    vm.end(&bench.host)?;
    Ok(format!("{count} pages written, {} faults", leaves + 1))
}

pub(super) fn of_4k<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    on_demand(bench, Level::PAGE, (2048, page::<M>()), ("pages_4k", 2048))
}

pub(super) fn of_2m<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let leaves = (GIB / huge::<M>()).min(8);
    let step = huge::<M>() / 512;
    on_demand(
        bench,
        Level::MEGA,
        (leaves * 512, step),
        ("pages_2m", leaves),
    )
}

pub(super) fn of_1g<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    on_demand(bench, Level::GIGA, (512, huge::<M>()), ("pages_1g", 1))
}

pub(super) fn prefetch_window<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const PAGES: u64 = 512;
    const WINDOW: u64 = 8;
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "8")])?;
    vm.set(&bench.data_slot(PAGES * page::<M>(), SlotFlags::default()))?;
    // If the walker sets no accessed bits, the first use of a prefetched page faults to the monitor, too. The engine
    // counts no fault: the leaf is mapped.
    let first_uses = |pages: u64| match bench.cpu.sets_accessed() {
        true => 0,
        false => pages,
    };
    let (in_one, in_others) = (
        first_uses(WINDOW - 1),
        first_uses((PAGES / WINDOW - 1) * (WINDOW - 1)),
    );
    // The fault is in the middle of a window, which extends in both directions.
    bench.write(&mut vm, pages::<M>(Op::Write, 5, 1))?;
    bench.write(&mut vm, pages::<M>(Op::Write, 0, WINDOW))?;
    vm.faulted(1 + 1 + in_one)?;
    bench.write(&mut vm, pages::<M>(Op::Write, 0, PAGES))?;
    vm.faulted(PAGES / WINDOW - 1 + in_others)?;
    let faults = 1 + PAGES / WINDOW;
    vm.counted(&[
        ("pf_taken", faults),
        ("pf_fixed", faults),
        ("pages_4k", CODE_PAGES + PAGES),
        ("prefetched", CODE_PAGES + PAGES - faults),
    ])?;
    vm.end(&bench.host)?;
    Ok(format!("{PAGES} pages written, {faults} faults"))
}
