//! Finds the group of an instruction, and decodes the groups that move lanes.

use super::compute::{Function, Op, Permutation};
use super::form::{Form, expanded};
use super::{Change, Input, Output, Simd, fixed, misc, scalar, three};
use crate::bits::{field, flag, register};
use crate::width::Width;

/// Decodes a floating-point or Advanced SIMD instruction: bits 27 to 25 are 111.
pub(crate) fn decode(word: u32) -> Option<Simd> {
    match (field(word, 31, 30), flag(word, 28)) {
        (0b00 | 0b10, true) => match flag(word, 29) {
            false => scalar::decode(word),
            true => None,
        },
        (0b01, true) => advanced(Form {
            word,
            is_scalar: true,
        }),
        (0b00 | 0b01, false) => advanced(Form {
            word,
            is_scalar: false,
        }),
        _ => None,
    }
}

fn advanced(form: Form) -> Option<Simd> {
    let word = form.word;
    if flag(word, 24) {
        return match (flag(word, 10), flag(word, 23), field(word, 22, 19)) {
            (false, ..) => three::by_element(form),
            (true, false, 0) if !form.is_scalar => immediate(word),
            (true, false, 1..) => fixed::decode(form),
            _ => None,
        };
    }
    let (b15, b11_10) = (flag(word, 15), field(word, 11, 10));
    if flag(word, 21) {
        return match (b11_10, field(word, 20, 17)) {
            (0b01 | 0b11, _) => three::same(form),
            (0b00, _) => three::different(form),
            (_, 0b0000) => misc::misc(form),
            (_, 0b1000) => misc::across(form),
            (_, 0b1100) => misc::misc_half(form),
            _ => None,
        };
    }
    match b11_10 {
        0b01 | 0b11 if b15 => three::extra(form),
        0b01 | 0b11 if field(word, 15, 14) == 0 && flag(word, 22) => three::same_half(form),
        0b01 | 0b11 if field(word, 23, 22) == 0 => copy(form),
        0b10 if !b15 && !form.is_scalar && !form.u() => permute(form),
        0b00 if !b15 && !form.is_scalar && !form.u() && field(word, 23, 22) == 0 => table(form),
        0b00 | 0b10 if !b15 && !form.is_scalar && form.u() && field(word, 23, 22) == 0 => {
            extract(form)
        }
        _ => None,
    }
}

fn copy(form: Form) -> Option<Simd> {
    let word = form.word;
    let (imm5, imm4) = (field(word, 20, 16), field(word, 14, 11));
    let size = imm5.trailing_zeros() as u8;
    if size > 3 {
        return None;
    }
    let lane = (imm5 >> (size + 1)) as u8;
    let (rd, rn) = (register(word, 0), register(word, 5));
    let from_lane = Input::Lane { r: rn, size, lane };
    let element = |is_signed| Function {
        immediate: lane,
        is_signed,
        ..form.function(Op::Element, size)
    };
    let nothing = Input::Zero;
    if form.is_scalar {
        let is_dup = !form.u() && imm4 == 0;
        return form
            .compute(element(false), [form.rn(), nothing, nothing])
            .filter(|_| is_dup);
    }
    let to_general = |is_signed| {
        let output = Output::X(rd, Width::of(form.full()));
        let inputs = [form.rn(), nothing, nothing];
        Some(Simd::Compute {
            function: element(is_signed),
            inputs,
            output,
        })
    };
    let insert = Function {
        immediate: lane,
        ..form.function(Op::Insert, size)
    };
    match (form.u(), imm4, form.full()) {
        (false, 0b0000, _) if form.fits(size) => form.compute(
            form.function(Op::Duplicate, size),
            [from_lane, nothing, nothing],
        ),
        (false, 0b0001, _) if form.fits(size) => form.compute(
            form.function(Op::Duplicate, size),
            [Input::X(rn), nothing, nothing],
        ),
        (false, 0b0011, true) => form.compute(insert, [Input::X(rn), nothing, form.rd()]),
        (false, 0b0101, full) if size < 2 + u8::from(full) => to_general(true),
        (false, 0b0111, full) if (size == 3) == full => to_general(false),
        (true, _, true) => {
            let lane = (imm4 >> size) as u8;
            form.compute(
                insert,
                [Input::Lane { r: rn, size, lane }, nothing, form.rd()],
            )
        }
        _ => None,
    }
}

fn permute(form: Form) -> Option<Simd> {
    let opcode = field(form.word, 14, 12);
    let kind = match opcode & 3 {
        1 => Permutation::Unzip,
        2 => Permutation::Transpose,
        3 => Permutation::Zip,
        _ => return None,
    };
    let op = Op::Permute {
        kind,
        second: opcode & 4 != 0,
    };
    let function = form.function(op, form.size());
    form.compute(function, [form.rn(), form.rm(), Input::Zero])
        .filter(|_| form.fits(form.size()))
}

fn table(form: Form) -> Option<Simd> {
    Some(Simd::Table {
        full: form.full(),
        registers: field(form.word, 14, 13) as u8 + 1,
        keeps: flag(form.word, 12),
        rd: register(form.word, 0),
        rn: register(form.word, 5),
        rm: register(form.word, 16),
    })
}

fn extract(form: Form) -> Option<Simd> {
    let immediate = field(form.word, 14, 11) as u8;
    let is_ext = !flag(form.word, 10) && (form.full() || immediate < 8);
    let function = Function {
        immediate,
        ..form.function(Op::Extract, 0)
    };
    form.compute(function, [form.rn(), form.rm(), Input::Zero])
        .filter(|_| is_ext && !flag(form.word, 11))
}

/// Returns a doubleword that repeats a value of `bits` bits.
fn repeated(value: u64, bits: u32) -> u64 {
    (0..64 / bits).fold(0, |all, n| all | value << (n * bits))
}

/// Decodes MOVI, MVNI, ORR, BIC and FMOV with an immediate (AdvSIMDExpandImm).
fn immediate(word: u32) -> Option<Simd> {
    let (full, op, cmode) = (flag(word, 30), flag(word, 29), field(word, 15, 12));
    let short = field(word, 18, 16) << 5 | field(word, 9, 5);
    let byte = u64::from(short);
    let is_half = flag(word, 11);
    let value = match cmode {
        _ if is_half && (op || cmode != 0b1111) => return None,
        0b0000..=0b0111 => repeated(byte << (8 * (cmode >> 1)), 32),
        0b1000..=0b1011 => repeated(byte << (8 * (cmode >> 1 & 1)), 16),
        0b1100 => repeated(byte << 8 | 0xff, 32),
        0b1101 => repeated(byte << 16 | 0xffff, 32),
        0b1110 if !op => repeated(byte, 8),
        0b1110 => (0..8)
            .filter(|n| byte >> n & 1 != 0)
            .fold(0, |all, n| all | 0xff << (8 * n)),
        _ if is_half => repeated(expanded(short, 1), 16),
        _ if !op => repeated(expanded(short, 2), 32),
        _ if full => expanded(short, 3),
        _ => return None,
    };
    let changes = cmode & 1 != 0 && cmode < 0b1100;
    let (change, value) = match (changes, op) {
        (true, false) => (Change::Or, value),
        (true, true) => (Change::Clear, value),
        (false, true) if cmode < 0b1110 => (Change::Set, !value),
        (false, _) => (Change::Set, value),
    };
    Some(Simd::Immediate {
        rd: register(word, 0),
        value,
        full,
        change,
    })
}
