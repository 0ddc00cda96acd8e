//! Advanced SIMD instructions on two registers, across the lanes of a register, and on pairs of scalars.

use super::arithmetic::Extreme;
use super::compute::{Bitwise, Float, Function, Narrowing, Op};
use super::float::Rounding;
use super::form::Form;
use super::integer::Integer;
use super::{Input, Simd};
use crate::bits::{field, flag, register};

/// Decodes instructions on two registers.
pub(super) fn misc(form: Form) -> Option<Simd> {
    let opcode = field(form.word, 16, 12);
    let is_float = matches!(opcode, 0b01100..=0b01111 | 0b10110.. );
    if !is_float {
        return integer(form, opcode);
    }
    let size = 2 + (form.size() & 1);
    match (opcode, form.u(), flag(form.word, 23)) {
        (0b10110 | 0b10111, ..) => convert(form, opcode),
        (0b11100, u, true) => {
            let op = match u {
                true => Integer::UnsignedRootReciprocal,
                false => Integer::UnsignedReciprocal,
            };
            let exists = size == 2 && !form.is_scalar;
            let inputs = [form.rn(), Input::Zero, Input::Zero];
            form.compute(form.function(Op::Lanes(op), 2), inputs)
                .filter(|_| exists)
        }
        _ => float(form, opcode, size).filter(|_| form.fits(size)),
    }
}

/// Decodes half-precision instructions on two registers.
pub(super) fn misc_half(form: Form) -> Option<Simd> {
    let opcode = field(form.word, 16, 12);
    // Bit 22 must be 1. FRINT32 and FRINT64 have no half-precision form.
    if !flag(form.word, 22) || (opcode >= 0b11110 && !flag(form.word, 23)) {
        return None;
    }
    float(form, opcode, 1)
}

fn integer(form: Form, opcode: u32) -> Option<Simd> {
    let (u, size) = (form.u(), form.size());
    let (rn, rd, zero) = (form.rn(), form.rd(), Input::Zero);
    let lanes = |op| (Op::Lanes(op), [rn, zero, zero]);
    let compared = |op| (Op::Lanes(op), [rn, zero, zero]);
    let reversed = |op| (Op::Lanes(op), [zero, rn, zero]);
    let narrow = |kind| {
        (
            Op::Narrow {
                kind,
                rounds: false,
                upper: form.full(),
            },
            [rn, zero, rd],
        )
    };
    // Columns: the operation and its inputs, whether it is signed, the largest size of vectors, the least size of
    // scalars.
    let ((op, inputs), is_signed, most, least) = match (opcode, u) {
        (0b00000, false) => ((Op::Reverse { group: 64 }, [rn, zero, zero]), false, 2, 4),
        (0b00000, true) => ((Op::Reverse { group: 32 }, [rn, zero, zero]), false, 1, 4),
        (0b00001, false) => ((Op::Reverse { group: 16 }, [rn, zero, zero]), false, 0, 4),
        (0b00010 | 0b00110, _) => {
            let op = Op::AddPairsLong {
                adds: opcode == 0b00110,
            };
            ((op, [rn, zero, rd]), !u, 2, 4)
        }
        (0b00011, _) => (
            (Op::Lanes(Integer::SaturatingAddOther), [rd, rn, zero]),
            !u,
            3,
            0,
        ),
        (0b00100, false) => (lanes(Integer::LeadingSigns), false, 2, 4),
        (0b00100, true) => (lanes(Integer::LeadingZeros), false, 2, 4),
        (0b00101, false) => (lanes(Integer::Ones), false, 0, 4),
        (0b00101, true) => {
            let inputs = [rn, zero, zero];
            let function = match size {
                0 => form.function(Op::Bitwise(Bitwise::Not), 0),
                1 => form.function(Op::Lanes(Integer::ReverseBits), 0),
                _ => return None,
            };
            return form.compute(function, inputs).filter(|_| !form.is_scalar);
        }
        (0b00111, false) => (lanes(Integer::Abs { saturates: true }), true, 3, 0),
        (0b00111, true) => (lanes(Integer::Neg { saturates: true }), true, 3, 0),
        (0b01000, false) => (compared(Integer::Greater), true, 3, 3),
        (0b01000, true) => (compared(Integer::GreaterEqual), true, 3, 3),
        (0b01001, false) => (compared(Integer::Equal), true, 3, 3),
        (0b01001, true) => (reversed(Integer::GreaterEqual), true, 3, 3),
        (0b01010, false) => (reversed(Integer::Greater), true, 3, 3),
        (0b01011, false) => (lanes(Integer::Abs { saturates: false }), true, 3, 3),
        (0b01011, true) => (lanes(Integer::Neg { saturates: false }), true, 3, 3),
        (0b10010, false) => (narrow(Narrowing::Plain), false, 2, 4),
        (0b10010, true) => (narrow(Narrowing::ToUnsigned), true, 2, 0),
        (0b10011, true) if size < 3 && !form.is_scalar => {
            return super::fixed::shift_left_long(form, size, 8 << size);
        }
        (0b10100, _) => (narrow(Narrowing::Saturating), !u, 2, 0),
        _ => return None,
    };
    let narrows = matches!(op, Op::Narrow { .. });
    let exists = match form.is_scalar {
        true => size >= least && !(narrows && size == 3),
        false => size <= most && (narrows || form.fits(size)),
    };
    let mut function = Function {
        is_signed,
        ..form.function(op, size)
    };
    if narrows && !form.is_scalar {
        function.bytes = 16;
    }
    form.compute(function, inputs).filter(|_| exists)
}

