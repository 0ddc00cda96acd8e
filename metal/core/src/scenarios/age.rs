//! Scenarios about accessed bits that the walker sets.

use alloc::format;

use slat::{Format, Level, SlotFlags, Stale};

use super::Verdict;
use crate::bench::{Bench, DATA, every, huge, page, pages, same};
use crate::guest::Tables;
use crate::{Cpu, Machine, Op};

/// Uses `count` leaves, `step` bytes apart, and then some of these leaves again. Checks after each use which leaves
/// were used.
fn age<M: Machine>(bench: &mut Bench<'_, M>, level: Level, count: u64, step: u64) -> Verdict {
    const AGAIN: u64 = 5;
    let size = count * step;
    let all = bench.backing(0..size / page::<M>());
    let mut vm = bench.vm(level, &[("prefetch", "off")])?;
    vm.set(&bench.data_slot(size, SlotFlags::default()))?;
    bench.run(&mut vm, every::<M>(Op::Write, 0, count, step))?;
    vm.faulted(1 + count)?;
    same("leaves used at first", vm.vm.age(all.clone(), true), count)?;
    // A translation in a TLB is used without a walk, and sets no accessed bit.
    let first = Tables::<M>::GRANULE.gfn(DATA);
    let gfns = first..first.add(size / page::<M>());
    M::flush_guests(vm.vm.id(), &gfns, Stale::ANYTHING);
    same("leaves used since", vm.vm.age(all.clone(), false), 0)?;

    bench.run(&mut vm, every::<M>(Op::Read, 0, AGAIN, 2 * step))?;
    vm.faulted(if bench.cpu.sets_accessed() { 0 } else { AGAIN })?;
    same("leaves used again", vm.vm.age(all.clone(), false), AGAIN)?;
    let first = bench.backing(0..step / page::<M>());
    same("the first of them", vm.vm.age(first, true), 1)?;
    same("the others", vm.vm.age(all, false), AGAIN - 1)?;
    vm.end(&bench.host)?;
    Ok(format!("{count} leaves, {AGAIN} used again"))
}

pub(super) fn of_pages<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    age(bench, Level::PAGE, 16, page::<M>())?;
    // Prefetched pages do not count as used before the guest uses them.
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "8")])?;
    vm.set(&bench.data_slot(64 * page::<M>(), SlotFlags::default()))?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, 1))?;
    let all = bench.backing(0..64);
    same("young after one fault", vm.vm.age(all.clone(), false), 1)?;
    bench.run(&mut vm, pages::<M>(Op::Read, 0, 3))?;
    same("young after two more pages", vm.vm.age(all, false), 3)?;
    vm.end(&bench.host)?;
    Ok("16 leaves, 5 used again; 7 mapped ahead, 2 used".into())
}

pub(super) fn of_huge_pages<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    age(bench, Level::MEGA, 12, huge::<M>())
}
