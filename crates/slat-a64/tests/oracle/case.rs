//! Makes random cases.

use crate::qemu::{Record, Registers, WINDOW, WORDS, border, code};
use crate::rng::Rng;
use crate::spec::Encoding;
use slat_a64::is_defined;

pub const BRK: u32 = 0xd420_0000;

/// The existing bits of FPCR: AHP, DN, FZ, RMode, FZ16.
const FPCR: u32 = 0x07c8_0000;

fn field(word: u32, high: u32, low: u32) -> u32 {
    word >> low & (u32::MAX >> (31 - (high - low)))
}

fn set_field(word: &mut u32, high: u32, low: u32, value: u32) {
    let mask = u32::MAX >> (31 - (high - low));
    *word = *word & !(mask << low) | (value & mask) << low;
}

fn signed(word: u32, high: u32, low: u32) -> i64 {
    i64::from((word << (31 - high)) as i32 >> (31 - (high - low)))
}

/// Classes whose instructions depend on the machine around the processor, or end qemu's program. For example, DC ZVA
/// depends on the size of a block.
const NOT_EXECUTED: [&str; 3] = ["exception", "systeminstrs", "hints"];

/// Registers that the oracle reads and writes: NZCV, FPCR, FPSR.
const SYSTEM_REGISTERS: [u32; 3] = [0xd51b_4200, 0xd51b_4400, 0xd51b_4420];

/// Returns a random word of an encoding. `None`: the oracle cannot execute it, or the processor does not have it.
pub fn word(encoding: &Encoding, rng: &mut Rng) -> Option<u32> {
    let random = rng.next() as u32;
    let mut word = random & !encoding.mask | encoding.value;
    match encoding.class {
        "hints" | "exception" | "systeminstrs" => {
            return special(encoding.name, word);
        }
        "systemmove" => {
            let register = rng.pick(&SYSTEM_REGISTERS);
            word = register | word & 0x0020_001f;
        }
        "pstate" if encoding.name == "MSR_SI_pstate" => word = 0xd503_405f | word & 0xf00,
        // Otherwise small counts would be rare.
        "memop" if rng.one_in(4) => set_field(&mut word, 4, 0, 31),
        _ => {}
    }
    (is_defined(word) && is_predictable(encoding.class, word)).then_some(word)
}

/// Returns a word of a class of which only few words can be executed.
fn special(name: &str, word: u32) -> Option<u32> {
    let word = match name {
        _ if name.contains("WF") => return None,
        "BRK_EX_exception" | "HVC_EX_exception" | "SMC_EX_exception" => word,
        _ if name.ends_with("hints") => word,
        _ => return None,
    };
    is_defined(word).then_some(word)
}

/// Whether the architecture determines the registers after the instruction (K1.2).
pub fn is_predictable(class: &str, word: u32) -> bool {
    let (rt, rn, rt2, rs) = (
        field(word, 4, 0),
        field(word, 9, 5),
        field(word, 14, 10),
        field(word, 20, 16),
    );
    let is_vector = word >> 26 & 1 != 0;
    let loads = word >> 22 & 1 != 0;
    let base_is = |r: u32| rn == r && rn != 31;
    match class {
        "ldst_immpre" | "ldst_immpost" => is_vector || !base_is(rt),
        "ldstpair_pre" | "ldstpair_post" => {
            (is_vector || !(base_is(rt) || base_is(rt2))) && !(loads && rt == rt2)
        }
        "ldstpair_off" | "ldstnapair_offs" => !(loads && rt == rt2),
        "ldstexclr" => loads || !(rs == rt || base_is(rs)),
        // qemu 7.2 has X30 together with SP instead of the zero register.
        "comswappr" => rs != 30 && rt != 30,
        // The address could be anywhere, even in the helper's own memory.
        "ldst_regoff" => rn != rs,
        // qemu 7.2 extends the sign of half a word to a word.
        "asisdshf" => field(word, 22, 20) != 1 || field(word, 15, 11) != 0b11111,
        "ldstexclp" if loads => rt != rt2,
        "ldstexclp" => !(rs == rt || rs == rt2 || base_is(rs)),
        _ => true,
    }
}

/// The operands from which an instruction computes the address of an access.
struct Aim {
    offset: i64,
    /// The register, the field that says how it is extended, and the shift.
    index: Option<(usize, u32, u32)>,
    alignment: u64,
}