/// Decodes FCVTL, FCVTN and FCVTXN.
fn convert(form: Form, opcode: u32) -> Option<Simd> {
    let is_double = form.size() & 1 != 0;
    if flag(form.word, 23) {
        return None;
    }
    let upper = form.full();
    if opcode == 0b10111 {
        let mut function = form.function(Op::ConvertLong { upper }, 2 + u8::from(is_double));
        function.bytes = 16;
        let inputs = [form.rn(), Input::Zero, Input::Zero];
        return form
            .compute(function, inputs)
            .filter(|_| !form.u() && !form.is_scalar);
    }
    let odd = form.u();
    let exists = match odd {
        true => is_double,
        false => !form.is_scalar,
    };
    let size = 1 + u8::from(is_double);
    let mut function = form.function(Op::ConvertNarrow { upper, odd }, size);
    if !form.is_scalar {
        function.bytes = 16;
    }
    form.compute(function, [form.rn(), Input::Zero, form.rd()])
        .filter(|_| exists)
}

fn float(form: Form, opcode: u32, size: u8) -> Option<Simd> {
    let (u, a) = (form.u(), flag(form.word, 23));
    let (rn, zero) = (form.rn(), Input::Zero);
    let [equal, at_least, greater] = [
        Float::Equal { absolute: false },
        Float::GreaterEqual { absolute: false },
        Float::Greater { absolute: false },
    ];
    let round = |mode, exact| Float::Round { mode, exact };
    let to = |mode| Float::ToFixed { mode };
    let to_bits = |bits| Float::RoundToBits {
        mode: (!u).then_some(Rounding::Zero),
        bits,
    };
    // Columns: the operation, and whether it has a scalar form.
    let (op, of_scalars) = match (opcode, a, u) {
        (0b01100, true, false) => (greater, true),
        (0b01100, true, true) => (at_least, true),
        (0b01101, true, false) => (equal, true),
        (0b01101, true, true) => (at_least, true),
        (0b01110, true, false) => (greater, true),
        (0b01111, true, false) => (Float::Abs, false),
        (0b01111, true, true) => (Float::Neg, false),
        (0b11000, false, false) => (round(Some(Rounding::Nearest), false), false),
        (0b11000, true, false) => (round(Some(Rounding::Up), false), false),
        (0b11000, false, true) => (round(Some(Rounding::Away), false), false),
        (0b11001, false, false) => (round(Some(Rounding::Down), false), false),
        (0b11001, true, false) => (round(Some(Rounding::Zero), false), false),
        (0b11001, false, true) => (round(None, true), false),
        (0b11001, true, true) => (round(None, false), false),
        (0b11010, false, _) => (to(Rounding::Nearest), true),
        (0b11010, true, _) => (to(Rounding::Up), true),
        (0b11011, false, _) => (to(Rounding::Down), true),
        (0b11011, true, _) => (to(Rounding::Zero), true),
        (0b11100, false, _) => (to(Rounding::Away), true),
        (0b11101, false, _) => (Float::FromFixed, true),
        (0b11101, true, false) => (Float::ReciprocalEstimate, true),
        (0b11101, true, true) => (Float::RootEstimate, true),
        (0b11110, false, _) => (to_bits(32), false),
        (0b11111, false, _) => (to_bits(64), false),
        (0b11111, true, true) => (Float::Sqrt, false),
        (0b11111, true, false) if form.is_scalar => (Float::ReciprocalExponent, true),
        _ => return None,
    };
    // FCMLE and FCMLT compare zero with the operand, so the inputs are swapped.
    let is_reversed = matches!((opcode, u), (0b01101, true) | (0b01110, _));
    let inputs = if is_reversed {
        [zero, rn, zero]
    } else {
        [rn, zero, zero]
    };
    let exists = of_scalars || !form.is_scalar;
    form.compute(form.function(Op::Float(op), size), inputs)
        .filter(|_| exists)
}

