//! Instructions that EL1 takes exceptions of, returns, and system registers.

use crate::commands::{EL0, EL1, MASKED, Run, SCTLR, Script};
use crate::image::{DATA, TABLE, UPPER};
use crate::numbers::Random;
use crate::{check, compare, first_round, rounds};

/// SCTLR_EL1's permissions of EL0: UMA, DZE, UCT, nTWI, nTWE, UCI; and A.
const PERMISSIONS: u64 = 1 << 9 | 1 << 14 | 1 << 15 | 1 << 16 | 1 << 18 | 1 << 26;
const ALIGNED: u64 = 1 << 1;
const NTWI: u64 = 1 << 16;
/// The fields of TCR_EL1 for the half of the address space that is not the payload's: the same as the payload's.
const LOWER_TCR: u64 = 25 | 2 << 32;
const UPPER_TCR: u64 = 25 << 16 | 2 << 30 | 2 << 32;

/// Instructions without a condition, and the registers' contents. X1 is an address.
const INSTRUCTIONS: [u32; 35] = [
    0xd400_0001, // SVC #0
    0xd41f_ffe1, // SVC #0xffff
    0xd420_00a0, // BRK #5
    0xd43f_ffe0, // BRK #0xffff
    0x0000_0000, // UDF #0
    0xd440_0020, // HLT #1
    0xd4a0_0001, // DCPS1
    0xd6bf_03e0, // DRPS
    0x1e61_2800, // FADD D0, D0, D1
    0x4e20_d400, // FADD V0.4S, V0.4S, V0.4S
    0xd53b_4400, // MRS X0, FPCR
    0xd51b_4420, // MSR FPSR, X0
    0xd503_42df, // MSR DAIFSet, #2
    0xd503_44ff, // MSR DAIFClr, #4
    0xd53b_4220, // MRS X0, DAIF
    0xd51b_4220, // MSR DAIF, X0
    0xd53b_003f, // MRS XZR, CTR_EL0
    0xd53b_00e0, // MRS X0, DCZID_EL0
    0xd50b_7b21, // DC CVAU, X1
    0xd50b_7a21, // DC CVAC, X1
    0xd50b_7e21, // DC CIVAC, X1
    0xd50b_7521, // IC IVAU, X1
    0xd508_751f, // IC IALLU
    0xd508_871f, // TLBI VMALLE1
    0xd508_8720, // TLBI VAE1, X0
    0xd503_203f, // YIELD
    0xd538_4240, // MRS X0, CurrentEL
    0xd538_4200, // MRS X0, SPSel
    0xd538_4260, // MRS X0, PAN
    0xd538_4100, // MRS X0, SP_EL0
    0xd53b_4200, // MRS X0, NZCV
    0xd500_40bf, // MSR SPSel, #0
    0xd500_41bf, // MSR SPSel, #1
    0xd500_419f, // MSR PAN, #1
    0xd500_409f, // MSR PAN, #0
];

/// Accesses from X1, which may be misaligned.
const ACCESSES: [u32; 22] = [
    0x7940_0020, // LDRH W0, [X1]
    0xb940_0020, // LDR W0, [X1]
    0xf940_0020, // LDR X0, [X1]
    0x3dc0_0020, // LDR Q0, [X1]
    0xa940_0c20, // LDP X0, X3, [X1]
    0xad40_0420, // LDP Q0, Q1, [X1]
    0xf900_0022, // STR X2, [X1]
    0xa900_0c22, // STP X2, X3, [X1]
    0x2900_0c22, // STP W2, W3, [X1]
    0x3d80_0020, // STR Q0, [X1]
    0xad00_0020, // STP Q0, Q0, [X1]
    0x4c40_7020, // LD1 {V0.16B}, [X1]
    0x4c40_7820, // LD1 {V0.4S}, [X1]
    0x4c00_7c20, // ST1 {V0.2D}, [X1]
    0x0d40_8020, // LD1 {V0.S}[0], [X1]
    0xc8df_fc20, // LDAR X0, [X1]
    0xc89f_fc22, // STLR X2, [X1]
    0xc85f_7c20, // LDXR X0, [X1]
    0xf840_0820, // LDTR X0, [X1]
    0xf800_0822, // STTR X2, [X1]
    0xf822_0020, // LDADD X2, X0, [X1]
    0xc8a2_7c20, // CAS X2, X0, [X1]
];

/// System registers: op0, op1, CRn, CRm, op2; with the bits that both processors have, which is a matter of extensions.
const REGISTERS: [([u32; 5], u64); 21] = [
    ([3, 0, 1, 0, 2], 3 << 20),       // CPACR_EL1
    ([3, 0, 4, 0, 0], 0xf030_03df),   // SPSR_EL1
    ([3, 0, 4, 0, 1], !0),            // ELR_EL1
    ([3, 0, 5, 2, 0], 0xffff_ffff),   // ESR_EL1
    ([3, 0, 6, 0, 0], !0),            // FAR_EL1
    ([3, 0, 7, 4, 0], !0),            // PAR_EL1
    ([3, 0, 10, 2, 0], !0),           // MAIR_EL1
    ([3, 0, 10, 3, 0], !0),           // AMAIR_EL1
    ([3, 0, 12, 0, 0], !0x7ff),       // VBAR_EL1
    ([3, 0, 13, 0, 1], 0xffff_ffff),  // CONTEXTIDR_EL1
    ([3, 0, 13, 0, 4], !0),           // TPIDR_EL1
    ([3, 0, 14, 1, 0], 0x3ff),        // CNTKCTL_EL1
    ([3, 3, 13, 0, 2], !0),           // TPIDR_EL0
    ([3, 3, 13, 0, 3], !0),           // TPIDRRO_EL0
    ([3, 0, 5, 1, 0], !0),            // AFSR0_EL1
    ([2, 0, 0, 2, 2], 0xa001),        // MDSCR_EL1
    ([2, 0, 0, 5, 4], !3 >> 15 << 2), // DBGBVR5_EL1
    ([2, 0, 0, 1, 5], 0x00ff_e006),   // DBGBCR1_EL1
    ([2, 0, 0, 3, 6], !0 >> 15),      // DBGWVR3_EL1
    ([2, 0, 0, 2, 7], 0x1f1f_fffe),   // DBGWCR2_EL1
    ([2, 0, 1, 1, 4], !0),            // OSLSR_EL1
];