fn aim(class: &str, word: u32) -> Option<Aim> {
    let size = field(word, 31, 30);
    let is_vector = word >> 26 & 1 != 0;
    let scale = if is_vector && word >> 23 & 1 != 0 {
        4
    } else {
        size
    };
    let plain = |offset| {
        Some(Aim {
            offset,
            index: None,
            alignment: 1,
        })
    };
    match class {
        "ldst_pos" => plain(i64::from(field(word, 21, 10)) << scale),
        "ldst_unscaled" | "ldst_unpriv" | "ldst_immpre" => plain(signed(word, 20, 12)),
        "ldst_immpost" | "ldstpair_post" => plain(0),
        "ldst_regoff" => {
            let rm = field(word, 20, 16) as usize;
            let shift = if word >> 12 & 1 != 0 { scale } else { 0 };
            let index = Some((rm, field(word, 15, 13), shift));
            Some(Aim {
                offset: 0,
                index,
                alignment: 1,
            })
        }
        "ldstpair_off" | "ldstpair_pre" | "ldstnapair_offs" => {
            let scale = if is_vector { 2 + size } else { 2 + size / 2 };
            plain(signed(word, 21, 15) << scale)
        }
        _ if class.starts_with("asisdl") => plain(0),
        "ldstord" | "ldstexclr" | "ldstexclp" | "comswap" | "comswappr" | "memop" => Some(Aim {
            offset: 0,
            index: None,
            alignment: 16,
        }),
        "ldapstl_unscaled" => Some(Aim {
            offset: signed(word, 20, 12),
            index: None,
            alignment: 16,
        }),
        _ => None,
    }
}

fn extended(value: u64, option: u32) -> u64 {
    let bits = 8 << (option & 3);
    let unused = 64 - bits;
    match option & 4 {
        0 => value << unused >> unused,
        _ => ((value << unused) as i64 >> unused) as u64,
    }
}

/// Sets the registers of an access so that its address is in the window.
fn point(class: &str, word: u32, target: u64, before: &mut Registers) {
    let Some(aim) = aim(class, word) else { return };
    let base = field(word, 9, 5) as usize;
    let target = target & !(aim.alignment - 1);
    let mut value = target.wrapping_sub(aim.offset as u64);
    if let Some((rm, option, shift)) = aim.index {
        let index = if rm == 31 { 0 } else { before.x[rm] };
        value = value.wrapping_sub(extended(index, option) << shift);
    }
    match base {
        31 => before.sp = value,
        _ => before.x[base] = value,
    }
}

/// Makes branches, and loads of literals, lead to words of the case.
fn confine(class: &str, word: &mut u32, start: usize, rng: &mut Rng) {
    let mut target = rng.below(WORDS - 1) as u32;
    if target >= start as u32 {
        target += 1;
    }
    let offset = target.wrapping_sub(start as u32);
    match class {
        "branch_imm" => set_field(word, 25, 0, offset),
        "condbranch" | "compbranch" => set_field(word, 23, 5, offset),
        // LDR of a vector register reads two more words.
        "loadlit" => set_field(word, 23, 5, offset.min(WORDS as u32 - 4 - start as u32)),
        "testbranch" => set_field(word, 18, 5, offset),
        _ => {}
    }
}

pub fn registers(rng: &mut Rng) -> Registers {
    let mut before = Registers::zero();
    before.x = std::array::from_fn(|_| rng.integer());
    before.sp = rng.integer();
    before.pstate = (rng.next() & 15) << 28;
    if rng.one_in(2) {
        before.fpcr = rng.next() as u32 & FPCR;
    }
    for v in &mut before.v {
        let value = rng.xmm();
        *v = [value as u64, (value >> 64) as u64];
    }
    before
}

pub fn empty() -> Record {
    Record {
        before: Registers::zero(),
        after: Registers::zero(),
        memory: [0; WINDOW],
        memory_after: [0; WINDOW],
        code: [BRK; WORDS],
        start: 0,
        set: 0,
    }
}

/// Makes a case of one instruction. `case` is the index of the case in a batch.
pub fn single(encoding: &Encoding, case: usize, rng: &mut Rng) -> Option<Record> {
    let mut word = word(encoding, rng)?;
    let mut record = empty();
    let start = WORDS / 2;
    record.start = start as u32;
    record.before = registers(rng);
    for chunk in record.memory.chunks_mut(8) {
        chunk.copy_from_slice(&rng.integer().to_le_bytes());
    }
    // Half of the accesses have memory. Some of the other accesses reach the page on the other side of the border.
    record.set = rng.pick(&[0, 0, 0, 0, 1, 2, 3, 4]);
    let middle = border(record.set);
    let target = match record.set {
        0 => middle - 256 + rng.below(512 - 64) as u64,
        _ => middle - 40 + rng.below(64) as u64,
    };
    confine(encoding.class, &mut word, start, rng);
    point(encoding.class, word, target, &mut record.before);
    if encoding.class == "branch_reg" {
        let register = field(word, 9, 5) as usize;
        let mut offset = 4 * rng.below(start) as u64;
        if rng.one_in(8) {
            offset += 2;
        }
        if register < 31 {
            record.before.x[register] = code(case) + offset;
        }
    }
    record.code[start] = word;
    Some(record)
}

/// Whether the oracle can execute any word of the class.
pub fn is_executed(encoding: &Encoding) -> bool {
    !NOT_EXECUTED.contains(&encoding.class) || special(encoding.name, encoding.value).is_some()
}
