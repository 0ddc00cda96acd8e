//! Random tables. The processor's results must be those of the model.

use crate::machine::*;
use crate::model::{self, Outcome, Query, Registers};
use crate::numbers::Random;
use slat_a64::{Cpu, Leave, Pstate, Right, SystemName};

/// The action of a test case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Load,
    Store,
    LoadUnprivileged,
    StoreUnprivileged,
    /// LDADD, which reads and writes.
    Add,
    Fetch,
    Clean,
    Invalidate,
    Code,
    /// S1E1R, S1E1W, S1E0R, S1E0W, S1E1RP, S1E1WP.
    At(u32),
}

const OPS: [Op; 15] = [
    Op::Load,
    Op::Store,
    Op::LoadUnprivileged,
    Op::StoreUnprivileged,
    Op::Add,
    Op::Fetch,
    Op::Clean,
    Op::Invalidate,
    Op::Code,
    Op::At(0),
    Op::At(1),
    Op::At(2),
    Op::At(3),
    Op::At(4),
    Op::At(5),
];

/// The instruction, with the address in X1, the value in X2, and the result in X0.
fn word(op: Op) -> u32 {
    match op {
        Op::Load => 0xf940_0020,
        Op::Store => 0xf900_0022,
        Op::LoadUnprivileged => 0xf840_0820,
        Op::StoreUnprivileged => 0xf800_0822,
        Op::Add => 0xf822_0020,
        Op::Fetch => 0,
        Op::Clean => 0xd50b_7a21,
        Op::Invalidate => 0xd508_7621,
        Op::Code => 0xd50b_7521,
        Op::At(n @ 0..=3) => 0xd508_7801 | n << 5,
        Op::At(n) => 0xd508_7901 | (n - 4) << 5,
    }
}

/// Returns a descriptor of random bits.
fn descriptor(n: u64) -> u64 {
    let mut random = Random(n);
    let kind = random.of(&[3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 0, 2]);
    let mut value = random.next() & !3 | kind;
    // Permission bits of tables are rarely set, and the access flag is mostly.
    if !random.one_in(4) {
        value &= !(0xf << 59);
    }
    if !random.one_in(3) {
        value &= !(3 << 53);
    }
    if !random.one_in(4) {
        value |= 1 << 10;
    }
    // Some addresses are too great for the smaller sizes.
    let limit = random.of(&[31, 31, 31, 31, 31, 31, 32, 36, 40, 48]);
    value & !(0xffff_ffff_f000 & !((1 << limit) - 1))
}

struct Case {
    registers: Registers,
    va: u64,
    el0: bool,
    pan: bool,
    op: Op,
    in_upper: bool,
}

fn case(random: &mut Random) -> Case {
    let in_upper = random.one_in(2);
    let op = random.of(&OPS);
    let size = match random.one_in(24) {
        true => random.below(64),
        false => 16 + random.below(24),
    };
    let granule = random.below(4);
    let common = random.of(&[0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 6, 7]) << 32
        | (random.next() & 0x7f0_0000_0000);
    let epd = u64::from(random.one_in(40));
    let tcr = common
        | match in_upper {
            false => OWN_T1 | size | granule << 14 | epd << 7,
            true => OWN_T0 | size << 16 | granule << 30 | epd << 23,
        };
    let base = random.next() & ((1 << random.of(&[31, 31, 31, 31, 32, 36, 44, 48])) - 1);
    let ttbr = match in_upper {
        false => [base, TABLE],
        true => [TABLE, base],
    };
    let registers = Registers {
        tcr,
        ttbr,
        mair: (0..8).fold(0, |mair, _| {
            mair << 8 | random.of(&[0x00, 0x04, 0x0c, 0x44, 0xbb, 0xff])
        }),
        wxn: random.one_in(4),
    };
    let mut va = random.next() & !7;
    let input = 64 - size.clamp(16, 39);
    let sign = if in_upper { !0 << 55 } else { 0 };
    va = match random.below(24) {
        0 => va & !(1 << 55) | sign & 1 << 55,
        // An address with a tag (TBI).
        1 => va & ((1 << input) - 1) | sign << input >> input << input | va & 0xff << 56,
        _ => va & ((1 << input) - 1) | if in_upper { !0 << input } else { 0 },
    };
    va = va & !(1 << 55) | if in_upper { 1 << 55 } else { 0 };
    // Unlike addresses, program counters have no tags.
    if op == Op::Fetch {
        let tbi = tcr >> (37 + u32::from(in_upper)) & 1 != 0;
        if tbi {
            va = (va << 8) as i64 as u64 >> 8 | if in_upper { 0xff << 56 } else { 0 };
        }
    }
    // At EL0, only instructions that EL0 has are chosen.
    let is_privileged = matches!(op, Op::At(_) | Op::Invalidate);
    Case {
        registers,
        va,
        el0: !is_privileged && random.one_in(2),
        pan: random.one_in(3),
        op,
        in_upper,
    }
}