fn access(reads: bool, [op0, op1, crn, crm, op2]: [u32; 5], rt: u32) -> u32 {
    let name = op0 << 19 | op1 << 16 | crn << 12 | crm << 8 | op2 << 5 | rt;
    0xd500_0000 | name | if reads { 1 << 21 } else { 0 }
}

/// Configures the other half with the payload's own table, which has memory at 0x40000000 that all may read, and at
/// 0x80000000 memory that EL1 may write. Returns that half's base and SCTLR.
fn configure(script: &mut Script, random: &mut Random) -> (u64, u64) {
    let upper = random.one_in(2);
    script.work_on(upper);
    let aligned = if random.one_in(2) { ALIGNED } else { 0 };
    let sctlr = SCTLR | random.next() & PERMISSIONS | aligned;
    let tcr = if upper { UPPER_TCR } else { LOWER_TCR };
    script.configure(tcr, TABLE, 0, sctlr);
    (if upper { UPPER } else { 0 }, sctlr)
}

fn run(script: &Script, random: &mut Random, base: u64, sctlr: u64) -> Run {
    let flags = random.next() & 0xf << 28;
    let pan = u64::from(random.one_in(3)) << 22;
    let level = random.of(&[EL0, EL1, EL1 & !1]) | flags | pan;
    let x = [
        random.next(),
        base | DATA | random.below(0x100),
        random.next(),
        random.next(),
    ];
    let any = match random.below(8) {
        0 | 1 => {
            let word = random.of(&INSTRUCTIONS);
            // QEMU has op1 and op2 of MSR DAIFSet and DAIFClr in each other's place in the syndrome of EL0's trap.
            let is_field = word & 0xffff_f01f == 0xd503_401f;
            Run::new(if is_field { EL1 | flags } else { level }, &[word])
        }
        2 => Run {
            cpacr: random.below(4) << 20,
            ..Run::new(level, &[INSTRUCTIONS[8 + random.below(4) as usize]])
        },
        // Accesses, also across pages.
        3 | 4 => {
            let at = base | DATA | (0xff0 + random.below(16));
            let at = if random.one_in(2) {
                at + 0x4000_0000
            } else {
                at
            };
            return Run {
                x: [0, at, random.next(), random.next()],
                ..Run::new(level, &[random.of(&ACCESSES)])
            };
        }
        // A program counter that is not aligned, and a return that is illegal: by the payload, and by the stub.
        5 => Run {
            start: script.stub() + random.below(4),
            ..Run::new(level, &[])
        },
        6 => {
            // AArch32 at EL0 is not on both.
            let mode = random.of(&[1, 2, 3, 6, 7, 8, 9, 0xa, 0xc, 0xd, 0xf, 0x11, 0x13, 0x1f]);
            let illegal = random.of(&[mode, 1 << 20, 1 << 20 | 5]) | flags | MASKED & random.next();
            match random.one_in(2) {
                true => Run::new(illegal, &[]),
                false => {
                    // MSR SPSR_EL1, X0; MSR ELR_EL1, X1; ERET.
                    let run = Run::new(EL1 | pan, &[0xd518_4000, 0xd518_4021, 0xd69f_03e0]);
                    let x = [illegal, script.stub() + 16, 0, 0];
                    return Run { x, ..run };
                }
            }
        }
        _ => {
            let (register, bits) = random.of(&REGISTERS);
            // DBGBCR_EL1.BAS is all ones.
            let ones = if register[0] == 2 && register[4] == 5 {
                0x1e0
            } else {
                0
            };
            let value = random.next() & bits | ones;
            let words = [
                access(true, register, 2),
                access(false, register, 0),
                access(true, register, 0),
                access(false, register, 2),
            ];
            // OSLSR_EL1 cannot be written.
            let words = if register[2..] == [1, 1, 4] {
                &words[2..3]
            } else {
                &words[..]
            };
            // VBAR_EL1 and the like are not left with another value.
            let level = if register[..2] == [3, 3] {
                level
            } else {
                random.of(&[EL1, level])
            };
            return Run {
                x: [value, 0, 0, 0],
                ..Run::new(level, words)
            };
        }
    };
    // WFI, if it is trapped.
    if sctlr & NTWI == 0 && random.one_in(16) {
        return Run {
            x,
            ..Run::new(EL0, &[0xd503_207f])
        };
    }
    Run { x, ..any }
}

#[test]
fn el1_takes_exceptions_as_in_qemu() {
    for round in first_round()..first_round() + rounds() {
        let mut random = Random(!round);
        let mut script = Script::default();
        while !script.is_full() {
            let (base, sctlr) = configure(&mut script, &mut random);
            for _ in 0..16 {
                let run = run(&script, &mut random, base, sctlr);
                script.run(run);
            }
        }
        let Some((records, wrong)) = compare("exceptions", &script, |_, _| 0) else {
            return;
        };
        check(records, &wrong);
    }
}
