//! Accesses, AT instructions and fetches through random tables.

use crate::commands::{EL0, EL1, Run, SCTLR, Script};
use crate::image::{DATA, DATA_END, ZEROS, tables};
use crate::numbers::Random;
use crate::{check, compare, first_round, rounds};

/// The logarithms of the granules, and the levels at which a table can be.
const GRANULES: [u32; 3] = [12, 14, 16];

/// Returns a descriptor of a granule's table. Blocks are of memory that is not the payload's.
fn descriptor(random: &mut Random, granule: u64, level: u64) -> u64 {
    let mut low = random.next() & 0xffc | 1 << 10;
    // Attribute 6 is the own half's for devices.
    if low >> 2 & 7 == 6 {
        low ^= 1 << 2;
    }
    if random.below(8) == 0 {
        low &= !(1 << 10);
    }
    let high = match random.below(3) {
        // DBM, contiguous, PXN, UXN.
        0 => random.next() & 0xf << 51,
        _ => random.next() & 1 << 51,
    };
    // An address that may be too great.
    let great = match random.below(24) {
        0 => 1 << [33, 37, 41, 43, 45, 47][random.below(6) as usize],
        _ => 0,
    };
    let kind = match (level, random.below(16)) {
        (_, 0) => 0,
        (_, 1) => 2,
        (3, 2) => 1,
        (3, _) => 3,
        // QEMU has blocks at each level.
        (1, 2..6) if granule == 0 => 1,
        (2, 2..6) => 1,
        _ => 3,
    };
    if level < 3 && kind == 3 {
        let hierarchy = match random.below(4) {
            0 => random.next() & 0xf << 59,
            _ => 0,
        };
        // A table somewhere in those of the next level.
        let within = random.below(1 << 16) & !((1 << GRANULES[granule as usize].min(16)) - 1);
        return (tables(granule, level + 1) + within) | great | hierarchy | 3;
    }
    let address = match (level, granule) {
        (3, _) => match random.below(16) {
            0 => 0x8000_0000,
            1 => ZEROS,
            _ => (DATA + random.below(DATA_END - DATA)) & !0xffff,
        },
        (2, 0) => [DATA, ZEROS][random.below(2) as usize],
        (2, 1) => ZEROS,
        _ => 0x8000_0000,
    };
    address | great | high | low & !3 | kind
}

/// Returns the first level of a table for a number of input bits.
fn first_level(granule: u32, input: u32) -> u64 {
    u64::from(4 - (input - granule).div_ceil(granule - 3))
}

const HA: u64 = 1 << 39;
const HD: u64 = 1 << 40;

/// The values of TCR_EL1.HA and HD in an image.
#[derive(Clone, Copy, PartialEq)]
enum Flags {
    /// Always these bits; the image may have AT instructions. (QEMU's AT instructions set access flag and dirty state.
    /// The architecture permits that only for the access flag, but the difference is not seen if hardware sets both
    /// anyway.)
    Fixed(u64),
    /// Random bits; the image has no AT instructions.
    Any,
}

/// Configures the half of the address space without the payload at random, and returns it.
fn configure(script: &mut Script, random: &mut Random, flags: Flags) -> Half {
    let upper = random.below(2) == 0;
    script.work_on(upper);
    let granule = random.below(3);
    let size = match random.below(24) {
        0 => random.below(64),
        _ => 16 + random.below(24),
    };
    let input = 64 - size.clamp(16, 39) as u32;
    let field = match (upper, granule) {
        (false, 0) | (true, 2) => [0, 3][usize::from(upper)],
        (false, 1) => 2,
        (false, _) | (true, 1) => 1,
        (true, _) => 2,
    };
    let epd = u64::from(random.below(40) == 0);
    let half = match upper {
        false => size | field << 14 | epd << 7,
        true => size << 16 | field << 30 | epd << 23,
    };
    // AS, TBI, HPD; HA and HD.
    let flags = match flags {
        Flags::Fixed(flags) => flags,
        Flags::Any => random.next() & (HA | HD),
    };
    let common = random.next() & 0x670_0000_0000 | flags;
    let output = [1, 2, 3, 4, 5, 5, 5, 5, 0, 6, 7][random.below(11) as usize] << 32;
    let level = first_level(GRANULES[granule as usize], input);
    let base = match random.below(24) {
        // QEMU's devices are below 1 TiB.
        0 => random.next() & ((1 << 48) - 1) | 1 << 40,
        _ => tables(granule, level) + (random.below(1 << 16) & !0xfff),
    };
    let has_devices = random.one_in(2);
    let attributes: &[u64] = match has_devices {
        true => &[0x00, 0x04, 0x0c, 0x44, 0xbb, 0xff],
        false => &[0x44, 0xbb, 0xff],
    };
    let mair = (0..6).fold(0, |mair, n| mair | random.of(attributes) << (8 * n));
    let wxn = u64::from(random.below(4) == 0) << 19;
    let tcr = half | common | output;
    script.configure(tcr, random.next() << 48 | base, mair, SCTLR | wxn);
    let hd = flags == HA | HD;
    Half {
        upper,
        input,
        hd,
        has_devices,
    }
}

