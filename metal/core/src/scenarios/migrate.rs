//! Scenarios about dirty logs of a guest that keeps writing, as in a migration. After a log was read, the pages that it
//! names are copied. When the guest has stopped and the pages of the last log are copied, the copy must equal the
//! memory. A write that no log contains, made through a TLB or without setting a dirty bit, would be missing in the
//! copy.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::SeqCst;

use slat::{Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, DATA_SLOT, MIB, TestVm, fell, holds, pages, read_word, same};
use crate::guest::Beside;
use crate::{Command, Cpu, Machine, Op};

const HUGE: u64 = 4;
const PAGES: u64 = HUGE * 512;
/// The number of pages whose log is cleared at a time.
const CHUNK: u64 = 512;
const ROUNDS: u64 = 20;

/// Copies the word that the guest writes, which is the first word, of each page that the log names. Returns the number
/// of these pages. Every page that was written before the log was read, and was not copied since, must be in this log.
fn copy<M: Machine>(
    bench: &Bench<'_, M>,
    vm: &TestVm<M>,
    copies: &mut [u32],
) -> Result<u64, String> {
    let written: Vec<u32> = (0..PAGES).map(|page| read_word(bench.page(page))).collect();
    let log = vm.log()?;
    let mut copied = 0;
    for first in (0..PAGES).step_by(CHUNK as usize) {
        let part = &log[first as usize / 64..(first + CHUNK) as usize / 64];
        vm.vm
            .clear_dirty_log(0, DATA_SLOT, first, CHUNK, part)
            .map_err(|error| error.to_string())?;
        for page in first..first + CHUNK {
            if log[page as usize / 64] >> (page % 64) & 1 != 0 {
                copies[page as usize] = read_word(bench.page(page));
                copied += 1;
            } else {
                let unnamed = (copies[page as usize], written[page as usize]);
                same(
                    "word of a page that the log does not name",
                    unnamed.0,
                    unnamed.1,
                )
                .map_err(|error| format!("{error}, page {page}: a write went unnoticed"))?;
            }
        }
    }
    Ok(copied)
}

/// Makes a command that writes every page in turn.
fn all_pages<M: Machine>() -> Command {
    pages::<M>(Op::Write, 0, PAGES)
}

/// Makes a command that writes one page again and again: all but the first write of a pass use the TLB.
fn one_page<M: Machine>() -> Command {
    Command {
        step: 0,
        ..pages::<M>(Op::Write, 3, 100_000)
    }
}

fn migrate<M: Machine>(bench: &mut Bench<'_, M>, means: &str, writes: Command) -> Verdict {
    let mut vm = bench.vm(Level::MEGA, &[("prefetch", "off"), ("dirty_log", means)])?;
    vm.vm.set_manual_dirty_log(true, true);
    vm.set(&bench.data_slot(HUGE * 2 * MIB, SlotFlags::default()))?;
    bench.write(&mut vm, all_pages::<M>())?;
    vm.counted(&[("pages_2m", HUGE), ("splits", 0)])?;

    let running = Beside::start(vm.second_guest()?, writes);
    running.pass();
    vm.set(&bench.data_slot(HUGE * 2 * MIB, SlotFlags::LOG_DIRTY_PAGES))?;
    let mut copies = vec![0; PAGES as usize];
    let mut copied = 0;
    for _ in 0..ROUNDS {
        // Read most logs in the middle of a pass.
        for _ in 0..3 {
            copied += copy(bench, &vm, &mut copies)?;
        }
        running.pass();
    }
    let kicks = running.seen.kicks.load(SeqCst);
    drop(running.stop()?);
    copied += copy(bench, &vm, &mut copies)?;
    for (page, copy) in copies.iter().enumerate() {
        same(
            "word in the copy",
            *copy,
            read_word(bench.page(page as u64)),
        )
        .map_err(|error| format!("{error}, page {page}: a write went unnoticed"))?;
    }
    vm.counted(&[("splits", HUGE), ("pages_2m", fell(HUGE))])?;
    // The first log names all pages. Each later log names the pages that were written in the pass before.
    holds(
        "a log names nothing, and the guest wrote",
        copied >= PAGES + ROUNDS,
    )?;
    vm.end(&bench.host)?;
    Ok(format!(
        "{copied} pages copied from {} logs, {kicks} kicks",
        3 * ROUNDS + 1
    ))
}

pub(super) fn by_write_protection<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    migrate(bench, "write-protect", all_pages::<M>())
}

pub(super) fn of_one_page_by_write_protection<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    migrate(bench, "write-protect", one_page::<M>())
}

pub(super) fn by_dirty_bit<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    with_dirty_bits(bench, all_pages::<M>())
}

pub(super) fn of_one_page_by_dirty_bit<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    with_dirty_bits(bench, one_page::<M>())
}

fn with_dirty_bits<M: Machine>(bench: &mut Bench<'_, M>, writes: Command) -> Verdict {
    if !bench.cpu.sets_dirty() {
        return Ok("this CPU sets no dirty bits: nothing to see".into());
    }
    migrate(bench, "dirty-bit", writes)
}
