//! Data processing with registers (C4.1.95).

use super::immediate::logic;
use crate::bits::{field, flag, register};
use crate::insn::{Extend, Insn, OneSource, Operand, Otherwise, Shift, ThreeSource, TwoSource};
use crate::width::Width;

pub(super) fn decode(word: u32) -> Option<Insn> {
    match (flag(word, 28), field(word, 24, 21)) {
        (false, 0b0000..=0b0111) => logical(word),
        (false, op) if op & 1 == 0 => add_shifted(word),
        (false, _) => add_extended(word),
        (true, 0b0000) => with_carry(word),
        (true, 0b0010) => conditional_compare(word),
        (true, 0b0100) => select(word),
        (true, 0b0110) => match flag(word, 30) {
            true => one_source(word),
            false => two_source(word),
        },
        (true, 0b1000..=0b1111) => three_source(word),
        _ => None,
    }
}

fn shift(kind: u32) -> Shift {
    match kind {
        0 => Shift::Lsl,
        1 => Shift::Lsr,
        2 => Shift::Asr,
        _ => Shift::Ror,
    }
}

/// Decodes the extension of an index register or operand, which the field `option` selects.
pub(super) fn extend(option: u32, shift: u32) -> Extend {
    Extend {
        bits: 8 << (option & 3),
        is_signed: option & 4 != 0,
        shift: shift as u8,
    }
}

fn shifted(word: u32, width: Width) -> Option<Operand> {
    let amount = field(word, 15, 10) as u8;
    (width == Width::X || amount < 32).then_some(Operand::Shifted {
        rm: register(word, 16),
        shift: shift(field(word, 23, 22)),
        amount,
    })
}

fn logical(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    let (op, sets) = logic(field(word, 30, 29));
    Some(Insn::Logic {
        width,
        op,
        inverts: flag(word, 21),
        sets,
        sp: false,
        rd: register(word, 0),
        rn: register(word, 5),
        operand: shifted(word, width)?,
    })
}

fn add_shifted(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    if field(word, 23, 22) == 3 {
        return None;
    }
    Some(Insn::AddSub {
        width,
        subtracts: flag(word, 30),
        sets: flag(word, 29),
        sp: [false, false],
        rd: register(word, 0),
        rn: register(word, 5),
        operand: shifted(word, width)?,
    })
}

fn add_extended(word: u32) -> Option<Insn> {
    let amount = field(word, 12, 10);
    if field(word, 23, 22) != 0 || amount > 4 {
        return None;
    }
    let sets = flag(word, 29);
    Some(Insn::AddSub {
        width: Width::of(flag(word, 31)),
        subtracts: flag(word, 30),
        sets,
        sp: [!sets, true],
        rd: register(word, 0),
        rn: register(word, 5),
        operand: Operand::Extended {
            rm: register(word, 16),
            extend: extend(field(word, 15, 13), amount),
        },
    })
}

fn with_carry(word: u32) -> Option<Insn> {
    let rn = register(word, 5);
    if field(word, 15, 10) == 0 {
        return Some(Insn::Carry {
            width: Width::of(flag(word, 31)),
            subtracts: flag(word, 30),
            sets: flag(word, 29),
            rd: register(word, 0),
            rn,
            rm: register(word, 16),
        });
    }
    if field(word, 31, 29) == 0b101 && field(word, 14, 10) == 1 && !flag(word, 4) {
        let (amount, mask) = (field(word, 20, 15) as u8, field(word, 3, 0) as u8);
        return Some(Insn::RotateIntoFlags { rn, amount, mask });
    }
    let is_setf = field(word, 31, 29) == 0b001 && field(word, 20, 15) == 0;
    if is_setf && field(word, 13, 10) == 0b0010 && field(word, 4, 0) == 0b01101 {
        let bits = if flag(word, 14) { 16 } else { 8 };
        return Some(Insn::SetFlags { rn, bits });
    }
    None
}

fn conditional_compare(word: u32) -> Option<Insn> {
    if !flag(word, 29) || flag(word, 10) || flag(word, 4) {
        return None;
    }
    let operand = match flag(word, 11) {
        true => Operand::Immediate(field(word, 20, 16).into()),
        false => Operand::Shifted {
            rm: register(word, 16),
            shift: Shift::Lsl,
            amount: 0,
        },
    };
    Some(Insn::ConditionalCompare {
        width: Width::of(flag(word, 31)),
        subtracts: flag(word, 30),
        condition: field(word, 15, 12) as u8,
        nzcv: field(word, 3, 0) as u8,
        rn: register(word, 5),
        operand,
    })
}

fn select(word: u32) -> Option<Insn> {
    let otherwise = match (flag(word, 29), field(word, 11, 10), flag(word, 30)) {
        (false, 0, false) => Otherwise::Same,
        (false, 1, false) => Otherwise::Increment,
        (false, 0, true) => Otherwise::Invert,
        (false, 1, true) => Otherwise::Negate,
        _ => return None,
    };
    Some(Insn::Select {
        width: Width::of(flag(word, 31)),
        otherwise,
        condition: field(word, 15, 12) as u8,
        rd: register(word, 0),
        rn: register(word, 5),
        rm: register(word, 16),
    })
}

fn one_source(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    // A second opcode (bits 20 to 16) other than 0 is for pointer authentication, which this CPU does not have:
    // UNDEFINED.
    if flag(word, 29) || field(word, 20, 16) != 0 {
        return None;
    }
    let op = match (field(word, 15, 10), width) {
        (0, _) => OneSource::Rbit,
        (1, _) => OneSource::Rev { bits: 16 },
        (2, _) => OneSource::Rev { bits: 32 },
        (3, Width::X) => OneSource::Rev { bits: 64 },
        (4, _) => OneSource::Clz,
        (5, _) => OneSource::Cls,
        _ => return None,
    };
    Some(Insn::OneSource {
        width,
        op,
        rd: register(word, 0),
        rn: register(word, 5),
    })
}

fn two_source(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    if flag(word, 29) {
        return None;
    }
    let op = match field(word, 15, 10) {
        0b000010 => TwoSource::Udiv,
        0b000011 => TwoSource::Sdiv,
        op @ 0b001000..=0b001011 => TwoSource::Shift(shift(op & 3)),
        op @ 0b010000..=0b010111 => {
            let bits = 8 << (op & 3);
            if (bits == 64) != (width == Width::X) {
                return None;
            }
            TwoSource::Crc {
                bits,
                castagnoli: op & 4 != 0,
            }
        }
        _ => return None,
    };
    let (rd, rn, rm) = (register(word, 0), register(word, 5), register(word, 16));
    Some(Insn::TwoSource {
        width,
        op,
        rd,
        rn,
        rm,
    })
}

fn three_source(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    let subtracts = flag(word, 15);
    let op = match (field(word, 30, 29), field(word, 23, 21), width) {
        (0, 0b000, _) if subtracts => ThreeSource::Msub,
        (0, 0b000, _) => ThreeSource::Madd,
        (0, op @ (0b001 | 0b101), Width::X) => ThreeSource::Long {
            is_signed: op == 0b001,
            subtracts,
        },
        (0, op @ (0b010 | 0b110), Width::X) if !subtracts => ThreeSource::High {
            is_signed: op == 0b010,
        },
        _ => return None,
    };
    Some(Insn::ThreeSource {
        width,
        op,
        rd: register(word, 0),
        rn: register(word, 5),
        rm: register(word, 16),
        ra: register(word, 10),
    })
}
