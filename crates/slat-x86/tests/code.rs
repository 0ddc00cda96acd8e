//! Tests that decoded code takes a bounded part of the heap, and that the guest's results do not depend on how large
//! that part is.

mod common;
use common::*;
use slat_x86::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts the bytes that a thread has allocated and not freed.
struct Counting;

#[derive(Clone, Copy, Default)]
struct Count {
    bytes: usize,
    most: usize,
    /// Whether all allocations fail.
    fails: bool,
}

thread_local! {
    static COUNT: Cell<Count> = const { Cell::new(Count { bytes: 0, most: 0, fails: false }) };
}

fn count(add: usize, sub: usize) -> bool {
    let change = |cell: &Cell<Count>| {
        let mut count = cell.get();
        if add > 0 && count.fails {
            return false;
        }
        count.bytes = count.bytes.wrapping_add(add).wrapping_sub(sub);
        count.most = count.most.max(count.bytes);
        cell.set(count);
        true
    };
    COUNT.try_with(change).unwrap_or(true)
}

// SAFETY: all memory comes from the system allocator. An allocator may refuse a request, as this one sometimes does.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count(layout.size(), 0) {
            return std::ptr::null_mut();
        }
        // SAFETY: the size of `layout` is not 0, as `alloc` asks of its caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: `pointer` is from `System` with `layout`, like all memory of this allocator, which `dealloc` asks of
        // its caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// The address of the guest's first block. Each block has `BLOCK` bytes.
const FIRST: u64 = 0x10_0000;
const BLOCK: u64 = 192;
/// The number of blocks in a part of the code. A part runs several times before the next part runs.
const PART: u64 = 512;

/// Makes a guest of `blocks` blocks, each of which adds its own number in many small steps.
fn guest_of(blocks: u64) -> Guest {
    let mut guest = Guest::new(b"\xf4");
    // The memory that the test's own machine needs is reserved first, so that it is not counted.
    guest.machine.translations.reserve(1 << 20);
    for n in 0..blocks {
        // add eax,n; add eax,1 ...; ret
        let mut code = vec![0x05];
        code.extend((n as u32).to_le_bytes());
        for _ in 0..40 {
            code.extend(b"\x83\xc0\x01");
        }
        code.push(0xc3);
        guest.memory().write(FIRST + n * BLOCK, &code);
    }
    guest
}

/// Whether this thread compiles all code itself. That takes additional memory, and fails without it.
fn compiles_here() -> bool {
    std::env::var_os("SLAT_TEST_COMPILED").is_some()
}

/// Calls a block. Returns RAX afterwards.
fn call(guest: &mut Guest, block: u64) -> u64 {
    guest.cpu.state.gpr[RSP] = STACK;
    guest.memory().write64(STACK, CODE);
    guest.cpu.state.rip = FIRST + block * BLOCK;
    guest.halt();
    guest.cpu.state.gpr[RAX]
}

/// An executor lends its CPU, so a caller can exchange the CPUs of two executors.
#[test]
fn executors_whose_cpus_are_exchanged_forget_the_code_of_the_other_cpu() {
    if compiles_here() {
        return;
    }
    let blocks = 300;
    let [mut first, mut second] = [guest_of(blocks), guest_of(blocks)];
    for guest in [&mut first, &mut second] {
        for block in (0..3).flat_map(|_| 0..blocks) {
            call(guest, block);
        }
    }
    let kept = first.cpu.code_bytes();
    std::mem::swap(&mut *first.cpu, &mut *second.cpu);
    drop(second);
    first.cpu.flush_tlb();
    first.cpu.state.gpr[RAX] = 0;
    assert_eq!(call(&mut first, 2), 42);
    let now = first.cpu.code_bytes();
    assert!(now < kept / 2, "{now} bytes of {kept}");
}