impl Case {
    fn query(&self) -> Query {
        let privileged = !self.el0;
        let right = match self.op {
            Op::Load | Op::LoadUnprivileged => 'r',
            Op::Store | Op::StoreUnprivileged | Op::Add | Op::Invalidate => 'w',
            Op::Fetch => 'x',
            Op::Clean | Op::Code => match self.el0 {
                true => 'r',
                false => '-',
            },
            Op::At(n) => match n % 2 {
                0 => 'r',
                _ => 'w',
            },
        };
        let is_el0s = matches!(
            self.op,
            Op::LoadUnprivileged | Op::StoreUnprivileged | Op::At(2 | 3)
        );
        Query {
            privileged: privileged && !is_el0s,
            pan: self.pan && !matches!(self.op, Op::At(0 | 1)),
            right,
            updates: !matches!(self.op, Op::Clean | Op::Invalidate | Op::Code | Op::At(_)),
        }
    }

    fn pstate(&self) -> Pstate {
        Pstate {
            el1: !self.el0,
            own_stack: !self.el0,
            pan: self.pan,
            daif: 15,
            ..Pstate::default()
        }
    }

    fn prepare(&self, cpu: &mut Cpu, ram: &mut Ram) -> u64 {
        ram.written.clear();
        let code = map_code(ram, !self.in_upper);
        let Registers {
            tcr,
            ttbr,
            mair,
            wxn,
        } = self.registers;
        let settings: [(SystemName, u64); 6] = [
            (TCR, tcr),
            (TTBR0, ttbr[0]),
            (TTBR1, ttbr[1]),
            (MAIR, mair),
            (SCTLR, M | SPAN | EL0_MAINTAINS | if wxn { WXN } else { 0 }),
            (VBAR, code + 0x8000),
        ];
        for (name, value) in settings {
            cpu.set_system(name, value);
        }
        cpu.forget_pages();
        for name in [ESR, FAR, PAR] {
            cpu.set_system(name, 0);
        }
        cpu.state.set_pstate(self.pstate());
        code
    }
}

/// Counts of outcomes.
#[derive(Default, Debug)]
struct Seen {
    addresses: u32,
    faults: u32,
    holes: u32,
    updates: u32,
    by_status: std::collections::BTreeMap<u8, u32>,
}

