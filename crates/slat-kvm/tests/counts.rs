//! Tests what an operation costs, in walks, look-ups, flushes and decoded blocks. The counts are exact: if a change
//! makes an operation more expensive, these tests fail, so no benchmark is needed to notice it.
#![cfg(target_arch = "x86_64")]

mod common;
#[path = "long_mode/mod.rs"]
mod long_mode;

use long_mode::{Machine, answer};
use slat_kvm::VcpuFd;
use slat_kvm::report;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const CODE: u64 = 0x1000;

/// Returns all counts of the process by name. This file has one test, so that nothing else is counted.
fn counts() -> BTreeMap<&'static str, u64> {
    let totals = report::totals();
    let cpu = slat_x86::Counters::NAMES.into_iter().zip(totals.cpu);
    totals.memory.iter().chain(cpu).collect()
}

fn exits(vcpu: &mut VcpuFd, times: u64) {
    for _ in 0..times {
        assert!(answer(vcpu.run().unwrap()));
    }
}

/// An operation that the guest repeats. A counter that neither list names does not rise.
struct Operation {
    name: &'static str,
    code: &'static [u8],
    /// The amount by which each of these counters rises with each operation.
    each: &'static [(&'static str, u64)],
    /// The amount by which each of these counters rises with each window of pages.
    window: &'static [(&'static str, u64)],
}

/// The number of pages that one fault maps. It is the size of the prefetch window, which is fixed in this test.
const WINDOW: u64 = 8;
/// The number of operations that are counted: a multiple of the window.
const TIMES: u64 = 96;
/// The cost of the first use of a page in a window.
const FAULT: &[(&str, u64)] = &[
    ("pf_taken", 1),
    ("pf_fixed", 1),
    ("prefetched", WINDOW - 1),
    ("slot_lookups_saved", 1),
];

const WRITE: &str = "a write of a device register";

const OPERATIONS: &[Operation] = &[
    Operation {
        name: "a read of a device register",
        // mov ebx,0x400000; mov eax,[rbx]; jmp back
        code: b"\xbb\0\0\x40\0\x8b\x03\xeb\xfc",
        each: &[
            ("blocks", 2),
            ("blocks_looked_up", 1),
            ("instructions", 2),
            ("mmio_cached", 1),
            ("pages_compared", 1),
            ("tlb_misses", 1),
        ],
        window: &[],
    },
    Operation {
        name: WRITE,
        // mov ebx,0x400000; mov [rbx],eax; jmp back
        code: b"\xbb\0\0\x40\0\x89\x03\xeb\xfc",
        each: &[
            ("blocks", 2),
            ("blocks_looked_up", 1),
            ("instructions", 2),
            ("mmio_cached", 1),
            ("pages_compared", 1),
            ("tlb_misses", 1),
        ],
        window: &[],
    },
    Operation {
        name: "a read of a port",
        // in al,dx; jmp back
        code: b"\xec\xeb\xfd",
        each: &[
            ("blocks", 2),
            ("blocks_looked_up", 1),
            ("instructions", 1),
            ("pages_compared", 1),
        ],
        window: &[],
    },
    Operation {
        name: "the first write to a page",
        // mov ebx,0x100000; mov [rbx],eax; add ebx,0x1000; out 0x10,al; jmp back
        code: b"\xbb\0\0\x10\0\x89\x03\x81\xc3\0\x10\0\0\xe6\x10\xeb\xf4",
        each: &[
            ("blocks", 2),
            ("blocks_looked_up", 1),
            ("guest_pte_reads", 3),
            ("instructions", 3),
            ("pages_4k", 1),
            ("pages_compared", 1),
            ("tlb_misses", 1),
        ],
        window: FAULT,
    },
    Operation {
        name: "the first call of a function on its own page",
        // mov ebx,0x100000; call rbx; add ebx,0x1000; out 0x10,al; jmp back
        code: b"\xbb\0\0\x10\0\xff\xd3\x81\xc3\0\x10\0\0\xe6\x10\xeb\xf4",
        each: &[
            ("blocks", 4),
            ("blocks_decoded", 1),
            ("blocks_looked_up", 2),
            ("guest_pte_reads", 3),
            ("instructions", 4),
            ("pages_4k", 1),
            ("pages_compared", 1),
        ],
        window: FAULT,
    },
];

