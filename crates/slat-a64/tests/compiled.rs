//! Compiled code during events outside it: kicks, invalidations, stores of other processors, and memory that the host
//! takes away.
#![cfg(feature = "jit")]

#[allow(dead_code)]
#[path = "common/compiled.rs"]
mod common;
#[allow(dead_code)]
#[path = "common/host.rs"]
mod host;

use host::{Memory, Refusal};
use slat_a64::{Cpu, Invalidation, Leave, State, SystemName};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SCTLR: SystemName = SystemName::new(3, 0, 1, 0, 0);
const TTBR0: SystemName = SystemName::new(3, 0, 2, 0, 0);
const TCR: SystemName = SystemName::new(3, 0, 2, 0, 2);
const MAIR: SystemName = SystemName::new(3, 0, 10, 2, 0);
const CPACR: SystemName = SystemName::new(3, 0, 1, 0, 2);

/// The addresses of the code, the data and the tables. Each virtual address is mapped to the same physical address.
const CODE: u64 = 0x1000;
const DATA: u64 = 0x8000;
const TABLES: u64 = 0x20_0000;
const PAGE: u64 = 4096;

const HVC: u32 = 0xd400_0002;

/// Memory with code.
fn memory(words: &[u32]) -> Memory {
    let mut memory = Memory::new();
    memory.add(CODE, 2, [true; 2]);
    memory.add(DATA, 2, [true; 2]);
    memory.add(TABLES, 1, [true; 2]);
    // A level 1 block of 1 GiB.
    memory.put(TABLES, 1 | 1 << 10 | 3 << 8);
    put_code(&mut memory, CODE, words);
    memory
}

fn put_code(memory: &mut Memory, at: u64, words: &[u32]) {
    for (n, pair) in words.chunks(2).enumerate() {
        let word = u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(HVC)) << 32;
        memory.put(at + 8 * n as u64, word);
    }
}

/// A processor at EL1 with translation, which compiles all code.
fn cpu() -> Cpu {
    let mut cpu = Cpu::new(State::reset());
    // 39 bits, no upper half.
    let settings = [
        (MAIR, 0xff),
        (TTBR0, TABLES),
        (TCR, 25 | 1 << 23),
        (SCTLR, 1),
    ];
    for (name, value) in settings {
        assert!(cpu.set_system(name, value));
    }
    common::always(&mut cpu);
    // SAFETY: the pages are mappings of `Memory`, which only guarded accesses and raw pointers reach.
    // `Memory::new` has installed the handlers.
    unsafe { cpu.access_directly() };
    cpu.state.pc = CODE;
    cpu
}

#[test]
fn a_loop_has_as_many_turns_as_instructions_permit() {
    // ADD X2, X2, X1; SUBS X1, X1, #1; B.NE; HVC.
    let mut memory = memory(&[0x8b01_0042, 0xf100_0421, 0x54ff_ffc1, HVC]);
    for limit in 1..40 {
        let mut cpu = cpu();
        cpu.state.x[1] = 10;
        let leave = cpu.run(&mut memory, limit);
        let (turns, rest) = (limit.min(30) / 3, limit.min(30) % 3);
        assert_eq!(cpu.state.x[1], 10 - turns - u64::from(rest == 2), "{limit}");
        assert_eq!(leave == Leave::Hvc(0), limit > 30, "{limit}");
    }
    let mut cpu = cpu();
    cpu.state.x[1] = 1_000_000;
    assert_eq!(cpu.run(&mut memory, u64::MAX), Leave::Hvc(0));
    assert_eq!(cpu.state.x[2], 500_000_500_000);
    assert!(cpu.state.flags == [false, true, true, false]);
    assert!(cpu.compiled_instructions() > 2_999_000);
}

#[test]
fn inexact_results_are_noted_where_they_are_computed() {
    const IXC: u32 = 1 << 4;
    // CBZ X2, on; SCVTF D0, X3; on: SUBS X1, X1, #1; B.NE; HVC.
    let mut conversions = memory(&[0xb400_0042, 0x9e62_0060, 0xf100_0421, 0x54ff_ffa1, HVC]);
    for (converts, flags) in [(0, 0), (1, IXC)] {
        let mut cpu = cpu();
        assert!(cpu.set_system(CPACR, 3 << 20));
        cpu.state.x[1] = 1000;
        cpu.state.x[2] = converts;
        cpu.state.x[3] = (1 << 53) + 1;
        assert_eq!(cpu.run(&mut conversions, u64::MAX), Leave::Hvc(0));
        assert_eq!(cpu.state.fpsr, flags);
        assert!(cpu.compiled_instructions() > 2000);
    }
    // FDIV D0, D1, D2; MRS X4, FPSR; FDIV D0, D1, D3; MRS X5, FPSR; HVC.
    let words = [0x1e62_1820, 0xd53b_4424, 0x1e63_1820, 0xd53b_4425, HVC];
    let mut quotients = memory(&words);
    let mut cpu = cpu();
    assert!(cpu.set_system(CPACR, 3 << 20));
    for (v, number) in [(1, 1.0f64), (2, 4.0), (3, 3.0)] {
        cpu.state.v[v] = number.to_bits().into();
    }
    assert_eq!(cpu.run(&mut quotients, u64::MAX), Leave::Hvc(0));
    assert_eq!(cpu.state.x[4..6], [0, IXC.into()]);
    assert_eq!(cpu.state.v[0], (1.0f64 / 3.0).to_bits().into());
}

