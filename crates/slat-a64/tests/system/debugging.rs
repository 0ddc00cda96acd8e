//! Software step, breakpoints and watchpoints. Accesses are aligned: QEMU 7.2 lets watchpoints of a page match all
//! misaligned stores to it. `tests/stage1` has misaligned ones.

use crate::commands::{EL1, Run, SCTLR, Script};
use crate::image::{DATA, TABLE, UPPER};
use crate::numbers::Random;
use crate::{check, compare, first_round, rounds};

const SS: u64 = 1 << 21;
const KDE: u64 = 1 << 13;
const MDE: u64 = 1 << 15;
const STEP: u64 = 1 << 0;

/// The code that is stepped and watched. X1 is an address that EL1 may write, X0 is 0.
const INSTRUCTIONS: [u32; 16] = [
    0xd503_201f, // NOP
    0x9100_0400, // ADD X0, X0, #1
    0xf940_0020, // LDR X0, [X1]
    0xf900_0022, // STR X2, [X1]
    0x3940_0c20, // LDRB W0, [X1, #3]
    0x7900_0422, // STRH W2, [X1, #2]
    0xa940_0c20, // LDP X0, X3, [X1]
    0xa900_0c22, // STP X2, X3, [X1]
    0x3dc0_0020, // LDR Q0, [X1]
    0xc85f_7c20, // LDXR X0, [X1]
    0xf840_0820, // LDTR X0, [X1]
    0x1400_0002, // B .+8
    0xb400_0040, // CBZ X0, .+8
    0xd400_0041, // SVC #2
    0xd420_0060, // BRK #3
    0x0000_0000, // UDF
];

/// Returns a run of MSRs of X0 to X3 to debug registers: n, op2.
fn set(registers: &[(u32, u32)], x: [u64; 4]) -> Run {
    let words: Vec<u32> = (registers.iter().enumerate())
        .map(|(rt, (n, op2))| 0xd510_0000 | n << 8 | op2 << 5 | rt as u32)
        .collect();
    Run {
        x,
        ..Run::new(EL1, &words)
    }
}

/// Sets a breakpoint and a watchpoint, near the stub and near an address.
fn arm(script: &mut Script, random: &mut Random, at: u64) {
    let n = random.below(6);
    let who = random.below(4) << 1 | random.below(4) << 14 | random.below(2) << 13 | 1;
    // An address, or one linked to breakpoint 5, which matches a context.
    let kind = if n < 5 {
        random.of(&[0, 0, 1]) << 20 | 5 << 16
    } else {
        3 << 20
    };
    let value = match n {
        5 => random.below(2),
        _ => script.stub() + 4 * random.below(5),
    };
    script.run(set(
        &[(n as u32, 4), (n as u32, 5)],
        [value, who | kind | 0x1e0, 0, 0],
    ));
    let n = random.below(4);
    let who =
        random.below(4) << 1 | random.below(4) << 14 | random.below(2) << 13 | random.below(2);
    let lanes = random.below(8);
    let bytes = (0xff << lanes & 0xff) & (0xff >> random.below(8 - lanes));
    let mask = random.of(&[0, 0, 3, 5, 12]) << 24;
    let linked = u64::from(random.one_in(4)) << 20 | 5 << 16;
    let control = who | random.below(4) << 3 | bytes << 5 | mask | linked;
    // An address under a mask has no low bits.
    let low = if mask == 0 { 4 * random.below(6) } else { 0 };
    let value = (at & !7).wrapping_add(low).wrapping_sub(8) & !((1 << (mask >> 24)) - 1);
    script.run(set(&[(n as u32, 6), (n as u32, 7)], [value, control, 0, 0]));
    // CONTEXTIDR_EL1.
    let context = Run {
        x: [random.below(2), 0, 0, 0],
        ..Run::new(EL1, &[0xd518_d020])
    };
    script.run(context);
}

#[test]
fn debug_exceptions_are_as_in_qemu() {
    for round in first_round()..first_round() + rounds() {
        let mut random = Random(round.wrapping_mul(77) + 5);
        let mut script = Script::default();
        while !script.is_full() {
            let upper = random.one_in(2);
            script.work_on(upper);
            let tcr = if upper { 25 << 16 | 2 << 30 } else { 25 };
            script.configure(tcr | 2 << 32, TABLE, 0, SCTLR);
            let base = if upper { UPPER } else { 0 };
            let writable = base + (DATA + 0x4000_0000) + 0x40;
            arm(&mut script, &mut random, writable);
            for _ in 0..10 {
                let words: [u32; 4] = std::array::from_fn(|_| random.of(&INSTRUCTIONS));
                let mdscr = random.of(&[STEP, MDE, MDE, STEP | MDE, 0]) | random.of(&[0, KDE]);
                // D, and SS.
                let bits = random.of(&[0, 1 << 9]) | random.of(&[0, SS, SS]);
                let spsr = random.of(&[0, 5, 4]) | 7 << 6 | bits;
                let at = if random.one_in(2) {
                    writable
                } else {
                    base + DATA + 0x40
                };
                let x = [0, at + 8 * random.below(3), random.next(), random.next()];
                script.run(Run {
                    x,
                    mdscr,
                    ..Run::new(spsr, &words)
                });
            }
        }
        let Some((records, wrong)) = compare("debug", &script, |_, _| 0) else {
            return;
        };
        check(records, &wrong);
    }
}