/// Executes a case, and compares it with the model. `twice`: the second execution is served by the TLB.
fn check(cpu: &mut Cpu, random: &mut Random, seen: &mut Seen) {
    let case = case(random);
    let mut ram = Ram::new(Some(random.next()), descriptor);
    let code = case.prepare(cpu, &mut ram);
    set_code(cpu, &mut ram, CODE, &[word(case.op)]);
    let query = case.query();
    let (mut written, mut walked) = (vec![], vec![]);
    let model_of = |ram: &Ram, query: Query, written: &mut Vec<_>, walked: &mut Vec<u64>| {
        let mut read = |at: u64| {
            walked.push(at);
            (!ram.is_hole(at)).then(|| ram.word(at))
        };
        model::translate(&case.registers, case.va, query, &mut read, written)
    };
    let expected = model_of(&ram, query, &mut written, &mut walked);
    let value = random.next();
    let is_data = matches!(
        case.op,
        Op::Load | Op::Store | Op::LoadUnprivileged | Op::StoreUnprivileged | Op::Add
    );
    if let Outcome::Address { pa, .. } = expected {
        // Cases whose access is to a descriptor that its own walk needs, or to the code, are left out.
        if (walked.contains(&(pa & !7)) || pa >> 12 == CODE >> 12)
            && (is_data || case.op == Op::Fetch)
        {
            return;
        }
        if case.op == Op::Fetch {
            // MOVZ X0, #0x1234, twice.
            ram.set(pa, 0xd282_4680_d282_4680);
        }
    }
    let before = ram.clone();
    cpu.state.x[0] = 0;
    cpu.state.x[1] = case.va;
    cpu.state.x[2] = value;
    cpu.state.pc = if case.op == Op::Fetch { case.va } else { code };
    if case.op == Op::Fetch {
        cpu.forget_pages();
    }
    let start = cpu.state.pc;
    let leave = cpu.run(&mut ram, 1);
    let what = format!(
        "{:?} at {:#x} {:?} {query:?}: {expected:x?}",
        case.op, case.va, case.registers
    );
    let [esr, far, par] = [ESR, FAR, PAR].map(|name| cpu.state.system(name).unwrap());
    let is_maintenance = matches!(case.op, Op::Clean | Op::Invalidate | Op::Code);
    let mut expect_ram = before.clone();
    match expected {
        Outcome::Fault(status) => {
            seen.faults += 1;
            *seen.by_status.entry(status).or_default() += 1;
            if let Op::At(_) = case.op {
                assert_eq!(leave, Leave::Limit, "{what}");
                assert_eq!(par, 1 << 11 | u64::from(status) << 1 | 1, "{what}");
            } else {
                assert_eq!(leave, Leave::Limit, "{what}");
                let class = if case.op == Op::Fetch { 0x20 } else { 0x24 } + u64::from(!case.el0);
                // A fault of LDADD that a read would have is not a write's.
                let reads_too = case.op == Op::Add && {
                    let read = Query {
                        right: 'r',
                        ..query
                    };
                    matches!(
                        model_of(&before, read, &mut vec![], &mut vec![]),
                        Outcome::Fault(_)
                    )
                };
                let is_write = (query.right == 'w' && !reads_too) || is_maintenance;
                let syndrome = u64::from(is_maintenance) << 8 | u64::from(is_write) << 6;
                assert_eq!(
                    esr,
                    class << 26 | 1 << 25 | syndrome | u64::from(status),
                    "{what}"
                );
                assert_eq!(far, case.va, "{what}");
                assert_eq!(
                    cpu.state.pc,
                    code + 0x8000 + if case.el0 { 0x400 } else { 0x200 }
                );
            }
        }
        Outcome::Hole { ipa, level } => {
            seen.holes += 1;
            let Leave::Stage2 { fault, syndrome } = leave else {
                panic!("{leave:?} {what}");
            };
            assert_eq!(
                (fault.ipa, fault.level, fault.is_walk),
                (ipa, level, true),
                "{what}"
            );
            assert_eq!(
                (fault.address, fault.right),
                (case.va, Right::Read),
                "{what}"
            );
            assert_eq!(fault.is_fetch, case.op == Op::Fetch, "{what}");
            let esr = fault.esr(syndrome, 0x04);
            assert_eq!(esr & (1 << 24 | 1 << 7), 1 << 7, "{what}");
            assert_eq!(cpu.state.pc, start, "{what}");
        }
        Outcome::Address {
            pa,
            attribute,
            shareability,
        } => {
            seen.addresses += 1;
            for (at, new) in written {
                seen.updates += 1;
                expect_ram.set(at, new);
            }
            let needs_page = is_data || matches!(case.op, Op::Fetch | Op::Code);
            if needs_page && before.is_hole(pa) {
                let Leave::Stage2 { fault, .. } = leave else {
                    panic!("{leave:?} {what}");
                };
                assert_eq!((fault.ipa, fault.is_walk), (pa, false), "{what}");
                assert_eq!(cpu.state.pc, start, "{what}");
            } else {
                match case.op {
                    Op::Code => assert!(matches!(leave, Leave::Invalidated(_)), "{leave:?} {what}"),
                    _ => assert_eq!(leave, Leave::Limit, "{what}"),
                }
                assert_eq!(cpu.state.pc, start.wrapping_add(4), "{what}: {esr:x}");
                match case.op {
                    Op::Load | Op::LoadUnprivileged | Op::Add => {
                        assert_eq!(cpu.state.x[0], before.word(pa), "{what}");
                    }
                    Op::Fetch => assert_eq!(cpu.state.x[0], 0x1234, "{what}"),
                    Op::At(_) => {
                        let expected = 1 << 11 | 1 << 9 | pa >> 12 << 12;
                        let memory = u64::from(attribute) << 56 | u64::from(shareability) << 7;
                        assert_eq!(par, expected | memory, "{what}");
                    }
                    _ => {}
                }
                match case.op {
                    Op::Store | Op::StoreUnprivileged => expect_ram.set(pa, value),
                    Op::Add => expect_ram.set(pa, before.word(pa).wrapping_add(value)),
                    _ => {}
                }
            }
        }
    }
    assert_eq!(ram.written, expect_ram.written, "{what}");
    // The TLB must translate like the tables.
    if let (Leave::Limit, Outcome::Address { pa, .. }, true) = (leave, expected, is_data) {
        cpu.state.pc = start;
        ram.asked.clear();
        assert_eq!(cpu.run(&mut ram, 1), Leave::Limit, "{what}");
        assert_eq!(cpu.state.pc, start.wrapping_add(4), "{what}");
        if case.op == Op::Load {
            assert_eq!(cpu.state.x[0], before.word(pa), "{what}");
        }
    }
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The number of random cases.
pub fn rounds() -> u32 {
    number("SLAT_STAGE1_ROUNDS", 200_000)
}

pub fn seed() -> u64 {
    number("SLAT_STAGE1_SEED", 1)
}

#[test]
fn random_tables_translate_as_the_model_says() {
    let rounds = rounds();
    let mut random = Random(seed());
    let (mut cpu, mut seen) = (cpu(), Seen::default());
    for _ in 0..rounds {
        check(&mut cpu, &mut random, &mut seen);
    }
    println!("{seen:?}");
    // Each kind of fault at each level where it can be.
    assert!(
        seen.addresses > rounds / 12 && seen.updates > rounds / 200,
        "{seen:?}"
    );
    assert!(
        seen.by_status.len() >= 14 && seen.holes > rounds / 200,
        "{seen:?}"
    );
}