#[test]
fn functions_return_where_the_link_register_says() {
    // BL f; ADD X0, X0, #1; BL f; ADD X0, X0, #2; BL g; HVC.
    let mut memory = memory(&[
        0x9400_0040,
        0x9100_0400,
        0x9400_003e,
        0x9100_0800,
        0x9400_0040,
        HVC,
    ]);
    // f: ADD X2, X2, #1; RET. g: MOV X30, X9; RET. At X9: ADD X0, X0, #100; HVC.
    put_code(&mut memory, CODE + 0x100, &[0x9100_0442, 0xd65f_03c0]);
    put_code(&mut memory, CODE + 0x110, &[0xaa09_03fe, 0xd65f_03c0]);
    put_code(&mut memory, CODE + 0x40, &[0x9101_9000, HVC]);
    for limit in [1, 2, 3, 5, 100] {
        let mut cpu = cpu();
        cpu.state.x[9] = CODE + 0x40;
        let mut leave = Leave::Limit;
        while leave == Leave::Limit {
            leave = cpu.run(&mut memory, limit);
        }
        assert_eq!(leave, Leave::Hvc(0));
        assert_eq!((cpu.state.x[0], cpu.state.x[2]), (103, 2), "{limit}");
        assert_eq!((cpu.state.pc, cpu.state.x[30]), (CODE + 0x48, CODE + 0x40));
        assert!(limit < 5 || cpu.compiled_instructions() >= 8, "{limit}");
    }
}

#[test]
fn a_kick_ends_endless_loops() {
    // B .; and two blocks that lead to one another through another page.
    let mut memory = memory(&[0x1400_0000]);
    put_code(&mut memory, CODE + 0x100, &[0x1400_03c0]);
    put_code(&mut memory, CODE + PAGE, &[0x17ff_fc40]);
    let attention = memory.attention.clone();
    for start in [CODE, CODE + 0x100] {
        let mut cpu = cpu();
        cpu.state.pc = start;
        attention.store(false, Ordering::Relaxed);
        let kicker = {
            let attention = attention.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                attention.store(true, Ordering::Relaxed);
                Instant::now()
            })
        };
        assert_eq!(cpu.run(&mut memory, u64::MAX), Leave::Attention);
        let late = kicker.join().unwrap().elapsed();
        assert!(late < Duration::from_secs(1), "{late:?}");
        assert!(cpu.compiled_instructions() > 100);
    }
}

#[test]
fn invalidated_code_is_read_again() {
    // ADD X0, X0, #1; HVC.
    let mut memory = memory(&[0x9100_0400, HVC]);
    let mut cpu = cpu();
    let run = |cpu: &mut Cpu, memory: &mut Memory| {
        cpu.state.pc = CODE;
        assert_eq!(cpu.run(memory, 100), Leave::Hvc(0));
        cpu.state.x[0]
    };
    assert_eq!(run(&mut cpu, &mut memory), 1);
    assert_eq!(run(&mut cpu, &mut memory), 2);
    // The code becomes ADD X0, X0, #16, which another processor announces by its invalidation; then ADD X0, X0, #256,
    // which the embedder announces.
    put_code(&mut memory, CODE, &[0x9100_4000, HVC]);
    let at = page_of(&mut memory);
    cpu.invalidate(Invalidation::CodeLine(at));
    assert_eq!(run(&mut cpu, &mut memory), 18);
    put_code(&mut memory, CODE, &[0x9104_0000, HVC]);
    cpu.forget_pages();
    assert_eq!(run(&mut cpu, &mut memory), 274);
    // The old code again, which is known.
    put_code(&mut memory, CODE, &[0x9100_0400, HVC]);
    cpu.forget_pages();
    assert_eq!(run(&mut cpu, &mut memory), 275);
}

/// Returns the host's address of the code.
fn page_of(memory: &mut Memory) -> u64 {
    use slat_a64::{Hypervisor, Right};
    memory.page(CODE, Right::Execute).unwrap().base
}

