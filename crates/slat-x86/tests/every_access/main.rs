//! Makes each memory access of compiled code fail in turn, in each way in which an access can fail. The interpreter
//! determines what has to happen then: registers, flags, memory, and the exits with their contents must be the same.
//!
//! `SLAT_TEST_ROUNDS=1000` tries more programs, `SLAT_TEST_SEED=7` other ones.
#![cfg(feature = "jit")]

#[path = "../common/mod.rs"]
mod common;
mod program;

use common::*;
use program::{AREA, Program};
use slat_x86::{Access, Exit, Fault, State};
use std::collections::BTreeSet;

const MEMORY: usize = 0x20_0000;
/// A number of entries of a block. After fewer entries than this, the block is compiled.
const HOT: u64 = 5000;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// The ways in which the accesses to a page fail.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The first access raises #PF. Then the page is present.
    Absent,
    /// The first store raises #PF. Then the page is writable.
    ReadOnly,
    /// The host page is inaccessible until the machine rechecks the access.
    Gone,
    /// Like `Gone`, but the recheck abandons the instruction.
    GoneRetry,
    /// Like `Gone`, but the recheck ends the run.
    BadAddress,
    /// The page belongs to a device.
    Device,
    /// The machine requires a report of each store.
    Tracked,
    /// The page holds decoded code.
    HoldsCode,
}

const WAYS: [Way; 8] = [
    Way::Absent,
    Way::ReadOnly,
    Way::Gone,
    Way::GoneRetry,
    Way::BadAddress,
    Way::Device,
    Way::Tracked,
    Way::HoldsCode,
];

/// The results of a guest's run.
#[derive(PartialEq)]
struct Account {
    exits: Vec<(Exit, State)>,
    memory: Vec<u8>,
    stores: Vec<(u64, Vec<u8>)>,
    rechecks: bool,
}

