//! Random programs: sequences with forward branches, loops with a limited number of rounds, and exclusive accesses.

use crate::case::{self, BRK};
use crate::qemu::{Record, WORDS, border};
use crate::rng::Rng;
use crate::spec::{ENCODINGS, Encoding};

/// The register that counts the rounds of a loop, and the register with an address in the window.
const COUNTER: u32 = 28;
const BASE: u32 = 27;

/// The encodings from which programs are made.
pub struct Pool {
    plain: Vec<&'static Encoding>,
    accesses: Vec<&'static Encoding>,
}

impl Pool {
    pub fn new() -> Self {
        let of = |classes: &[&str]| {
            let found = ENCODINGS
                .iter()
                .filter(|e| classes.iter().any(|c| e.class.starts_with(c)));
            found.collect()
        };
        Self {
            plain: of(&[
                "addsub",
                "log_",
                "movewide",
                "bitfield",
                "extract",
                "pcreladdr",
                "condcmp",
                "condsel",
                "dp_",
                "rmif",
                "setf",
                "float",
                "asimd",
                "asisd",
            ]),
            accesses: of(&[
                "ldst_unscaled",
                "ldst_pos",
                "ldst_imm",
                "ldstpair",
                "ldstnapair",
                "asisdlse",
                "asisdlso",
                "memop",
                "comswap",
                "ldstord",
            ]),
        }
    }

    /// Returns a random instruction that does not change the counter. The instruction changes the base register only
    /// by writing it back.
    fn word(&self, rng: &mut Rng) -> u32 {
        loop {
            if rng.one_in(3) {
                let encoding = rng.pick(&self.accesses);
                let Some(mut word) = case::word(encoding, rng) else {
                    continue;
                };
                word = word & !(31 << 5) | BASE << 5;
                if encoding.class == "ldst_pos" {
                    word &= !(0xff8 << 10);
                }
                let others = [word & 31, word >> 10 & 31, word >> 16 & 31];
                let is_small = others
                    .iter()
                    .all(|r| *r != BASE && *r != COUNTER && *r != BASE - 1);
                if is_small && case::is_predictable(encoding.class, word) {
                    return word;
                }
            } else {
                let encoding = rng.pick(&self.plain);
                let Some(word) = case::word(encoding, rng) else {
                    continue;
                };
                if encoding.class.starts_with("asisdl") {
                    continue;
                }
                if word & 31 != COUNTER && word & 31 != BASE {
                    return word;
                }
            }
        }
    }

    pub fn random(&self, rng: &mut Rng) -> Record {
        let mut record = case::empty();
        record.before = case::registers(rng);
        for chunk in record.memory.chunks_mut(8) {
            chunk.copy_from_slice(&rng.integer().to_le_bytes());
        }
        record.set = rng.pick(&[0, 0, 0, 1, 2, 3, 4]);
        let into = match record.set {
            0 | 3 | 4 => 16 * (rng.below(8) as i64 - 4),
            _ => -16 * (1 + rng.below(8) as i64),
        };
        record.before.x[BASE as usize] = border(record.set).wrapping_add(into as u64);
        record.before.x[COUNTER as usize] = 1 + rng.below(20) as u64;
        let length = 8 + rng.below(WORDS - 24);
        let (mut at, mut after_loop) = (0, 0);
        while at < length {
            match rng.below(16) {
                // A branch goes forward, at most to the end.
                0 => {
                    let offset = 1 + rng.below(6) as u32;
                    record.code[at] = match rng.below(3) {
                        0 => 0x5400_0000 | offset << 5 | rng.below(16) as u32,
                        1 => 0x3400_0000 | offset << 5 | rng.next() as u32 & 0x8100_001f,
                        _ => 0x3600_0000 | offset << 5 | rng.next() as u32 & 0x81f8_001f,
                    };
                    at += 1;
                }
                // This pair counts down and jumps back.
                1 if at > after_loop => {
                    let back = 2 + rng.below(at - after_loop) as u32;
                    record.code[at] = 0xd100_0400 | COUNTER << 5 | COUNTER;
                    record.code[at + 1] =
                        0xb500_0000 | (back.wrapping_neg() & 0x7_ffff) << 5 | COUNTER;
                    at += 2;
                    // After a loop the counter is 0, with which the next loop would never end. So the counter is set
                    // again.
                    record.code[at] = 0xd280_0060 | COUNTER;
                    at += 1;
                    after_loop = at;
                }
                // LDAXR, a change, STLXR into W0. Sometimes a second store follows, which fails.
                2 => {
                    let size = rng.below(4) as u32;
                    let words = [
                        0x085f_fc00 | size << 30 | BASE << 5 | 1,
                        0x9100_0421,
                        0x0800_fc00 | size << 30 | BASE << 5 | 1,
                        match rng.below(3) {
                            0 => 0x0802_fc00 | size << 30 | BASE << 5 | 1,
                            _ => 0xd503_201f,
                        },
                    ];
                    record.code[at..at + 4].copy_from_slice(&words);
                    at += 4;
                }
                _ => {
                    record.code[at] = self.word(rng);
                    at += 1;
                }
            }
        }
        // A branch to the jump at the end of a loop would skip the counting. So the branch goes to the instruction
        // after the jump.
        let is_jump = |word: u32| word & 0xff80_001f == 0xb580_0000 | COUNTER;
        for n in 0..length {
            let word = record.code[n];
            let is_branch = matches!(word >> 24 & 0x7f, 0x34..=0x37 | 0x54);
            let offset = (word >> 5 & 0x3fff) as usize;
            if is_branch && !is_jump(word) && is_jump(record.code[n + offset]) {
                record.code[n] += 1 << 5;
            }
        }
        assert_eq!(record.code[WORDS - 1], BRK);
        record
    }
}