struct Half {
    upper: bool,
    input: u32,
    /// If hardware sets the dirty state, the right to execute is not compared.
    hd: bool,
    /// There is Device memory, to which accesses must be aligned. QEMU does not look at that.
    has_devices: bool,
}

fn address(random: &mut Random, half: &Half) -> u64 {
    let within = random.next() & ((1 << half.input) - 1);
    let sign = if half.upper { !0 << half.input } else { 0 };
    match random.below(24) {
        // Out of range, and with a tag.
        0 => within | random.next() & !(1 << 55) | sign & 1 << 55,
        1 => (within | sign) << 8 >> 8 | random.next() & 0xff << 56,
        _ => within | sign,
    }
}

/// The accesses, from X2 or to X0, at X1.
const ACCESSES: [u32; 14] = [
    0xf940_0020, // LDR X0, [X1]
    0xf900_0022, // STR X2, [X1]
    0xf840_0820, // LDTR X0, [X1]
    0xf800_0822, // STTR X2, [X1]
    0x3940_0020, // LDRB W0, [X1]
    0x3900_0022, // STRB W2, [X1]
    0x7940_0020, // LDRH W0, [X1]
    0xb900_0022, // STR W2, [X1]
    0xa940_0c20, // LDP X0, X3, [X1]
    0xa900_0c22, // STP X2, X3, [X1]
    0x3dc0_0020, // LDR Q0, [X1]
    0x3d80_0020, // STR Q0, [X1]
    0xc8df_fc20, // LDAR X0, [X1]
    0xd50b_7421, // DC ZVA, X1
];

fn commands(random: &mut Random, flags: Flags) -> Script {
    let mut script = Script::default();
    while !script.is_full() {
        // The test reads again the descriptor that the hardware has written.
        if !matches!(flags, Flags::Fixed(flags) if flags != 0) {
            let [granule, level] = [3, 4].map(|limit| random.below(limit));
            script.read(tables(granule, level) + random.below(8192) * 8);
        }
        let half = configure(&mut script, random, flags);
        for _ in 0..12 {
            let va = address(random, &half);
            let pan = u64::from(random.below(3) == 0) << 22;
            let level = if random.below(2) == 0 { EL0 } else { EL1 | pan };
            let run = match random.below(6) {
                // AT, of the six kinds.
                0..=2 if flags != Flags::Any => {
                    let n = random.below(6) as u32;
                    let at = match n {
                        0..4 => 0xd508_7801 | n << 5,
                        _ => 0xd508_7901 | (n - 4) << 5,
                    };
                    Run::new(EL1 | pan, &[at])
                }
                3 if !half.hd => Run {
                    start: va & !3,
                    ..Run::new(level, &[])
                },
                _ => {
                    // DC ZVA is the last one.
                    let accesses = ACCESSES.len() - usize::from(half.has_devices);
                    Run::new(level, &[random.of(&ACCESSES[..accesses])])
                }
            };
            let mask = if half.has_devices || random.one_in(2) {
                15
            } else {
                0
            };
            // The stored word is UNDEFINED as an instruction.
            let x = [0, va & !mask, 0x1_0000_0001, 0x2_0000_0002];
            script.run(Run { x, ..run });
        }
    }
    script
}

#[test]
fn random_tables_are_walked_as_in_qemu() {
    for round in first_round()..first_round() + rounds() {
        let mut random = Random(round + 1);
        let flags = [
            Flags::Fixed(HA),
            Flags::Any,
            Flags::Fixed(0),
            Flags::Fixed(HA | HD),
        ][round as usize % 4];
        let script = commands(&mut random, flags);
        let Some((records, wrong)) = compare("tables", &script, |granule, level| {
            descriptor(&mut random, granule, level)
        }) else {
            return;
        };
        check(records, &wrong);
    }
}