fn setting(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// The part of a program that is compiled.
#[derive(Clone, Copy, Debug)]
enum Compiled {
    Nothing,
    /// Each block is compiled and run alone.
    Blocks,
    /// All blocks are compiled together, after they have run often.
    Regions,
}

/// Makes a guest of `program`. The handler of each vector executes HLT. After that it drops the error code and returns.
fn guest(program: &Program, operands: &[u8], what: Compiled) -> Guest {
    let mut guest = Guest::interpreted(Memory::new(MEMORY), &[0xf4]);
    for vector in 0..32 {
        let at = HANDLERS + 16 * u64::from(vector);
        Guest::gate(guest.memory(), vector, at, 0, 1);
        // hlt; add rsp,8; iretq
        let handler = b"\xf4\x48\x83\xc4\x08\x48\xcf";
        guest.memory().write(at, handler);
    }
    program.load(guest.memory(), operands);
    if matches!(what, Compiled::Blocks) {
        compiled::always(&mut guest.cpu);
    }
    // From the second run on, the blocks are kept.
    for _ in 0..2 {
        program.start(&mut guest.cpu.state, None);
        guest.halt();
        program.reset(guest.memory(), operands);
    }
    if matches!(what, Compiled::Regions) {
        compiled::always(&mut guest.cpu);
        program.start(&mut guest.cpu.state, Some(HOT));
        guest.halt();
    }
    guest
}

/// Returns the data of a device.
fn data_at(gpa: u64) -> [u8; 8] {
    (gpa.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

/// Runs `program`. If `page` is given, accesses to this page fail.
fn run(
    guest: &mut Guest,
    program: &Program,
    operands: &[u8],
    failing: Option<(u64, Way)>,
) -> Account {
    let gva = failing.map_or(0, |(page, _)| page << 12);
    program.reset(guest.memory(), operands);
    guest.machine.stores.clear();
    guest.machine.rechecks = 0;
    match failing.map(|(_, way)| way) {
        None => guest.cpu.flush_tlb(),
        Some(Way::Absent) => guest.machine.absent(gva),
        Some(Way::ReadOnly) => guest.machine.read_only(gva),
        Some(Way::Device) => drop(guest.machine.moved.insert(gva >> 12, MMIO >> 12)),
        Some(Way::Tracked) => guest.machine.track(gva),
        Some(Way::HoldsCode) => {
            for _ in 0..2 {
                guest.memory().write(gva + 0x800, &[0xf4]);
                guest.cpu.state.rip = gva + 0x800;
                guest.halt();
            }
        }
        // The TLB still contains the page when its host page becomes inaccessible.
        Some(Way::Gone) => guest.machine.mends = Some(Ok(())),
        Some(Way::GoneRetry) => guest.machine.mends = Some(Err(Fault::Retry)),
        Some(Way::BadAddress) => guest.machine.bad_address = true,
    }
    match failing.map(|(_, way)| way) {
        Some(Way::Gone | Way::GoneRetry | Way::BadAddress) => {
            guest.memory().protect(gva, libc::PROT_NONE)
        }
        _ => guest.cpu.flush_tlb(),
    }
    program.start(&mut guest.cpu.state, None);
    let mut exits = vec![];
    while exits.len() < 1000 {
        let exit = guest.run();
        exits.push((exit.clone(), guest.cpu.state.clone()));
        match exit {
            Exit::Hlt
                if guest.cpu.state.rip == HANDLERS + 16 * u64::from(slat_x86::vector::PF) + 1 =>
            {
                guest.machine.rights.clear();
            }
            Exit::BadAddress => guest.memory().protect(gva, READ_WRITE),
            Exit::Mmio { write: true, .. } => {}
            Exit::Mmio { gpa, len, .. } => {
                guest.cpu.complete_mmio_read(&data_at(gpa)[..len.into()])
            }
            _ => break,
        }
    }
    guest.machine.rights.clear();
    guest.machine.moved.clear();
    guest.machine.tracked.clear();
    (guest.machine.mends, guest.machine.bad_address) = (None, false);
    if gva != 0 {
        guest.memory().protect(gva, READ_WRITE);
    }
    let bytes = |gpa, len| {
        // SAFETY: the range is in the memory of the guest, and the guest is not running.
        unsafe { std::slice::from_raw_parts(guest.memory().at(gpa), len) }
    };
    let mut memory = bytes(AREA, program.area() as usize).to_vec();
    memory.extend_from_slice(bytes(IST_STACK - 0x100, 0x100));
    memory.extend_from_slice(bytes(STACK - 0x100, 0x100));
    let stores = guest.machine.stores.drain(..);
    Account {
        exits,
        memory,
        stores: stores.map(|stored| (stored.gpa, stored.bytes)).collect(),
        rechecks: guest.machine.rechecks != 0,
    }
}

/// Panics with a description if the results differ.
fn compare(expected: &Account, found: &Account, what: &str) {
    if expected == found {
        return;
    }
    for (n, (a, b)) in expected.exits.iter().zip(&found.exits).enumerate() {
        if a != b {
            println!("exit {n}, interpreter: {a:#x?}\ncompiled code: {b:#x?}");
            break;
        }
    }
    println!("exits: {} and {}", expected.exits.len(), found.exits.len());
    println!("stores: {:x?} and {:x?}", expected.stores, found.stores);
    println!("rechecks: {} and {}", expected.rechecks, found.rechecks);
    let differing = expected
        .memory
        .iter()
        .zip(&found.memory)
        .position(|(a, b)| a != b);
    println!("memory differs at {differing:x?}");
    panic!("{what}");
}

#[test]
fn every_access_of_compiled_code_that_fails_leaves_what_it_leaves_in_the_interpreter() {
    let rounds = setting("SLAT_TEST_ROUNDS", 30);
    let seed = setting("SLAT_TEST_SEED", 1);
    let (mut runs, mut failed) = (0u64, [0u64; WAYS.len()]);
    let mut instructions = [0u64; 2];
    for round in seed..seed + rounds {
        let mut random = Random(round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let is_single = round.is_multiple_of(2);
        let program = Program::random(&mut random, is_single);
        let operands: Vec<u8> = std::iter::repeat_with(|| random.next().to_le_bytes())
            .take(program.area() as usize / 8)
            .flatten()
            .collect();
        let mut interpreted = guest(&program, &operands, Compiled::Nothing);
        let mut guests =
            [Compiled::Blocks, Compiled::Regions].map(|what| guest(&program, &operands, what));
        interpreted.machine.translations.clear();
        let expected = run(&mut interpreted, &program, &operands, None);
        assert_eq!(
            expected.exits.last().unwrap().1.rip,
            program.end(),
            "seed {round}"
        );
        let data =
            |(gva, access): &(u64, Access)| (*access != Access::Execute).then_some(gva >> 12);
        let area = AREA >> 12..(AREA + program.area()) >> 12;
        let pages: BTreeSet<u64> = (interpreted.machine.translations.iter())
            .filter_map(data)
            .filter(|page| area.contains(page))
            .collect();
        for guest in &mut guests {
            let before = *guest.cpu.counters();
            compare(
                &expected,
                &run(guest, &program, &operands, None),
                &format!("seed {round}"),
            );
            let after = guest.cpu.counters();
            let compiled = after.instructions_compiled - before.instructions_compiled;
            // In a single block, each turn of the loop may stop at the first access.
            assert!(compiled > 0 || is_single, "seed {round}");
            instructions[0] += after.instructions - before.instructions;
            instructions[1] += compiled;
        }
        for page in pages {
            for (n, way) in WAYS.into_iter().enumerate() {
                // This part makes new blocks, whose compilation takes long, so it is tried less often.
                if matches!(way, Way::HoldsCode) && random.below(4) != 0 {
                    continue;
                }
                let failing = Some((page, way));
                let expected = run(&mut interpreted, &program, &operands, failing);
                failed[n] += u64::from(
                    expected.exits.len() > 1 || expected.rechecks || !expected.stores.is_empty(),
                );
                for guest in &mut guests {
                    let found = run(guest, &program, &operands, failing);
                    compare(
                        &expected,
                        &found,
                        &format!("seed {round}, page {page:#x}, {way:?}"),
                    );
                    runs += 1;
                }
            }
        }
    }
    println!("{runs} runs; in the interpreter's, there failed {failed:?} as {WAYS:?}");
    let [all, compiled] = instructions;
    assert!(compiled > all * 3 / 4, "{compiled} of {all} instructions");
    assert!(failed[..7].iter().all(|n| *n > 0));
}
