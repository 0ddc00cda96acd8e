//! Tests memslots that are deleted and moved while the guest writes to them. When the call has returned, no write may
//! reach the memory that backed the old address.

use alloc::format;
use alloc::string::String;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Gpa, Level, Region, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, DATA, holds, page, pages, read_word, same, write_word};
use crate::guest::Beside;
use crate::{Machine, Op};

const PAGES: u64 = 512;
const ROUNDS: u32 = 20;
/// The value of a mark, which is larger than any value that the guest writes.
const STAMP: u32 = 0xfeed_0000;

/// Marks the memory, lets the guest run, and checks that the marks are unchanged.
fn stays_as_it_is<M: Machine>(
    bench: &Bench<'_, M>,
    running: &Beside<M>,
    round: u32,
) -> Result<(), String> {
    for page in 0..PAGES {
        write_word(bench.page(page), STAMP + round);
    }
    running.pass();
    for page in 0..PAGES {
        same(
            "word behind the slot that went",
            read_word(bench.page(page)),
            STAMP + round,
        )
        .map_err(|error| format!("{error}, page {page}"))?;
    }
    Ok(())
}

/// Checks that the guest's writes reach the memory again.
fn is_written<M: Machine>(bench: &Bench<'_, M>, running: &Beside<M>) -> Result<(), String> {
    running.pass();
    let written = (0..PAGES).all(|page| read_word(bench.page(page)) < STAMP);
    holds("the slot is back, and nothing is written to it", written)
}

/// Repeatedly removes the data slot by `gone`, and restores it by `back`.
fn changes_under_the_guest<M: Machine>(
    bench: &mut Bench<'_, M>,
    gone: Region,
    back: Region,
) -> Verdict {
    let vm = bench.vm(Level::PAGE, &[])?;
    vm.set(&back)?;
    let running = Beside::start(vm.second_guest()?, pages::<M>(Op::Write, 0, PAGES));
    is_written(bench, &running)?;
    for round in 0..ROUNDS {
        vm.set(&gone)?;
        stays_as_it_is(bench, &running, round)?;
        vm.set(&back)?;
        is_written(bench, &running)?;
    }
    let seen = running.seen.clone();
    drop(running.stop()?);
    let (mmio, kicks) = (seen.mmio.load(SeqCst), seen.kicks.load(SeqCst));
    // Each round takes at least one whole pass.
    holds(
        "too few writes found no slot",
        mmio >= u64::from(ROUNDS) * PAGES,
    )?;
    vm.end(&bench.host)?;
    Ok(format!(
        "{ROUNDS} times, {mmio} writes to nowhere, {kicks} kicks"
    ))
}

pub(super) fn deleted<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let slot = bench.data_slot(PAGES * page::<M>(), SlotFlags::default());
    changes_under_the_guest(bench, slot.with_size(0), slot)
}

pub(super) fn moved<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    let slot = bench.data_slot(PAGES * page::<M>(), SlotFlags::default());
    let elsewhere = slot.with_gpa(Gpa(DATA.0 + (1 << 29)));
    changes_under_the_guest(bench, elsewhere, slot)
}
