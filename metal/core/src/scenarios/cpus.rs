//! Scenarios with two CPUs in one guest.

use alloc::format;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, every, holds, page, pages, read_word, same};
use crate::guest::Beside;
use crate::{Machine, Op};

/// Each of two CPUs writes every second page, one of them the even pages and the other one the odd pages.
pub(super) fn fault_in_the_same_tables<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const PAGES: u64 = 8192;
    let mut vm = bench.vm(Level::PAGE, &[("prefetch", "off")])?;
    vm.set(&bench.data_slot(PAGES * page::<M>(), SlotFlags::default()))?;
    let odd = every::<M>(Op::Write, 1, PAGES / 2, 2 * page::<M>());
    let running = Beside::start(vm.second_guest()?, odd);
    bench.write(
        &mut vm,
        every::<M>(Op::Write, 0, PAGES / 2, 2 * page::<M>()),
    )?;
    running.pass();
    let passes_before_stop = running.passes();
    let other = running.stop()?;
    holds("the second CPU made no pass", passes_before_stop > 0)?;
    // Both CPUs fault on the code page.
    let faults = vm.guest.seen.faults.load(SeqCst) + other.seen.faults.load(SeqCst);
    drop(other);
    let spurious = faults.saturating_sub(PAGES + 1);
    holds("more faults than two CPUs can have", spurious <= 1)?;
    vm.counted(&[("pages_4k", PAGES + 1), ("pf_fixed", PAGES + 1)])?;
    for page in (1..PAGES).step_by(2) {
        let passed = read_word(bench.page(page)).wrapping_sub(odd.value);
        let number = u64::from(passed) % (PAGES / 2);
        same("word written by the second CPU", number, page / 2)?;
    }
    vm.end(&bench.host)?;
    Ok(format!("{PAGES} pages written, {faults} faults"))
}

pub(super) fn a_kick<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const KICKS: u64 = 10;
    let vm = bench.vm(Level::PAGE, &[])?;
    vm.set(&bench.data_slot(page::<M>(), SlotFlags::default()))?;
    let mut long = pages::<M>(Op::Read, 0, 100_000);
    long.step = 0;
    let running = Beside::start(vm.second_guest()?, long);
    running.pass();
    for kick in 1..=KICKS {
        // The CPU may have been outside the guest, so kick again.
        while running.seen.kicks.load(SeqCst) < kick && !running.has_ended() {
            let before = running.seen.kicks.load(SeqCst);
            M::kick(1);
            for _ in 0..10_000 {
                if running.seen.kicks.load(SeqCst) != before {
                    break;
                }
                core::hint::spin_loop();
            }
        }
    }
    drop(running.stop()?);
    vm.end(&bench.host)?;
    Ok(format!("{KICKS} kicks"))
}