#[test]
fn decoded_code_is_thrown_away_when_it_takes_more_than_its_part_of_the_heap() {
    if compiles_here() {
        return;
    }
    let blocks = 78_000;
    let mut guest = guest_of(blocks);
    let before = COUNT.get().bytes;
    let (mut most, mut thrown_away, mut expected) = (0, 0, 0);
    for part in 0..blocks / PART {
        for _ in 0..3 {
            for block in part * PART..(part + 1) * PART {
                expected = (expected + block + 40) & 0xffff_ffff;
                let kept = guest.cpu.code_bytes();
                assert_eq!(call(&mut guest, block), expected, "block {block}");
                let now = guest.cpu.code_bytes();
                let counted = COUNT.get().bytes - before;
                // The empty index has one entry, and an index has some bytes that belong to no entry.
                assert!(counted.abs_diff(now) < 64, "{counted} bytes, not {now}");
                thrown_away += u32::from(now < kept / 2);
                most = most.max(now);
            }
        }
    }
    assert!(thrown_away > 1, "{most} bytes at most");
    assert!(most <= CODE_BYTES && most > CODE_BYTES / 10 * 9, "{most}");
    println!("{thrown_away} times, {most} bytes at most");
    drop(guest);
}

#[test]
fn code_for_which_there_is_no_memory_runs_all_the_same() {
    if compiles_here() {
        return;
    }
    let blocks = 2000;
    let mut guest = guest_of(blocks);
    let mut expected = 0;
    for round in 0..6u64 {
        for block in 0..blocks {
            expected = (expected + block + 40) & 0xffff_ffff;
            let mut now = COUNT.get();
            now.fails = (round + block / 100) % 2 == 0;
            COUNT.set(now);
            let sum = call(&mut guest, block);
            now = COUNT.get();
            now.fails = false;
            COUNT.set(now);
            assert_eq!(sum, expected, "block {block}");
        }
    }
}

#[cfg(feature = "jit")]
#[test]
fn a_cpu_without_memory_has_hot_code_compiled_later_or_not_at_all() {
    let mut guest = guest_of(1);
    let compiler = Compiler::try_new().unwrap();
    guest
        .cpu
        .set_compiler(compiler.clone(), Compile::Hot)
        .unwrap();
    std::thread::spawn(move || compiler.work(Tier::Baseline));
    let mut expected = 0;
    for round in 0..100_000 {
        expected = (expected + 40) & 0xffff_ffff;
        let mut now = COUNT.get();
        now.fails = round < 50_000;
        COUNT.set(now);
        let sum = call(&mut guest, 0);
        now = COUNT.get();
        now.fails = false;
        COUNT.set(now);
        assert_eq!(sum, expected);
        let compiled = guest.cpu.counters().instructions_compiled;
        assert!(compiled == 0 || round >= 50_000);
        if compiled != 0 {
            return;
        }
        if round > 50_000 {
            std::thread::yield_now();
        }
    }
    panic!("nothing was compiled");
}

#[test]
fn the_decoders_tables_fit_into_what_is_probed_for_them() {
    // The test runs itself again in a new process, because another test in this process may have built the tables
    // already.
    if std::env::var_os("SLAT_TEST_TABLES").is_none() {
        let test = "the_decoders_tables_fit_into_what_is_probed_for_them";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env("SLAT_TEST_TABLES", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let before = COUNT.get().bytes;
    COUNT.set(Count {
        most: before,
        ..COUNT.get()
    });
    let first = Executor::try_new(CodePages::try_new().unwrap()).unwrap();
    let with_tables = COUNT.get().bytes - before;
    let most = COUNT.get().most - before;
    let second = Executor::try_new(CodePages::try_new().unwrap()).unwrap();
    let cpu = COUNT.get().bytes - before - with_tables;
    let tables = with_tables - cpu;
    println!("tables {tables} bytes, at most {most} with a CPU of {cpu}");
    assert!(most - cpu <= DECODER_BYTES, "{most}");
    assert!(tables > DECODER_BYTES / 4, "{tables}: probed for too much");
    drop((first, second));
}