/// Decodes operations across the lanes of a register, and operations on the two lanes of a pair.
pub(super) fn across(form: Form) -> Option<Simd> {
    let opcode = field(form.word, 16, 12);
    let (u, size, word) = (form.u(), form.size(), form.word);
    let is_minimum = flag(word, 23);
    let extreme = match (opcode, is_minimum) {
        (0b01100, false) => Some(Extreme::MaxNumber),
        (0b01100, true) => Some(Extreme::MinNumber),
        (0b01111, false) => Some(Extreme::Max),
        (0b01111, true) => Some(Extreme::Min),
        _ => None,
    };
    // Half precision has U clear and no other size.
    let float_size = match (u, size & 1) {
        (true, double) => 2 + double,
        (false, 0) => 1,
        (false, _) => 4,
    };
    if form.is_scalar {
        let (op, size) = match (opcode, extreme) {
            (0b11011, _) if !u && size == 3 => (Op::Pairs(Integer::Add), 3),
            (0b01101, _) if !is_minimum => (Op::FloatPairs(Float::Add), float_size),
            (_, Some(extreme)) => (Op::FloatPairs(Float::Extreme(extreme)), float_size),
            _ => return None,
        };
        if size > 3 {
            return None;
        }
        let second = Input::Lane {
            r: register(word, 5),
            size,
            lane: 1,
        };
        return form.compute(form.function(op, size), [form.rn(), second, Input::Zero]);
    }
    let inputs = [form.rn(), Input::Zero, Input::Zero];
    if let Some(extreme) = extreme {
        let exists = float_size == 1 || (float_size == 2 && form.full());
        let function = form.function(Op::FloatAcross(extreme), float_size);
        return form.compute(function, inputs).filter(|_| exists);
    }
    let (op, long) = match (opcode, u) {
        (0b00011, _) => (Integer::Add, true),
        (0b01010, _) => (Integer::Max, false),
        (0b11010, _) => (Integer::Min, false),
        (0b11011, false) => (Integer::Add, false),
        _ => return None,
    };
    let exists = size < 2 || (size == 2 && form.full());
    form.compute(form.function(Op::Across { op, long }, size), inputs)
        .filter(|_| exists)
}