/// Returns the counters that have risen since `before`, and by how much.
fn risen(before: &BTreeMap<&'static str, u64>) -> BTreeMap<&'static str, u64> {
    let mut risen = counts();
    risen.retain(|name, value| {
        *value -= before[name];
        *value != 0
    });
    risen
}

/// Makes a machine whose vCPU is about to execute `operation`.
fn start(operation: &Operation) -> (Machine, VcpuFd) {
    let machine = Machine::new();
    let window = slat::Prefetch::Window(WINDOW as u16);
    machine
        .vm
        .engine()
        .set_policy(slat::Setting::Prefetch(window));
    machine.memory.write(CODE, operation.code);
    for page in 0..2 * TIMES {
        machine.memory.write(0x10_0000 + page * 0x1000, b"\xc3"); // ret
    }
    let vcpu = machine.vm.create_vcpu(0).unwrap();
    machine.start(&vcpu);
    (machine, vcpu)
}

/// Returns the counters that rise while the guest executes `operation` [`TIMES`] times, after it was executed for a
/// while.
fn measure(operation: &Operation) -> BTreeMap<&'static str, u64> {
    let (_machine, mut vcpu) = start(operation);
    exits(&mut vcpu, 6 * WINDOW);
    let before = counts();
    exits(&mut vcpu, TIMES);
    risen(&before)
}

/// The number of measurements that are made until one is not interrupted. Every 10 ms the ticker makes each vCPU
/// check its code, which costs a look-up and a comparison. A measurement takes much less time, so the first or second
/// one succeeds.
const ATTEMPTS: usize = 10;

/// Asserts that `operation` has the expected costs. If its costs have changed, they differ in each attempt.
fn compare(operation: &Operation) {
    let each = operation.each.iter().map(|cost| (cost, TIMES));
    let windows = operation.window.iter().map(|cost| (cost, TIMES / WINDOW));
    let expected: BTreeMap<_, _> = each
        .chain(windows)
        .map(|((name, cost), times)| (*name, cost * times))
        .collect();
    let mut seen = BTreeMap::new();
    for _ in 0..ATTEMPTS {
        seen = measure(operation);
        if !operation.window.is_empty() {
            // Once in a measurement, the block of a function has the same entry as the block of the loop, in the
            // table in which blocks are looked up first.
            for name in ["blocks_looked_up", "pages_compared"] {
                let (seen, expected) = (seen.get_mut(name).unwrap(), expected[name]);
                if seen.abs_diff(expected) <= 1 {
                    *seen = expected;
                }
            }
        }
        if seen == expected {
            return;
        }
    }
    assert_eq!(seen, expected, "{}", operation.name);
}

/// Compiled code leaves an access to a device to the interpreter, and tells it which device it has found.
fn a_device_is_found_once_by_compiled_code(write: &Operation) {
    let (_machine, mut vcpu) = start(write);
    let began = Instant::now();
    loop {
        let before = counts();
        exits(&mut vcpu, TIMES);
        let risen = risen(&before);
        let is_compiled = risen.get("instructions_compiled") >= Some(&TIMES);
        // After an interruption by the ticker, the access is looked up once more. So not each round has these counts.
        if is_compiled && risen["mmio_cached"] == TIMES && !risen.contains_key("slot_lookups") {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{risen:?}");
    }
}

#[test]
fn each_operation_costs_what_it_did() {
    for operation in OPERATIONS {
        compare(operation);
        if operation.name == WRITE {
            a_device_is_found_once_by_compiled_code(operation);
        }
    }
}