#[test]
fn a_guest_changes_its_own_code() {
    // The function at X5 is called, and its first instruction is replaced by X6, for each turn of X7:
    // again: BLR X5; STR W6, [X5]; ADD W6, W6, #0x400; DC CVAU, X5; DSB ISH; IC IVAU, X5; DSB ISH; ISB;
    // SUBS X7, X7, #1; B.NE again; HVC.
    let mut memory = memory(&[
        0xd63f_00a0,
        0xb900_00a6,
        0x1110_00c6,
        0xd50b_7b25,
        0xd503_3b9f,
        0xd50b_7525,
        0xd503_3b9f,
        0xd503_3fdf,
        0xf100_04e7,
        0x54ff_fee1,
        HVC,
    ]);
    // ADD X0, X0, #0; RET.
    put_code(&mut memory, CODE + PAGE, &[0x9100_0000, 0xd65f_03c0]);
    let mut cpu = cpu();
    cpu.state.x[5] = CODE + PAGE;
    // ADD X0, X0, #1, and then #2, ...
    cpu.state.x[6] = 0x9100_0400;
    cpu.state.x[7] = 50;
    loop {
        match cpu.run(&mut memory, u64::MAX) {
            Leave::Invalidated(Invalidation::CodeLine(_)) => {}
            leave => break assert_eq!(leave, Leave::Hvc(0)),
        }
    }
    // ADD W6, W6, #0x400 adds 1 to the immediate.
    assert_eq!(cpu.state.x[0], (0..50).sum::<u64>());
}

#[test]
fn a_page_that_goes_away_stops_at_its_instruction() {
    // again: LDR X3, [X4], #8; ADD X2, X2, X3; STR X2, [X5], #8; SUBS X1, X1, #1; B.NE again; HVC.
    let mut memory = memory(&[
        0xf840_8483,
        0x8b03_0042,
        0xf800_84a2,
        0xf100_0421,
        0x54ff_ff81,
        HVC,
    ]);
    for n in 0..8 {
        memory.put(DATA + 8 * n, n + 1);
    }
    for limit in 1..40 {
        for page in [DATA, DATA + PAGE] {
            let mut cpu = cpu();
            cpu.state.x[1] = 8;
            cpu.state.x[4] = DATA;
            cpu.state.x[5] = DATA + PAGE;
            // Both pages are in the TLB.
            assert_eq!(cpu.run(&mut memory, 3 + limit % 4), Leave::Limit);
            memory.protect(page, true);
            let gone = memory.gone.get();
            let Leave::Stage2 { fault, .. } = cpu.run(&mut memory, limit.max(6)) else {
                panic!("the page is there");
            };
            assert_eq!(
                (fault.reason, fault.ipa & !(PAGE - 1)),
                (Refusal::Gone, page)
            );
            let expected = if page == DATA { CODE } else { CODE + 8 };
            assert_eq!(cpu.state.pc, expected);
            assert!(memory.gone.get() > gone);
            memory.protect(page, false);
            assert_eq!(cpu.run(&mut memory, u64::MAX), Leave::Hvc(0));
            assert_eq!((cpu.state.x[1], cpu.state.x[2]), (0, 36));
            assert_eq!(memory.get(DATA + PAGE + 56), 36);
        }
    }
}

/// Processors on threads of their own add to the same words, by exclusive accesses and by LSE.
#[test]
fn increments_by_compiled_code_on_several_threads_are_all_there() {
    const TURNS: u64 = 20_000;
    // again: LDAXR X0, [X4]; ADD X0, X0, #1; STLXR W2, X0, [X4]; CBNZ W2, again; LDADD X5, X6, [X7];
    // SUBS X1, X1, #1; B.NE again; HVC.
    let code = [
        0xc85f_fc80,
        0x9100_0400,
        0xc802_fc80,
        0x35ff_ffa2,
        0xf825_00e6,
        0xf100_0421,
        0x54ff_ff41,
        HVC,
    ];
    let shared = Arc::new(host::Shared::new(1));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let mut memory = memory(&code);
                memory.share(0x10_0000, shared);
                let mut cpu = cpu();
                cpu.state.x[1] = TURNS;
                cpu.state.x[4] = 0x10_0000;
                cpu.state.x[5] = 3;
                cpu.state.x[7] = 0x10_0040;
                assert_eq!(cpu.run(&mut memory, u64::MAX), Leave::Hvc(0));
                assert!(cpu.compiled_instructions() > TURNS);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(shared.get(0), 4 * TURNS);
    assert_eq!(shared.get(0x40), 3 * 4 * TURNS);
}
