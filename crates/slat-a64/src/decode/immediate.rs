//! Data processing with an immediate (C4.1.93).

use crate::bits::{field, flag, ones, register, signed_field};
use crate::insn::{Bitfield, Insn, Logic, MoveWide, Operand};
use crate::width::Width;

pub(super) fn decode(word: u32) -> Option<Insn> {
    let width = Width::of(flag(word, 31));
    let (rd, rn) = (register(word, 0), register(word, 5));
    match field(word, 25, 23) {
        0b000 | 0b001 => {
            let offset = signed_field(word, 23, 5) << 2 | field(word, 30, 29) as i32;
            let page = flag(word, 31);
            Some(Insn::Adr { rd, page, offset })
        }
        0b010 => {
            let shift = if flag(word, 22) { 12 } else { 0 };
            let sets = flag(word, 29);
            Some(Insn::AddSub {
                width,
                subtracts: flag(word, 30),
                sets,
                sp: [!sets, true],
                rd,
                rn,
                operand: Operand::Immediate(u64::from(field(word, 21, 10)) << shift),
            })
        }
        0b100 => {
            let value = bitmask(
                width,
                flag(word, 22),
                field(word, 15, 10),
                field(word, 21, 16),
            )?;
            let (op, sets) = logic(field(word, 30, 29));
            Some(Insn::Logic {
                width,
                op,
                inverts: false,
                sets,
                sp: !sets,
                rd,
                rn,
                operand: Operand::Immediate(value),
            })
        }
        0b101 => move_wide(word, width, rd),
        0b110 => {
            let (immr, imms) = (field(word, 21, 16) as u8, field(word, 15, 10) as u8);
            let kind = match field(word, 30, 29) {
                0 => Bitfield::Signed,
                1 => Bitfield::Insert,
                2 => Bitfield::Unsigned,
                _ => return None,
            };
            let fits = width == Width::X || (immr | imms) < 32;
            (flag(word, 22) == flag(word, 31) && fits).then_some(Insn::Bitfield {
                width,
                kind,
                rd,
                rn,
                immr,
                imms,
            })
        }
        0b111 => {
            let lsb = field(word, 15, 10) as u8;
            let is_extract = field(word, 30, 29) == 0 && !flag(word, 21);
            let fits = width == Width::X || lsb < 32;
            (is_extract && flag(word, 22) == flag(word, 31) && fits).then_some(Insn::Extract {
                width,
                rd,
                rn,
                rm: register(word, 16),
                lsb,
            })
        }
        // ADDG, SUBG, and the minima and maxima of FEAT_CSSC, which this CPU does not have: UNDEFINED.
        _ => None,
    }
}

/// Returns the logical operation of `opc`, and whether it sets the flags.
pub(super) fn logic(opc: u32) -> (Logic, bool) {
    match opc {
        0 => (Logic::And, false),
        1 => (Logic::Orr, false),
        2 => (Logic::Eor, false),
        _ => (Logic::And, true),
    }
}

fn move_wide(word: u32, width: Width, rd: u8) -> Option<Insn> {
    let shift = 16 * field(word, 22, 21) as u8;
    if width == Width::W && shift >= 32 {
        return None;
    }
    let value = u64::from(field(word, 20, 5)) << shift;
    let (kind, value) = match field(word, 30, 29) {
        0 => (MoveWide::Set, !value & ones(width.bits())),
        2 => (MoveWide::Set, value),
        3 => (MoveWide::Keep { shift }, value),
        _ => return None,
    };
    Some(Insn::MoveWide {
        width,
        kind,
        rd,
        value,
    })
}

/// Decodes the immediate of a logical instruction (DecodeBitMasks, J1): a rotated run of ones, repeated.
fn bitmask(width: Width, n: bool, imms: u32, immr: u32) -> Option<u64> {
    let length = (u32::from(n) << 6 | !imms & 63).checked_ilog2()?;
    if length < 1 || (width == Width::W && n) {
        return None;
    }
    let bits = 1 << length;
    let (run, rotation) = (imms & (bits - 1), immr & (bits - 1));
    if run == bits - 1 {
        return None;
    }
    let run = ones(run + 1);
    let element = match rotation {
        0 => run,
        _ => (run >> rotation | run << (bits - rotation)) & ones(bits),
    };
    let repeated = (0..64 / bits).fold(0, |value, n| value | element << (n * bits));
    Some(repeated & ones(width.bits()))
}
